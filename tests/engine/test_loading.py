"""Damaged and unusual model files: refused in one sentence, and nothing random in place of what is wrong."""

from __future__ import annotations

import errno
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headscope.engine.base.errors import ModelError
from headscope.engine.config.facts import facts_of
from headscope.engine.model import copies, packaged
from headscope.engine.model.foreign import explained
from headscope.engine.model.load import LoadedModel, load_model


@pytest.fixture
def folder(tiny_llama: LoadedModel, tmp_path: Path) -> Path:
    tiny_llama.model.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"1 tensors are missing \(model.layers.1.mlp.up_proj"),
        (lambda t: t.pop("model.layers.2.input_layernorm.weight"), "missing"),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(96)}), "1 are left over"),
        (lambda t: t.update({"model.layers.3.mlp.up_proj.weight": torch.zeros(64, 48)}), "1 are left over"),
    ],
    ids=["missing", "missing norm", "left over", "another layer"],
)
def test_missing_and_left_over_weights(folder: Path, change: Callable[..., Any], says: str) -> None:
    change_weights(folder, change)
    with pytest.raises(ModelError, match=says) as caught:
        load_model(folder, device="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("layers", "says"), [(2, "left over"), (4, "missing")])
def test_a_layer_count_that_does_not_fit_the_weights(folder: Path, layers: int, says: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = layers
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=says):
        load_model(folder, device="cpu")


def test_tied_heads_need_no_tensor_of_their_own(make_tiny: Callable[..., LoadedModel], tmp_path: Path) -> None:
    tied = make_tiny("Llama", tie_word_embeddings=True)
    tied.model.save_pretrained(tmp_path / "tied")
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    assert load_model(tmp_path / "tied", device="cpu").fingerprint == tied.fingerprint


@pytest.mark.parametrize(
    "shard", ["pytorch_model.bin", "../tiny2/model.safetensors", "/etc/passwd", "gone.safetensors"]
)
def test_an_index_may_name_only_safetensors_beside_it(folder: Path, shard: str) -> None:
    torch.save({"model.norm.weight": torch.ones(48)}, folder / "pytorch_model.bin")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="index") as caught:
        load_model(folder, device="cpu")
    assert shard[-20:] in str(caught.value)


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": {"a": 1}}', "not json"])
def test_a_damaged_index(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError):
        load_model(folder, device="cpu")


def test_the_fingerprint_covers_layers_without_norms() -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=3, n_head=4, n_positions=64)
    model = transformers.GPT2LMHeadModel(config)
    before = facts_of(model).fingerprint
    for layer in range(3):
        for parameter in model.transformer.h[layer].parameters():
            parameter.data.add_(1)
        after = facts_of(model).fingerprint
        assert after != before, layer
        before = after


def test_the_facts_know_models_without_rope() -> None:
    import transformers

    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=1, n_head=4))
    assert facts_of(gpt2).rope["type"] == "none"
    gptj = transformers.GPTJForCausalLM(
        transformers.GPTJConfig(vocab_size=97, n_embd=32, n_layer=1, n_head=4, rotary_dim=4)
    )
    assert facts_of(gptj).rope["type"] == "default"


def write_gguf(path: Path, tiny: LoadedModel, change: Callable[[Any, dict[str, np.ndarray]], None]) -> Path:
    """A tiny llama as a GGUF file, changed by `change(writer, tensors)` before it is written."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    config = tiny.model.config
    writer.add_name("tiny")
    writer.add_context_length(512)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{number}>" for number in range(config.vocab_size)])
    writer.add_token_scores([0.0] * config.vocab_size)
    writer.add_token_types([1] * config.vocab_size)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    tensors = {}
    for name, value in tiny.model.state_dict().items():
        base, _, kind = name.rpartition(".")
        tensors[f"{names.get_name(base)}.{kind}"] = value.numpy()
    change(writer, tensors)
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_whole_gguf_loads(tiny_llama: LoadedModel, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama, lambda writer, tensors: writer.add_rope_scaling_factor(1.0))
    assert load_model(path, device="cpu").facts.layers == 3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w, t: w.add_string("llama.rope.scaling.type", "yarn"), r"llama.rope.scaling.type = yarn"),
        (lambda w, t: w.add_rope_scaling_factor(4.0), r"llama.rope.scaling.factor = 4.0"),
        (lambda w, t: w.add_logit_scale(0.5), "logit_scale"),
        (lambda w, t: t.update({"rope_freqs.weight": np.ones(8, np.float32)}), "left over.*rope_freqs"),
        (lambda w, t: t.update({"blk.3.attn_norm.weight": np.ones(48, np.float32)}), "left over.*blk.3"),
        (lambda w, t: t.pop("blk.1.ffn_up.weight"), "missing.*layers.1.mlp.up_proj"),
    ],
    ids=["yarn", "factor", "logit scale", "rope_freqs", "another layer", "missing"],
)
def test_what_a_gguf_reader_would_pass_over(
    tiny_llama: LoadedModel, tmp_path: Path, change: Callable[..., None], says: str
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama, change)
    with pytest.raises(ModelError, match=says) as caught:
        load_model(path, device="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "head",
    [
        b"GGUF",
        b"GGUX" + struct.pack("<IQQ", 3, 1, 1),
        b"GGUF" + struct.pack("<IQQ", 77, 1, 1),
        b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1),
        b"GGUF" + struct.pack("<IQQ", 3, 1, 1 << 60),
        b"GGUF" + struct.pack("<IQQ", 3, 2, 2) + struct.pack("<Q", 1 << 50) + b"x" * 200,
    ],
)
@pytest.mark.timeout(60)
def test_gguf_headers_that_promise_too_much(tmp_path: Path, head: bytes) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(head)
    with pytest.raises(ModelError) as caught:
        load_model(path, device="cpu")
    assert "\n" not in str(caught.value)


class PanicException(BaseException):
    """Named as what a panic of Rust code becomes."""


@pytest.mark.parametrize(
    "error",
    [
        struct.error("unpack requires a buffer"),
        OverflowError("too large"),
        AttributeError("no such"),
        IndexError("list index"),
        PermissionError(errno.EACCES, "Permission denied"),
        PanicException("called `Option::unwrap()` on a `None` value"),
    ],
)
def test_foreign_errors_become_one_sentence(error: BaseException) -> None:
    with pytest.raises(ModelError) as caught, explained("x"):
        raise error
    assert "\n" not in str(caught.value) and "'x'" in str(caught.value)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), MemoryError()])
def test_an_interrupt_stays_one(error: BaseException) -> None:
    with pytest.raises(type(error)), explained("x"):
        raise error


def test_names_that_no_file_system_takes() -> None:
    for name in ("a" * 5000, "/tmp/" + "b" * 400 + "/c", "bad\0name"):
        with pytest.raises(ModelError):
            load_model(name)


def test_a_damaged_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": -1}}}')
    with pytest.raises(ModelError) as caught:
        load_model(folder, device="cpu")
    assert "\n" not in str(caught.value)


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """Makes the copy of a packaged model whose conversion writes two small files."""
    monkeypatch.setenv("HEADSCOPE_CACHE", str(tmp_path))
    (tmp_path / "smollm2").mkdir()
    monkeypatch.setattr(copies, "fetch", lambda name, progress: tmp_path / "smollm2" / "model.gguf")

    def convert(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(bytes(range(256)))

    return lambda: copies.float32_copy("smollm2", None, convert)


def test_a_copy_is_hashed_and_rebuilt_when_it_does_not_fit(copy: Callable[[], Path]) -> None:
    target = copy()
    weights = target / "model.safetensors"
    assert copies.is_whole(target) and copy() == target
    for damage in (
        lambda: weights.write_bytes(bytes(128) + bytes(range(128, 256))),
        lambda: weights.write_bytes(bytes(range(100))),
        weights.unlink,
        (target / copies.MANIFEST).unlink,
        lambda: (target / copies.MANIFEST).write_text("{}"),
    ):
        damage()
        assert not copies.is_whole(target)
        assert copy() == target and copies.is_whole(target) and weights.read_bytes() == bytes(range(256))


def test_leftovers_of_a_killed_conversion_are_swept(copy: Callable[[], Path], tmp_path: Path) -> None:
    left = tmp_path / "smollm2" / ".convert-abc"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    target = copy()
    assert sorted(item.name for item in target.parent.iterdir() if item.name != ".lock") == [target.name]


def test_a_disk_that_is_full_while_converting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSCOPE_CACHE", str(tmp_path))
    (tmp_path / "smollm2").mkdir()
    monkeypatch.setattr(copies, "fetch", lambda name, progress: tmp_path / "model.gguf")

    def full(gguf: Path, folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ModelError, match="no room to keep a float32 copy"):
        copies.float32_copy("smollm2", None, full)
    assert not list((tmp_path / "smollm2").glob(".convert-*"))
    assert packaged.cache_dir() == tmp_path
