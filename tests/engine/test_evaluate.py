"""Dense against sparse on whole models: figures against full-logit references, layer by layer, retrieval marks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from headscope.engine.base.errors import Cancelled, ModelError
from headscope.engine.config.file import HeadConfig
from headscope.engine.model.apply import apply
from headscope.engine.model.load import LoadedModel
from headscope.engine.patterns.families import AShape, Dense
from headscope.engine.prompts.retrieval import RetrievalPrompt
from headscope.engine.runs import evaluate


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(3, 97, (1, 300), generator=torch.Generator().manual_seed(4))


def sparse_config(loaded: LoadedModel) -> HeadConfig:
    return HeadConfig.uniform(loaded.facts, AShape(1, 24))


def test_figures_equal_those_of_the_full_logits(tiny_llama: LoadedModel, ids: torch.Tensor) -> None:
    config = sparse_config(tiny_llama)
    found = evaluate.quality(tiny_llama, ids, config, "made")
    with torch.no_grad():
        dense = tiny_llama.model(ids).logits[0].double().log_softmax(-1)
        with apply(tiny_llama, config):
            sparse = tiny_llama.model(ids).logits[0].double().log_softmax(-1)
    kl = (dense.exp() * (dense - sparse)).sum(-1)
    nll = [-x[:-1].gather(1, ids[0, 1:, None]).mean().item() for x in (dense, sparse)]
    assert found.kl_mean == pytest.approx(kl.mean().item(), rel=1e-3) and found.kl_mean > 1e-6
    assert found.kl_worst == pytest.approx(kl.max().item(), rel=1e-3)
    assert found.kl_last == pytest.approx(kl[-1].item(), rel=1e-2, abs=1e-7)
    assert found.perplexity_dense == pytest.approx(math.exp(nll[0]), rel=1e-4)
    assert found.perplexity_sparse == pytest.approx(math.exp(nll[1]), rel=1e-4)
    assert found.top1_agreement == pytest.approx((dense.argmax(-1) == sparse.argmax(-1)).double().mean().item())


def test_dense_against_itself_is_exact(tiny_llama: LoadedModel, ids: torch.Tensor) -> None:
    found = evaluate.quality(tiny_llama, ids, HeadConfig.uniform(tiny_llama.facts, Dense()))
    assert found.kl_worst < 1e-9 and found.top1_agreement == 1 and found.perplexity_change == pytest.approx(0, abs=1e-9)
    same = evaluate.continuation(tiny_llama, ids, HeadConfig.uniform(tiny_llama.facts, Dense()), tokens=6)
    assert same.agree == same.tokens


def test_a_model_with_its_own_logits_is_refused(make_tiny, ids: torch.Tensor) -> None:  # type: ignore[no-untyped-def]
    loaded = make_tiny("Granite", logits_scaling=7.0)
    with pytest.raises(ModelError, match="changes its logits"):
        evaluate.quality(loaded, ids, sparse_config(loaded))


def test_error_grows_from_no_layer_to_all_of_them(tiny_llama: LoadedModel, ids: torch.Tensor) -> None:
    config = sparse_config(tiny_llama)
    effects = evaluate.by_layer(tiny_llama, ids, config)
    alone = [effect for effect in effects if effect.how == "alone"]
    first = [effect for effect in effects if effect.how == "first layers"]
    assert [effect.layer for effect in alone] == [effect.layer for effect in first] == [0, 1, 2]
    assert alone[0].kl_mean == pytest.approx(first[0].kl_mean)
    whole = evaluate.quality(tiny_llama, ids, config)
    assert first[-1].kl_mean == pytest.approx(whole.kl_mean, rel=1e-6)
    with pytest.raises(Cancelled):
        evaluate.by_layer(tiny_llama, ids, config, cancel=lambda: True)


def test_layer_weights_average_to_one(tiny_llama: LoadedModel, ids: torch.Tensor) -> None:
    weights = evaluate.layer_weights(tiny_llama, ids, sparse_config(tiny_llama), [0, 2], [0.1, 0.2])
    assert len(weights) == 2 and sum(weights) / 2 == pytest.approx(1.0) and min(weights) > 0


def test_tasks_that_dense_cannot_do_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    def right(loaded: object, prompt: RetrievalPrompt, ids: torch.Tensor, config: object) -> bool:
        if config is None:
            return prompt.kind == "pass-key" or prompt.depth < 0.3
        return prompt.kind == "pass-key" and prompt.depth > 0.3

    class Words:
        """A tokenizer of one token per four characters."""

        def __call__(self, text: str, verbose: bool = True):  # type: ignore[no-untyped-def]
            return type("Ids", (), {"input_ids": list(range(len(text) // 4))})

    monkeypatch.setattr(evaluate, "_right", right)
    loaded = LoadedModel(None, Words(), "made", "", None)  # type: ignore[arg-type]
    cells, tasks = evaluate.retrieval(
        loaded,
        object(),
        kinds=("pass-key", "number"),
        lengths=(512,),
        depths=(0.1, 0.5, 0.9),
        seeds=(0,),  # type: ignore[arg-type]
    )
    assert [(task.kind, task.informative) for task in tasks] == [("pass-key", True), ("number", False)]
    assert len(cells) == 6 and {cell.prompts for cell in cells} == {1}
    report = evaluate.report([], (), cells, tasks)
    assert report["retrieval_dense"] == 1.0 and report["retrieval_sparse"] == pytest.approx(2 / 3)
    assert report["uninformative"] == ["number at 512"]


@pytest.mark.model
@pytest.mark.slow
def test_the_command_reports_a_real_model(smollm2: LoadedModel, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from headscope.engine.base import files
    from headscope.engine.cli import main as cli

    config = HeadConfig.uniform(smollm2.facts, AShape(4, 256)).save(tmp_path / "c.json")
    arguments = ["evaluate", "--model", "smollm2", "--config", str(config), "--tokens", "300", "--kinds", "pass-key"]
    arguments += [
        "--lengths",
        "400",
        "--depths",
        "0.5",
        "--seeds",
        "1",
        "--continue",
        "4",
        "--json",
        str(tmp_path / "q.json"),
    ]
    result = CliRunner().invoke(cli.build(), arguments)
    assert result.exit_code == 0, result.output
    report = files.read_json(tmp_path / "q.json")
    assert len(report["quality"]) == 2 and report["tasks"][0]["dense"] == 1.0
    assert abs(report["worst_perplexity_change"]) < 0.05
