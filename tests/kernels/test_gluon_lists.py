"""What the lean Hopper kernel takes for granted about layouts that know their plans, checked cell by cell."""

from __future__ import annotations

import pytest
import torch

from headscope.engine.attend.estimator import Estimator
from headscope.engine.patterns.families import VerticalSlash
from headscope.kernels.cells.layout import Layout
from headscope.kernels.torch import index as torch_index
from tests.helpers import triton_cases

pytest.importorskip("triton")


@pytest.mark.parametrize("seed", range(60))
def test_lean_layouts_never_share_cells(seed: int) -> None:
    from headscope.kernels.gluon import attention as gluon_attention

    case = triton_cases.built_case(seed, "cpu", torch.float32, 16, (1, 64, 65, 128, 200, 333, 700))
    layout = case.layout
    if gluon_attention.may_overlap(layout):
        return
    for head, plan in enumerate(layout.plans):
        length = layout.length(head // layout.heads)
        if plan.online_slash and length:
            _check_columns(layout, head, length)
        kinds = (layout.windows[head], layout.bands[head], layout.columns[head])
        counts = (layout.window_count[head], layout.band_count[head], layout.column_count[head])
        some = [int(count) > 0 for _, count in zip(kinds, counts, strict=True)] + [layout.block_slot[head] >= 0]
        if some[1] and some[2]:
            assert layout.columns[head, : counts[2]].tolist() == list(range(int(counts[2])))
            assert int(counts[1]) == 1 and int(layout.bands[head, 0, 0]) == 0
        assert not some[3] or sum(some) == 1
        assert not (some[0] and some[1])


def _check_columns(layout: Layout, head: int, length: int) -> None:
    """Of every column, all rows of a block read the cell from a window, or all or none read it as a column."""
    rows = torch.arange(length)[:, None]
    columns = layout.columns[head, : layout.column_count[head]].long()
    reach = rows // 64 * 64 - columns[None, :]
    windows = layout.windows[head, : layout.window_count[head]].long()
    covered = ((reach[..., None] <= windows) & (reach[..., None] >= windows - 127)).any(-1)
    alone = (rows >= columns[None, :]) & ~covered
    for block in range(0, length, 64):
        mine = alone[block : block + 64]
        assert bool((mine.all(0) | ~mine.any(0)).all())


def test_lean_is_common_and_care_is_possible() -> None:
    """Both kernels are reached by the cases above."""
    from headscope.kernels.gluon import attention as gluon_attention

    seen = [
        gluon_attention.may_overlap(triton_cases.built_case(seed, "cpu", torch.float32, 16, (200,)).layout)
        for seed in range(60)
    ]
    assert 5 < sum(seen) < 55


def test_requested_layouts_make_no_promise() -> None:
    """Their columns and distances share cells, so they take the kernel that decides every cell."""
    from headscope.kernels.gluon import attention as gluon_attention

    q, k = torch.randn(1, 1, 500, 16), torch.randn(1, 1, 500, 16)
    plan = VerticalSlash(60, 90, sink=4, local=8).plan(500)
    requested, computed = torch_index.build(q, k, [plan], (0,), 0.25, Estimator(), 128)
    assert gluon_attention.may_overlap(requested) and not gluon_attention.may_overlap(computed)
