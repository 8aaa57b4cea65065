"""One evidence and provenance record, whoever writes it; old files read under the names of today; nothing hides NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headscope.engine.base.errors import Cancelled, ModelError
from headscope.engine.config.evidence import (
    Evidence,
    prompt_record,
    prompt_set,
    read_evidence,
    read_provenance,
)
from headscope.engine.config.file import HeadConfig
from headscope.engine.model.load import LoadedModel
from headscope.engine.patterns.families import AShape
from headscope.engine.prompts.prompt import text_sha256
from headscope.engine.runs import evaluate
from headscope.engine.runs.answer import answer, next_token_kl
from headscope.engine.runs.inspection import in_situ, inspect_prompt, with_evidence
from headscope.engine.search.cost import CostModel
from headscope.engine.search.grid import Grid
from headscope.engine.search.results import SearchPrompt
from headscope.engine.search.run import search_config
from headscope.engine.search.table import Target

IDS = torch.randint(3, 97, (1, 300), generator=torch.Generator().manual_seed(6))
RECORD = prompt_record("prose", "prose", text_sha256("text"), 300, False)


@pytest.fixture(scope="module")
def written(tiny_llama: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, HeadConfig]:
    """A config with evidence as `inspect` and a search write it, of the same ids."""
    inspected = inspect_prompt(tiny_llama, IDS)
    prompt = SearchPrompt("prose", "prose", tuple(IDS[0].tolist()), text_sha256("text"), False)
    folder = tmp_path_factory.mktemp("evidence")
    grid = Grid((AShape(4, 32), AShape(4, 64)))
    searched = search_config(tiny_llama, [prompt], Target(max_missed=0.5), folder, grid=grid, cost=CostModel.tiles())
    return {
        "inspect": with_evidence(inspected, tiny_llama, RECORD),
        "search": searched.config,
    }


def test_the_writers_write_the_same_fields(written: dict[str, HeadConfig], tmp_path: Path) -> None:
    fields = {name for name in Evidence.__dataclass_fields__ if name != "run"}
    common = ["created", "made_by", "versions", "hardware", "prompts", "prompt_set", "lengths", "metric", "parent"]
    for name, config in written.items():
        again = HeadConfig.load(config.save(tmp_path / f"{name}.json"))
        assert again == config
        evidence = again.heads[1][2].evidence
        assert evidence is not None and set(evidence) - {"run"} == fields
        assert evidence["tokens"] == 300 and evidence["loss"] == "isolated"
        assert evidence["prompt"] == text_sha256("text") and evidence["prompt_set"] == prompt_set([RECORD])
        assert 0 < evidence["computed_density"] <= 1 and len(evidence["missed_mass_thirds"]) == 3
        assert sum(evidence["missed_mass_thirds"]) / 3 == pytest.approx(evidence["missed_mass_mean"], rel=0.02)
        assert set(common) <= set(again.provenance)
        (prompt,) = again.provenance["prompts"]
        assert {key: prompt[key] for key in RECORD} == RECORD
        assert again.provenance["prompt_set"] == prompt_set([RECORD]) and again.provenance["lengths"] == [300]
        assert read_evidence(evidence) == evidence and read_provenance(again.provenance) == again.provenance
    assert [written[name].provenance["made_by"] for name in written] == [
        "starting point, not searched",
        "search",
    ]


def test_inspecting_keeps_what_made_the_patterns(written: dict[str, HeadConfig], tiny_llama: LoadedModel) -> None:
    again = with_evidence(inspect_prompt(tiny_llama, IDS, written["search"]), tiny_llama, RECORD)
    assert again.provenance["made_by"] == "search" and again.provenance["device"] == "cpu"
    assert again.provenance["candidates"] == written["search"].provenance["candidates"]
    was, now_ = (config.heads[0][1].evidence for config in (written["search"], again))
    assert was is not None and now_ is not None
    for name in ("missed_mass_mean", "missed_mass_worst", "missed_mass_p99", "output_error", "computed_density"):
        assert now_[name] == pytest.approx(was[name], abs=1e-5), name
    assert now_["computed_pairs"] == was["computed_pairs"]


def test_old_files_are_read_under_the_names_of_today() -> None:
    studio = {
        "made": "by hand in the studio",
        "versions": {"torch": "2.9", "hardware": "x86_64 cpu, 2 threads"},
        "device": "cpu",
        "prompts": [{"sha256": "ab", "tokens": 9, "name": "prose", "chat_template": True}],
    }
    copy = {**studio, "prompts": [dict(studio["prompts"][0])]}  # type: ignore[index, arg-type]
    read = read_provenance(studio)
    assert read["made_by"] == "by hand in the studio" and "made" not in read and studio == copy
    assert read["hardware"] == "x86_64 cpu, 2 threads" and read["versions"] == {"torch": "2.9"}
    prompt = {"sha256": "ab", "tokens": 9, "kind": "prose"}
    inspect = {"made_by": "search", "prompts": [prompt | {"template": False}]}
    assert read_provenance(inspect)["prompts"] == [prompt | {"chat_template": False}]
    assert read_evidence({"missed_mass_mean": 0.1, "worst_prompt": "ab"}) == {"missed_mass_mean": 0.1, "prompt": "ab"}
    assert read_evidence({"prompt_sha256": "ab"}) == {"prompt": "ab"} and read_evidence(None) == {}
    assert read_provenance({"imported_from": "sglang"}) == {"imported_from": "sglang"}
    assert read_provenance({"made": "a", "made_by": "b"})["made_by"] == "b"


def test_a_set_of_prompts_has_one_hash_in_any_order() -> None:
    other = RECORD | {"sha256": text_sha256("other")}
    assert prompt_set([RECORD, other]) == prompt_set([other, RECORD]) != prompt_set([RECORD])
    assert prompt_set([RECORD]) != prompt_set([RECORD | {"tokens": 299}])


@pytest.mark.parametrize("field", ["missed_mass_mean", "missed_mass_p99", "output_error", "time_share_ms"])
def test_what_is_not_finite_is_no_evidence(tiny_llama: LoadedModel, field: str) -> None:
    head = inspect_prompt(tiny_llama, IDS, layers=[0]).heads[0]
    for value in (math.nan, math.inf):
        with pytest.raises(ModelError, match=r"not finite.*bfloat16"):
            Evidence.of(replace(head, **{field: value}), RECORD)


@pytest.fixture
def damaged(make_tiny: Callable[..., LoadedModel]) -> Callable[[str], LoadedModel]:
    """A model whose keys of layer 1, or whose logits, overflow."""

    def make(where: str) -> LoadedModel:
        loaded = make_tiny("Llama")
        with torch.no_grad():
            if where == "layer":
                loaded.model.model.layers[1].self_attn.k_proj.weight[5] = math.inf
            else:
                loaded.model.lm_head.weight[7] = math.nan
        return loaded

    return make


def test_a_run_ends_at_the_first_layer_that_is_not_finite(damaged: Any, tmp_path: Path) -> None:
    loaded = damaged("layer")
    config = HeadConfig.uniform(loaded.facts, AShape(2, 16))
    prompt = SearchPrompt("prose", "prose", tuple(IDS[0].tolist()), "ab", False)
    runs: list[Callable[[], Any]] = [
        lambda: inspect_prompt(loaded, IDS),
        lambda: in_situ(loaded, IDS, config),
        lambda: search_config(loaded, [prompt], Target(max_missed=0.5), tmp_path, grid=Grid((AShape(4, 32),))),
    ]
    for run in runs:
        with pytest.raises(ModelError, match=r"layer 1 are not finite in float32: .* --dtype bfloat16"):
            run()
    assert not list(tmp_path.glob("results/*.json"))
    assert inspect_prompt(loaded, IDS, layers=[0]).heads


def test_logits_that_are_not_finite_are_no_answer(damaged: Any) -> None:
    loaded = damaged("logits")
    config = HeadConfig.uniform(loaded.facts, AShape(2, 16))
    with pytest.raises(ModelError, match=r"logits of the first new token are not finite in float32: .*bfloat16"):
        answer(loaded, IDS)
    hidden = evaluate.hidden_states(loaded, IDS, None)
    with pytest.raises(ModelError, match="logits at position 0 are not finite"):
        evaluate.compare(loaded, IDS, hidden, hidden)
    with pytest.raises(ModelError):
        evaluate.quality(loaded, IDS, config)
    with pytest.raises(ModelError):
        evaluate.continuation(loaded, IDS, config)
    for bad in (math.nan, math.inf):
        with pytest.raises(ModelError, match=r"not finite in float16.*bfloat16 or float32"):
            next_token_kl(torch.tensor([0.0, bad], dtype=torch.float16), torch.tensor([0.0, 1.0]))
        with pytest.raises(ModelError, match="not finite"):
            next_token_kl(torch.tensor([0.0, 1.0]), torch.tensor([0.0, bad]))


def test_an_answer_tells_its_layers_and_tokens_and_can_be_cancelled(tiny_llama: LoadedModel) -> None:
    config = HeadConfig.uniform(tiny_llama.facts, AShape(2, 16))
    layers: list[tuple[int, int]] = []
    tokens: list[int] = []
    quiet = answer(tiny_llama, IDS, config, max_new_tokens=4)
    told = answer(
        tiny_llama,
        IDS,
        config,
        max_new_tokens=4,
        warm_up=False,
        on_layer=lambda *at: layers.append(at),
        on_token=tokens.append,
        cancel=lambda: False,
    )
    assert told.token_ids == quiet.token_ids and torch.equal(told.logits, quiet.logits)
    assert layers == [(1, 3), (2, 3), (3, 3)] and tokens == list(range(1, len(told.token_ids)))
    assert told.total_ms >= told.ttft_ms > 0
    with pytest.raises(Cancelled):
        answer(
            tiny_llama,
            IDS,
            config,
            max_new_tokens=4,
            on_layer=lambda *at: layers.append(at),
            cancel=lambda: len(layers) > 4,
        )
    assert len(layers) == 5
    with pytest.raises(Cancelled):
        answer(tiny_llama, IDS, max_new_tokens=4, on_token=tokens.append, cancel=lambda: len(tokens) > 3)
    hooks = [module for module in tiny_llama.model.modules() if module._forward_pre_hooks]
    assert hooks == []
