"""Head configs of other tools: MInference's JSON and SGLang's (0.5.19 and earlier).

Both hold a list of layers of `{"head": [pattern, a, b, score]}`. What a family makes of an entry, and how it is
written, the family says itself (`Pattern.imported`, `Pattern.exported`).

Scores have two meanings in published files (a share of mass, a count of differing outputs), so they are kept as
foreign notes and trusted nowhere. The expansion of chosen cells to tiles is ours after an import.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headscope.engine.attend.estimator import Estimator
from headscope.engine.base import files
from headscope.engine.base.errors import ConfigError
from headscope.engine.config import check as config_check
from headscope.engine.config.file import MOST_HEADS, MOST_LAYERS, HeadConfig, HeadEntry
from headscope.engine.patterns import foreign
from headscope.engine.patterns.families import FAMILIES, LARGEST_BUDGET, Pattern
from headscope.kernels.cells.plan import TILES_VERSION

ForeignEntry = list[Any]


@dataclass(frozen=True)
class Export:
    """A config in another tool's form: `layers` is its JSON value, `notes` what was lost (empty unless lossy)."""

    layers: list[dict[str, ForeignEntry]]
    notes: tuple[str, ...]

    def to_json(self) -> str:
        """The text as the other tool writes it: one line."""
        return files.one_line(self.layers) + "\n"


def detect(value: Any, name: str = "the file") -> str:
    """`headscope` or `minference` by the shape of a parsed file; an SGLang file looks the same as the latter."""
    if isinstance(value, dict) and str(value.get("format", "")).startswith("headscope."):
        return "headscope"
    if isinstance(value, list) and value and all(isinstance(layer, dict) for layer in value):
        return "minference"
    raise ConfigError(
        f"{name}: neither a head config of headscope (an object with a format) nor one of MInference or SGLang "
        "(a list of layers)."
    )


def import_foreign(value: Any, source: str, facts: Any = None, name: str = "the file") -> HeadConfig:
    """A head config from a parsed MInference or SGLang file.

    Without `facts` (see `HeadConfig.check`) only layers and query heads are known, and `check` will say that the
    rest is not. A head that is missing is an error, where MInference would quietly take (1000, 6096). The
    fingerprint of `facts` is kept: by giving a model, a person says that the file was made for it.
    """
    if source not in foreign.KNOWN:
        raise ConfigError(f"Configs are imported from minference or sglang, got {source[:40]!r}.")
    try:
        if not isinstance(value, list) or not 1 <= len(value) <= MOST_LAYERS:
            raise ConfigError(f"a {source} config is a list of 1 to {MOST_LAYERS} layers.")
        rows = [_layer(layer, item) for layer, item in enumerate(value)]
        _check_names(source, rows)
        heads = tuple(
            tuple(_entry(source, f"layer {layer} head {head}", raw) for head, raw in enumerate(row))
            for layer, row in enumerate(rows)
        )
        known = {"layers": len(heads), "query_heads": len(heads[0])}
        model = known if facts is None else config_check.facts_dict(facts)
        provenance = {"imported_from": source, "imported_file": name}
        return HeadConfig(model, provenance, TILES_VERSION, Estimator(), heads)
    except ConfigError as problem:
        raise ConfigError(f"{name}: {problem}") from problem


def export_foreign(config: HeadConfig, target: str, lossy: bool = False) -> Export:
    """The config in MInference's or SGLang's form.

    `ConfigError` names the heads that the other tool cannot express, unless `lossy`: then the nearest thing it can
    is written and the loss noted. An entry that came from the same tool and was not changed is written as it was.
    """
    if target not in foreign.KNOWN:
        raise ConfigError(f"Configs are exported to minference or sglang, got {target[:40]!r}.")
    layers: list[dict[str, ForeignEntry]] = []
    lost: dict[str, dict[int, list[int]]] = {}
    for layer, entries in enumerate(config.heads):
        written: dict[str, ForeignEntry] = {}
        for head, entry in enumerate(entries):
            written[str(head)], loss = _written(entry, target)
            if loss is None and config.estimator != Estimator() and entry.pattern.sampled:
                loss = "another estimator than the last 64 rows"
            if loss is not None:
                lost.setdefault(loss, {}).setdefault(layer, []).append(head)
        layers.append(written)
    notes = tuple(f"{what} ({_places(heads)})" for what, heads in lost.items())
    if notes and not lossy:
        label = "MInference" if target == "minference" else "SGLang (0.5.19 and earlier)"
        raise ConfigError(f"{label} cannot express: {'; '.join(notes)}. Give --lossy to write the nearest it can.")
    return Export(layers, notes)


def _places(heads: dict[int, list[int]]) -> str:
    """`layer 0 heads 3, 5; layer 2 head 1`, every head of up to 12 layers by number."""
    texts = [
        f"layer {layer} head{'s' if len(entries) > 1 else ''} {files.listing(entries, 64)}"
        for layer, entries in heads.items()
    ]
    rest = sum(len(entries) for entries in list(heads.values())[12:])
    return "; ".join(texts[:12]) + (f"; {rest} more heads in later layers" if rest else "")


def import_pattern(source: str, kind: str, first: int, second: int) -> Pattern:
    """The pattern that the other tool's code runs for `[kind, first, second, score]`; `ValueError` if none."""
    if kind not in foreign.KNOWN[source]:
        raise ValueError(_unknown(source, [kind]))
    family = next(family for family in FAMILIES.values() if family.foreign_name == kind)
    return family.imported(source, first, second)


def _check_names(source: str, rows: list[list[Any]]) -> None:
    """ConfigError with every pattern name that the tool does not know; nothing else in such entries can be read."""
    unknown: dict[str, str] = {}
    for layer, row in enumerate(rows):
        for head, raw in enumerate(row):
            name = raw[0] if isinstance(raw, list) and raw else raw.get("pattern") if isinstance(raw, dict) else None
            if isinstance(name, str) and name not in foreign.KNOWN[source]:
                unknown.setdefault(name, f"layer {layer} head {head}")
    if unknown:
        raise ConfigError(f"{next(iter(unknown.values()))}: {_unknown(source, list(unknown))}.")


def _unknown(source: str, names: list[str]) -> str:
    """The sentence for names of patterns that a tool does not know."""
    named = files.listing(repr(name[:40]) for name in names)
    if source == "sglang":
        return f"SGLang knows the pattern vertical_and_slash only, got {named}"
    return f"unknown pattern {named}; known are vertical_and_slash, stream_llm and block_sparse"


def _layer(layer: int, item: Any) -> list[Any]:
    """The entries of one layer in the order of their heads."""
    if not isinstance(item, dict):
        raise ConfigError(f"layer {layer} must be an object of heads.")
    if not 1 <= len(item) <= MOST_HEADS:
        raise ConfigError(f"layer {layer} must hold 1 to {MOST_HEADS} heads, got {len(item)}.")
    missing = [head for head in range(len(item)) if str(head) not in item]
    if missing:
        odd = [key for key in item if key not in {str(head) for head in range(len(item))}]
        raise ConfigError(f"layer {layer} head {missing[0]} is missing (it has {odd[0][:40]!r} instead).")
    return [item[str(head)] for head in range(len(item))]


def _entry(source: str, place: str, raw: Any) -> HeadEntry:
    if not isinstance(raw, list) or len(raw) != 4 or not isinstance(raw[0], str):
        raise ConfigError(f"{place} must be a list [pattern, number, number, score].")
    kind, first, second, score = raw
    for value in (first, second):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST_BUDGET:
            raise ConfigError(
                f"{place}: budgets must be whole numbers from 0 to {LARGEST_BUDGET}, got {str(value)[:40]!r}."
            )
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise ConfigError(f"{place}: the score must be a number, got {str(score)[:40]!r}.")
    try:
        pattern = import_pattern(source, kind, first, second)
    except ValueError as problem:
        raise ConfigError(f"{place}: {problem}.") from problem
    return HeadEntry(pattern, foreign={"format": source, "entry": [kind, first, second, score]})


def _written(entry: HeadEntry, target: str) -> tuple[ForeignEntry, str | None]:
    """The entry as the other tool has it, and in words what it cannot express of the head."""
    original = _unchanged(entry, target)
    if original is not None:
        return original, None
    head = entry.pattern.exported(target)
    loss = head.loss
    if target == "sglang" and head.first == foreign.FORCED_COLUMNS:
        loss = loss or "exactly 30 columns, which SGLang reads as 130"
    return [head.name, head.first, head.second, _score(entry)], loss


def _unchanged(entry: HeadEntry, target: str) -> ForeignEntry | None:
    """What the other tool's file said, if the head came from there and still means the same."""
    note = entry.foreign
    raw = note.get("entry") if note and note.get("format") == target else None
    if raw is None:
        return None
    try:
        same = _entry(target, "note", raw).pattern == entry.pattern
    except ConfigError:
        return None
    return list(raw) if same else None


def _score(entry: HeadEntry) -> float:
    """The captured mass if it was measured (the first of the two meanings), 0 if not."""
    missed = (entry.evidence or {}).get("missed_mass_mean")
    return 1.0 - missed if isinstance(missed, int | float) else 0.0
