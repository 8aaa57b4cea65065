"""The head config: which pattern and budget every head has, for which model, and why.

One JSON file, format `headscope.head-config/1`, with one head a line so that a diff shows which heads changed.
It holds quality only (which cells are allowed); what belongs to a machine is in the host profile. The reader is
strict: a file that is not exactly right is refused with one sentence that names the place.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from headscope.engine.attend.estimator import Estimator
from headscope.engine.base import files, records
from headscope.engine.base.errors import ConfigError
from headscope.engine.base.records import OpenRecord, Record, Share
from headscope.engine.config import check as config_check
from headscope.engine.config.facts import FULL
from headscope.engine.patterns import families as patterns
from headscope.engine.patterns.families import Dense, Pattern
from headscope.kernels.cells.plan import TILES_VERSION

FORMAT = "headscope.head-config/1"
MOST_LAYERS = 4096
MOST_HEADS = 4096

_Limit = Annotated[int, Field(ge=0)]
_Size = Annotated[int, Field(ge=1)]
_Tiles = Annotated[str, Field(min_length=1, max_length=60)]


class _Facts(Record):
    """What `check` compares; None where it is unknown. Some models state no position limit; facts give 0 there."""

    architecture: str | None
    layers: _Size | None
    query_heads: _Size | None
    kv_heads: _Size | None
    head_dim: _Size | None
    rope: dict[str, Any] | None
    max_position: _Limit | None
    layer_types: list[str] | None
    fingerprint: str | None
    load_format: str | None
    name: str | None


class _Provenance(OpenRecord):
    """Free, but for what is read again: the calibrated lengths, and whose weights were forced."""

    lengths: list[_Size] = Field(default_factory=list)
    forced_weights: list[dict[str, Any]] = Field(default_factory=list)


class _Audit(OpenRecord):
    """Free, but for the rate of the checks in production."""

    rate: Share = 0.0


class _File(Record):
    """The fields of the file; what they hold is checked one by one, so that an error names the head."""

    format: str
    model: Any
    provenance: Any
    tiles: _Tiles
    estimator: Any
    audit: Any
    heads: list[Any]


class _Head(OpenRecord):
    """What stands beside the pattern of a head."""

    at: Any = None
    evidence: dict[str, Any] = Field(default_factory=dict)
    foreign: dict[str, Any] = Field(default_factory=dict)


MODEL_FIELDS = tuple(_Facts.model_fields)
_BESIDE = tuple(_Head.model_fields)


@dataclass(frozen=True)
class HeadEntry:
    """One head: its pattern, the measurements that justified it, and a note of another tool's if it was imported.

    `evidence` is free JSON (missed mass mean and worst, output error, time share, of which run). `foreign` keeps
    what an imported file said (`{"format", "entry"}`); its score is a note and is not trusted.
    """

    pattern: Pattern
    evidence: dict[str, Any] | None = None
    foreign: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, Pattern):
            raise ConfigError(f"A head needs a pattern such as AShape(4, 256), got {type(self.pattern).__name__}.")
        for name in ("evidence", "foreign"):
            object.__setattr__(self, name, _plain_object(name, getattr(self, name), optional=True))

    def to_dict(self, layer: int, head: int) -> dict[str, Any]:
        """The head's line in the file: its place, its pattern, then the notes that exist."""
        notes = {name: getattr(self, name) for name in ("evidence", "foreign") if getattr(self, name) is not None}
        return {"at": [layer, head], **self.pattern.to_dict(), **notes}


@dataclass(frozen=True)
class HeadConfig:
    """Patterns and budgets of every query head of one model.

    `model` holds the facts that `check` compares (`facts.ModelFacts`; None where unknown), `provenance` how the
    config came to be, `tiles` the version of the expansion rule, `heads[layer][head]` the entries, `audit` the rate
    and thresholds of the checks in production. Raises `ConfigError` naming the place.
    """

    model: dict[str, Any]
    provenance: dict[str, Any]
    tiles: str
    estimator: Estimator
    heads: tuple[tuple[HeadEntry, ...], ...]
    audit: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("model", "provenance", "audit"):
            object.__setattr__(self, name, _plain_object(name, getattr(self, name)))
        object.__setattr__(self, "heads", tuple(tuple(layer) for layer in self.heads))
        object.__setattr__(self, "model", _checked_model(self.model))
        records.check(_Provenance, self.provenance, "provenance")
        records.check(_Audit, self.audit, "audit")
        records.check(_Tiles, self.tiles, "tiles")
        if not isinstance(self.estimator, Estimator):
            raise ConfigError(f"estimator must be an Estimator, got {type(self.estimator).__name__}.")
        _check_shape(self.heads, self.model)

    @classmethod
    def uniform(
        cls,
        facts: Any,
        pattern: Pattern,
        *,
        provenance: dict[str, Any] | None = None,
        estimator: Estimator | None = None,
    ) -> HeadConfig:
        """The same pattern for every head; layers with their own kind of attention (sliding windows) stay dense."""
        model = config_check.facts_dict(facts)
        types = model.get("layer_types") or [FULL] * int(model["layers"])
        served, left_alone = HeadEntry(pattern), HeadEntry(Dense())
        heads = tuple(
            (served if layer_type == FULL else left_alone,) * int(model["query_heads"]) for layer_type in types
        )
        return cls(model, provenance or {}, TILES_VERSION, estimator or Estimator(), heads)

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Layers in which some head has a pattern other than dense, ascending."""
        return tuple(
            layer for layer, entries in enumerate(self.heads) if any(not entry.pattern.is_dense for entry in entries)
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> HeadConfig:
        """Read a file; `ConfigError` with one sentence that names file and place if anything is not as it must be."""
        return cls.from_json(files.read_bytes(path), str(path))

    @classmethod
    def from_json(cls, raw: bytes | str, name: str = "config") -> HeadConfig:
        data = raw.encode("utf-8", "surrogatepass") if isinstance(raw, str) else raw
        return cls.from_dict(files.parse_json(data, name), name)

    @classmethod
    def from_dict(cls, value: Any, name: str = "config") -> HeadConfig:
        """The config of a parsed file (as `files.parse_json` gives it)."""
        try:
            return _read(value)
        except ConfigError as problem:
            raise ConfigError(f"{name}: {problem}") from problem

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the file whole or not at all; equal configs give equal bytes."""
        return files.write_atomic(path, self.to_json())

    def to_json(self, level: int = 0) -> str:
        """The text of the file; `level` indents it for use inside another file."""
        pad = "  " * level
        lines = [
            "{",
            f'{pad}  "format": {files.one_line(FORMAT)},',
            f'{pad}  "model": {_one_a_line(self.model, level + 1)},',
            f'{pad}  "provenance": {_one_a_line(self.provenance, level + 1)},',
            f'{pad}  "tiles": {files.one_line(self.tiles)},',
            f'{pad}  "estimator": {files.one_line(self.estimator.to_dict())},',
            f'{pad}  "audit": {files.one_line(self.audit)},',
            f'{pad}  "heads": [',
        ]
        for layer, entries in enumerate(self.heads):
            lines.append(f"{pad}    [")
            for head, entry in enumerate(entries):
                comma = "," if head + 1 < len(entries) else ""
                lines.append(f"{pad}      {files.one_line(entry.to_dict(layer, head))}{comma}")
            lines.append(f"{pad}    ]{',' if layer + 1 < len(self.heads) else ''}")
        lines += [f"{pad}  ]", f"{pad}}}"]
        return "\n".join(lines) + ("" if level else "\n")

    def patterns(self, layer: int) -> tuple[Pattern, ...]:
        """The patterns of one layer, one per query head, as `build_index` takes them."""
        self._check_place(layer, 0)
        return tuple(entry.pattern for entry in self.heads[layer])

    def with_heads(self, entries: Mapping[tuple[int, int], HeadEntry | Pattern]) -> HeadConfig:
        """The same config with the heads at these (layer, head) changed; a bare pattern drops the old evidence."""
        rows = [list(row) for row in self.heads]
        for (layer, head), entry in entries.items():
            self._check_place(layer, head)
            rows[layer][head] = entry if isinstance(entry, HeadEntry) else HeadEntry(entry)
        return replace(self, heads=tuple(tuple(row) for row in rows))

    def digest(self) -> str:
        """sha256 over patterns and budgets alone: equal heads give the same digest, whenever and wherever made.

        The estimator is not in it, though it decides which cells a vertical-slash head gets: compare that beside it.
        """
        rows = [[entry.pattern.to_dict() for entry in layer] for layer in self.heads]
        return hashlib.sha256(files.one_line(rows).encode()).hexdigest()

    def check(self, model: Any, length: int | None = None, *, force_weights: bool = False) -> list[str]:
        """Every reason why this config must not run on `model`, all at once; [] means that it fits.

        `model` is a loaded model, a transformers model, its facts, or a dict of them. With `length`, a prompt
        beyond the model's positions is a reason too. `force_weights` drops the one reason that the weights differ.
        """
        return config_check.reasons(self, config_check.facts_dict(model), length, force_weights)

    def warnings(self, length: int) -> list[str]:
        """What to tell a person about a prompt of `length` tokens: lengths that were never calibrated."""
        return config_check.length_warnings(self.provenance, length)

    def forced_onto(self, model: Any) -> HeadConfig:
        """The config for other weights of the same shape, by a person's decision, which provenance records.

        `ConfigError` with all reasons if anything but the weights differs.
        """
        facts = config_check.facts_dict(model)
        others = config_check.reasons(self, facts, None, True)
        if others:
            raise ConfigError("Only other weights can be forced, and more than that differs: " + "; ".join(others))
        record = {"from": self.model["fingerprint"], "to": facts.get("fingerprint"), "model": facts.get("name")}
        earlier = self.provenance.get("forced_weights", [])
        provenance = {**self.provenance, "forced_weights": [*earlier, record]}
        return replace(self, model={**self.model, "fingerprint": facts.get("fingerprint")}, provenance=provenance)

    def _check_place(self, layer: int, head: int) -> None:
        if not 0 <= layer < len(self.heads):
            raise ConfigError(f"There is no layer {layer}: the config has layers 0 to {len(self.heads) - 1}.")
        if not 0 <= head < len(self.heads[layer]):
            raise ConfigError(f"There is no head {head}: layer {layer} has heads 0 to {len(self.heads[layer]) - 1}.")


def _read(value: Any) -> HeadConfig:
    records.check_format(value, FORMAT, "a head config")
    records.check(_File, value, "", whole="the config")
    records.check(_Facts, value["model"], "model")
    estimator = _within("estimator", Estimator.from_dict, value["estimator"])
    heads = tuple(_read_layer(layer, row) for layer, row in enumerate(value["heads"]))
    return HeadConfig(value["model"], value["provenance"], value["tiles"], estimator, heads, value["audit"])


def _read_layer(layer: int, row: Any) -> tuple[HeadEntry, ...]:
    if not isinstance(row, list):
        raise ConfigError(f"layer {layer} must be a list of heads, got {records.kind(row)}.")
    return tuple(_read_head(layer, head, item) for head, item in enumerate(row))


def _read_head(layer: int, head: int, item: Any) -> HeadEntry:
    place = f"layer {layer} head {head}"
    if item is None:
        raise ConfigError(f"{place} is missing.")
    records.check(_Head, item, place)
    if "at" in item and item["at"] != [layer, head]:
        raise ConfigError(f'{place}: its field "at" says {str(item["at"])[:40]}; heads must stand in order.')
    budgets = {name: entry for name, entry in item.items() if name not in _BESIDE}
    pattern = _within(place, patterns.from_dict, budgets)
    return HeadEntry(pattern, item.get("evidence"), item.get("foreign"))


def _within(place: str, read: Callable[[Any], Any], value: Any) -> Any:
    """`read(value)`, whose complaint becomes a `ConfigError` that starts with the place."""
    try:
        return read(value)
    except (ValueError, TypeError, OverflowError) as problem:
        raise ConfigError(f"{place}: {' '.join(str(problem).split())[:300]}.") from problem


def _plain_object(name: str, value: Any, optional: bool = False) -> dict[str, Any] | None:
    if optional and value is None:
        return None
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be an object, got {records.kind(value)}.")
    try:
        return files.plain(value)
    except ValueError as problem:
        raise ConfigError(f"{name}: {problem}.") from problem


def _checked_model(model: dict[str, Any]) -> dict[str, Any]:
    """The facts in their fixed order, None for what is unknown."""
    facts = dict.fromkeys(MODEL_FIELDS) | model
    records.check(_Facts, facts, "model")
    if facts["query_heads"] and facts["kv_heads"] and facts["query_heads"] % facts["kv_heads"]:
        raise ConfigError(f"model: {facts['query_heads']} query heads do not divide over {facts['kv_heads']} KV heads.")
    return facts


def _check_shape(heads: tuple[tuple[HeadEntry, ...], ...], model: dict[str, Any]) -> None:
    """Every layer and every head is there: a missing one is an error, never a default."""
    layers = model["layers"] if model["layers"] is not None else len(heads)
    if not heads or len(heads) > MOST_LAYERS:
        raise ConfigError(f"heads must hold 1 to {MOST_LAYERS} layers, got {len(heads)}.")
    if len(heads) < layers:
        raise ConfigError(f"layer {len(heads)} is missing: model.layers says {layers}, heads holds {len(heads)}.")
    if len(heads) > layers:
        raise ConfigError(f"layer {layers} is one too many: model.layers says {layers}, heads holds {len(heads)}.")
    if model["layer_types"] is not None and len(model["layer_types"]) != layers:
        raise ConfigError(f"model.layer_types names {len(model['layer_types'])} layers where the model has {layers}.")
    wanted = model["query_heads"] if model["query_heads"] is not None else len(heads[0])
    for layer, entries in enumerate(heads):
        if not entries or len(entries) > MOST_HEADS:
            raise ConfigError(f"layer {layer} must hold 1 to {MOST_HEADS} heads, got {len(entries)}.")
        if len(entries) < wanted:
            raise ConfigError(f"layer {layer} head {len(entries)} is missing: each layer has {wanted} query heads.")
        if len(entries) > wanted:
            raise ConfigError(f"layer {layer} head {wanted} is one too many: each layer has {wanted} query heads.")
        for head, entry in enumerate(entries):
            if not isinstance(entry, HeadEntry):
                raise ConfigError(f"layer {layer} head {head} must be a HeadEntry, got {type(entry).__name__}.")


def _one_a_line(value: dict[str, Any], level: int) -> str:
    """An object with one field a line."""
    if not value:
        return "{}"
    pad = "  " * level
    lines = [f"{pad}  {files.one_line(name)}: {files.one_line(item)}" for name, item in value.items()]
    return "{\n" + ",\n".join(lines) + f"\n{pad}}}"
