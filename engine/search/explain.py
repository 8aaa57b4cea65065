"""Why a head got its pattern: its front, the runner-up, how the prompts vote, what a larger budget would buy.

Everything but the loss split is arithmetic on stored results; the split needs the head's Q and K once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headscope.engine.attend.index import index_layer
from headscope.engine.attend.inputs import LayerInputs
from headscope.engine.base import files
from headscope.engine.base.progress import Cancel
from headscope.engine.config.file import HeadConfig
from headscope.engine.loss.measure import dense_pass
from headscope.engine.loss.oracle import LossSplit, loss_split
from headscope.engine.patterns.families import Dense
from headscope.engine.search.cost import CostModel
from headscope.engine.search.front import TIE_TIME, Front, Point, simplest_of_fastest
from headscope.engine.search.measure import Source
from headscope.engine.search.results import SearchPrompt
from headscope.engine.search.table import Allocation, Table, Target, fronts


@dataclass(frozen=True)
class Option:
    """One candidate as a reader sees it: predicted ms, the loss on its worst prompt, computed share of the pairs."""

    label: str
    kind: str
    number: int
    ms: float
    loss: float
    computed_density: float


@dataclass(frozen=True)
class Explanation:
    """One head's story.

    `win_rate` is the share of prompts that would choose the same family if each stood alone, `same_rate` the same
    candidate. `smaller` and `larger` are the neighbours in budget within the family: what less would lose and what
    more would save. `runner_up` is the best choice of any other family.
    """

    layer: int
    head: int
    chosen: Option
    front: tuple[Option, ...]
    runner_up: Option | None
    win_rate: float
    same_rate: float
    worst_prompt: str
    worst_loss: float
    smaller: Option | None
    larger: Option | None
    sentence: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        value = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name in ("chosen", "runner_up", "smaller", "larger"):
            value[name] = None if value[name] is None else vars(value[name])
        value["front"] = [vars(option) for option in self.front]
        return files.plain(value)


def explain(
    table: Table,
    cost: CostModel,
    target: Target,
    allocation: Allocation,
    places: Sequence[tuple[int, int]] | None = None,
) -> list[Explanation]:
    """Explanations of all heads, or of the given (layer, head) ones, in order."""
    all_fronts = fronts(table, cost, target)
    alone = [fronts(table.only([at]), cost, target) for at in range(len(table.prompts))]
    wanted = set(places) if places is not None else None
    return [
        _explain(table, cost, target, allocation, front, [prompt[number] for prompt in alone])
        for number, front in enumerate(all_fronts)
        if wanted is None or (front.layer, front.head) in wanted
    ]


def _explain(
    table: Table, cost: CostModel, target: Target, allocation: Allocation, front: Front, alone: Sequence[Front]
) -> Explanation:
    at = table.layers.index(front.layer)
    number = int(allocation.picked[at, front.head])
    picked = front.every[number]
    limit = dict(target.layer_limits).get(front.layer, 1.0)
    limit = min(limit, target.max_missed if target.max_missed is not None else picked.loss)
    votes = [_best(each, limit) for each in alone]
    kind = table.grid.candidates[number].kind
    others = [point for point in front.every if table.grid.candidates[point.number].kind != kind]
    fits = [point for point in others if point.loss <= limit]
    runner = simplest_of_fastest(fits) if fits else min(others, key=lambda p: (p.loss, p.ms), default=None)
    family = sorted(
        (point for point in front.every if table.grid.candidates[point.number].kind == kind),
        key=lambda p: (p.ms, p.number),
    )
    place = next(n for n, point in enumerate(family) if point.number == number)
    worst = int(table.stats["mean"][:, at, front.head, number].argmax())

    def option(point: Point | None) -> Option | None:
        return None if point is None else _option(table, at, front.head, point)

    shown = _option(table, at, front.head, picked)
    return Explanation(
        layer=front.layer,
        head=front.head,
        chosen=shown,
        front=tuple(_option(table, at, front.head, point) for point in front.points),
        runner_up=option(runner),
        win_rate=sum(table.grid.candidates[vote].kind == kind for vote in votes) / len(votes),
        same_rate=sum(vote == number for vote in votes) / len(votes),
        worst_prompt=str(table.prompts[worst]["name"]),
        worst_loss=float(table.stats["mean"][worst, at, front.head, number]),
        smaller=option(family[place - 1]) if place else None,
        larger=option(family[place + 1]) if place + 1 < len(family) else None,
        sentence=_sentence(
            shown, option(runner), limit, target, front, allocation, cost.unit, not allocation.picked[at].any()
        ),
    )


def _best(front: Front, limit: float) -> int:
    """What one prompt alone would choose within the limit."""
    fits = [point for point in front.every if point.loss <= limit + 1e-5]
    return simplest_of_fastest(fits).number


def _option(table: Table, at: int, head: int, point: Point) -> Option:
    pattern = table.grid.candidates[point.number]
    causal = sum(n * (n + 1) // 2 for n in table.tokens)
    density = float(table.stats["computed_pairs"][:, at, head, point.number].sum()) / causal
    return Option(pattern.label, pattern.kind, point.number, point.ms, point.loss, density)


def _sentence(
    picked: Option,
    runner: Option | None,
    limit: float,
    target: Target,
    front: Front,
    allocation: Allocation,
    unit: str,
    dense_layer: bool,
) -> str:
    """Why this one, in words that its figures bear out: a head is chosen with its layer, so that alone it may be slower
    than another candidate."""
    if (front.layer, front.head) in allocation.stayed_dense:
        best = "" if runner is None else f" The nearest, {runner.label}, misses {runner.loss:.2%}."
        return f"Stays dense: no candidate misses at most {limit:.2%} on every prompt.{best}"
    fastest = min((point.ms for point in front.every if point.loss <= limit), default=picked.ms)
    slower = picked.ms > fastest * (1 + TIE_TIME)
    if target.max_missed is None:
        why = "loses least for its time at the common exchange rate of loss for time"
    elif picked.kind == Dense.kind and dense_layer and slower:
        why = "is chosen since its whole layer is faster in the dense kernel than in any mix of sparse heads"
    elif picked.kind == Dense.kind and slower:
        why = "is chosen since a faster family would cost its layer more than this head would save"
    elif picked.kind == Dense.kind:
        tie = f", up to the {TIE_TIME:.0%} that count as a tie" if picked.ms > fastest else ""
        why = f"is as fast here as any sparse candidate within the limit{tie}"
    elif slower:
        why = f"is the fastest within {limit:.2%} of the families that its layer runs anyway"
    elif picked.ms > fastest:
        why = f"is the simplest of those that tie as the fastest with at most {limit:.2%} missed on every prompt"
    else:
        why = f"is the fastest that misses at most {limit:.2%} on every prompt"
    text = f"{picked.label} {why}: {picked.loss:.2%} missed, {picked.ms:.2f} {unit}."
    if runner is None:
        return text
    if runner.loss > limit + 1e-12:
        return f"{text} Outside its family the nearest is {runner.label}, which misses {runner.loss:.2%}."
    return f"{text} Outside its family the best is {runner.label}: {runner.loss:.2%} missed, {runner.ms:.2f} {unit}."


def splits(
    source: Source,
    prompt: SearchPrompt,
    config: HeadConfig,
    places: Sequence[tuple[int, int]],
    cancel: Cancel | None = None,
) -> dict[tuple[int, int], LossSplit]:
    """The four-step loss split of chosen heads on one prompt: is budget, family, sampling or tiling at fault?"""
    by_place: dict[tuple[int, int], LossSplit] = {}

    def visit(layer: int, inputs: LayerInputs) -> None:
        lse = dense_pass(inputs, layer=layer).lse
        index = index_layer(inputs, config.patterns(layer), estimator=config.estimator)
        for place in sorted(set(places)):
            if place[0] == layer:
                by_place[place] = loss_split(inputs, lse, index, place[1])

    source.stream(prompt, visit, sorted({layer for layer, _ in places}), cancel)
    return by_place


def blame(split: LossSplit) -> str:
    """One sentence on the largest of the four steps; nothing where nearly no mass is missed, as in a dense head."""
    names = (
        "the budget is too small even for the best cells",
        "the pattern family does not fit this head",
        "the sampled rows choose other cells than all rows would",
        "the tile expansion",
    )
    if split.computed < 1e-4:
        return ""
    largest = max(range(3), key=lambda at: split.steps[at])
    return f"Mostly {names[largest]} ({split.steps[largest]:.2%} of {split.computed:.2%} missed)."
