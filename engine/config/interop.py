"""Head configs of other tools: MInference's JSON and SGLang's (0.5.19 and earlier).

Both hold a list of layers of `{"head": [pattern, a, b, score]}`. What their code makes of it is what we import:

- MInference, `vertical_and_slash` V, S: at least 30 columns and 50 distances; the first 30 columns and the last
  100 distances are forced and charged. `stream_llm` A, B: A first tokens and a window of B. `block_sparse`: its
  two numbers are ignored, 100 blocks of 64 are taken.
- SGLang knows `vertical_and_slash` only, and reads V = 30 as 130.

Scores have two meanings in published files (a share of mass, a count of differing outputs), so they are kept as
foreign notes and trusted nowhere. The expansion of chosen cells to tiles is ours after an import.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headscope.engine.attend.estimator import Estimator
from headscope.engine.base import files
from headscope.engine.base.errors import ConfigError
from headscope.engine.config import check as config_check
from headscope.engine.config.file import MOST_HEADS, MOST_LAYERS, HeadConfig, HeadEntry
from headscope.engine.patterns.families import (
    AShape,
    BlockSparse,
    Budget,
    Dense,
    Fixed,
    Fraction,
    Pattern,
    VerticalSlash,
)
from headscope.kernels.cells.plan import TILE, TILES_VERSION

FORMATS = ("headscope", "minference", "sglang")
FORCED_COLUMNS = 30
FORCED_DISTANCES = 100
LEAST_DISTANCES = 50
FORCED_BLOCKS = BlockSparse(blocks=100, block_size=64)
SGLANG_THIRTY = 130
LARGEST = 2**30 - 1

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
    if source not in ("minference", "sglang"):
        raise ConfigError(f"Configs are imported from minference or sglang, got {source[:40]!r}.")
    try:
        if not isinstance(value, list) or not 1 <= len(value) <= MOST_LAYERS:
            raise ConfigError(f"a {source} config is a list of 1 to {MOST_LAYERS} layers.")
        rows = [_layer(layer, item) for layer, item in enumerate(value)]
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
    writers: dict[str, Callable[[HeadEntry], tuple[ForeignEntry, str | None]]] = {
        "minference": _to_minference,
        "sglang": _to_sglang,
    }
    if target not in writers:
        raise ConfigError(f"Configs are exported to minference or sglang, got {target[:40]!r}.")
    layers: list[dict[str, ForeignEntry]] = []
    lost: dict[str, dict[int, list[int]]] = {}
    for layer, entries in enumerate(config.heads):
        made: dict[str, ForeignEntry] = {}
        for head, entry in enumerate(entries):
            made[str(head)], loss = writers[target](entry)
            if loss is None and config.estimator != Estimator() and _online(entry.pattern):
                loss = "another estimator than the last 64 rows"
            if loss is not None:
                lost.setdefault(loss, {}).setdefault(layer, []).append(head)
        layers.append(made)
    notes = tuple(f"{what} ({_places(heads)})" for what, heads in lost.items())
    if notes and not lossy:
        label = "MInference" if target == "minference" else "SGLang (0.5.19 and earlier)"
        raise ConfigError(f"{label} cannot express: {'; '.join(notes)}. Give --lossy to write the nearest it can.")
    return Export(layers, notes)


def _places(heads: dict[int, list[int]]) -> str:
    """`layer 0 heads 3, 5; layer 2 head 1`, every head of up to 12 layers by number."""
    texts = [
        f"layer {layer} head{'s' if len(found) > 1 else ''} {files.listing(found, 64)}"
        for layer, found in heads.items()
    ]
    rest = sum(len(found) for found in list(heads.values())[12:])
    return "; ".join(texts[:12]) + (f"; {rest} more heads in later layers" if rest else "")


def import_pattern(source: str, kind: str, first: int, second: int) -> Pattern:
    """The pattern that the other tool's code runs for `[kind, first, second, score]`; `ValueError` if none."""
    if kind == "vertical_and_slash":
        if source == "sglang":
            first = SGLANG_THIRTY if first == FORCED_COLUMNS else first
        slash = max(second, LEAST_DISTANCES)
        return VerticalSlash(
            vertical=max(first, FORCED_COLUMNS), slash=slash, sink=FORCED_COLUMNS, local=min(FORCED_DISTANCES, slash)
        )
    if source == "sglang":
        raise ValueError(f"SGLang knows the pattern vertical_and_slash only, got {kind[:40]!r}")
    if kind == "stream_llm":
        return AShape(sink=first, window=second)
    if kind == "block_sparse":
        return FORCED_BLOCKS
    raise ValueError(f"unknown pattern {kind[:40]!r}; known are vertical_and_slash, stream_llm and block_sparse")


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
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
            raise ConfigError(f"{place}: budgets must be whole numbers from 0 to {LARGEST}, got {str(value)[:40]!r}.")
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise ConfigError(f"{place}: the score must be a number, got {str(score)[:40]!r}.")
    try:
        pattern = import_pattern(source, kind, first, second)
    except ValueError as problem:
        raise ConfigError(f"{place}: {problem}.") from problem
    return HeadEntry(pattern, foreign={"format": source, "entry": [kind, first, second, score]})


def _to_minference(entry: HeadEntry) -> tuple[ForeignEntry, str | None]:
    original = _unchanged(entry, "minference")
    if original is not None:
        return original, None
    pattern, score = entry.pattern, _score(entry)
    if isinstance(pattern, AShape):
        loss = "budgets as a share of the length" if _has_fraction(pattern.sink, pattern.window) else None
        return ["stream_llm", _whole(pattern.sink), _whole(pattern.window), score], loss
    if isinstance(pattern, BlockSparse):
        loss = None if pattern == FORCED_BLOCKS else "block-sparse other than 100 blocks of 64"
        return ["block_sparse", FORCED_BLOCKS.blocks, 1, score], loss
    return _vertical_slash(pattern, score)


def _to_sglang(entry: HeadEntry) -> tuple[ForeignEntry, str | None]:
    original = _unchanged(entry, "sglang")
    if original is not None:
        return original, None
    pattern, score = entry.pattern, _score(entry)
    loss: str | None
    if isinstance(pattern, AShape):
        sizes = max(_whole(pattern.sink), FORCED_COLUMNS), max(_whole(pattern.window), LEAST_DISTANCES)
        written, loss = ["vertical_and_slash", *sizes, score], "a-shape"
    elif isinstance(pattern, BlockSparse):
        blocks = _whole(pattern.blocks) * pattern.block_size
        written, loss = ["vertical_and_slash", max(1000, min(blocks, LARGEST)), 6096, score], "block-sparse"
    else:
        written, loss = _vertical_slash(pattern, score)
    if written[1] == FORCED_COLUMNS:
        loss = loss or "exactly 30 columns, which SGLang reads as 130"
    return written, loss


def _vertical_slash(pattern: Pattern, score: float) -> tuple[ForeignEntry, str | None]:
    """A vertical-slash entry for a pattern of that kind, or the nearest one for dense and fixed heads."""
    if isinstance(pattern, VerticalSlash):
        sizes, loss = _vertical_slash_sizes(pattern)
    elif isinstance(pattern, Fixed):
        sizes, loss = (len(pattern.columns), len(pattern.distances)), "fixed positions"
    elif isinstance(pattern, Dense):
        sizes, loss = (LARGEST, FORCED_DISTANCES), "dense heads"
    else:
        raise ConfigError(f"There is no rule to export a {pattern.kind} head.")
    return ["vertical_and_slash", max(sizes[0], FORCED_COLUMNS), max(sizes[1], LEAST_DISTANCES), score], loss


def _vertical_slash_sizes(pattern: VerticalSlash) -> tuple[tuple[int, int], str | None]:
    if pattern.windows is not None:
        sizes = _whole(pattern.vertical), min(_whole(pattern.windows) * TILE, LARGEST)
        return sizes, "a budget of windows instead of distances"
    assert pattern.slash is not None
    sizes = _whole(pattern.vertical), _whole(pattern.slash)
    if _has_fraction(pattern.vertical, pattern.slash):
        return sizes, "budgets as a share of the length"
    if sizes[0] < FORCED_COLUMNS or sizes[1] < LEAST_DISTANCES:
        return sizes, f"fewer than {FORCED_COLUMNS} columns or {LEAST_DISTANCES} distances"
    if pattern.sink != FORCED_COLUMNS or pattern.local != min(FORCED_DISTANCES, sizes[1]):
        return sizes, f"other forced cells than the first {FORCED_COLUMNS} columns and {FORCED_DISTANCES} distances"
    return sizes, None


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


def _whole(budget: Budget) -> int:
    """A budget as a number: a fraction at the length where the published files were made, 128K tokens."""
    return min(budget.resolve(131072), LARGEST) if isinstance(budget, Fraction) else budget


def _has_fraction(*budgets: Budget) -> bool:
    return any(isinstance(budget, Fraction) for budget in budgets)


def _online(pattern: Pattern) -> bool:
    return isinstance(pattern, VerticalSlash)
