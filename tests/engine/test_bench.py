"""`headscope bench`: planted structure is found, wrong kernels are refused, the crossover reads the rows."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from headscope.engine import build_index
from headscope.engine.attend.inputs import LayerInputs
from headscope.engine.base.errors import HeadscopeError, OptionError, PromptError
from headscope.engine.bench import decoder as bench_decoder
from headscope.engine.bench import flex as bench_flex
from headscope.engine.bench import layers as bench
from headscope.engine.bench import prefill as bench_prefill
from headscope.engine.bench.cases import CASES, Case, clustered_layout, planted_layout
from headscope.engine.bench.decoder import ModelShape
from headscope.engine.bench.prefill import Setting, run_prefill, uniform
from headscope.engine.bench.rate import rate
from headscope.engine.bench.sampling import choices, study
from headscope.engine.bench.shapes import SHAPES, Shape
from headscope.engine.bench.timing import Timing, gate
from headscope.engine.cli.bench import bench as command
from headscope.engine.config.host import HostProfile
from headscope.engine.loss.measure import measure_patterns
from headscope.engine.model.load import LoadedModel
from headscope.engine.patterns.families import AShape, BlockSparse, Dense, Fixed, Pattern, VerticalSlash
from headscope.engine.prompts.tokens import Encoded
from headscope.engine.runs.capture import stream
from headscope.engine.search.cost import CostModel
from headscope.engine.search.results import SearchPrompt
from headscope.engine.search.source import ModelSource
from headscope.kernels.cells import counts, membership
from headscope.kernels.cells.layout import Layout
from tests.helpers import triton_cases

TINY = ModelShape(layers=3, hidden=32, mlp=48, heads=Shape(4, 2, 16))


def _row(length: int, with_index: float) -> bench.Row:
    return bench.Row(length, 1, "vs", "torch", 1.0, 0.0, 0.1, 1.0, 2.0, index_ms=0.1, with_index=with_index)


def test_command_writes_json(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(command)
    target = tmp_path / "bench.json"
    options = [
        "--lengths",
        "256,1K",
        "--shape",
        "smollm2",
        "--cases",
        "vs 30/800",
        "--repeats",
        "1",
        "--json",
        str(target),
    ]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    report = json.loads(target.read_text())
    assert {row["name"] for row in report["rows"]} == {"baseline", "dense", "vs 30/800", "planted vs 64/256"}
    assert all(row["median_ms"] > 0 for row in report["rows"])
    sparse = [row for row in report["rows"] if row["name"] == "vs 30/800" and row["length"] == 1024]
    assert 0 < sparse[0]["density"] <= 1 and sparse[0]["index_ms"] > 0 and sparse[0]["error"] < 1e-5
    assert sparse[0]["index"] == bench.FIXED and 0 < sparse[0]["missed_mean"] <= sparse[0]["missed_worst"] < 1
    assert set(report["crossovers"]) == {"vs 30/800"}
    assert report["planted"][0]["columns_found"] == 1.0 and report["planted"][0]["distances_found"] == 1.0


def test_rows_say_what_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"baseline": (8.0, 0.5), "dense": (4.0, 0.25), "vs": (1.5, 0.125), "index vs": (0.5, 0.0625)}
    made = {name: Timing(median, spread, 3) for name, (median, spread) in times.items()}
    monkeypatch.setattr(bench, "interleaved", lambda work, *_: {name: made[name] for name in work})
    q, k, v = torch.randn(1, 4, 300, 16), torch.randn(1, 2, 300, 16), torch.randn(1, 2, 300, 16)
    case = Case("vs", VerticalSlash(8, 64, sink=2, local=4))
    timed = bench.Timed(LayerInputs(q, k, v, 0.25), "torch", 3, print)
    base, dense, sparse = timed.rows([case])
    cells = int(membership.mask(timed.build(case)[1]).sum())
    assert (base.median_ms, base.to_baseline, base.index_ms, base.with_index) == (8, 1, None, None)
    assert (dense.median_ms, dense.to_baseline, dense.density, dense.index_spread_ms) == (4, 2, 1, None)
    assert (sparse.median_ms, sparse.spread_ms, sparse.rounds) == (1.5, 0.125, 3)
    assert (sparse.index_ms, sparse.index_spread_ms, sparse.with_index) == (0.5, 0.0625, 8 / 2)
    assert sparse.to_baseline == 8 / 1.5 and sparse.density == cells / (4 * 300 * 301 / 2)
    assert sparse.tflops == pytest.approx(4 * 16 * cells / 1.5e9)


def test_gate_refuses_a_wrong_result() -> None:
    q, k, v = (torch.randn(1, 2, 64, 16) for _ in range(3))
    with pytest.raises(HeadscopeError, match="not timed"):
        gate("dense", (torch.zeros_like(q), torch.zeros(1, 2, 64)), LayerInputs(q, k, v, 0.25), None)
    with pytest.raises(HeadscopeError, match="not timed"):
        gate("dense", (torch.full_like(q, torch.nan), torch.zeros(1, 2, 64)), LayerInputs(q, k, v, 0.25), None)


def test_crossover() -> None:
    assert bench.crossover([_row(1024, 0.5), _row(2048, 0.9), _row(4096, 1.2), _row(8192, 2.0)]) == {1: 4096}
    assert bench.crossover([_row(1024, 1.5), _row(2048, 0.9)]) == {1: 2049}
    assert bench.crossover([_row(1024, 1.5)]) == {1: 1024}
    unmeasured = dataclasses.replace(_row(1024, 1.0), with_index=None)
    assert bench.crossover([unmeasured]) == {}
    blocks = [dataclasses.replace(_row(1024, 2.0), name="blocks 1x1"), dataclasses.replace(_row(2048, 0.5), name="vs")]
    assert bench.crossovers(blocks) == {"blocks 1x1": {1: 1024}, "vs": {1: 2049}} and bench.crossover(blocks) == {
        1: 2049
    }


def test_clustered_layout_is_repeatable_and_within_causal() -> None:
    shape = SHAPES["smollm2"]
    one, two = (clustered_layout(shape, 1, 2000, 40, 400, torch.device("cpu")) for _ in range(2))
    assert torch.equal(one.windows, two.windows) and torch.equal(one.columns, two.columns)
    pairs = counts.pairs(one)
    assert bool((pairs < counts.causal_pairs(one)[:, None]).all())
    assert int(pairs.sum()) == int(membership.mask(one).sum())


def test_every_setting_that_the_figures_name_is_a_case() -> None:
    names = {case.name for case in CASES}
    assert {"vs 1000/6096", "vs 30/800", "vs 3500/100", "vs 500/700", "a-shape 128/3968", "blocks 100x64"} <= names
    assert "blocks 50x128" in names


def _held(layout: Layout, side: int) -> torch.Tensor:
    """By definition: the tiles of the written-out mask that hold a cell."""
    return membership.mask(layout).unflatten(-1, (side, 128)).unflatten(-3, (side, 128)).any(-1).any(-2)


@pytest.mark.parametrize("seed", range(30))
def test_tiles_are_those_that_hold_a_cell(seed: int) -> None:
    rng = random.Random(seed)
    length = rng.choice((128, 256, 640, 1024))
    kinds = rng.choice((triton_cases.KINDS, ("all",), ("windows",), ("blocks",)))
    layout = triton_cases.random_layout(rng, 4, length, length, (0, 0), 128, kinds, "cpu")
    assert torch.equal(bench_flex.tiles(layout), _held(layout, length // 128))


def test_tiles_of_what_they_cannot_say_is_refused() -> None:
    layout = triton_cases.random_layout(random.Random(0), 2, 100, 256, (0,), 128, ("all",), "cpu")
    with pytest.raises(ValueError, match="128"):
        bench_flex.tiles(layout)


def test_planted_layout_replaces_vertical_slash_heads_alone() -> None:
    patterns: list[Pattern] = [
        Dense(),
        VerticalSlash(20, 300, local=8),
        AShape(4, 100),
        BlockSparse(3, 64),
        VerticalSlash(9, windows=2),
        Fixed(columns=(1, 5), distances=(0, 3)),
    ]
    q, k = torch.randn(1, 6, 900, 16), torch.randn(1, 2, 900, 16)
    built = build_index(q, k, patterns).computed
    planted = planted_layout(built, patterns)
    before, after = membership.mask(built)[0], membership.mask(planted)[0]
    assert [bool(torch.equal(*pair)) for pair in zip(before, after, strict=True)] == [
        True,
        False,
        True,
        True,
        True,
        True,
    ]
    assert int(planted.column_count[1]) == 20 and bool(after[1].diagonal().all())
    assert torch.equal(counts.pairs(planted)[0], after.sum((1, 2)))
    assert planted_layout(built, [Dense()] * 6) is built


def test_captures_are_timed_with_the_online_index(tiny_llama: LoadedModel) -> None:
    ids = torch.randint(3, 97, (1, 512), generator=torch.Generator().manual_seed(0))
    cases = (Case("vs 2/4", VerticalSlash(2, 4)), Case("a-shape 2/30", AShape(2, 30)))
    found = bench.run_captures(tiny_llama, ids, lengths=[100, 512], layers=[0, 2], cases=cases, repeats=2)
    assert [row.length for row in found.rows] == [100] * 8 + [512] * 8
    assert [row.layer for row in found.rows] == [0, 0, 0, 0, 2, 2, 2, 2] * 2
    sparse = [row for row in found.rows if row.name == "vs 2/4"]
    assert all(row.index == bench.ONLINE and row.index_ms and row.rounds == 2 for row in sparse)
    assert all(row.missed_mean is not None and row.missed_worst is not None for row in sparse)
    long = {row.layer: row for row in sparse if row.length == 512}

    def check(layer: int, inputs: LayerInputs) -> None:
        heads = measure_patterns(inputs, [cases[0].pattern] * inputs.query_heads).heads
        missed = [head.missed_mass_mean for head in heads]
        assert long[layer].missed_mean == pytest.approx(sum(missed) / len(missed), abs=1e-5)
        assert long[layer].missed_worst == pytest.approx(max(missed), abs=1e-5)
        assert max(missed) > 0.05

    stream(tiny_llama, ids, check, layers=(0, 2), logits=False)
    assert {row.index for row in found.rows if row.name == "a-shape 2/30"} == {bench.EXACT}
    with pytest.raises(OptionError, match="512"):
        bench.run_captures(tiny_llama, ids, lengths=[600])


def test_whole_prefill_of_mixed_heads() -> None:
    mixed = (Dense(), VerticalSlash(20, 50), BlockSparse(2, 64), AShape(3, 20))
    settings = [uniform(TINY, "vs", VerticalSlash(20, 40)), Setting("mixed", (mixed,) * 3)]
    host = HostProfile(dense_below={1: 300})
    report = run_prefill("tiny", TINY, [200, 333], settings, dtype=torch.float32, repeats=2, host=host)
    short, long = report.rows[:3], report.rows[3:]
    assert [row.setting for row in long] == ["dense", "vs", "mixed"]
    assert all(row.impl == "sdpa" and row.index_ms == 0 for row in short) and "host profile" in short[1].note
    assert all(row.impl == "torch" and row.index_ms > 0 and 0 < row.density < 1 for row in long[1:])
    for row in report.rows:
        parts = row.projections_ms + row.index_ms + row.attention_ms + row.other_ms
        assert row.layers == row.layers_timed == 3 and row.rounds == 2 and parts == pytest.approx(row.total_ms, rel=0.2)
    assert long[0].to_dense == pytest.approx(1.0) and long[0].ceiling == pytest.approx(1 / (1 - long[0].share))
    some = run_prefill("tiny", TINY, [200], [], timed_layers=1, dtype=torch.float32, repeats=1).rows[0]
    assert some.layers_timed == 1 and "1 of 3 layers" in some.note
    with pytest.raises(OptionError, match="3 of 4"):
        run_prefill("tiny", TINY, [200], [Setting("wrong", (mixed,))], dtype=torch.float32)


def test_prefill_layers_are_a_decoder() -> None:
    """The timed layers against transformers' Llama with the same weights, dense."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=8,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": TINY.rope_theta},
        rms_norm_eps=1e-5,
    )
    decoder = bench_decoder.Decoder(TINY, 2, torch.float32, torch.device("cpu"))
    model = transformers.LlamaModel(config).eval()
    model.norm = torch.nn.Identity()
    for layer, weights in zip(model.layers, decoder.weights, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        parts = weights.qkv.split((64, 32, 32)), weights.gate_up.split(48)
        pairs = zip((attention.q_proj, attention.k_proj, attention.v_proj), parts[0], strict=True)
        for module, weight in (*pairs, (mlp.gate_proj, parts[1][0]), (mlp.up_proj, parts[1][1])):
            module.weight.data = weight
        attention.o_proj.weight.data, mlp.down_proj.weight.data = weights.out, weights.down
    x = torch.randn(70, 32, generator=torch.Generator().manual_seed(70))
    with torch.no_grad():
        expected = model(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]
    got = decoder.forward(x.clone(), bench_prefill.dense_attention)
    assert torch.allclose(got, expected, atol=1e-5)


def test_prefill_command(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(command)
    target, config = tmp_path / "p.json", tmp_path / "mine.json"
    config.write_text(json.dumps([{str(h): ["vertical_and_slash", 30, 100, 1] for h in range(9)}] * 30))
    options = ["--prefill", "--shape", "smollm2", "--lengths", "256", "--timed-layers", "1", "--repeats", "1"]
    result = CliRunner().invoke(app, [*options, "--config", str(config), "--json", str(target)])
    assert result.exit_code == 0, result.output
    rows = json.loads(target.read_text())["rows"]
    assert [row["setting"] for row in rows] == ["dense", "vs 1000/6096", "mine"] and rows[2]["layers"] == 30


@pytest.mark.parametrize(
    "options",
    [
        ("--model", "smollm2"),
        ("--prompt", "code"),
        ("--layers", "1"),
        ("--prefill", "--model", "smollm2", "--prompt", "code"),
        ("--prefill", "--host"),
        ("--config", "x.json"),
        ("--timed-layers", "2"),
        ("--prefill", "--shape", "gemma3-270m"),
        ("--prefill", "--search-rate"),
        ("--search-rate", "--model", "smollm2", "--prompt", "code"),
        ("--search-rate", "--config", "x.json"),
        ("--sampling", "--model", "smollm2"),
        ("--sampling", "--prompts", "folder"),
        ("--sampling", "--model", "smollm2", "--prompts", "folder", "--prompt", "code"),
        ("--sampling", "--model", "smollm2", "--prompts", "sample_prompts", "--lengths", "1K,2K"),
        ("--sampling", "--model", "smollm2", "--prompts", "sample_prompts", "--impl", "torch"),
        ("--search-rate", "--shape", "smollm2", "--impl", "no such"),
        ("--prompts", "folder"),
        ("--cost-model", "file.json"),
    ],
)
def test_options_that_do_not_go_together(options: tuple[str, ...]) -> None:
    app = typer.Typer()
    app.command()(command)
    assert isinstance(CliRunner().invoke(app, list(options)).exception, OptionError)


def test_a_search_of_layers_too_short_to_leave_anything_out_is_refused() -> None:
    with pytest.raises(PromptError, match="synthetic"):
        rate("smollm2", 1, 1, torch.float32)


def test_search_rate_command(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(command)
    target = tmp_path / "rate.json"
    options = ["--search-rate", "--shape", "gemma3-270m", "--lengths", "256", "--timed-layers", "1"]
    result = CliRunner().invoke(app, [*options, "--json", str(target)])
    assert result.exit_code == 0, result.output
    (search,) = json.loads(target.read_text())["searches"]
    assert search["tokens"] == 256 and search["layers"] == 1 and search["heads_per_second"] > 0
    assert len(search["rows"]) == search["candidates"] and len(search["winners"]) == 6
    for winner in search["winners"]:
        limit = winner["target"]["max_missed"]
        assert limit is None or winner["missed_mass_worst_head"] <= limit + 1e-5
    assert "heads a second" in result.output and "no head above 2.0%" in result.output


def test_sampling_command(tmp_path: Path, tiny_llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    app = typer.Typer()
    app.command()(command)
    ids = torch.randint(3, 97, (1, 300), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr("headscope.engine.model.load.load_model", lambda *_, **__: tiny_llama)
    monkeypatch.setattr(
        "headscope.engine.search.source.encode", lambda *_, most=None, **__: Encoded(ids[:, :most], False)
    )
    folder, target, cost = tmp_path / "prompts", tmp_path / "sampling.json", tmp_path / "cost.json"
    folder.mkdir()
    (folder / "a.txt").write_text("one")
    cost.write_text(json.dumps(CostModel.tiles().to_dict()))
    options = ["--sampling", "--model", "tiny", "--prompts", str(folder), "--lengths", "200", "--layers", "1"]
    result = CliRunner().invoke(app, [*options, "--cost-model", str(cost), "--json", str(target)])
    assert result.exit_code == 0, result.output
    report = json.loads(target.read_text())
    assert report["layers"] == [1] and report["prompts"][0]["tokens"] == 200
    expected = study(ModelSource(tiny_llama), [SearchPrompt("a", "text", tuple(ids[0, :200].tolist()), "0" * 64)], [1])
    for point, again in zip(report["points"], expected, strict=True):
        assert point["estimator"] == again.estimator.to_dict() and point["captured"] == pytest.approx(again.captured)
    assert len(report["totals"]) == len(choices())
    assert "64 rows, half, overlap removed" in " ".join(result.output.split())
