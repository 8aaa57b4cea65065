"""How many rows to sample, which ones, and how to sum them: captured mass against index time, at equal cells.

Estimators choose different distances, and near ones have more cells than far ones; so every choice here gets the
same number of requested cells, not the same number of lines. Columns get a fixed share of the cells, in the
estimator's order; distances fill the rest, in its order. Masses are exact sums over all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from headscope.engine.attend.attention import attend_dense
from headscope.engine.attend.estimator import Estimator
from headscope.engine.attend.finite import check_values
from headscope.engine.attend.index import index_layer
from headscope.engine.attend.inputs import LayerInputs, ScoreInputs
from headscope.engine.base.progress import Cancel
from headscope.engine.base.timing import timed
from headscope.engine.patterns.families import Fraction, VerticalSlash
from headscope.engine.search.cost import TILE_CELLS, CostModel
from headscope.engine.search.measure import Source
from headscope.engine.search.results import SearchError, SearchPrompt
from headscope.kernels.torch import index as torch_index
from headscope.kernels.torch.probabilities import probabilities

SHARES = (0.06, 0.12, 0.24, 0.48)
"""Requested cells as shares of the causal cells."""

FEWEST_TOKENS = 64
"""Of a prompt: its thirds are looked at apart, and the first rows keep everything."""

MISSED = 0.1
"""Mean missed mass at which estimators are compared by their whole time."""

COLUMN_SHARE = 0.5
SINK, LOCAL = 4, 16
_ROWS = 128


@dataclass(frozen=True)
class SamplingPoint:
    """One estimator at one share of cells: captured mass over heads and prompts, and its index time in ms a layer.

    `worst_row` is the mean over heads of each head's worst row, `p10_head` the tenth percentile of heads' means.
    """

    estimator: Estimator
    share: float
    captured: float
    worst_row: float
    start: float
    end: float
    p10_head: float
    index_ms: float
    prompts: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        value = asdict(self)
        return value | {"estimator": self.estimator.to_dict(), "prompts": list(self.prompts)}


def choices(rows: Sequence[int] = (16, 32, 64, 128, 256)) -> tuple[Estimator, ...]:
    """The curve over rows for two ways to sample, and every other choice at 64 rows."""
    half = Estimator(64, "half", overlap="removed")
    estimators = [replace(base, rows=count) for base in (Estimator(), half) for count in rows]
    estimators += [
        Estimator(64, where, overlap=overlap) for where in ("tail", "spread", "half") for overlap in ("keep", "removed")
    ]
    for base in (Estimator(), half):
        estimators += [replace(base, columns="max"), replace(base, statistic="logit")]
        estimators += [replace(base, slashes=how) for how in ("mean", "shrunk")]
    return tuple(dict.fromkeys(estimators))


def study(
    source: Source,
    prompts: Sequence[SearchPrompt],
    layers: Sequence[int],
    estimators: Sequence[Estimator] | None = None,
    shares: Sequence[float] = SHARES,
    cancel: Cancel | None = None,
) -> list[SamplingPoint]:
    """Every estimator at every share, on the given layers of several prompts. Memory is linear in the length.

    SearchError for nothing to compare and for prompts of fewer than `FEWEST_TOKENS` tokens; what `source` raises.
    """
    compared = tuple(estimators) if estimators is not None else choices()
    if not prompts or not layers or not compared:
        raise SearchError("A study of sampling needs at least one prompt, one layer and one estimator.")
    for prompt in prompts:
        if len(prompt.ids) < FEWEST_TOKENS:
            raise SearchError(
                f"A study of sampling needs prompts of at least {FEWEST_TOKENS} tokens, and {prompt.name} has "
                f"{len(prompt.ids)}: leave it out, or give it more text."
            )
    # [prompt][layer] of (captured [estimators, shares, heads, 4], index ms [estimators])
    results: list[list[tuple[np.ndarray, np.ndarray]]] = []
    for prompt in prompts:
        rows: list[tuple[np.ndarray, np.ndarray]] = []

        def visit(layer: int, inputs: LayerInputs, rows: list[Any] = rows) -> None:
            rows.append(_layer(inputs, compared, shares))

        source.stream(prompt, visit, list(layers), cancel)
        results.append(rows)
    captured = np.array([[layer[0] for layer in prompt] for prompt in results])
    index_ms = np.array([[layer[1] for layer in prompt] for prompt in results])
    return [
        SamplingPoint(
            estimator=estimator,
            share=share,
            captured=float(captured[:, :, e, s, :, 0].mean()),
            worst_row=float(captured[:, :, e, s, :, 1].mean()),
            start=float(captured[:, :, e, s, :, 2].mean()),
            end=float(captured[:, :, e, s, :, 3].mean()),
            p10_head=float(np.quantile(captured[:, :, e, s, :, 0].mean(0), 0.1)),
            index_ms=float(np.median(index_ms[:, :, e])),
            prompts=tuple(captured[:, :, e, s, :, 0].mean((1, 2)).tolist()),
        )
        for e, estimator in enumerate(compared)
        for s, share in enumerate(shares)
    ]


def _layer(
    inputs: LayerInputs, estimators: Sequence[Estimator], shares: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    heads = inputs.query_heads
    lines = [[lines_at(inputs, estimator, share) for share in shares] for estimator in estimators]
    columns = torch.stack([torch.stack([pair[0] for pair in row]) for row in lines])  # [E, S, H, n] bool
    distances = torch.stack([torch.stack([pair[1] for pair in row]) for row in lines])
    _, lse = attend_dense(inputs)
    rows = captured_rows(inputs, lse, columns.flatten(0, 1), distances.flatten(0, 1))
    rows = rows.view(*columns.shape[:2], heads, -1)
    # The first rows keep everything whatever is chosen, so the worst row and the thirds start after them.
    third = rows.shape[-1] // 3
    stats = torch.stack([rows.mean(-1), rows.amin(-1), rows[..., :third].mean(-1), rows[..., -third:].mean(-1)], -1)
    pattern = VerticalSlash(Fraction(1 / 16, least=8), Fraction(1 / 16, least=16), sink=SINK, local=LOCAL)
    times = []
    for estimator in estimators:
        times_ms = [
            timed(lambda e=estimator: index_layer(inputs, [pattern] * heads, estimator=e), inputs.device)[1]  # type: ignore[misc]
            for _ in range(3)
        ]
        times.append(min(times_ms))
    return stats.cpu().numpy(), np.array(times)


def lines_at(inputs: ScoreInputs, estimator: Estimator, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns and distances bool [H, n] with `share` of the causal cells requested, as near as whole lines allow."""
    q, k, scale = inputs.q, inputs.k, inputs.scale
    heads, length = inputs.query_heads, inputs.length
    target = share * length * (length + 1) / 2
    rows = torch.tensor(torch_index.sampled_rows(0, length, estimator), device=q.device)
    weight = torch_index.row_statistic(q[0][:, rows], k[0], rows, scale, estimator.statistic)
    score = weight.sum(1) if estimator.columns == "sum" else weight.amax(1)
    place = torch.arange(length, device=q.device)
    columns = _fill(score, (length - place).expand(heads, -1), SINK, target * COLUMN_SHARE)
    if estimator.overlap == "removed":
        weight = weight.masked_fill(columns[:, None, :], 0.0)
    along = torch_index.distance_sums(weight, rows, estimator.slashes)
    # Distance d has length - d cells, less one for every chosen column below length - d.
    taken_out = columns.long().cumsum(1).flip(1)
    used = (length - place)[None, :] - taken_out
    left = target - (columns * (length - place)).sum(1)
    return columns, _fill(along, used, LOCAL, left)


def _fill(score: torch.Tensor, cells: torch.Tensor, forced: int, target: torch.Tensor | float) -> torch.Tensor:
    """bool [H, n]: the forced first lines, then the best in order, while their cells stay within the target."""
    place = torch.arange(score.shape[-1], device=score.device)
    keys = score.masked_fill(place[None, :] < forced, torch.inf)
    order = keys.sort(dim=-1, descending=True, stable=True).indices
    total = cells.gather(-1, order).cumsum(-1)
    limit = torch.as_tensor(target, device=score.device, dtype=torch.float64).reshape(-1, 1)
    within = (total <= limit) | (torch.arange(score.shape[-1], device=score.device)[None, :] < forced)
    return torch.zeros_like(within).scatter_(-1, order, within)


def captured_rows(
    inputs: ScoreInputs, lse: torch.Tensor, columns: torch.Tensor, distances: torch.Tensor
) -> torch.Tensor:
    """float32 [C, H, n]: exact captured mass of every row under C choices of lines [C, H, n], a few rows at a time.

    ModelError where it is not finite.
    """
    q, k, scale = inputs.q, inputs.k, inputs.scale
    heads, length, group = inputs.query_heads, inputs.length, inputs.group
    result = torch.zeros(columns.shape[0], heads, length, device=q.device)
    place = torch.arange(length, device=q.device)
    for head in range(heads):
        kept = columns[:, head].float().T.contiguous()  # [n, C]
        along = distances[:, head].float().T.contiguous()
        lists = [choice[head].nonzero()[:, 0] for choice in columns]
        for row in range(0, length, _ROWS):
            own = place[row : row + _ROWS]
            weight = probabilities(q[:, head, own], k[:, head // group], lse[:, head, own], own, scale)[0]
            source = own[:, None] - place[None, :]
            skewed = weight.gather(1, source.clamp(min=0)).masked_fill(source < 0, 0.0)
            total = weight @ kept + skewed @ along
            for at, list_ in enumerate(lists):
                gap = own[:, None] - list_[None, :]
                both = distances[at, head][gap.clamp(min=0)] & (gap >= 0)
                total[:, at] -= (weight[:, list_] * both).sum(1)
            result[:, head, own] = total.T
    check_values("the captured mass", result)
    return result.clamp(0.0, 1.0)


@dataclass(frozen=True)
class Total:
    """What an estimator costs at a target: the share of cells it needs, and index plus kernel time a layer in ms."""

    estimator: Estimator
    share: float
    index_ms: float
    kernel_ms: float
    reached: bool

    @property
    def total_ms(self) -> float:
        return self.index_ms + self.kernel_ms

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"total_ms": self.total_ms}


def totals(points: Sequence[SamplingPoint], target: float, cost: CostModel, tokens: int, heads: int) -> list[Total]:
    """Estimators by total time at a mean missed mass of `target`, cheapest first; those that never reach it last.

    Cells needed are read off the line between the two measured shares around the target.
    """
    by_estimator: dict[Estimator, list[SamplingPoint]] = {}
    for point in points:
        by_estimator.setdefault(point.estimator, []).append(point)
    tile_ms = cost.heads["vertical-slash"]["tile"]
    compared = []
    for estimator, row in by_estimator.items():
        share, reached = _share_needed(sorted(row, key=lambda point: point.share), target)
        tiles = share * tokens * (tokens + 1) / 2 / TILE_CELLS * heads
        compared.append(Total(estimator, share, row[0].index_ms, tiles * tile_ms, reached))
    return sorted(compared, key=lambda total: (not total.reached, total.total_ms, total.estimator.rows))


def _share_needed(row: Sequence[SamplingPoint], target: float) -> tuple[float, bool]:
    # With every cell nothing is missed: the line ends at share 1.
    before = (0.0, 1.0)
    for point in row:
        missed = 1 - point.captured
        if missed <= target:
            low_share, low_missed = before
            part = (low_missed - target) / max(1e-12, low_missed - missed)
            return low_share + part * (point.share - low_share), True
        before = (point.share, missed)
    part = (before[1] - target) / max(1e-12, before[1])
    return before[0] + part * (1 - before[0]), False
