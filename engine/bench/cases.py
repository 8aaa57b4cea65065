"""What `headscope bench` runs: sparse settings, fixed clustered indexes, and inputs with planted structure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from headscope.engine.attend.inputs import LayerInputs
from headscope.engine.bench.shapes import Shape
from headscope.engine.patterns.families import LARGEST_BUDGET, AShape, BlockSparse, Pattern, VerticalSlash
from headscope.kernels.cells.layout import PAD, Layout
from headscope.kernels.cells.plan import TILE, HeadPlan
from headscope.kernels.torch import index as torch_index


@dataclass(frozen=True)
class Case:
    """One sparse setting: the pattern that an online index would get, and its name in the tables."""

    name: str
    pattern: Pattern

    @property
    def clustered(self) -> tuple[int, int] | None:
        """Columns and distances of the fixed clustered index that attention is timed on, since random inputs have no
        slashes to find; None where the pattern buys no distances."""
        plan = self.pattern.plan(LARGEST_BUDGET)  # at this length nothing is cut off
        return (plan.vertical, plan.slash) if plan.slash else None


CASES = (
    Case("vs 1000/6096", VerticalSlash(1000, 6096, sink=4, local=64)),
    Case("vs 30/800", VerticalSlash(30, 800, sink=4, local=64)),
    Case("vs 3500/100", VerticalSlash(3500, 100, sink=4, local=64)),
    Case("vs 500/700", VerticalSlash(500, 700, sink=4, local=64)),
    Case("a-shape 128/3968", AShape(128, 3968)),
    Case("blocks 100x64", BlockSparse(100, 64)),
    Case("blocks 50x128", BlockSparse(50, 128)),
)


def clustered_layout(
    shape: Shape, batch: int, length: int, vertical: int, slash: int, device: torch.device, seed: int = 0
) -> Layout:
    """A computed layout as real vertical-slash heads have it, the same on every run.

    Per head: random columns; the first 1,024 distances (or a tenth of a small budget) and clusters of 64
    contiguous ones at random offsets, up to the budgets.
    """
    count = batch * shape.query_heads
    windows, window_count, listed, column_count = _clustered(length, [(vertical, slash)] * count, device, seed)

    def none(*size: int) -> torch.Tensor:
        return torch.zeros(*size, dtype=torch.int32, device=device)

    return Layout(
        tile=TILE,
        batch=batch,
        heads=shape.query_heads,
        q_len=length,
        kv_len=length,
        starts=(0,) * batch,
        windows=windows,
        window_count=window_count,
        bands=none(count, 0, 2),
        band_count=none(count),
        columns=listed,
        column_count=column_count,
        blocks=none(0, 0, 0),
        block_count=none(0, 0),
        block_slot=(-1,) * count,
        block_size=(0,) * count,
        plans=(HeadPlan(vertical=min(vertical, length), slash=min(slash, length), local=1),) * count,
    )


def planted_layout(layout: Layout, patterns: Sequence[Pattern], seed: int = 0) -> Layout:
    """`layout` with the lists of its vertical-slash heads replaced by clustered ones of the same budgets.

    `layout` is what an index of these `patterns` (one per query head) computes for whole unpadded sequences. Heads of
    other kinds, and those with a budget of windows, stay as they are.
    """
    plans = [pattern.plan(layout.kv_len) for pattern in patterns] * layout.batch
    replaced = [head for head, plan in enumerate(plans) if plan.slash]
    if not replaced:
        return layout
    budgets = [(plans[head].vertical, plans[head].slash) for head in replaced]
    windows, window_count, columns, column_count = _clustered(layout.kv_len, budgets, layout.device, seed)
    at = torch.tensor(replaced, device=layout.device)
    kept = torch.ones(len(plans), dtype=torch.bool, device=layout.device)
    kept[at] = False

    def merged(old: torch.Tensor, old_count: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        most = int((old_count * kept).max())
        lists = torch.full((len(plans), max(most, new.shape[1])), PAD, dtype=torch.int32, device=layout.device)
        lists[kept, :most] = old[kept, :most]
        lists[at, : new.shape[1]] = new
        return lists

    return replace(
        layout,
        windows=merged(layout.windows, layout.window_count, windows),
        window_count=layout.window_count.clone().index_copy_(0, at, window_count),
        columns=merged(layout.columns, layout.column_count, columns),
        column_count=layout.column_count.clone().index_copy_(0, at, column_count),
    )


def _clustered(
    length: int, budgets: Sequence[tuple[int, int]], device: torch.device, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Windows, their counts, columns and their counts, one head per (vertical, slash) budget."""
    rng = random.Random(seed)
    columns = torch.zeros(len(budgets), length, dtype=torch.bool)
    distances = torch.zeros_like(columns)
    for head, (vertical, slash) in enumerate(budgets):
        near = min(length, 1024 if slash >= 2048 else max(16, slash // 10))
        columns[head, rng.sample(range(length), min(vertical, length))] = True
        distances[head, :near] = True
        for _ in range(max(0, min(slash, length) - near) // 64):
            at = rng.randrange(near, max(near + 1, length - 63))
            distances[head, at : at + 64] = True
    lengths = torch.full((len(budgets),), length, device=device)
    windows = torch_index.positions(torch_index.run_windows(distances.to(device), lengths, TILE))
    return *windows, *torch_index.positions(columns.to(device))


def random_inputs(
    shape: Shape, batch: int, length: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> LayerInputs:
    """Normal q [B, Hq, n, D] and k, v [B, Hkv, n, D]."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(heads: int) -> torch.Tensor:
        # A head at a time: no float32 copy of the whole tensor.
        out = torch.empty(batch, heads, length, shape.head_dim, dtype=dtype, device=device)
        for head in range(heads):
            out[:, head] = torch.randn(batch, length, shape.head_dim, generator=generator, device=device)
        return out

    return LayerInputs(draw(shape.query_heads), draw(shape.kv_heads), draw(shape.kv_heads))


@dataclass(frozen=True)
class Planted:
    """Where planted inputs carry their mass: columns that every row looks at, distances that every row looks back."""

    columns: tuple[int, ...]
    distances: tuple[int, ...]


def plant(
    q: torch.Tensor, k: torch.Tensor, columns: int = 16, distances: int = 4, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, Planted]:
    """Copies of q and k with known structure that an online index must find.

    Planted keys share a direction that every query carries; and every query carries the keys at the planted
    distances before it.
    """
    rng = random.Random(seed)
    length, dim = k.shape[2], k.shape[3]
    group = q.shape[1] // k.shape[1]
    planted = tuple(sorted(rng.sample(range(length // 2), min(columns, length // 2))))
    back = tuple(sorted(rng.sample(range(length // 4, length // 2), min(distances, length // 4))))
    generator = torch.Generator(device=q.device).manual_seed(seed)
    direction = torch.randn(dim, generator=generator, device=q.device).to(q.dtype)
    q, k = 0.3 * q, k.clone()
    k[:, :, list(planted)] = 2 * direction
    for distance in back:
        # The keys that the queries copy are those before the planted columns took their place.
        q[:, :, distance:] += k[:, :, :-distance].repeat_interleave(group, 1)
    q += 0.5 * direction
    return q, k, Planted(planted, back)
