"""Every Triton kernel in the interpreter, on a CPU, against float64 (fp16 and fp32: a bf16 dot is wrong there).

The interpreter must be chosen before Triton's functions are decorated, so a plain run of this file starts
pytest on itself in a process of its own.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
import torch

from headscope.engine.attend.estimator import Estimator
from headscope.kernels.cells import membership, reference
from headscope.kernels.cells.layout import PAD, Layout
from headscope.kernels.cells.plan import HeadPlan
from headscope.kernels.torch import index as torch_index
from headscope.kernels.torch import mass as torch_mass
from tests.helpers import index_cases, strides, triton_cases

INSIDE = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INSIDE, reason="runs in the interpreter's own process")
ESTIMATORS = (
    Estimator(),
    Estimator(rows=100, where="spread"),
    Estimator(rows=7, where="half", columns="max"),
    Estimator(rows=64, where="half", overlap="removed"),
    Estimator(rows=16, statistic="logit", slashes="mean"),
    Estimator(rows=33, where="spread", slashes="shrunk", overlap="removed"),
    Estimator(rows=100),
)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3}


@pytest.mark.skipif(INSIDE, reason="this is that process")
@pytest.mark.parametrize("part", ["attention", "index", "mass"])
@pytest.mark.timeout(960)  # beyond what its process may take on a machine that does something else too
def test_in_interpreter(part: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-k",
        part,
        __file__,
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@inside
@pytest.mark.parametrize("seed", range(40))
def test_attention_over_layouts(seed: int) -> None:
    from headscope.kernels.triton import attention as triton_attention

    case = triton_cases.random_case(seed)
    out, lse = triton_attention.attend(case.q, case.k, case.v, case.layout, case.scale)
    expected, expected_lse = triton_cases.truth(case)
    assert triton_cases.error_of(out, expected) <= TOLERANCE[case.q.dtype], case.name
    assert triton_cases.lse_error(lse, expected_lse) <= 1e-5, case.name


@inside
@pytest.mark.parametrize("seed", range(1000, 1012))
def test_attention_dense(seed: int) -> None:
    from headscope.kernels.triton import attention as triton_attention

    case = triton_cases.random_case(seed)
    out, lse = triton_attention.dense(case.q, case.k, case.v, case.scale, case.layout.starts)
    expected, expected_lse = reference.dense(case.q, case.k, case.v, case.scale, case.layout.starts)
    assert triton_cases.error_of(out, expected) <= TOLERANCE[case.q.dtype], case.name
    assert triton_cases.lse_error(lse, expected_lse) <= 1e-5, case.name


@inside
@pytest.mark.parametrize("how", strides.WAYS)
def test_attention_of_any_strides(how: str) -> None:
    from headscope.kernels.triton import attention as triton_attention

    case = triton_cases.random_case(3, lengths=(65,), head_dims=(16,), dtypes=(torch.float32,))
    q, k, v = strides.restrided(how, case.q, case.k, case.v)
    for found, expected in (
        (
            triton_attention.attend(q, k, v, case.layout, case.scale),
            reference.attend(q, k, v, case.layout, case.scale),
        ),
        (
            triton_attention.dense(q, k, v, case.scale, case.layout.starts),
            reference.dense(q, k, v, case.scale, case.layout.starts),
        ),
    ):
        assert triton_cases.error_of(found[0], expected[0]) <= TOLERANCE[q.dtype], case.name
        assert triton_cases.lse_error(found[1], expected[1]) <= 1e-5, case.name


@inside
@pytest.mark.parametrize("how", ["transposed dimensions", "expanded", "odd offset"])
def test_index_and_mass_of_any_strides(how: str) -> None:
    from headscope.kernels.triton import index as triton_index
    from headscope.kernels.triton import mass as triton_mass
    from headscope.kernels.triton import profiles as triton_profiles

    generator = torch.Generator().manual_seed(5)
    q, k = strides.restrided(how, *(torch.randn(1, heads, 130, 16, generator=generator) for heads in (2, 1)))
    starts, scale = (20,), 0.25
    plans = [HeadPlan(vertical=9, sink=2, slash=12, local=3), HeadPlan(top_blocks=2, block_size=32)]
    arguments = (plans, starts, scale, Estimator(), 128)
    ours, theirs = triton_index.build(q, k, *arguments)[1], torch_index.build(q, k, *arguments)[1]
    assert torch.equal(membership.mask(ours), membership.mask(theirs))
    lse = reference.dense(q, k, k, scale, starts)[1].transpose(1, 2).contiguous().transpose(1, 2)
    span = ((0, 130), (3, 129), (2, 3))
    pairs = [(triton_mass.pooled(q, k, lse, scale, starts, *span), torch_mass.pooled(q, k, lse, scale, starts, *span))]
    found, expected = (module.sums(q, k, lse, scale, starts) for module in (triton_profiles, torch_mass))
    for one, other in (*pairs, *zip(found, expected, strict=True)):
        assert torch.allclose(one, other, atol=2e-4, rtol=2e-4)


@inside
def test_attention_refuses_what_does_not_fit() -> None:
    """By the launchers themselves, before a kernel reads beside a tensor."""
    from headscope.kernels.triton import attention as triton_attention
    from headscope.kernels.triton import mass as triton_mass
    from headscope.kernels.triton import scores as triton_scores

    case = triton_cases.random_case(1, dtypes=(torch.float32,), lengths=(65,), head_dims=(16,))
    q, k, v = case.q, case.k, case.v
    with pytest.raises(ValueError, match="the layout is for"):
        triton_attention.attend(q[:, :, :-1], k[:, :, :-1], v[:, :, :-1], case.layout, case.scale)
    with pytest.raises(ValueError, match="starts must be"):
        triton_attention.dense(q, k, v, case.scale, (66,) * len(q))
    with pytest.raises(ValueError, match="lse must be"):
        span = ((0, 65), (0, 65), (1, 1))
        triton_mass.pooled(q, k, torch.zeros(1, 1, 65), case.scale, case.layout.starts, *span)
    with pytest.raises(ValueError, match="k must be contiguous"):
        ints = torch.zeros(1, 1, dtype=torch.int32)
        triton_scores.norms(q, k.transpose(2, 3).contiguous().transpose(2, 3), ints[0], ints, ints[0], 1.0, False)


@inside
@pytest.mark.parametrize("seed", range(8))
def test_attention_ignores_padding_values(seed: int) -> None:
    """Whatever stands before a sequence's first key, numbers or not, changes no row."""
    from headscope.kernels.triton import attention as triton_attention

    case = triton_cases.random_case(2000 + seed, lengths=(111, 200))
    clean, _ = triton_attention.attend(case.q, case.k, case.v, case.layout, case.scale)
    k, v = case.k.clone(), case.v.clone()
    for sequence, start in enumerate(case.layout.starts):
        k[sequence, :, :start] = torch.nan
        v[sequence, :, :start] = torch.nan
    spoiled, _ = triton_attention.attend(case.q, k, v, case.layout, case.scale)
    assert torch.equal(clean, spoiled), case.name


@inside
@pytest.mark.parametrize("seed", range(12))
def test_attention_keep_bits(seed: int) -> None:
    """The bits that say which columns the boxes leave, against the cells themselves."""
    from headscope.kernels.triton import cover, plan

    case = triton_cases.random_case(3000 + seed, lengths=(65, 200, 333))
    layout = case.layout
    launch = plan.make_tables(layout)
    if not layout.columns.shape[1]:
        return
    some, whole = cover.keep_bits(layout, launch.cover)
    even = cover.column_bits(layout, launch.cover)
    assert torch.equal(even[..., : some.shape[2]], some) and not even[..., some.shape[2] :].any()
    tables = membership.tables(layout)
    for head in range(layout.batch * layout.heads):
        length = layout.length(head // layout.heads)
        for block in range(-(-length // 64)):
            rows = torch.arange(block * 64, block * 64 + 64)
            for place, column in enumerate(layout.columns[head, : int(layout.column_count[head])].tolist()):
                distance = rows - column
                taken = tables.band[head][distance.clamp(0, layout.kv_len - 1)] & (distance < layout.kv_len)
                offset = rows // layout.rows * layout.rows - column
                taken = taken | tables.windows_at(offset)[head] & (offset < layout.kv_len)
                left = (distance >= 0) & ~taken
                bit = int(some[head, block, place // 32]) >> (place % 32) & 1
                every = int(whole[head, block, place // 32]) >> (place % 32) & 1
                assert bit or not bool(left.any()), (case.name, head, block, column)
                assert not every or bool(left.all()), (case.name, head, block, column)
                by_block = int(launch.edge[head, 0, 0]) == 64 and layout.tile == 128 and layout.band_count[head] == 0
                if by_block and layout.window_count[head] > 0:
                    assert bool(left.all()) == bool(left.any()) == bool(bit), (case.name, head, block, column)


@inside
@pytest.mark.parametrize("seed", range(8))
def test_mass_maps(seed: int) -> None:
    """Pooled maps of everything and of a layout, and cell counts, for random crops and pools."""
    from headscope.kernels.triton import mass as triton_mass

    case = triton_cases.random_case(4000 + seed, lengths=(1, 63, 65, 130, 200), tiles=(128, 1))
    rng = random.Random(seed)
    _, lse = reference.dense(case.q, case.k, case.v, case.scale, case.layout.starts)
    length = case.layout.kv_len
    rows, cols = _span(rng, length), _span(rng, length)
    shape = (rng.randrange(1, rows[1] - rows[0] + 1), rng.randrange(1, cols[1] - cols[0] + 1))
    arguments = (case.q, case.k, lse.float(), case.scale, case.layout.starts, rows, cols, shape)
    for layout in (None, case.layout):
        found = triton_mass.pooled(*arguments, layout)
        expected = torch_mass.pooled(*arguments, layout)
        assert torch.allclose(found, expected, atol=2e-4, rtol=2e-4), (case.name, rows, cols, shape)
    cells = triton_mass.coverage(case.layout, rows, cols, shape)
    assert torch.equal(cells, torch_mass.coverage(case.layout, rows, cols, shape)), (case.name, rows, cols, shape)


@inside
def test_mass_maps_of_more_pools_than_a_grid_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools of rows, and heads, go in chunks that the second and third axis of a grid can count."""
    from headscope.kernels.triton import mass as triton_mass

    monkeypatch.setattr(triton_mass, "_MOST_PROGRAMS", 2)
    case = triton_cases.random_case(4003, lengths=(65,), tiles=(128,))
    _, lse = reference.dense(case.q, case.k, case.v, case.scale, case.layout.starts)
    span = ((0, 65), (0, 65), (13, 2))
    arguments = (case.q, case.k, lse, case.scale, case.layout.starts, *span)
    assert torch.allclose(triton_mass.pooled(*arguments), torch_mass.pooled(*arguments), atol=2e-4, rtol=2e-4)
    cells = triton_mass.coverage(case.layout, *span)
    assert torch.equal(cells, torch_mass.coverage(case.layout, *span))


@inside
def test_mass_refuses_tiles_that_its_masks_do_not_know() -> None:
    """A layout of tile 16 gave the map of other cells, without a word."""
    from headscope.kernels.triton import mass as triton_mass

    q, k = torch.randn(1, 1, 100, 16), torch.randn(1, 1, 100, 16)
    plan = HeadPlan(vertical=3, sink=1, slash=9, local=1)
    layout = torch_index.build(q, k, [plan], (0,), 0.25, Estimator(), 16)[1]
    span = ((0, 100), (0, 100), (2, 2))
    with pytest.raises(ValueError, match="tile 128 or 1"):
        triton_mass.pooled(q, k, torch.zeros(1, 1, 100), 0.25, (0,), *span, layout)
    with pytest.raises(ValueError, match="tile 128 or 1"):
        triton_mass.coverage(layout, *span)


@inside
@pytest.mark.parametrize("seed", range(8))
def test_mass_sums(seed: int) -> None:
    from headscope.kernels.triton import profiles as triton_profiles

    case = triton_cases.random_case(5000 + seed, lengths=(1, 2, 63, 64, 65, 130, 200, 333))
    _, lse = reference.dense(case.q, case.k, case.v, case.scale, case.layout.starts)
    found = triton_profiles.sums(case.q, case.k, lse.float(), case.scale, case.layout.starts)
    expected = torch_mass.sums(case.q, case.k, lse.float(), case.scale, case.layout.starts)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=2e-4, rtol=2e-4), case.name


def _span(rng: random.Random, length: int) -> tuple[int, int]:
    low = rng.randrange(length)
    return rng.choice(((0, length), (low, rng.randrange(low, length) + 1)))


SHAPES = ((1, 330, 330, (0,)), (2, 70, 200, (0, 77)), (1, 1, 65, (0,)))
PLANS = {
    "online": (
        HeadPlan(vertical=9, sink=2, slash=12, local=3),
        HeadPlan(vertical=40, sink=0, slash=90, local=1),
        HeadPlan(vertical=5, sink=5, windows=2, slash=0, local=1),
        HeadPlan(top_blocks=2, block_size=64),
        HeadPlan(top_blocks=3, block_size=16),
        HeadPlan(vertical=10**6, sink=1, slash=10**6, local=1),
    ),
    "mixed": (
        HeadPlan(bands=((0, 5), (9, 30)), columns=(0, 3, 8)),
        HeadPlan(vertical=7, sink=1, slash=30, local=2),
        HeadPlan(blocks=((0, 0), (1, 0), (2, 2)), block_size=32),
        HeadPlan(top_blocks=1, block_size=48),
        HeadPlan(vertical=3, sink=1, windows=10**6, local=1),
        HeadPlan(),
    ),
}


@inside
@pytest.mark.parametrize("plans", PLANS)
@pytest.mark.parametrize(
    "estimator, shape, room", [*((number, number % 3, 2**28) for number in range(7)), (0, 0, 1), (4, 1, 1), (6, 2, 1)]
)
def test_index_equals_torch(plans: str, estimator: int, shape: int, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same requested and computed cells as the torch path, with all heads at once and with room for one."""
    from headscope.kernels.triton import index as triton_index

    monkeypatch.setattr(triton_index, "_SCORES", room)
    batch, q_len, kv_len, starts = SHAPES[shape]
    generator = torch.Generator().manual_seed(7 * estimator + kv_len)
    q = torch.randn(batch, 6, q_len, 16, generator=generator)
    k = torch.randn(batch, 2, kv_len, 16, generator=generator)
    options = ESTIMATORS[estimator]
    plan_list = PLANS[plans] * batch
    for tile in (128, 1):
        arguments = (q, k, plan_list, starts, 0.25, options, tile)
        for ours, theirs in zip(triton_index.build(*arguments), torch_index.build(*arguments), strict=True):
            assert torch.equal(membership.mask(ours), membership.mask(theirs)), (options, tile)
            for name in ("windows", "bands", "columns", "blocks"):
                _check_lists(ours, name)


@inside
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128])
def test_index_of_more_windows_than_there_are_beside_distances(length: int) -> None:
    """A layer may hold heads of both kinds of budget at any length, however short."""
    from headscope.kernels.triton import index as triton_index

    generator = torch.Generator().manual_seed(length)
    q, k = (torch.randn(1, heads, length, 16, generator=generator) for heads in (2, 1))
    plans = [HeadPlan(vertical=1, windows=9), HeadPlan(vertical=1, slash=min(44, length), local=1)]
    arguments = (q, k, plans, (0,), 0.25, Estimator(), 128)
    for ours, theirs in zip(triton_index.build(*arguments), torch_index.build(*arguments), strict=True):
        assert torch.equal(membership.mask(ours), membership.mask(theirs))


@inside
@pytest.mark.parametrize("programs", [1, 30, 10_000])
def test_tail_sums(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Column scores and distance sums do not depend on how tiles are dealt to programs, and equal float64 sums."""
    from headscope.kernels.triton import scores as triton_scores

    monkeypatch.setattr(triton_scores, "PROGRAMS", programs)
    generator = torch.Generator().manual_seed(programs)
    q, k = torch.randn(1, 3, 40, 16, generator=generator), torch.randn(1, 1, 2100, 16, generator=generator)
    heads, starts = torch.arange(3, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    rows = torch.tensor([[*range(2060, 2100), *[-1] * 24]], dtype=torch.int32)
    column, distance = triton_scores.tail(triton_scores.norms(q, k, heads, rows, starts, 0.25, False), False)
    weight = torch_index.row_statistic(q[0].double(), k[0].double(), rows[0, :40].long(), 0.25, "probability")
    assert torch.allclose(column[:, :2100], weight.sum(1).float(), atol=1e-6)
    expected = torch_index.distance_sums(weight, rows[0, :40].long(), "sum")
    assert torch.allclose(distance[:, :2100], expected.float(), atol=1e-6)


@inside
@pytest.mark.parametrize("seed", range(8))
def test_index_runs_over_chunks(seed: int) -> None:
    """Lists of chosen distances, with runs and gaps across the ends of chunks."""
    from headscope.kernels.triton import runs as triton_runs

    rng = random.Random(seed)
    length = rng.choice((1, 4096, 4097, 9000, 13000))
    flags = torch.zeros(3, length, dtype=torch.uint8)
    for line in range(3):
        for _ in range(rng.choice((1, 20, 200))):
            begin = rng.choice((0, 4095, 4096, 8191 - rng.randrange(300), rng.randrange(length)))
            flags[line, begin : begin + rng.choice((1, 2, 64, 65, 191, 192, 700))] = 1
    lengths = torch.full((3,), length, dtype=torch.int32)
    bands, windows = (torch.full((3, length + 2, *more), PAD, dtype=torch.int32) for more in ((2,), ()))
    counts = torch.zeros(2, 3, dtype=torch.int32)
    order = torch.tensor([2, 0, 1], dtype=torch.int32)
    triton_runs.write(flags, lengths, order, bands, counts[0], windows, counts[1])
    expected, many = torch_index.positions(torch_index.run_windows(flags.bool(), lengths, 128))
    for line, row in enumerate(order.tolist()):
        assert counts[1][row] == many[line]
        assert windows[row, : many[line]].tolist() == expected[line, : many[line]].tolist()
        marked = flags[line].tolist()
        edges = [d for d in range(length) if marked[d] and (d == 0 or not marked[d - 1])]
        ends = [d for d in range(length) if marked[d] and (d == length - 1 or not marked[d + 1])]
        assert bands[row, : counts[0][row]].tolist() == [list(pair) for pair in zip(edges, ends, strict=True)]
        assert (bands[row, counts[0][row] :] == PAD).all() and (windows[row, many[line] :] == PAD).all()


@inside
@pytest.mark.parametrize("seed", range(6))
def test_index_ties_and_budgets(seed: int) -> None:
    """Many equal scores: exactly the budget is chosen, smaller positions first."""
    from headscope.kernels.triton import cut as triton_cut
    from headscope.kernels.triton import select as triton_select

    generator = torch.Generator().manual_seed(seed)
    score = torch.randint(0, 4, (5, 5000), generator=generator).float()
    forced, lengths = (0, 3, 10, 0, 7), (5000, 4999, 2048, 2049, 7)
    budget = (1, 700, 2048, 1500, 7)
    flags = torch.zeros(5, 5000, dtype=torch.uint8)
    out = torch.full((5, 2048), PAD, dtype=torch.int32)
    ints = [torch.tensor(x, dtype=torch.int32) for x in (lengths, forced, budget)]
    cut = triton_cut.cut_values(score, forced, budget, lengths)
    triton_select.write(
        score,
        triton_select.SCORES,
        ints[0],
        torch.arange(5, dtype=torch.int32),
        cut=cut,
        forced=ints[1],
        budget=ints[2],
        out=out,
        flags=flags,
    )
    for line in range(5):
        one = (slice(line, line + 1),)
        expected = torch_index.best(score[one], torch.tensor(forced)[one], torch.tensor(budget)[one], lengths[line])[0]
        assert torch.equal(flags[line].bool(), expected)
        assert out[line, : budget[line]].tolist() == expected.nonzero()[:, 0].tolist()


@inside
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize(("side", "held"), [*((n, 16384) for n in (1, 2, 3, 63, 64, 65, 130, 1100)), (2100, 1024)])
def test_index_chooses_rows(side: int, held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with many ties, infinities and NaN; rows beyond registers."""
    from headscope.kernels.triton import rows as triton_rows

    monkeypatch.setattr(triton_rows, "_HELD", held)
    index_cases.check_rows(side, "cpu")


@inside
def test_index_rows_at_once() -> None:
    """Many rows a launch, some of whose candidates all fit in the budget; a layout that it does not serve."""
    from headscope.kernels.triton import rows as triton_rows

    generator = torch.Generator().manual_seed(0)
    score = torch.randint(0, 5, (2, 10, 80), generator=generator).float()
    slots = torch.tensor([1, 0], dtype=torch.int32)
    blocks, count = torch.full((2, 75, 20), PAD, dtype=torch.int32), torch.zeros(2, 75, dtype=torch.int32)
    triton_rows.choose(score, 33, 20, 1.0, slots, blocks, count)
    triton_rows.choose(score, 13, 20, 1.0, slots, blocks, count)
    for line, slot in enumerate(slots.tolist()):
        for row in [*range(13, 23), *range(33, 43)]:
            expected = index_cases.best_of_row(score[line, row - (33 if row >= 33 else 13)].tolist(), row, 20)
            assert blocks[slot, row, : count[slot, row]].tolist() == expected, row
            assert (blocks[slot, row, count[slot, row] :] == PAD).all()
    assert (blocks[:, 43:] == PAD).all() and (count[:, 43:] == 0).all()
    with pytest.raises(ValueError, match="multiple of 16"):
        triton_rows.choose(score[..., :75].contiguous(), 33, 20, 1.0, slots, blocks, count)


@inside
@pytest.mark.parametrize("room", [2**26, 3 * 48])
@pytest.mark.parametrize("shape", [(1, 208, 208, (0,)), (2, 80, 240, (0, 128)), (1, 16, 656, (16,))])
def test_index_of_tied_blocks(shape: tuple, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lists of the torch path, of queries and keys whose block scores are exact and often equal, in few steps
    and many."""
    from headscope.kernels.triton import index as triton_index

    monkeypatch.setattr(triton_index, "_BLOCK_SCORES", room)
    batch, q_len, kv_len, starts = shape
    generator = torch.Generator().manual_seed(kv_len)
    q, k = (
        torch.randint(-1, 2, (batch, heads, length // 16, 16), generator=generator).float().repeat_interleave(16, 2)
        for heads, length in ((4, q_len), (2, kv_len))
    )
    budgets = (1, 5, 5, 100)
    plans = [HeadPlan(top_blocks=budget, block_size=16) for budget in budgets] * batch
    arguments = (q, k, plans, starts, 0.25, Estimator(), 128)
    ours, theirs = triton_index.build(*arguments)[0], torch_index.build(*arguments)[0]
    assert torch.equal(ours.block_count, theirs.block_count)
    most = theirs.blocks.shape[2]
    assert torch.equal(ours.blocks[..., :most], theirs.blocks) and (ours.blocks[..., most:] == PAD).all()


@inside
@pytest.mark.parametrize("size", [1, 5, 2047, 2048, 2049, 10000])
def test_index_cuts(size: int) -> None:
    index_cases.check_cuts(size, "cpu")


@inside
@pytest.mark.parametrize("length", [1, 2049, 4100])
def test_index_bands_across_chunks(length: int) -> None:
    """Bands that end, begin and go on where a chunk does; one list is too short for them."""
    from headscope.kernels.triton import runs as triton_runs

    place = torch.arange(length)
    around = (place - 2048).abs() <= 3
    lines = (around, around & (place != 2048), around & (place != 2047), place < 2048, place % 2 == 0, place < length)
    flags = torch.stack(lines).to(torch.uint8)
    ends, rows = torch.full((6,), length, dtype=torch.int32), torch.arange(6, dtype=torch.int32)
    for cap in (length, 2):
        table, windows = torch.full((6, cap, 2), PAD, dtype=torch.int32), torch.empty(6, 200, dtype=torch.int32)
        counts = torch.zeros(2, 6, dtype=torch.int32)
        triton_runs.write(flags, ends, rows, table, counts[0], windows, counts[1])
        for line in range(6):
            padded = torch.nn.functional.pad(flags[line].int(), (1, 1))
            first, last = (padded.diff() > 0).nonzero()[:, 0], (padded.diff() < 0).nonzero()[:, 0] - 1
            expected = torch.stack((first, last), -1)
            assert counts[0, line] == len(expected)
            assert table[line, : len(expected)].tolist() == expected[:cap].tolist()
            assert (table[line, len(expected) :] == PAD).all()


def _check_lists(layout: Layout, name: str) -> None:
    """Ascending entries, PAD after the count."""
    table, count = getattr(layout, name), getattr(layout, {"blocks": "block_count"}.get(name, f"{name[:-1]}_count"))
    table = table[..., 0] if name == "bands" else table
    place = torch.arange(table.shape[-1])
    real = place < count[..., None]
    assert bool((table[real] < PAD).all()) and bool((table[~real] == PAD).all()), name
    assert bool(((table[..., 1:] > table[..., :-1]) | ~real[..., 1:]).all()), name
