"""What the files of a run folder must hold, so that a damaged one ends in a sentence and not in the arithmetic."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from headscope.engine.base import records
from headscope.engine.base.errors import HeadscopeError
from headscope.engine.base.records import Count, Finite, Milliseconds, OpenRecord

Time = Annotated[float, Field(gt=0, lt=1e12)]
"""Milliseconds that something is divided by."""


class PromptFacts(OpenRecord):
    """`results.SearchPrompt.to_dict`."""

    name: str
    sha256: str
    tokens: Annotated[int, Field(ge=1, lt=2**31)]
    kind: str
    key: str
    chat_template: bool | None = None


class PromptFile(OpenRecord):
    """`results.keep_prompt`."""

    prompt: PromptFacts
    ids: list[Annotated[int, Field(ge=0, lt=2**31)]]


class Row(OpenRecord):
    """One candidate on one layer: times, and one value a head of each of `results.STATS`."""

    index_ms: Milliseconds
    kernel_ms: Milliseconds
    dense_ms: Time = 1.0
    mean: list[Finite]
    worst: list[Finite]
    worst_row: list[Count]
    p99: list[Finite]
    start: list[Finite]
    middle: list[Finite]
    end: list[Finite]
    output_error: list[Finite]
    output_cosine: list[Finite]
    requested_pairs: list[Count]
    computed_pairs: list[Count]
    tile_cells: list[Count]


class Mix(OpenRecord):
    """One timed mix of candidates: their numbers, one a head."""

    picked: list[Count]
    index_ms: Milliseconds
    kernel_ms: Milliseconds
    dense_ms: Time = 1.0


class Layer(OpenRecord):
    """`measure.measure_layer`."""

    layer: Count
    dense_ms: Time
    rows: list[Row]
    mixed: list[Mix]


class Result(OpenRecord):
    """A result file; its layers are checked one by one."""

    prompt: PromptFacts
    candidates: list[Any]
    estimator: dict[str, Any]
    prefill_ms: Milliseconds
    layers: list[Any]


class Manifest(OpenRecord):
    """`run.manifest`."""

    facts: dict[str, Any]
    layers: Annotated[list[Count], Field(min_length=1)]
    estimator: dict[str, Any]
    candidates: list[Any]


class Facts(OpenRecord):
    """What a choice needs of the model."""

    layers: Annotated[int, Field(ge=1, le=4096)]
    query_heads: Annotated[int, Field(ge=1, le=4096)]


def check_layer(value: Any, layer: int, candidates: int, where: str, error: type[HeadscopeError]) -> int:
    """Raise `error` unless `value` is this layer's measurements under so many candidates; returns the heads."""
    place = f"{where} is damaged: layer {layer}"
    records.check(Layer, value, place, error)
    if value["layer"] != layer or len(value["rows"]) != candidates:
        raise error(f"{place} holds other candidates or another layer; delete it and run the search again.")
    heads = len(value["rows"][0]["mean"])
    lists = [entry for row in value["rows"] for entry in row.values() if isinstance(entry, list)]
    lists += [mix["picked"] for mix in value["mixed"]]
    if heads == 0 or any(len(entry) != heads for entry in lists):
        raise error(f"{place} has not one value for each head; delete it and run the search again.")
    if any(number >= candidates for mix in value["mixed"] for number in mix["picked"]):
        raise error(f"{place} mixes candidates that there are not; delete it and run the search again.")
    return heads
