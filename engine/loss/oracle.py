"""Where a head's loss comes from: four choices of cells at equal cost, from the best conceivable to what ran.

1. top-k: every row keeps its most probable keys, as many as its pattern requested for it.
2. geometric: the best columns and distances (or window, or blocks) of the head's own family, chosen from the
   probabilities of all rows, with as many cells as were requested.
3. online: the requested cells, which the index chose from a few sampled rows.
4. computed: those plus the tile expansion; what the kernel ran.

The differences tell what is at fault: the budget (1), the pattern family (2 - 1), the sampling (3 - 2), and what
tiles give back (4 - 3). The greedy choice of step 2 is not optimal, so a difference may be negative.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headscope.engine.attend.finite import check_values
from headscope.engine.attend.index import Index
from headscope.engine.attend.inputs import ScoreInputs
from headscope.kernels.cells import membership
from headscope.kernels.cells.diagonals import by_distance
from headscope.kernels.torch.probabilities import probabilities

_CELLS = 2**24
"""Probabilities formed for one head: 64 MiB. Longer prompts are judged on evenly spread rows."""

_ROUNDS = 8
"""Rounds of the greedy choice; each takes the best of what is left for a share of the cells."""


@dataclass(frozen=True)
class LossSplit:
    """Mean missed mass of one head under the four choices, over `rows` of its rows (`sampled` if not all)."""

    top_k: float
    geometric: float
    online: float
    computed: float
    rows: int
    sampled: bool

    @property
    def steps(self) -> tuple[float, float, float, float]:
        """What budget, pattern family, sampling and tiles each add; they sum to the missed mass."""
        return (
            self.top_k,
            self.geometric - self.top_k,
            self.online - self.geometric,
            self.computed - self.online,
        )


def loss_split(inputs: ScoreInputs, lse_dense: torch.Tensor, index: Index, head: int, sequence: int = 0) -> LossSplit:
    """The four steps for one query head. `lse_dense` [B, Hq, S]; `index` is built on the same inputs.

    ModelError where the head's LSEs or probabilities are not finite: every comparison below would lose a NaN.
    """
    q, k = inputs.q, inputs.k
    layout, start = index.computed, index.starts[sequence]
    length = layout.length(sequence)
    first = max(0, layout.first_row[sequence])
    rows = _rows(first, length, q.device)
    local = rows - layout.first_row[sequence]
    key_head = head // inputs.group
    queries, keys = q[sequence, head, local][None], k[sequence, key_head, start:][None]
    lse = lse_dense[sequence, head, local]
    check_values(f"lse_dense of head {head}", lse)
    weight = probabilities(queries, keys, lse[None], rows, index.scale)[0]
    check_values(f"the probabilities of head {head}", weight)
    number = sequence * layout.heads + head
    requested = _cells(index, number, rows, length, requested=True)
    computed = _cells(index, number, rows, length, requested=False)
    budget = requested.sum(1)
    return LossSplit(
        top_k=_missed(_top_k(weight, budget)),
        geometric=_missed(_geometric(weight, rows, index, head, number, requested)),
        online=_missed((weight * requested).sum(1)),
        computed=_missed((weight * computed).sum(1)),
        rows=len(rows),
        sampled=len(rows) < length - first,
    )


def _rows(first: int, length: int, device: torch.device) -> torch.Tensor:
    most = max(1, _CELLS // length)
    count = length - first
    if count <= most:
        return torch.arange(first, length, device=device)
    return first + (torch.arange(most, device=device) * 2 + 1) * count // (2 * most)


def _cells(index: Index, number: int, rows: torch.Tensor, length: int, requested: bool) -> torch.Tensor:
    layout = index.requested if requested else index.computed
    columns = torch.arange(length, device=rows.device)
    return membership.cells(layout, membership.tables(layout), slice(number, number + 1), rows, columns)[0]


def _missed(captured: torch.Tensor) -> float:
    return float((1.0 - captured.double()).clamp(0.0, 1.0).mean())


def _top_k(weight: torch.Tensor, budget: torch.Tensor) -> torch.Tensor:
    """[r]: mass of each row's `budget` most probable keys."""
    best = weight.sort(1, descending=True).values.double().cumsum(1)
    best = torch.nn.functional.pad(best, (1, 0))
    return best.gather(1, budget[:, None])[:, 0]


def _geometric(
    weight: torch.Tensor, rows: torch.Tensor, index: Index, head: int, number: int, requested: torch.Tensor
) -> torch.Tensor:
    """[r]: mass of the best cells of the head's own family, as many as were requested."""
    pattern = index.patterns[head]
    if pattern.oracle == "lines":
        return _lines(weight, rows, int(requested.sum()))
    if pattern.oracle == "a-shape":
        return _best_a_shape(weight, rows, requested, _whole_rows(index, number, rows))
    if pattern.oracle == "blocks":
        return _best_blocks(weight, rows, requested, index.requested.block_size[number])
    assert pattern.oracle == "own"
    return (weight * requested).sum(1)


def _whole_rows(index: Index, number: int, rows: torch.Tensor) -> torch.Tensor:
    """bool [r]: rows for which every key block is listed, whatever else a head has; no family chooses those."""
    layout = index.requested
    if layout.block_slot[number] < 0:
        return torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    block_row = rows // layout.block_size[number]
    return layout.block_count[layout.block_slot[number]][block_row] > block_row


def _lines(weight: torch.Tensor, rows: torch.Tensor, cells: int) -> torch.Tensor:
    """[r]: mass under greedily chosen columns and distances with `cells` cells in all.

    Each round ranks what is left by mass per cell that is not taken yet, and takes the best for a share of the
    cells; distance 0 is always in, as in the pattern.
    """
    length = weight.shape[1]
    place = torch.arange(length, device=weight.device)
    causal = place[None, :] <= rows[:, None]
    distance = (rows[:, None] - place[None, :]).clamp(min=0)
    covered = distance.eq(0) & causal
    for step in range(_ROUNDS):
        allowed = cells * (step + 1) // _ROUNDS - int(covered.sum())
        if allowed <= 0:
            continue
        left = weight.masked_fill(covered, 0.0)
        free = (causal & ~covered).float()
        mass = torch.cat([left.sum(0), by_distance(left[None], rows)[0].sum(0)])
        cost = torch.cat([free.sum(0), by_distance(free[None], rows)[0].sum(0)])
        order = (mass / cost.clamp(min=1)).sort(descending=True).indices
        columns_kept = torch.zeros_like(mass, dtype=torch.bool)
        columns_kept[order] = (cost[order].cumsum(0) <= allowed) & (cost[order] > 0)
        covered |= (columns_kept[:length][None, :] | columns_kept[length:][distance]) & causal
    return (weight * covered).sum(1)


def _best_a_shape(
    weight: torch.Tensor, rows: torch.Tensor, requested: torch.Tensor, whole: torch.Tensor
) -> torch.Tensor:
    """[r]: mass of the best split of the requested cells into sink columns and a window; `whole` rows stay whole."""
    captured = weight.sum(1).double()
    captured[~whole] = _best_split(weight[~whole], rows[~whole], int(requested[~whole].sum()))
    return captured


def _best_split(weight: torch.Tensor, rows: torch.Tensor, cells: int) -> torch.Tensor:
    """[r]: mass of the best split of `cells` cells into sink columns and a window."""
    if not len(rows):
        return weight.new_zeros(0).double()
    total = torch.nn.functional.pad(weight.double().cumsum(1), (1, 0))
    best = weight.new_zeros(len(rows)).double()
    for share in (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 0.95):
        sink = round(share * cells / len(rows))
        low, high = 1, weight.shape[1]
        while low < high:
            middle = (low + high + 1) // 2
            fits = int(torch.minimum(rows + 1, torch.tensor(middle + sink, device=rows.device)).sum()) <= cells
            low, high = (middle, high) if fits else (low, middle - 1)
        edge = (rows + 1 - low).clamp(min=0)
        head = edge.clamp(max=sink)
        captured = total.gather(1, (rows + 1)[:, None]) - total.gather(1, edge[:, None])
        captured = (captured + total.gather(1, head[:, None]))[:, 0]
        best = captured if captured.sum() > best.sum() else best
    return best


def _best_blocks(weight: torch.Tensor, rows: torch.Tensor, requested: torch.Tensor, size: int) -> torch.Tensor:
    """[r]: mass of the heaviest blocks per block row, as many as were requested; the diagonal is always in."""
    length = weight.shape[1]
    side = -(-length // size)
    block = torch.arange(length, device=weight.device) // size
    row_block = rows // size
    mass = weight.new_zeros(len(rows), side).index_add_(1, block, weight)
    per_block = weight.new_zeros(side, side).index_add_(0, row_block, mass)
    listed = requested.new_zeros(len(rows), side, dtype=torch.float32)
    listed = listed.index_add_(1, block, requested.float()) > 0
    budget = torch.zeros(side, dtype=torch.long, device=rows.device)
    budget.scatter_reduce_(0, row_block, listed.sum(1), "amax")
    diagonal = torch.arange(side, device=rows.device)
    per_block[diagonal, diagonal] = torch.inf
    order = per_block.sort(1, descending=True).indices
    rank = torch.empty_like(order).scatter_(1, order, diagonal.expand_as(order))
    blocks_kept = rank < budget[:, None]
    return (mass * blocks_kept[row_block]).sum(1)
