"""Answers: TTFT, comparison, and losses in situ."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headscope.engine import AShape, HeadConfig, HostProfile, VerticalSlash
from headscope.engine.base.errors import PromptError
from headscope.engine.cli import main as cli
from headscope.engine.config.evidence import prompt_record
from headscope.engine.config.warnings import CalibrationWarning
from headscope.engine.model import load as model
from headscope.engine.model.load import LoadedModel
from headscope.engine.prompts.tokens import encode
from headscope.engine.runs.answer import answer, next_token_kl
from headscope.engine.runs.inspection import in_situ, inspect_prompt, starting_config, with_evidence
from tests.helpers.studio_toy import toy

EVERYTHING = VerticalSlash(vertical=10**6, slash=10**6)


def tokens(length: int) -> torch.Tensor:
    return torch.randint(3, 97, (1, length), generator=torch.Generator().manual_seed(3))


def test_dense_answer_equals_transformers_own(tiny_llama: LoadedModel) -> None:
    ids = tokens(30)
    made = answer(tiny_llama, ids, max_new_tokens=8)
    expected = tiny_llama.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    assert list(made.token_ids) == expected[0, 30:].tolist()
    assert made.ttft_ms > 0


def test_full_budgets_give_the_dense_answer_and_tight_ones_do_not(tiny_llama: LoadedModel) -> None:
    ids = tokens(60)
    dense = answer(tiny_llama, ids, max_new_tokens=6)
    full = answer(tiny_llama, ids, HeadConfig.uniform(tiny_llama.facts, EVERYTHING), max_new_tokens=6)
    tight = answer(tiny_llama, ids, HeadConfig.uniform(tiny_llama.facts, AShape(0, 1)), max_new_tokens=6)
    assert full.token_ids == dense.token_ids and (full.logits - dense.logits).abs().max() < 1e-4
    assert next_token_kl(dense.logits, full.logits) < 1e-8 < next_token_kl(dense.logits, tight.logits)


def test_kl_against_float64() -> None:
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.25, 0.5])
    expected = 0.5 * torch.log(torch.tensor(2.0)) - 0.25 * torch.log(torch.tensor(2.0))
    assert next_token_kl(p.log() + 3, q.log() - 5) == pytest.approx(float(expected), abs=1e-7)


def test_prompt_and_new_tokens_must_fit(tiny_llama: LoadedModel) -> None:
    with pytest.raises(PromptError, match=r"500 prompt tokens and 13 new .* 512"):
        answer(tiny_llama, tokens(500), max_new_tokens=13)


def test_one_token_prompt(tiny_llama: LoadedModel) -> None:
    config = HeadConfig.uniform(tiny_llama.facts, AShape(1, 4))
    assert len(answer(tiny_llama, tokens(1), config, max_new_tokens=2).token_ids) == 2


@pytest.mark.parametrize("count", [1, 2])
def test_time_a_token_needs_a_second_token(tiny_llama: LoadedModel, count: int) -> None:
    made = answer(tiny_llama, tokens(20), max_new_tokens=count)
    assert len(made.token_ids) == count and (made.decode_ms_per_token is None) == (count == 1)


def test_an_answer_warns_of_its_prompt_and_not_of_its_warm_up(tiny_llama: LoadedModel) -> None:
    config = HeadConfig.uniform(tiny_llama.facts, AShape(1, 4), provenance={"lengths": [50]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answer(tiny_llama, tokens(50), config, max_new_tokens=3)
    with pytest.warns(CalibrationWarning, match="has 40") as found:
        answer(tiny_llama, tokens(40), config, max_new_tokens=3)
    assert len(found) == 1


def test_in_situ_loss_is_isolated_loss_in_the_first_layer_only(tiny_llama: LoadedModel) -> None:
    ids = tokens(60)
    config = HeadConfig.uniform(tiny_llama.facts, AShape(1, 4))
    isolated = inspect_prompt(tiny_llama, ids, config)
    situ = [head for layer in in_situ(tiny_llama, ids, config) for head in layer.heads]
    for ours, theirs in zip(isolated.heads[:6], situ[:6], strict=True):
        assert ours.missed_mass_mean == theirs.missed_mass_mean
    assert any(a.missed_mass_mean != b.missed_mass_mean for a, b in zip(isolated.heads[6:], situ[6:], strict=True))


def test_inspection_against_the_softmax_matrix(tiny_llama: LoadedModel) -> None:
    """Missed mass of A-shape heads on the model's own tensors, from float64 probabilities."""
    from headscope.engine.runs.capture import capture

    ids = tokens(50)
    found = inspect_prompt(tiny_llama, ids, HeadConfig.uniform(tiny_llama.facts, AShape(2, 5)), layers=[1])
    assert [(head.layer, head.head) for head in found.heads] == [(1, head) for head in range(6)]
    layer = capture(tiny_llama, ids).layer(1)
    q, k = layer.q, layer.k
    scores = q.double() @ k.double().repeat_interleave(3, 1).transpose(2, 3) * 16**-0.5
    i, j = torch.arange(50)[:, None], torch.arange(50)[None, :]
    probabilities = scores.masked_fill(j > i, float("-inf")).softmax(-1)[0]
    missed = probabilities.masked_fill((j < 2) | (i - j < 5), 0).sum(-1)
    for head in found.heads:
        assert head.missed_mass_mean == pytest.approx(float(missed[head.head].mean()), abs=1e-5)
        assert head.missed_mass_worst == pytest.approx(float(missed[head.head].max()), abs=1e-5)
    worst = [head.missed_mass_mean for head in found.worst(3)]
    assert worst == sorted((head.missed_mass_mean for head in found.heads), reverse=True)[:3]


def test_evidence_is_kept_and_fits_the_model(tiny_llama: LoadedModel) -> None:
    found = inspect_prompt(tiny_llama, tokens(60), layers=[0, 2])
    config = with_evidence(found, tiny_llama, prompt_record("text", "code", "ab" * 32, 60, False))
    assert config.check(tiny_llama) == []
    assert HeadConfig.from_json(config.to_json()) == config
    assert config.provenance["lengths"] == [60] and config.provenance["prompts"][0]["tokens"] == 60
    for layer, row in enumerate(config.heads):
        assert [entry.evidence is not None for entry in row] == [layer != 1] * 6
    head = found.heads[7]
    evidence = config.heads[head.layer][head.head].evidence
    assert evidence is not None and evidence["missed_mass_mean"] == pytest.approx(head.missed_mass_mean, abs=1e-6)


def test_the_starting_config_leaves_sliding_layers_dense(make_tiny: Callable[..., LoadedModel]) -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    loaded = make_tiny("Qwen2", layer_types=kinds, sliding_window=8, use_sliding_window=True)
    config = starting_config(loaded.facts)
    assert [row[0].pattern.kind for row in config.heads] == ["dense", "vertical-slash", "vertical-slash"]
    assert {head.layer for head in inspect_prompt(loaded, tokens(40)).heads} == {1, 2}


@pytest.mark.model
def test_smollm2_full_budgets_give_the_same_continuation(smollm2: LoadedModel) -> None:
    ids = encode(smollm2, "List three animals that live in the sea, and say one thing about each of them.").ids
    dense = answer(smollm2, ids, max_new_tokens=16)
    full = answer(smollm2, ids, HeadConfig.uniform(smollm2.facts, EVERYTHING), max_new_tokens=16)
    tight = answer(smollm2, ids, HeadConfig.uniform(smollm2.facts, AShape(0, 2)), max_new_tokens=16)
    assert (full.logits - dense.logits).abs().max() < 1e-4
    assert full.token_ids == dense.token_ids != tight.token_ids
    assert full.text


@pytest.mark.model
def test_smollm2_prompt_encoding(smollm2: LoadedModel) -> None:
    plain, chat = encode(smollm2, "Hello", template=False).ids, encode(smollm2, "Hello").ids
    assert plain.shape == (1, 1) and chat.shape[1] > 10
    with pytest.raises(PromptError, match=r"tokens and smollm2 has 8192 positions"):
        encode(smollm2, "word " * 9000)
    with pytest.raises(PromptError, match="blank"):
        encode(smollm2, " \n\t")


def test_a_prompt_that_this_machine_keeps_dense_is_not_called_sparse_in_silence(
    tiny_llama: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model, "load_model", lambda name, **options: toy(tiny_llama))
    monkeypatch.setenv("HEADSCOPE_HOST", str(HostProfile(dense_below={1: 4096}).save(tmp_path / "host.json")))
    report = tmp_path / "report.json"
    arguments = ["generate", "--model", "smollm2", "--prompt", "prose", "--max-new-tokens", "2", "--compare"]
    with pytest.raises(SystemExit) as left:
        cli.main([*arguments, "--no-template", "--json", str(report)])
    assert not left.value.code and "under 4096 tokens dense" in capsys.readouterr().err
    found = json.loads(report.read_text())
    assert "4096" in found["ran_dense"] and found["next_token_kl"] == 0.0
    HostProfile(dense_below={1: 8}).save(tmp_path / "host.json")
    with pytest.raises(SystemExit):
        cli.main([*arguments, "--no-template", "--json", str(report)])
    assert json.loads(report.read_text())["ran_dense"] is None and "ran dense" not in capsys.readouterr().err
