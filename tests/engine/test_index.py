"""The index against its definition: forced cells, budgets, ties, tiles, counts, and that the way in does not matter."""

import itertools
import resource

import pytest
import torch

from headscope.engine import AShape, BlockSparse, Dense, Estimator, Fixed, Fraction, VerticalSlash, build_index
from headscope.kernels.cells import reference
from tests.helpers.cases import expand_by_definition, random_case


@pytest.mark.parametrize("seed", range(150))
def test_requested_within_computed_within_causal_and_counts_exact(seed):
    case = random_case(seed)
    index = build_index(case.q, case.k, case.patterns, None, case.starts, case.tile, case.estimator)
    requested, computed = index.requested_mask(), index.computed_mask()
    causal = reference.causal(case.q.shape[2], case.k.shape[2], index.starts, case.q.device)
    assert (requested <= computed).all()
    assert (computed <= causal).all()
    assert torch.equal(requested.sum((2, 3)), index.requested_pairs())
    assert torch.equal(computed.sum((2, 3)), index.computed_pairs())
    assert torch.equal(causal.sum((1, 2, 3)), index.causal_pairs())
    areas = index.areas()
    assert torch.equal(areas.block + areas.column, index.computed_pairs())
    assert min(int(x.min()) for x in (areas.block, areas.column, areas.causal_waste, areas.padding)) >= 0
    for batch, start in enumerate(index.starts):
        for head, pattern in enumerate(case.patterns):
            diagonal = computed[batch, head].diagonal(case.k.shape[2] - case.q.shape[2])
            real = torch.arange(len(diagonal)) + case.k.shape[2] - case.q.shape[2] >= start
            if not isinstance(pattern, Fixed):
                assert diagonal[real].all(), "distance 0 must always be in"


def test_the_seed_examples_have_their_cells():
    q, k = torch.randn(1, 1, 8, 4), torch.randn(1, 1, 8, 4)
    row = build_index(q, k, [Fixed(columns=(1,), distances=(0, 2))]).computed_mask()[0, 0, 6]
    assert row.nonzero().flatten().tolist() == [1, 4, 6]
    assert build_index(q, k, [AShape(1, 2)]).computed_pairs().item() == 21
    q, k = torch.randn(1, 1, 1024, 4), torch.randn(1, 1, 1024, 4)
    assert build_index(q, k, [Fixed(columns=(0, 512))]).computed_pairs().item() == 1536


def _scores(case, head, rows):
    """Column and distance sums of sampled softmax rows of one head, from the definition, in float64."""
    k = case.k[0, head // (case.q.shape[1] // case.k.shape[1])].double()
    n = len(k)
    columns, distances = [0.0] * n, [0.0] * n
    for row in rows:
        weight = (case.q[0, head, row].double() @ k[: row + 1].T / case.q.shape[3] ** 0.5).softmax(0).tolist()
        for column, mass in enumerate(weight):
            columns[column] += mass
            distances[row - column] += mass
    return columns, distances


@pytest.mark.parametrize("length", [1, 2, 65, 111, 200])
def test_vertical_slash_picks_the_best_lines(length):
    case = random_case(1, length=length)
    q, k = torch.randn(1, 3, length, 16), torch.randn(1, 1, length, 16)
    pattern = VerticalSlash(vertical=9, slash=12, sink=3, local=4)
    index = build_index(q, k, [pattern] * 3, tile=1, estimator=Estimator(rows=8))
    object.__setattr__(case, "q", q)
    object.__setattr__(case, "k", k)
    for head in range(3):
        columns, distances = _scores(case, head, range(max(0, length - 8), length))
        best_columns = sorted(range(min(3, length), length), key=lambda c: (-columns[c], c))[:6]
        best_distances = sorted(range(min(4, length), length), key=lambda d: (-distances[d], d))[:8]
        wanted = Fixed(tuple({*range(min(3, length)), *best_columns}), tuple({*range(min(4, length)), *best_distances}))
        expected = build_index(q, k, [wanted] * 3, tile=1).computed_mask()[0, head]
        assert torch.equal(index.computed_mask()[0, head], expected)


def test_ties_go_to_the_smaller_position():
    q, k = torch.zeros(1, 1, 64, 4), torch.zeros(1, 1, 64, 4)
    index = build_index(q, k, [VerticalSlash(vertical=5, slash=3)], estimator=Estimator(rows=1), tile=1)
    expected = build_index(q, k, [Fixed(columns=(0, 1, 2, 3, 4), distances=(0, 1, 2))], tile=1)
    assert torch.equal(index.computed_mask(), expected.computed_mask())
    blocks = build_index(torch.zeros(1, 1, 256, 4), torch.zeros(1, 1, 256, 4), [BlockSparse(2, 64)])
    assert blocks.computed.blocks[0].tolist() == [[0, 2**30], [0, 1], [0, 2], [0, 3]]


@pytest.mark.parametrize("seed", range(40))
def test_the_tile_rule_is_the_written_one(seed):
    torch.manual_seed(seed)
    length = int(torch.randint(1, 700, ()))
    q, k = torch.randn(1, 1, length, 8), torch.randn(1, 1, length, 8)
    pattern = VerticalSlash(vertical=3, slash=int(torch.randint(1, 9, ())))
    index = build_index(q, k, [pattern])
    bands = index.requested.bands[0, : int(index.requested.band_count[0])].tolist()
    distances = {d for low, high in bands for d in range(low, high + 1)}
    columns = set(index.computed.columns[0].tolist())
    mask = index.computed_mask()[0, 0]
    for row in {0, length // 3, length // 2, length - 1}:
        keys = expand_by_definition(distances, length, row) | {c for c in columns if c <= row}
        assert set(mask[row].nonzero().flatten().tolist()) == keys


@pytest.mark.parametrize("tile", [2, 4, 8, 128])
def test_windows_hold_what_was_paid_for_and_never_overlap(tile):
    torch.manual_seed(tile)
    q, k = torch.randn(1, 4, 900, 8), torch.randn(1, 2, 900, 8)
    patterns = [VerticalSlash(0, windows=3), VerticalSlash(0, slash=9), VerticalSlash(0, slash=90), VerticalSlash(4, 2)]
    index = build_index(q, k, patterns, tile=tile)
    assert int(index.computed_pairs()[0, 0]) <= 3 * tile * 900
    for head in range(4):
        offsets = index.computed.windows[head, : int(index.computed.window_count[head])].tolist()
        assert all(b - a >= tile for a, b in itertools.pairwise(offsets))
        assert offsets[0] == tile // 2, "the window of the diagonal is always in"
    assert int(index.computed.window_count[0]) == 3


def test_block_means_leave_padding_out():
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 150, 8), torch.randn(1, 1, 150, 8)
    plain = build_index(q, k, [BlockSparse(2, 32)] * 2).computed_mask()
    junk = torch.full((1, 1, 45, 8), 1e4)
    padded = build_index(
        torch.cat([junk.expand(1, 2, -1, -1), q], 2), torch.cat([junk, k], 2), [BlockSparse(2, 32)] * 2, starts=[45]
    ).computed_mask()
    assert torch.equal(padded[:, :, 45:, 45:], plain)
    assert not padded[:, :, :45].any()
    assert not padded[:, :, :, :45].any()


MIXED = (Dense(), AShape(3, 40), VerticalSlash(9, 20, 2, 3), VerticalSlash(6, windows=2), BlockSparse(3, 64), Dense())


@pytest.mark.parametrize("length", [64, 111, 400])
def test_padded_chunked_and_batched_calls_compute_the_same_pairs(length):
    torch.manual_seed(length)
    q, k = torch.randn(1, 6, length, 16), torch.randn(1, 2, length, 16)
    plain = build_index(q, k, MIXED).computed_mask()
    pad = 37
    q2 = torch.cat([torch.randn(1, 6, pad, 16), q], 2)
    k2 = torch.cat([torch.randn(1, 2, pad, 16), k], 2)
    assert torch.equal(build_index(q2, k2, MIXED, starts=[pad]).computed_mask()[:, :, pad:, pad:], plain)
    both = build_index(torch.cat([q2, q2 * 0.5]), torch.cat([k2, k2]), MIXED, starts=torch.tensor([pad, 0]))
    assert torch.equal(both.computed_mask()[:1, :, pad:, pad:], plain)
    rows = length - 64 * (length // 128) if length >= 128 else length
    chunk = build_index(q[:, :, -max(rows, 64) :], k, MIXED).computed_mask()
    assert torch.equal(chunk, plain[:, :, -max(rows, 64) :])


def test_short_sequences_and_empty_ones():
    q, k = torch.randn(2, 6, 5, 16), torch.randn(2, 2, 5, 16)
    index = build_index(q, k, MIXED, starts=[5, 4])
    assert index.computed_pairs().tolist() == [[0] * 6, [1] * 6]
    assert index.causal_pairs().tolist() == [0, 1]


def test_counts_do_not_enumerate_cells():
    """A million tokens: exact counts from tables of linear size, against closed forms."""
    n = 2**20
    q, k = torch.zeros(1, 2, 1, 1), torch.zeros(1, 1, n, 1)
    index = build_index(q.expand(1, 2, 1, 1), k, [AShape(4, 1000), Fixed(columns=(5, 7), distances=(3,))])
    assert index.computed_pairs().tolist() == [[1004, 3]]
    full = build_index(torch.zeros(1, 1, n, 1), k, [AShape(4, 1000)])
    assert full.computed_pairs().item() == 1000 * 1001 // 2 + (n - 1000) * 1000 + sum(
        max(0, min(4, i - 999)) for i in range(n)
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": torch.zeros(3, 8, 4)}, "q must be a tensor"),
        ({"q": torch.zeros(1, 5, 8, 4)}, "multiple of k's 2 heads"),
        ({"q": torch.zeros(1, 6, 9, 4)}, "at most as many rows"),
        ({"q": torch.zeros(1, 6, 8, 4, dtype=torch.int32)}, "q must be float32"),
        ({"q": torch.zeros(1, 6, 8, 4).half()}, "must match"),
        ({"patterns": (Dense(),)}, "one pattern per query head: 6, got 1"),
        ({"patterns": ("dense",) * 6}, "Pattern objects"),
        ({"starts": [1, 2]}, "starts must hold 1"),
        ({"starts": [9]}, "between 0 and 8"),
        ({"tile": 3}, "tile must be 1"),
        ({"scale": 0.0}, "scale"),
        ({"impl": "cuda"}, "impl must be one of"),
    ],
)
def test_bad_arguments_are_named(change, words):
    call = {"q": torch.zeros(1, 6, 8, 4), "k": torch.zeros(1, 2, 8, 4), "patterns": MIXED} | change
    with pytest.raises(ValueError, match=words):
        build_index(**call)


def test_long_masks_are_refused():
    index = build_index(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 8193, 4), [Dense()])
    with pytest.raises(ValueError, match="8192"):
        index.computed_mask()


def test_fraction_budgets_follow_each_sequence():
    q, k = torch.randn(2, 1, 100, 8), torch.randn(2, 1, 100, 8)
    index = build_index(q, k, [AShape(0, Fraction(0.5))], starts=[0, 80])
    assert index.computed.bands[:, 0].tolist() == [[0, 49], [0, 9]]


def test_blocks_beside_lines_are_counted_without_writing_their_cells_out() -> None:
    """A row of blocks over all keys beside a band and columns: 268 million cells, of which no list is made."""
    length, size = 2**16, 4096
    last = length // size - 1
    pattern = Fixed(tuple(range(4)), tuple(range(100)), tuple((last, key) for key in range(last + 1)), size)
    x = torch.zeros(1, 1, length, 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    index = build_index(x, x, [pattern])
    areas = index.areas()
    row = torch.arange(length) + 1
    expected = int(row[:-size].clamp(max=104).sum() + row[-size:].sum())
    assert int(index.requested_pairs()) == int(index.computed_pairs()) == expected
    assert int(areas.block + areas.column) == expected
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024  # KiB
