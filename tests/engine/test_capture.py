"""Capture: what is kept, where, in what memory, and what is left behind (nothing)."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from headscope.engine import AShape, HeadConfig
from headscope.engine.attend.inputs import LayerInputs
from headscope.engine.base.errors import Cancelled, CaptureError, OptionError, PromptError
from headscope.engine.model.load import LoadedModel
from headscope.engine.model.modules import attention_modules
from headscope.engine.runs.capture import Capture, Room, capture, stream


def tokens(length: int) -> torch.Tensor:
    return torch.randint(3, 97, (1, length), generator=torch.Generator().manual_seed(3))


def untouched(loaded: LoadedModel) -> bool:
    modules = attention_modules(loaded.model)
    return loaded.model.config._attn_implementation == "sdpa" and not any(
        hasattr(module, "_headscope_hook") for module in modules
    )


def same(one: LayerInputs, other: LayerInputs) -> bool:
    pairs = ((one.q, other.q), (one.k, other.k), (one.v, other.v))
    return one.scale == other.scale and all(torch.equal(a, b) for a, b in pairs)


def test_captured_tensors_are_those_that_the_model_attends_with(tiny_llama: LoadedModel) -> None:
    """SDPA over the captured tensors, through the output projection, is what the attention module returned."""
    seen: dict[int, torch.Tensor] = {}
    modules = attention_modules(tiny_llama.model)
    handles = [m.register_forward_hook(lambda m, _, out: seen.__setitem__(m.layer_idx, out[0])) for m in modules]
    ids = tokens(33)
    with capture(tiny_llama, ids) as kept:
        for handle in handles:
            handle.remove()
        assert kept.layers == (0, 1, 2)
        for module in modules:
            inputs = kept.layer(module.layer_idx)
            q, k, v = inputs.q, inputs.k, inputs.v
            assert q.shape == (1, 6, 33, 16) and k.shape == v.shape == (1, 2, 33, 16)
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=inputs.scale, enable_gqa=True)
            projected = module.o_proj(out.transpose(1, 2).reshape(1, 33, -1))
            assert (projected - seen[module.layer_idx]).abs().max() < 1e-5
        expected = tiny_llama.model(input_ids=ids).logits[0, -1]
        assert kept.logits is not None and (kept.logits - expected).abs().max() < 1e-5
    assert untouched(tiny_llama)


def test_one_token(tiny_llama: LoadedModel) -> None:
    kept = capture(tiny_llama, tokens(1))
    assert kept.layer(2).q.shape == (1, 6, 1, 16)


def test_chosen_layers_stop_early(tiny_llama: LoadedModel) -> None:
    visited: list[int] = []
    done: list[tuple[int, int]] = []
    result = stream(
        tiny_llama,
        tokens(20),
        lambda layer, _: visited.append(layer),
        layers=[1],
        progress=lambda n, total: done.append((n, total)),
        logits=False,
    )
    assert result is None and visited == [1] and done == [(1, 3), (2, 3)]
    assert untouched(tiny_llama)


LAYER_BYTES = 20 * (6 + 2 * 2) * 16 * 4


@pytest.mark.parametrize(
    ("host", "disk", "places"),
    [
        (10**6, 0, ["host"] * 3),
        (2 * LAYER_BYTES, 10**6, ["host", "host", "disk"]),
        (0, 10**6, ["disk"] * 3),
    ],
)
def test_memory_budget_decides_the_place(tiny_llama: LoadedModel, host: int, disk: int, places: list[str]) -> None:
    ids = tokens(20)
    with capture(tiny_llama, ids) as plain, capture(tiny_llama, ids, room=Room(0, host, disk)) as kept:
        assert [kept.places[layer] for layer in range(3)] == places
        for layer in range(3):
            assert same(kept.layer(layer), plain.layer(layer))
        folder = kept._folder
    assert folder is None or not folder.exists()


def test_too_small_budgets_are_told_before_the_prefill(tiny_llama: LoadedModel) -> None:
    done: list[int] = []
    with pytest.raises(CaptureError, match="budgets"):
        capture(tiny_llama, tokens(20), room=Room(0, 10, 10), progress=lambda n, total: done.append(n))
    assert not done


def test_cancel_stops_within_one_layer(tiny_llama: LoadedModel) -> None:
    done: list[int] = []
    with pytest.raises(Cancelled):
        capture(tiny_llama, tokens(20), progress=lambda n, total: done.append(n), cancel=lambda: len(done) >= 1)
    assert done == [1]
    assert untouched(tiny_llama)


def test_an_interrupt_leaves_no_folder(
    tiny_llama: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def interrupt(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture(tiny_llama, tokens(20), room=Room(0, 0, 10**6), progress=interrupt)
    assert not list(tmp_path.iterdir())
    assert untouched(tiny_llama)


def test_save_and_load(tiny_llama: LoadedModel, tmp_path: Path) -> None:
    kept = capture(tiny_llama, tokens(20), layers=[0, 2])
    target = kept.save(tmp_path / "kept")
    kept.save(target)  # replaces the first
    back = Capture.load(target)
    assert back.layers == (0, 2) and back.tokens == 20 and back.fingerprint == tiny_llama.fingerprint
    assert torch.equal(back.input_ids, kept.input_ids) and torch.equal(back.logits, kept.logits)
    assert same(back.layer(2), kept.layer(2))
    assert [item.name for item in tmp_path.iterdir()] == ["kept"]
    with pytest.raises(CaptureError, match="not captured"):
        back.layer(1)


def test_save_refuses_a_folder_with_other_things(tiny_llama: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(CaptureError, match="other things"):
        capture(tiny_llama, tokens(5)).save(tmp_path)
    assert [item.name for item in tmp_path.iterdir()] == ["letter.txt"]


def test_a_full_disk_leaves_nothing(tiny_llama: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = capture(tiny_llama, tokens(5))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(CaptureError, match="free some space"):
        kept.save(tmp_path / "kept")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["layer", "manifest", "nested"])
def test_damaged_captures_are_refused(tiny_llama: LoadedModel, tmp_path: Path, damage: str) -> None:
    target = capture(tiny_llama, tokens(5)).save(tmp_path / "kept")
    if damage == "layer":
        (target / "layer-0001.safetensors").unlink()
    elif damage == "manifest":
        (target / "capture.json").write_text("{")
    else:
        (target / "capture.json").write_text('{"format": "headscope.capture/1", "scales": {"../x": 1.0}}')
    with pytest.raises(CaptureError):
        Capture.load(target)


def test_sliding_layers_are_not_captured(make_tiny: Callable[..., LoadedModel]) -> None:
    loaded = make_tiny(
        "Qwen2",
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        sliding_window=8,
        use_sliding_window=True,
    )
    assert capture(loaded, tokens(20)).layers == (0, 2)
    with pytest.raises(OptionError, match="sliding_attention"):
        capture(loaded, tokens(20), layers=[1])


def test_in_situ_capture_differs_after_the_first_layer(tiny_llama: LoadedModel) -> None:
    ids = tokens(60)
    config = HeadConfig.uniform(tiny_llama.facts, AShape(1, 4))
    dense, situ = capture(tiny_llama, ids), capture(tiny_llama, ids, config=config)
    assert torch.equal(dense.layer(0).q, situ.layer(0).q)
    assert (dense.layer(1).q - situ.layer(1).q).abs().max() > 1e-3


@pytest.mark.parametrize("length", [0, 513])
def test_lengths_that_do_not_fit(tiny_llama: LoadedModel, length: int) -> None:
    with pytest.raises(PromptError, match="empty" if length == 0 else r"513 tokens .* 512 positions"):
        capture(tiny_llama, tokens(max(length, 1))[:, :length])


@pytest.mark.parametrize(
    ("layers", "got"), [([3], "3"), ([-1, 0], "-1"), ([1.5], "1.5"), ([0, 7, 9, 7], "7, 9"), ([], "none")]
)
def test_layers_that_are_not_there(tiny_llama: LoadedModel, layers: list[int], got: str) -> None:
    with pytest.raises(OptionError, match=rf"^tiny Llama has layers 0 to 2, got {got}$"):
        capture(tiny_llama, tokens(5), layers=layers)
