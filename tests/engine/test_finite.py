"""What overflows ends in one sentence that names the layer or the argument: in no average, rank, file or finding."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headscope.engine import AShape, Dense, VerticalSlash, build_index, measure_heads
from headscope.engine.attend.attention import attend_dense
from headscope.engine.attend.finite import check_layer
from headscope.engine.attend.inputs import LayerInputs, ScoreInputs
from headscope.engine.base.errors import HeadscopeError, ModelError, OptionError
from headscope.engine.bench.timing import gate
from headscope.engine.config.file import HeadConfig
from headscope.engine.loss import mass, oracle
from headscope.engine.loss.measure import dense_pass, output_errors
from headscope.engine.model.load import LoadedModel
from headscope.engine.runs import evaluate
from headscope.engine.runs.answer import answer
from headscope.engine.runs.inspection import in_situ, inspect_prompt
from headscope.engine.search.check import check_prompt
from headscope.engine.search.explain import splits
from headscope.engine.search.front import Front, Point
from headscope.engine.search.grid import SAMPLING, Grid
from headscope.engine.search.measure import SearchError, SearchPrompt, Settings, measure_layer
from headscope.engine.search.run import search_config
from headscope.engine.search.table import Table, Target
from tests.engine.test_search_choice import GRID, made_results

IDS = torch.arange(3, 303)[None] % 90
PROMPT = SearchPrompt("prose", "prose", tuple(IDS[0].tolist()), "ab", False)
BAD = (math.nan, math.inf, -math.inf)


def tensors(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, 150, 16, dtype=dtype) for h in (4, 2, 2))
    return q, k, v


@pytest.fixture
def overflowing(make_tiny: Callable[..., LoadedModel]) -> LoadedModel:
    """A model in float16 whose values of layer 1 are larger than float16 holds, as bfloat16 weights become there."""
    loaded = make_tiny("Llama")
    loaded.model.to(torch.float16)
    with torch.no_grad():
        loaded.model.model.layers[1].self_attn.v_proj.weight.mul_(0).add_(60000.0)
        loaded.model.model.layers[1].input_layernorm.weight.fill_(100.0)
    return loaded


def test_every_run_of_a_model_that_overflows_names_the_layer_or_the_logits(
    overflowing: LoadedModel, tmp_path: Path
) -> None:
    config = HeadConfig.uniform(overflowing.facts, AShape(2, 16))
    layer = r"the values of layer 1 are not finite in float16: .* --dtype bfloat16 or float32"
    for run, words in (
        (lambda: inspect_prompt(overflowing, IDS), layer),
        (lambda: in_situ(overflowing, IDS, config), layer),
        (
            lambda: search_config(overflowing, [PROMPT], Target(max_missed=1), tmp_path, grid=Grid((AShape(4, 32),))),
            layer,
        ),
        (lambda: answer(overflowing, IDS), "first new token are not finite in float16"),
        (lambda: answer(overflowing, IDS, config), "first new token are not finite in float16"),
        (lambda: evaluate.quality(overflowing, IDS, config), "not finite in float16"),
        (lambda: evaluate.continuation(overflowing, IDS, config), "not finite in float16"),
        (lambda: evaluate.by_layer(overflowing, IDS, config, layers=[0]), "not finite in float16"),
    ):
        with pytest.raises(ModelError, match=words):
            run()
    assert [path.name for path in tmp_path.glob("*/*/*")] == ["0000.json"]  # layer 0 is whole, and kept for a resume


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_measuring_names_what_is_not_finite(which: int, bad: float, dtype: torch.dtype) -> None:
    parts = tensors(dtype)
    parts[which][0, 1, 149, 3] = bad
    name = ("queries", "keys", "values")[which]
    words = rf"the {name} of layer 7 are not finite in {str(dtype)[6:]}: .*(float32|bfloat16)"
    # A window that does not reach the row of the other heads, and one that keeps everything.
    for pattern in (AShape(1, 2), Dense(), VerticalSlash(4, 8)):
        with pytest.raises(ModelError, match=words):
            measure_heads(*parts, [pattern] * 4, layer=7)


def test_scores_that_overflow_are_no_padding() -> None:
    """An LSE of -inf is a row without cells; finite q and k must not pass for one, nor for an exact 0."""
    q, k, v = tensors()
    q, k = q.abs() * 1e25, -k.abs() * 1e25
    with pytest.raises(ModelError, match="the attention scores of layer 3 are not finite in float32"):
        measure_heads(q, k, v, [AShape(2, 9)] * 4, layer=3)
    with pytest.raises(ModelError, match="the attention scores are not finite"):
        dense_pass(LayerInputs(q, -k, v))


def test_what_lies_in_the_padding_is_nobodys() -> None:
    q, k, v = tensors()
    patterns, starts = [VerticalSlash(4, 8)] * 4, (20,)
    before = measure_heads(q, k, v, patterns, starts=starts)
    for part in (q, k, v):
        part[:, :, :20] = 1e4
    assert measure_heads(q, k, v, patterns, starts=starts).heads[0].missed_mass_mean == pytest.approx(
        before.heads[0].missed_mass_mean, abs=1e-6
    )
    check_layer(
        0,
        LayerInputs(
            *(torch.nn.functional.pad(x[:, :, 20:], (0, 0, 20, 0), value=math.nan) for x in (q, k, v)), starts=starts
        ),
    )
    chunk = ScoreInputs(q[:, :, 100:], k, starts=starts)
    k[0, 0, 19] = math.nan
    check_layer(0, chunk)
    k[0, 0, 20] = math.nan
    with pytest.raises(ModelError, match="the keys are not finite"):
        check_layer(None, chunk)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_losses_of_lses_that_are_not_finite_are_refused(bad: float) -> None:
    q, k, v = tensors()
    inputs = LayerInputs(q, k, v)
    out, lse = attend_dense(inputs)
    damaged = lse.clone()
    damaged[0, 2, 77] = bad
    index = build_index(q, k, [VerticalSlash(4, 8)] * 4)
    for run, words in (
        (lambda: mass.missed_mass(damaged, lse), "lse_sparse holds values that are not finite.*bfloat16 or float32"),
        (lambda: mass.missed_mass(lse, damaged), "lse_dense holds"),
        (lambda: mass.captured_mass(damaged, lse), "lse_sparse holds"),
        (lambda: mass.losses(damaged, (0,)), "missed holds"),
        (lambda: mass.pooled_map(inputs, damaged), "lse_dense holds"),
        (lambda: mass.pooled_map(inputs, damaged, index=index), "lse_dense holds"),
        (lambda: mass.profiles(inputs, damaged), "lse_dense holds"),
        (lambda: oracle.loss_split(inputs, damaged, index, 2), "lse_dense of head 2 holds"),
        (lambda: output_errors(out.masked_fill(out > 1, bad), out), "out holds"),
        (lambda: output_errors(out, out.masked_fill(out > 1, bad)), "dense holds"),
    ):
        with pytest.raises(ModelError, match=words):
            run()
    assert oracle.loss_split(inputs, damaged, index, 1).computed >= 0
    empty = torch.full_like(lse, -math.inf)
    assert not mass.missed_mass(empty, empty).any() and bool((mass.missed_mass(empty, lse) == 1).all())


def test_maps_of_queries_that_are_not_finite_are_refused() -> None:
    q, k, v = tensors()
    _, lse = attend_dense(LayerInputs(q, k, v))
    q[0, 0, 90, 0] = math.nan
    index = build_index(q, k, [VerticalSlash(4, 8)] * 4)
    for run in (
        lambda: mass.pooled_map(ScoreInputs(q, k), lse),
        lambda: mass.profiles(ScoreInputs(q, k), lse),
        lambda: oracle.loss_split(ScoreInputs(q, k), lse, index, 0),
    ):
        with pytest.raises(ModelError, match="holds values that are not finite"):
            run()


@pytest.mark.parametrize("figure", ["missed_mass_mean", "missed_mass_worst", "output_cosine", "time_share_ms"])
@pytest.mark.parametrize("bad", BAD)
def test_no_measurement_holds_what_is_not_finite(figure: str, bad: float) -> None:
    head = measure_heads(*tensors(), [AShape(2, 9)] * 4, layer=2).heads[3]
    with pytest.raises(ModelError, match=r"layer 2 head 3 are not finite: .*bfloat16 or float32"):
        replace(head, **{figure: bad})


class Planted:
    """A layer that overflows, as a search's source."""

    def stream(self, prompt: Any, visit: Any, layers: Any, cancel: Any) -> None:
        q, k, v = tensors()
        v[0, 0, 5, 5] = math.inf
        for layer in layers:
            visit(layer, LayerInputs(q, k, v))

    def prefill_ms(self, prompt: Any) -> float:
        return 0.0


def test_a_search_measures_checks_and_splits_nothing_that_is_not_finite(tiny_llama: LoadedModel) -> None:
    q, k, v = tensors()
    k[0, 0, 5, 5] = math.inf
    with pytest.raises(ModelError, match="the keys of layer 4 are not finite"):
        measure_layer(LayerInputs(q, k, v), 4, PROMPT, Settings((4,), Grid((AShape(4, 32),)), SAMPLING))
    config = HeadConfig.uniform(tiny_llama.facts, AShape(2, 16))
    for run in (
        lambda: check_prompt(Planted(), PROMPT, config, [1], repeats=1),
        lambda: splits(Planted(), PROMPT, config, [(1, 0)]),
    ):
        with pytest.raises(ModelError, match="the values of layer 1 are not finite"):
            run()


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("figure", ["mean", "p99", "output_error"])
def test_nothing_is_chosen_from_results_that_are_not_finite(figure: str, bad: float) -> None:
    results = made_results()
    row = results[1].layers[2]["rows"][1]
    row[figure] = [bad, *row[figure][1:]]
    with pytest.raises(SearchError, match=r"results of layer 2 are not finite.*bfloat16 or float32"):
        Table.of(results, GRID)
    for ms, loss in ((bad, 0.1), (1.0, bad)):
        with pytest.raises(SearchError, match="Layer 5 head 6 has a candidate whose time or loss is not finite"):
            Front.of(5, 6, [Point(0, 1.0, 0.0, (0, 0)), Point(1, ms, loss, (1, 1))])
    with pytest.raises(OptionError, match="Weight 1 of the layers must be a finite number"):
        Target(max_missed=0.1, weight="logits", layer_weights=(1.0, bad))


def test_weights_and_perplexities_that_are_not_finite_are_refused(tiny_llama: LoadedModel) -> None:
    config = HeadConfig.uniform(tiny_llama.facts, AShape(2, 16))
    with pytest.raises(ModelError, match="the loss of layer 1 is not finite"):
        evaluate.layer_weights(tiny_llama, IDS, config, [0, 1], [0.1, math.nan])
    hidden = evaluate.hidden_states(tiny_llama, IDS, None) * 1e6
    with pytest.raises(ModelError, match="the probabilities of the tokens of prose are not finite"):
        evaluate.compare(tiny_llama, IDS, hidden, hidden, "prose")


@pytest.mark.parametrize("bad", BAD)
def test_the_gate_of_the_bench_sees_every_row(bad: float) -> None:
    q, k, v = tensors()
    inputs = LayerInputs(q, k, v)
    out, lse = attend_dense(inputs)
    assert gate("dense", (out, lse), inputs, None) < 1e-4
    out[0, 1, 60, 0] = bad  # in a head and a row that the comparison with float64 does not sample
    with pytest.raises(HeadscopeError, match="not finite, so it is not timed"):
        gate("dense", (out, lse), inputs, None)
