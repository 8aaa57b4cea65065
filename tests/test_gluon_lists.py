"""What the lean Hopper kernel takes for granted about layouts that know their plans, checked cell by cell."""

from __future__ import annotations

import pytest
import torch

from headscope.kernels import membership
from headscope.kernels.layout import Layout
from tests import triton_cases

pytest.importorskip("triton")


@pytest.mark.parametrize("seed", range(60))
def test_lean_layouts_never_share_cells(seed: int) -> None:
    from headscope.kernels import gluon_attention

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
    from headscope.kernels import gluon_attention

    seen = [
        gluon_attention.may_overlap(triton_cases.built_case(seed, "cpu", torch.float32, 16, (200,)).layout)
        for seed in range(60)
    ]
    assert 5 < sum(seen) < 55


def test_plans_speak_for_the_mask() -> None:
    """A layout that forgot its plans has the same cells: plans only say what need not be asked."""
    case = triton_cases.built_case(5, "cpu", torch.float32, 16, (333,))
    bare = Layout(**{**vars(case.layout), "plans": ()})
    assert torch.equal(membership.mask(bare), membership.mask(case.layout))
