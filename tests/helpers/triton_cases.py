"""Random layouts and inputs for the Triton tests, on any device; mixes every kind of list, also within one head."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from headscope.engine.attend.estimator import Estimator
from headscope.engine.patterns.families import AShape, BlockSparse, Dense, Fixed, Pattern, VerticalSlash
from headscope.kernels.cells import reference
from headscope.kernels.cells.layout import PAD, Layout
from headscope.kernels.cells.plan import tile_rows
from headscope.kernels.torch import index as torch_index

KINDS = ("dense", "windows", "a-shape", "blocks", "columns", "bands", "empty", "all")
LENGTHS = (1, 2, 63, 64, 65, 111, 127, 128, 200, 333)
BLOCK_SIZES = (16, 32, 48, 64, 100, 128)


@dataclass(frozen=True)
class Case:
    """One random problem. q [B, Hq, S, D], k/v [B, Hkv, T, D]."""

    name: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    layout: Layout
    scale: float


def random_case(
    seed: int,
    device: str = "cpu",
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.float32),
    head_dims: tuple[int, ...] = (16, 64, 80, 96),
    lengths: tuple[int, ...] = LENGTHS,
    groups: tuple[int, ...] = (1, 2, 3),
    tiles: tuple[int, ...] = (128, 128, 128, 1),
) -> Case:
    """A problem drawn from `seed`: batch, groups, `q_len <= kv_len`, left padding, every mix of patterns."""
    rng = random.Random(seed)
    generator = torch.Generator(device=device).manual_seed(seed)
    batch, kv_heads, group = rng.choice((1, 1, 2, 3)), rng.choice((1, 2)), rng.choice(groups)
    kv_len = rng.choice(lengths)
    q_len = rng.choice((kv_len, kv_len, rng.randrange(1, kv_len + 1)))
    starts = tuple(rng.choice((0, 0, rng.randrange(kv_len))) for _ in range(batch))
    head_dim, dtype, tile = rng.choice(head_dims), rng.choice(dtypes), rng.choice(tiles)
    kinds = rng.choice((*[(kind,) for kind in KINDS], KINDS, KINDS, KINDS[:4], KINDS[:4]))

    def draw(heads: int, length: int) -> torch.Tensor:
        return torch.randn(batch, heads, length, head_dim, generator=generator, device=device).to(dtype)

    q, k, v = draw(kv_heads * group, q_len), draw(kv_heads, kv_len), draw(kv_heads, kv_len)
    layout = random_layout(rng, kv_heads * group, q_len, kv_len, starts, tile, kinds, device)
    sizes = f"S{q_len} T{kv_len} {starts} D{head_dim} {dtype} W{tile}"
    name = f"{seed}: B{batch} H{kv_heads * group}/{kv_heads} {sizes} {kinds}"
    return Case(name, q, k, v, layout, rng.choice((1.0, 0.5, 2.0)) * head_dim**-0.5)


def built_case(seed: int, device: str, dtype: torch.dtype, head_dim: int, lengths: tuple[int, ...]) -> Case:
    """As `random_case`, but the layout is what the torch index builds for patterns, so it knows its plans."""
    rng = random.Random(seed)
    case = random_case(seed, device, (dtype,), (head_dim,), lengths, tiles=(128,))
    old = case.layout
    kinds = rng.choice((*[(kind,) for kind in PATTERNS], tuple(PATTERNS), tuple(PATTERNS)))
    patterns = [PATTERNS[rng.choice(kinds)](rng) for _ in range(old.heads)]
    plans = [pattern.plan(max(1, old.length(b))) for b in range(old.batch) for pattern in patterns]
    arguments = (plans, old.starts, case.scale, Estimator(), 128)
    layout = torch_index.build(case.q, case.k, *arguments)[1]
    return replace(case, name=f"{case.name} {patterns}", layout=layout)


def _fixed(rng: random.Random) -> Fixed:
    """Columns, distances and blocks that share cells, or columns alone."""
    columns = tuple(range(rng.choice((0, 3, 130)))) if rng.random() < 0.5 else tuple(rng.sample(range(400), 20))
    distances = rng.choice(((), tuple(range(70)), (0, 1, 65, 200), tuple(range(5, 140))))
    blocks = rng.choice(((), ((0, 0), (1, 0), (2, 1), (2, 2))))
    return Fixed(columns, distances, blocks, rng.choice((64, 128)))


PATTERNS: dict[str, Callable[[random.Random], Pattern]] = {
    "dense": lambda rng: Dense(),
    "a-shape": lambda rng: AShape(rng.choice((0, 1, 4, 64, 127, 128, 129, 300)), rng.choice((1, 7, 64, 128, 190, 400))),
    "slash": lambda rng: VerticalSlash(rng.choice((4, 30, 150)), 70, sink=4, local=rng.choice((1, 70))),
    "windows": lambda rng: VerticalSlash(rng.choice((0, 60)), windows=rng.choice((1, 3))),
    "blocks": lambda rng: BlockSparse(rng.choice((1, 3)), rng.choice((64, 128))),
    "fixed": _fixed,
}


def random_layout(
    rng: random.Random,
    heads: int,
    q_len: int,
    kv_len: int,
    starts: tuple[int, ...],
    tile: int,
    kinds: tuple[str, ...],
    device: str,
) -> Layout:
    """Lists of every kind; windows of a head stay disjoint, as do its bands."""
    windows, bands, columns, sizes, blocks = [], [], [], [], []
    for n in range(len(starts) * heads):
        length, kind = kv_len - starts[n // heads], rng.choice(kinds)
        windows.append(_windows(rng, length, tile) if kind in ("windows", "all") else [])
        bands.append(_bands(rng, length, kind))
        many = rng.choice((1, 5, 60, 140)) if kind in ("windows", "columns", "a-shape", "all") else 0
        columns.append(sorted(rng.sample(range(length), min(length, many))))
        sizes.append(rng.choice(BLOCK_SIZES) if kind in ("blocks", "all") else 0)
        blocks.append(_blocks(rng, length, sizes[-1]) if sizes[-1] else None)
    slots, listed = [], []
    for rows in blocks:
        slots.append(-1 if rows is None else len(listed))
        listed += [] if rows is None else [rows]
    block_rows = max((len(rows) for rows in listed), default=0)
    most = max((len(row) for rows in listed for row in rows), default=0)
    table = torch.full((len(listed), block_rows, most), PAD, dtype=torch.int32)
    count = torch.zeros(len(listed), block_rows, dtype=torch.int32)
    for slot, rows in enumerate(listed):
        for number, row in enumerate(rows):
            table[slot, number, : len(row)] = torch.tensor(row, dtype=torch.int32)
            count[slot, number] = len(row)
    pairs = _padded([[x for band in head for x in band] for head in bands])
    return Layout(
        tile=tile,
        batch=len(starts),
        heads=heads,
        q_len=q_len,
        kv_len=kv_len,
        starts=starts,
        windows=_padded(windows).to(device),
        window_count=_counts(windows).to(device),
        bands=pairs.view(len(bands), -1, 2).to(device),
        band_count=_counts(bands).to(device),
        columns=_padded(columns).to(device),
        column_count=_counts(columns).to(device),
        blocks=table.to(device),
        block_count=count.to(device),
        block_slot=tuple(slots),
        block_size=tuple(sizes),
    )


def _windows(rng: random.Random, length: int, tile: int) -> list[int]:
    if tile == 1:
        return sorted({0} | {rng.randrange(length) for _ in range(rng.choice((1, 20)))})
    found = [tile_rows(tile)]
    while True:
        following = found[-1] + tile + rng.choice((0, 1, rng.randrange(300)))
        if following - tile + 1 > length - 1:
            return found
        found.append(following)


def _bands(rng: random.Random, length: int, kind: str) -> list[tuple[int, int]]:
    if kind == "dense":
        return [(0, length - 1)]
    if kind == "a-shape":
        return [(0, min(length, rng.choice((1, 7, 64, 128, 190))) - 1)]
    found, low = [], rng.randrange(0, 80)
    while kind in ("bands", "all") and low < length and len(found) < 5:
        high = min(length - 1, low + rng.choice((0, 3, 63, 70, 190, 191, 300)))
        found.append((low, high))
        low = high + 2 + rng.randrange(100)
    return found


def _blocks(rng: random.Random, length: int, size: int) -> list[list[int]]:
    share = rng.choice((0.1, 0.5, 1.0))
    rows = range(-(-length // size))
    return [[v for v in range(u + 1) if rng.random() < share or (v == u and rng.random() < 0.8)] for u in rows]


def _padded(lists: list[list[int]]) -> torch.Tensor:
    most = max(map(len, lists), default=0)
    return torch.tensor([row + [PAD] * (most - len(row)) for row in lists], dtype=torch.int32).view(len(lists), most)


def _counts(lists: list) -> torch.Tensor:
    return torch.tensor([len(row) for row in lists], dtype=torch.int32)


def error_of(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2 error over all rows; not finite when anything is missing or not a number."""
    return float((out.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def lse_error(lse: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest LSE difference; infinite where one row is empty in one and not in the other."""
    if not torch.equal(torch.isneginf(lse), torch.isneginf(expected)):
        return float("inf")
    return float((lse.double() - expected).nan_to_num(nan=0.0, posinf=torch.inf, neginf=0.0).abs().max())


def plain_error(case: Case, mask: torch.Tensor, expected: torch.Tensor) -> float:
    """The error of plain torch in the case's own dtype: product, softmax, product."""
    group = case.q.shape[1] // case.k.shape[1]
    keys, values = case.k.repeat_interleave(group, 1), case.v.repeat_interleave(group, 1)
    scores = (case.q @ keys.transpose(-1, -2)) * case.scale
    weight = scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0)
    return error_of(weight @ values, expected)


def truth(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 output and LSE of the layout."""
    return reference.attend(case.q, case.k, case.v, case.layout, case.scale)
