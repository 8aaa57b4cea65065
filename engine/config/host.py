"""The host profile: what was measured on one machine. It changes no result beyond dense or sparse by length.

Format `headscope.host-profile/1`, in the user's config folder (`HEADSCOPE_HOST` names another file). What was not
measured has no default guess: an unmeasured batch size is never called dense. Earlier versions wrote an empty field
`kernels`, which is read over.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs
from pydantic import Field

from headscope.engine.base import files, records
from headscope.engine.base.errors import ConfigError
from headscope.engine.base.records import Count, NumberKey, Record

FORMAT = "headscope.host-profile/1"


class _File(Record):
    format: str
    machine: dict[str, Any]
    kernels: dict[NumberKey, dict[str, Any]] = Field(default_factory=dict)
    dense_below: dict[NumberKey, Count]
    cost: dict[str, Any]


def default_path() -> Path:
    """Where the profile of this machine is kept."""
    named = os.environ.get("HEADSCOPE_HOST", "").strip()
    return Path(named).expanduser() if named else platformdirs.user_config_path("headscope") / "host.json"


@dataclass(frozen=True)
class HostProfile:
    """Measurements of one machine.

    `machine` says which one it was (hardware, driver, versions, when); `dense_below` maps a batch size to the prompt
    length in tokens below which dense was faster; `cost` holds the coefficients of the cost model. Raises
    `ConfigError` naming the field.
    """

    machine: dict[str, Any] = field(default_factory=dict)
    dense_below: dict[int, int] = field(default_factory=dict)
    cost: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("machine", "cost"):
            object.__setattr__(self, name, _object(name, getattr(self, name)))
        object.__setattr__(self, "dense_below", _by_batch(self.dense_below))

    def dense_below_tokens(self, batch: int = 1) -> int:
        """Prompts shorter than this run dense at this batch size; 0 where it was not measured."""
        return self.dense_below.get(batch, 0)

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None = None) -> HostProfile:
        """Read the profile of this machine, empty if there is none. A `path` that is given must be there."""
        source = default_path() if path is None else Path(path)
        if path is None and not os.path.exists(source):
            return cls()
        value = files.read_json(source)
        try:
            return cls._read(value)
        except ConfigError as problem:
            raise ConfigError(f"{source}: {problem}") from problem

    @classmethod
    def _read(cls, value: Any) -> HostProfile:
        records.check_format(value, FORMAT, "a host profile")
        records.check(_File, value, "", whole="the host profile")
        return cls(value["machine"], value["dense_below"], value["cost"])

    def to_json(self) -> str:
        """The text of the file; equal profiles give equal bytes."""
        parts = {
            "format": FORMAT,
            "machine": self.machine,
            "dense_below": {str(batch): self.dense_below[batch] for batch in sorted(self.dense_below)},
            "cost": self.cost,
        }
        return files.indented(parts, 0) + "\n"

    def save(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write the profile, by default where `load` looks for it; returns the path."""
        return files.write_atomic(default_path() if path is None else path, self.to_json())


def _object(name: str, value: Any) -> dict[str, Any]:
    records.check(dict[str, Any], value, name)
    try:
        return files.plain(value)
    except ValueError as problem:
        raise ConfigError(f"{name}: {problem}.") from problem


def _by_batch(value: Any) -> dict[int, int]:
    """The mapping with numbers as keys; JSON has them as text."""
    texts = {str(key): tokens for key, tokens in value.items()} if isinstance(value, dict) else value
    records.check(dict[NumberKey, Count], texts, "dense_below")
    return {int(batch): tokens for batch, tokens in texts.items()}
