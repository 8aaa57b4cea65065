"""Hostile scores for the index kernels, held to plain sorting; run in the interpreter and on a GPU."""

from __future__ import annotations

import torch

from headscope.kernels.cells.layout import PAD
from headscope.kernels.torch import index as torch_index
from headscope.kernels.triton import cut as triton_cut
from headscope.kernels.triton import rows as triton_rows


def best_of_row(score: list[float], row: int, budget: int) -> list[int]:
    """The diagonal and the best before it; equal scores, and NaN, in order of position."""
    largest = torch.finfo(torch.float32).max
    keys = [(-min(s, largest) if s == s else torch.inf, block) for block, s in enumerate(score[:row])]
    return [*sorted(block for _, block in sorted(keys)[: budget - 1]), row]


def check_rows(side: int, device: str) -> None:
    """`triton_rows.choose` and the torch path: ties, infinities, NaN; budgets from 1 to more than there is."""
    generator = torch.Generator().manual_seed(side)
    some = sorted({0, 1, 7, 40, side - 1} & set(range(side))) if side <= 130 else [100, 1025, side - 1]
    many = len(some)
    score = torch.randint(-3, 4, (4, many, side), generator=generator).float()
    exponents = torch.randint(-40, 39, (many, 1), generator=generator)
    score[0] = torch.randn(many, side, generator=generator) * 10.0**exponents
    score[1][torch.rand(many, side, generator=generator) < 0.3] = -0.0
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, -1e-45, 0.0])
    score[2] = special[torch.randint(0, 6, (many, side), generator=generator)]
    padded = torch.nn.functional.pad(score, (0, -side % 16), value=torch.nan).to(device)
    slots = torch.tensor([3, 0, 4, 1], dtype=torch.int32, device=device)
    for budget in (1, 2, 7, 64) if side <= 130 else (1, 2, 64):
        blocks = torch.full((5, side, min(budget, side)), PAD, dtype=torch.int32, device=device)
        count = torch.zeros(5, side, dtype=torch.int32, device=device)
        for at, row in enumerate(some):
            triton_rows.choose(padded[:, at : at + 1].contiguous(), row, budget, 0.25, slots, blocks, count)
        budgets = torch.full((4,), budget)
        for at, row in enumerate(some):
            kept = torch_index._best_before(score[:, at : at + 1] * 0.25, torch.tensor([row]), budgets)[:, 0]
            for line, slot in enumerate(slots.tolist()):
                expected = best_of_row((score[line, at] * 0.25).tolist(), row, budget)
                assert kept[line].nonzero()[:, 0].tolist() == expected, (line, row, budget)
                assert count[slot, row] == len(expected), (line, row, budget)
                listed = [*expected, *[PAD] * (blocks.shape[2] - len(expected))]
                assert blocks[slot, row].tolist() == listed, (line, row, budget)
        assert (blocks[2] == PAD).all() and (count[2] == 0).all()


def check_cuts(size: int, device: str) -> None:
    """The exact k-th best of hostile scores: equal ones, both zeros, denormals, infinities, NaN."""
    generator = torch.Generator().manual_seed(size)
    plain = torch.randn(size, generator=generator)
    mixed = torch.tensor([0.0, -0.0, 1e-45, -1e-45, torch.inf, -torch.inf, torch.nan, 1.0, 3.4e38, -3.4e38])
    score = torch.stack(
        [
            plain,
            plain.abs() * 1e-6,
            -plain.abs(),
            plain * 1e-42,
            plain.round(),
            torch.full((size,), 0.25),
            torch.zeros(size).copysign(plain),
            mixed[torch.randint(10, (size,), generator=generator)],
            torch.full((size,), torch.nan),
            torch.where(plain > 2, plain, 0.0),
            torch.full((size,), -torch.inf),
            (-1.0 + 1e-6 * plain),
        ]
    )
    lines, there = len(score), score.to(device)
    for budgets in ((1,), (size,), (0,), (max(1, size // 3), 0, 1, size, 2)):
        for forced, length in ((0, size), (3, size), (0, max(0, size - 3)), (size // 2, size - size // 4)):
            spread = tuple(budgets[line % len(budgets)] for line in range(lines))
            lengths = tuple(max(0, length - line % 2) for line in range(lines))
            cut = triton_cut.cut_values(there, (forced,) * lines, spread, lengths).tolist()
            for line, (budget, end) in enumerate(zip(spread, lengths, strict=True)):
                wanted = min(budget, end) - min(forced, end)
                best = score[line, min(forced, end) : end].nan_to_num(-torch.inf, torch.inf, -torch.inf)
                expected = best.topk(wanted).values[-1].item() if wanted > 0 else torch.inf
                assert cut[line] == expected, (line, budgets, forced, length)
