"""Several head configs in one file: by prompt length, and by a name such as a domain.

Format `headscope.config-set/1`. Each member has a name, a range of prompt lengths and a whole head config, one
head a line as in a file of its own. `pick` answers which one serves a prompt.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from headscope.engine.base import files, records
from headscope.engine.base.errors import ConfigError
from headscope.engine.base.records import Record, Words
from headscope.engine.config.file import HeadConfig
from headscope.engine.patterns.families import LARGEST_BUDGET

FORMAT = "headscope.config-set/1"
DEFAULT = "default"

_Tokens = Annotated[int, Field(ge=1, le=LARGEST_BUDGET)]


class _File(Record):
    format: str
    configs: list[Any]


class _Member(Record):
    name: Words
    least: _Tokens
    most: _Tokens | None
    config: Any


@dataclass(frozen=True)
class Member:
    """A config for prompts of `least` to `most` tokens, both included (`most=None`: no upper end)."""

    config: HeadConfig
    name: str = DEFAULT
    least: int = 1
    most: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.config, HeadConfig):
            raise ConfigError(f"A member of a config set needs a HeadConfig, got {type(self.config).__name__}.")
        records.check(_Member, vars(self), f"the member {self.name!r:.60}")
        if self.most is not None and self.most < self.least:
            raise ConfigError(f"{self.name}: most = {self.most} is smaller than least = {self.least}.")

    def covers(self, length: int) -> bool:
        return self.least <= length and (self.most is None or length <= self.most)


@dataclass(frozen=True)
class ConfigSet:
    """Members in the order of the file. Ranges of one name must not overlap; different names may."""

    members: tuple[Member, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", tuple(self.members))
        if not self.members:
            raise ConfigError("A config set needs at least one config.")
        for name in self.names:
            ordered = sorted((m for m in self.members if m.name == name), key=lambda member: member.least)
            for before, after in pairwise(ordered):
                if before.most is None or before.most >= after.least:
                    raise ConfigError(f"{name}: two configs claim prompts of {after.least} tokens.")

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in the order of their first member."""
        return tuple(dict.fromkeys(member.name for member in self.members))

    def pick(self, length: int, name: str | None = None) -> HeadConfig | None:
        """The config for a prompt of `length` tokens; None if no range holds it: such a prompt runs dense.

        Without a name, the members called `default` are asked, or the only name there is. `ConfigError` lists the
        names if `name` is not one of them or is needed and not given.
        """
        if name is None:
            name = DEFAULT if DEFAULT in self.names else self.names[0]
            if name != DEFAULT and len(self.names) > 1:
                raise ConfigError(f"This config set has no default; choose one of {files.listing(self.names)}.")
        if name not in self.names:
            raise ConfigError(f"This config set has no {name[:60]!r}; choose one of {files.listing(self.names)}.")
        return next((m.config for m in self.members if m.name == name and m.covers(length)), None)

    def check(self, model: Any, *, force_weights: bool = False) -> list[str]:
        """Every reason against every member, each with the member's name and range; [] if all fit."""
        return [
            f"{member.name} ({member.least} to {member.most or 'any'} tokens): {reason}"
            for member in self.members
            for reason in member.config.check(model, force_weights=force_weights)
        ]

    def to_json(self) -> str:
        """The text of the file; equal sets give equal bytes."""
        parts = []
        for member in self.members:
            head = f'"name": {files.one_line(member.name)}, "least": {member.least}, '
            head += f'"most": {files.one_line(member.most)},'
            parts.append(f'    {{\n      {head}\n      "config": {member.config.to_json(level=3)}\n    }}')
        body = ",\n".join(parts)
        return f'{{\n  "format": {files.one_line(FORMAT)},\n  "configs": [\n{body}\n  ]\n}}\n'

    def save(self, path: str | os.PathLike[str]) -> Path:
        return files.write_atomic(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ConfigSet:
        """Read a config set, or a single head config as a set of one; `ConfigError` names file, member and place."""
        value = files.read_json(path)
        if isinstance(value, dict) and value.get("format") == FORMAT:
            try:
                return cls._read(value)
            except ConfigError as problem:
                raise ConfigError(f"{path}: {problem}") from problem
        return cls((Member(HeadConfig.from_dict(value, str(path))),))

    @classmethod
    def _read(cls, value: dict[str, Any]) -> ConfigSet:
        records.check(_File, value, "", whole="the config set")
        members = []
        for number, item in enumerate(value["configs"]):
            records.check(_Member, item, f"config {number}")
            config = HeadConfig.from_dict(item["config"], f"config {number}")
            members.append(Member(config, item["name"], item["least"], item["most"]))
        return cls(tuple(members))
