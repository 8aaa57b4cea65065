"""Tri-shape against a plain mask and float64: sink, window, and whole blocks of dense last rows.

The Triton kernels run in the interpreter, which must be chosen before they are decorated: a plain run of this file
starts pytest on itself in a process of its own. On a GPU they and the Gluon kernels run as they are.
"""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from headscope.engine import (
    AShape,
    Dense,
    Estimator,
    Fraction,
    TriShape,
    build_index,
    masked_attention,
    sparse_attention,
)
from headscope.engine.attend.inputs import ScoreInputs
from headscope.engine.base.errors import ConfigError
from headscope.engine.config import interop
from headscope.engine.config.file import HeadConfig
from headscope.engine.loss.oracle import loss_split
from headscope.engine.patterns.tri_shape import MOST_BLOCK_ROWS, block_size
from headscope.engine.search import run as search
from headscope.engine.search.cost import CostModel
from headscope.engine.search.grid import Grid
from headscope.engine.search.results import Settings
from headscope.engine.search.table import Target
from headscope.kernels.torch.attention import dense
from tests.engine.test_config import FACTS
from tests.helpers.planted import PlantedSource, planted_prompts

INSIDE = os.environ.get("TRITON_INTERPRET") == "1"
LENGTHS = (1, 2, 63, 64, 65, 111, 1000)


@dataclass(frozen=True)
class Case:
    """q [B, Hq, S, D], k and v [B, Hkv, T, D], a tri-shape per head, and the first real position per sequence."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    patterns: tuple[TriShape, ...]
    starts: tuple[int, ...]


def random_case(seed: int, length: int, device: str = "cpu", dtype: torch.dtype = torch.float32, dim: int = 16) -> Case:
    rng = random.Random(f"{seed} {length}")
    torch.manual_seed(seed)
    rows = rng.choice((length, length, max(1, length // 2), max(1, length - 64), 1))
    group, kv_heads, batch = rng.choice((1, 3, 4)), rng.choice((1, 2)), rng.choice((1, 2))

    def draw(heads: int, count: int) -> torch.Tensor:
        return torch.randn(batch, heads, count, dim).to(device, dtype)

    patterns = tuple(
        TriShape(
            rng.choice((0, 1, 5, Fraction(0.02))),
            rng.choice((1, 2, 33, 70, Fraction(0.1), 4 * length)),
            rng.choice((1, 2, 64, 65, 100, Fraction(0.2), 4 * length)),
        )
        for _ in range(group * kv_heads)
    )
    starts = tuple(rng.choice((0, rng.randrange(length))) for _ in range(batch))
    return Case(draw(group * kv_heads, rows), draw(kv_heads, length), draw(kv_heads, length), patterns, starts)


def by_definition(case: Case) -> torch.Tensor:
    """bool [B, Hq, S, T], written from the text of the class."""
    q_len, kv_len = case.q.shape[2], case.k.shape[2]
    parts = []
    for start in case.starts:
        length = kv_len - start
        size = next(64 << n for n in range(30) if length <= 256 * (64 << n))
        i = torch.arange(kv_len - q_len, kv_len)[:, None] - start
        j = torch.arange(kv_len)[None, :] - start
        for pattern in case.patterns:
            sink, window, last = (
                budget.resolve(length) if isinstance(budget, Fraction) else budget
                for budget in (pattern.sink, pattern.window, pattern.last)
            )
            holds_the_last = (length - min(last, length)) // size
            keep = (j < sink) | (i - j < window) | (i // size >= holds_the_last)
            parts.append(keep & (j >= 0) & (j <= i))
    return torch.stack(parts).view(len(case.starts), len(case.patterns), q_len, kv_len)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("seed", range(12))
def test_cells_are_those_of_the_definition_and_counted_exactly(seed: int, length: int) -> None:
    case = random_case(seed, length)
    index = build_index(case.q, case.k, case.patterns, starts=case.starts)
    mask = by_definition(case)
    assert torch.equal(index.requested_mask(), mask) and torch.equal(index.computed_mask(), mask)
    assert torch.equal(index.requested_pairs(), mask.sum((2, 3)))
    assert torch.equal(index.computed_pairs(), mask.sum((2, 3)))
    areas = index.areas()
    assert torch.equal(areas.block + areas.column, mask.sum((2, 3)))
    assert min(int(part.min()) for part in (areas.causal_waste, areas.padding)) >= 0


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("seed", range(4))
def test_attention_is_that_of_the_mask(impl: str, seed: int, length: int) -> None:
    case = random_case(seed, length)
    index = build_index(case.q, case.k, case.patterns, starts=case.starts)
    out, lse = sparse_attention(case.q, case.k, case.v, index, impl=impl)
    expected, expected_lse = masked_attention(case.q, case.k, case.v, by_definition(case))
    assert torch.allclose(out.double(), expected, atol=1e-5) and torch.allclose(lse.double(), expected_lse, atol=1e-5)


@pytest.mark.skipif(INSIDE, reason="this is that process")
def test_the_triton_path_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command += ["-k", "interpreted", __file__]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.skipif(not INSIDE, reason="runs in the interpreter's own process")
@pytest.mark.parametrize(("seed", "length"), [(0, 65), (1, 111), (2, 200), (3, 333), (4, 300)])
def test_interpreted(seed: int, length: int) -> None:
    from headscope.kernels.cells import membership
    from headscope.kernels.triton import attention, index

    case = random_case(seed, length)
    plans = [pattern.plan(length - start) for start in case.starts for pattern in case.patterns]
    scale = case.q.shape[-1] ** -0.5
    layout = index.build(case.q, case.k, plans, case.starts, scale, Estimator(), 128)[1]
    mask = by_definition(case)
    assert torch.equal(membership.mask(layout), mask)
    out, lse = attention.attend(case.q, case.k, case.v, layout, scale)
    expected, expected_lse = masked_attention(case.q, case.k, case.v, mask)
    assert torch.allclose(out.double(), expected, atol=1e-5) and torch.allclose(lse.double(), expected_lse, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", "gluon"])
@pytest.mark.parametrize("length", [*LENGTHS, 4095])
@pytest.mark.parametrize("seed", range(3))
def test_attention_on_the_gpu(impl: str, seed: int, length: int) -> None:
    if impl == "gluon" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    case = random_case(seed, length, "cuda", torch.bfloat16, 64)
    index = build_index(case.q, case.k, case.patterns, starts=case.starts)
    mask = by_definition(case).cuda()
    assert torch.equal(index.computed_mask(), mask)
    out, lse = sparse_attention(case.q, case.k, case.v, index, impl=impl)
    expected, expected_lse = masked_attention(case.q, case.k, case.v, mask)
    assert torch.allclose(out.double(), expected, atol=2e-2)
    assert torch.allclose(lse.double(), expected_lse, atol=1e-2)


def test_blocks_grow_with_the_length_so_that_memory_stays_linear() -> None:
    assert [block_size(n) for n in (1, 64, 16384, 16385, 32768, 2**20)] == [64, 64, 64, 128, 128, 4096]
    length = 2**17
    pattern = TriShape(64, 1024, 128)
    x = torch.zeros(1, 1, length, 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    index = build_index(x, x, [pattern])
    assert index.computed.blocks.shape == (1, MOST_BLOCK_ROWS, MOST_BLOCK_ROWS)
    row = torch.arange(length) + 1
    assert int(index.requested_pairs()) == int(row[:-512].clamp(max=1024 + 64).sum() + row[-512:].sum())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024  # KiB


def test_last_means_last_of_the_keys_so_far() -> None:
    x = torch.randn(1, 1, 256, 8)
    whole = build_index(x, x, [TriShape(1, 4, 1)]).requested_mask()
    first_half = build_index(x[:, :, :128], x[:, :, :128], [TriShape(1, 4, 1)]).requested_mask()
    assert whole[0, 0, 192:].sum() == sum(range(193, 257)) and int(whole[0, 0, 127].sum()) == 5
    assert int(first_half[0, 0, 127].sum()) == 128


def test_a_pattern_that_keeps_everything_is_planned_as_dense() -> None:
    for length in (1, 64, 200):
        for pattern in (TriShape(0, 1, length), TriShape(0, length, 1), TriShape(length, 1, 1), TriShape(40, 100, 64)):
            assert pattern.plan(length) == Dense().plan(length) and pattern.covers_all(length)
    assert not TriShape(4, 32, 64).covers_all(200)


def test_nonsense_is_refused_by_name() -> None:
    for arguments, words in (
        ((-1, 4, 4), "TriShape.sink"),
        ((1, 0, 4), "TriShape.window"),
        ((1, 4, 0), "TriShape.last"),
    ):
        with pytest.raises(ValueError, match=words):
            TriShape(*arguments)


@pytest.mark.parametrize("tool", ["minference", "sglang"])
def test_an_export_is_refused_with_the_reason_or_is_the_nearest_a_shape(tool: str) -> None:
    config = HeadConfig.uniform(FACTS, TriShape(64, 512, 128))
    with pytest.raises(ConfigError, match=r"cannot express: tri-shape, whose last rows are dense .*--lossy"):
        interop.export_foreign(config, tool)
    nearest = interop.export_foreign(HeadConfig.uniform(FACTS, AShape(64, 512)), tool, lossy=True)
    assert interop.export_foreign(config, tool, lossy=True).layers == nearest.layers


def test_the_best_sink_and_window_leave_the_last_rows_dense() -> None:
    """Mass on far keys for the last rows and on near ones elsewhere: another split gains little, and loses no row."""
    torch.manual_seed(1)
    q, k = torch.randn(1, 1, 300, 16), torch.randn(1, 1, 300, 16)
    index = build_index(q, k, [TriShape(4, 40, 64)])
    split = loss_split(ScoreInputs(q, k), dense(q, k, k, index.scale, (0,))[1], index, 0)
    assert split.top_k < split.geometric <= split.online == split.computed


def test_a_search_takes_it_where_the_grid_names_it(tmp_path: Path) -> None:
    source, prompts = PlantedSource(layers=1), planted_prompts(1)
    grid = Grid((AShape(4, 48), TriShape(4, 48, 64)))
    settings = Settings((0,), Grid.from_list(grid.to_list()), Estimator())
    results = search.measure(source, prompts, settings, tmp_path, facts=source.facts())
    chosen = search.choose(
        results, settings, Target(max_missed=0.05, metric="end"), tmp_path, source.facts(), CostModel.tiles()
    )
    loss = chosen.table.loss("mean")[0]
    assert (loss[:, 2] <= loss[:, 1]).all() and (loss[:, 2] < loss[:, 1]).any()
    kinds = {pattern.kind for pattern in chosen.config.patterns(0)}
    assert "a-shape" in kinds and kinds <= {"dense", "a-shape", "tri-shape"}
    assert HeadConfig.load(chosen.config.save(tmp_path / "config.json")).patterns(0) == chosen.config.patterns(0)
