"""The host profile: what was measured on one machine. It changes no result beyond dense or sparse by length.

Format `headscope.host-profile/1`, in the user's config folder (`HEADSCOPE_HOST` names another file). What was not
measured has no default guess: an unmeasured batch size is never called dense.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs

from headscope.engine.base import files
from headscope.engine.base.errors import ConfigError

FORMAT = "headscope.host-profile/1"
_FIELDS = ("format", "machine", "kernels", "dense_below", "cost")


def default_path() -> Path:
    """Where the profile of this machine is kept."""
    named = os.environ.get("HEADSCOPE_HOST", "").strip()
    return Path(named).expanduser() if named else platformdirs.user_config_path("headscope") / "host.json"


@dataclass(frozen=True)
class HostProfile:
    """Measurements of one machine.

    `machine` says which one it was (hardware, driver, versions, when); `kernels` maps a head size to the settings
    that won there; `dense_below` maps a batch size to the prompt length in tokens below which dense was faster;
    `cost` holds the coefficients of the cost model. Raises `ConfigError` naming the field.
    """

    machine: dict[str, Any] = field(default_factory=dict)
    kernels: dict[int, dict[str, Any]] = field(default_factory=dict)
    dense_below: dict[int, int] = field(default_factory=dict)
    cost: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("machine", "cost"):
            object.__setattr__(self, name, _object(name, getattr(self, name)))
        object.__setattr__(self, "kernels", _by_number("kernels", self.kernels))
        object.__setattr__(self, "dense_below", _by_number("dense_below", self.dense_below))
        for size, settings in self.kernels.items():
            self.kernels[size] = _object(f"kernels[{size}]", settings)
        for batch, tokens in self.dense_below.items():
            if isinstance(tokens, bool) or not isinstance(tokens, int) or not 0 <= tokens < 2**40:
                raise ConfigError(f"dense_below[{batch}] must be a number of tokens from 0, got {str(tokens)[:40]!r}.")

    def dense_below_tokens(self, batch: int = 1) -> int:
        """Prompts shorter than this run dense at this batch size; 0 where it was not measured."""
        return self.dense_below.get(batch, 0)

    def kernel_settings(self, head_dim: int) -> dict[str, Any]:
        """The kernel settings measured for a head size; {} leaves the kernels' own."""
        return dict(self.kernels.get(head_dim, {}))

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
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise ConfigError(f'a host profile is a JSON object with "format": "{FORMAT}".')
        for name in _FIELDS:
            if name not in value:
                raise ConfigError(f"the host profile lacks the field {name!r}.")
        unknown = [name for name in value if name not in _FIELDS]
        if unknown:
            raise ConfigError(f"the host profile has the unknown field {unknown[0][:60]!r}.")
        return cls(*(value[name] for name in _FIELDS[1:]))

    def to_json(self) -> str:
        """The text of the file; equal profiles give equal bytes."""
        parts = {
            "format": FORMAT,
            "machine": self.machine,
            "kernels": {str(size): self.kernels[size] for size in sorted(self.kernels)},
            "dense_below": {str(batch): self.dense_below[batch] for batch in sorted(self.dense_below)},
            "cost": self.cost,
        }
        return files.indented(parts, 0) + "\n"

    def save(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write the profile, by default where `load` looks for it; returns the path."""
        return files.write_atomic(default_path() if path is None else path, self.to_json())


def _object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be an object, got {type(value).__name__}.")
    try:
        return files.plain(value)
    except ValueError as problem:
        raise ConfigError(f"{name}: {problem}.") from problem


def _by_number(name: str, value: Any) -> dict[int, Any]:
    """A mapping with whole numbers from 1 as keys; JSON has them as text."""
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be an object, got {type(value).__name__}.")
    made: dict[int, Any] = {}
    for key, item in value.items():
        text = str(key)
        if (
            isinstance(key, bool)
            or not (text.isascii() and text.isdecimal())
            or not 1 <= len(text) <= 9
            or text[0] == "0"
        ):
            raise ConfigError(f"{name}: the key {text[:40]!r} must be a whole number from 1.")
        made[int(text)] = item
    return made
