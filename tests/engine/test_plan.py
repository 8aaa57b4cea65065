"""What `headscope check` says before any run: layer by layer, and every reason at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headscope.engine import AShape, Dense, HeadConfig, apply
from headscope.engine.base.errors import ConfigMismatch, ModelError
from headscope.engine.cli.convert import convert_file
from headscope.engine.cli.main import main
from headscope.engine.model import plan
from headscope.engine.model.load import LoadedModel
from tests.engine.test_apply import logits, tokens

TIGHT = AShape(sink=1, window=4)


def test_every_layer_is_named_with_what_it_will_run(make_tiny: Callable[..., LoadedModel]) -> None:
    loaded = make_tiny("Qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=2, num_hidden_layers=4)
    before = logits(loaded, tokens(1, 20))
    reasons = plan.layer_reasons(loaded.model)
    assert reasons == [None, None, "sliding-window or chunked layer", "sliding-window or chunked layer"]
    config = HeadConfig.uniform(loaded.facts, TIGHT)
    config = config.with_heads({(1, head): Dense() for head in range(6)})
    assert plan.described(config, reasons) == [
        ("0", "sparse"),
        ("1", "dense in the config"),
        ("2-3", "the model's own: sliding-window or chunked layer"),
    ]
    assert plan.problems(config, reasons) == []
    assert torch.equal(logits(loaded, tokens(1, 20)), before), "the look leaves no trace"


def test_no_layer_served_at_all_does_not_fit(make_tiny: Callable[..., LoadedModel]) -> None:
    loaded = make_tiny("Gemma2", attn_implementation="eager", sliding_window=8)
    reasons = plan.layer_reasons(loaded.model)
    assert plan.problems(HeadConfig.uniform(loaded.facts, Dense()), reasons) == [
        "layers: none can be served (sliding-window or chunked layer, soft-capped logits)"
    ]
    with pytest.raises(ModelError, match="no layer that this config makes sparse"):
        apply(loaded, HeadConfig.uniform(loaded.facts, TIGHT))


def test_patterns_in_layers_that_keep_their_own(make_tiny: Callable[..., LoadedModel]) -> None:
    loaded = make_tiny("Llama")
    config = HeadConfig.uniform(loaded.facts, TIGHT)
    found = plan.problems(config, [None, "learned attention sink", "learned attention sink"])
    assert len(found) == 1 and "layers 1-2 keep" in found[0] and "learned attention sink" in found[0]


def test_ranges() -> None:
    assert plan.ranges([0, 1, 2, 5, 7, 8]) == ["0-2", "5", "7-8"]


@pytest.fixture
def local(make_tiny: Callable[..., LoadedModel], tmp_path: Path) -> tuple[LoadedModel, Path]:
    loaded = make_tiny("Gemma2", attn_implementation="eager", sliding_window=8)
    loaded.model.save_pretrained(tmp_path / "model")
    return loaded, tmp_path


def test_check_prints_layers_and_every_reason(local: tuple[LoadedModel, Path], capsys: Any) -> None:
    loaded, folder = local
    config = HeadConfig.uniform(loaded.facts, TIGHT)
    value = json.loads(config.to_json())
    value["model"]["max_position"] = 4096
    (folder / "config.json").write_text(json.dumps(value))
    with pytest.raises(SystemExit) as left:
        main(["check", str(folder / "config.json"), "--model", str(folder / "model")])
    lines = capsys.readouterr().out.splitlines()
    assert left.value.code == 1
    assert "layers 0: the model's own: sliding-window or chunked layer" in lines
    assert "layers 1: the model's own: soft-capped logits" in lines
    assert any(line.startswith("largest position") for line in lines)
    assert any(line.startswith("layers: none can be served") for line in lines)


def test_convert_lists_every_reason(local: tuple[LoadedModel, Path]) -> None:
    _, folder = local
    head = ["vertical_and_slash", 100, 200, 1]
    source = folder / "foreign.json"
    source.write_text(json.dumps([{str(number): head for number in range(4)}] * 2))
    with pytest.raises(ConfigMismatch) as caught:
        convert_file(source, folder / "out.json", "headscope", "minference", str(folder / "model"))
    assert [reason.partition(":")[0] for reason in caught.value.reasons] == ["layers", "query heads", "layers"]
    assert not (folder / "out.json").exists()
