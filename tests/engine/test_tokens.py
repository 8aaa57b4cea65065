"""From text to token ids: pieces that rejoin, templates of every kind, cuts, hashes, tokenizers that fail."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headscope.engine.base.errors import HeadscopeError, ModelError, PromptError
from headscope.engine.model.load import LoadedModel
from headscope.engine.prompts.pieces import ends_by_decoding, pieces_at
from headscope.engine.prompts.prompt import Prompt, text_sha256
from headscope.engine.prompts.template import render
from headscope.engine.prompts.tokens import check_ids, counter, encode

TEXTS = (
    "plain words, and a number 1234567",
    "  two spaces before, and\n\n\ttabs  after  ",
    "你好，世界。这是一个测试。",
    "🦊 and 👨‍👩‍👧 and 🇨🇭🏳️‍🌈",
    "שלום עולם, مرحبا بالعالم",
    "a\u0301e\u0308 combining, ﬁ ligature, \u200b zero width",
    "def f(x):\n    return x  # größer",
    "\ufffd itself, twice \ufffd\ufffd",
    "<|im_start|>user what looks like a special token</s>",
)


def sentence_pieces(*, prepend: str = "always") -> Any:
    """A fast tokenizer as SentencePiece models have it: spaces are ▁, letters it does not know are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "n", "d", "an", "and"]
    vocabulary = {piece: number for number, piece in enumerate([*known, "▁and", "w", "o", "r", "s"])}
    merges = [("a", "n"), ("an", "d"), ("▁", "and")]
    rust = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    space = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    rust.decoder = decoders.Sequence(space)
    return PreTrainedTokenizerFast(tokenizer_object=rust, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def wide(make_tiny: Callable[..., LoadedModel]) -> LoadedModel:
    """A tiny model with embeddings for the SentencePiece-like tokenizer."""
    return replace(make_tiny("Llama", vocab_size=300), tokenizer=sentence_pieces())


class Slow:
    """The same tokenizer as one in Python would be: no offsets."""

    is_fast = False
    chat_template = None

    def __init__(self, fast: Any) -> None:
        self.fast, self.longest = fast, 0

    def __call__(self, text: str, **options: Any) -> Any:
        assert "return_offsets_mapping" not in options
        return self.fast(text, **options)

    def decode(self, ids: Any) -> str:
        self.longest = max(self.longest, len(ids))
        return self.fast.decode(ids)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("prepend", ["always", "never"])
def test_pieces_of_bytes_and_spaces_rejoin(wide: LoadedModel, text: str, prepend: str) -> None:
    loaded = replace(wide, tokenizer=sentence_pieces(prepend=prepend))
    encoded = encode(loaded, text, False, pieces=True)
    assert "".join(encoded.pieces) == text and len(encoded.pieces) == encoded.tokens
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in encoded.pieces)
    slow = Slow(loaded.tokenizer)
    again = encode(replace(loaded, tokenizer=slow), text, False, pieces=True)
    assert "".join(again.pieces) == text and torch.equal(again.ids, encoded.ids)
    assert slow.longest <= 32  # a few tokens at a time, however long the prompt


def test_a_piece_is_the_text_of_its_token(wide: LoadedModel) -> None:
    loaded = replace(wide, tokenizer=sentence_pieces(prepend="never"))
    assert encode(loaded, "and 你 and", False, pieces=True).pieces == ("and", " ", "你", "", "", " and")
    slow = replace(loaded, tokenizer=Slow(loaded.tokenizer))
    assert "".join(encode(slow, "and 你 and", False, pieces=True).pieces[:5]).strip() == "and 你"
    assert encode(loaded, "and and", False).pieces == ()


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=60), ends=st.lists(st.integers(-2, 70), max_size=40))
def test_pieces_rejoin_wherever_tokens_are_said_to_end(text: str, ends: list[int]) -> None:
    pieces = pieces_at(text, ends)
    assert len(pieces) == len(ends) and (not ends or "".join(pieces) == text)
    characters = list(text)
    found = ends_by_decoding(lambda ids: "".join(characters[at] for at in ids), range(len(text)), text)
    assert found == sorted(found) and (not text or found[-1] == len(text))


@pytest.mark.model
@pytest.mark.parametrize("template", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_pieces_rejoin(smollm2: LoadedModel, text: str, template: bool) -> None:
    encoded = encode(smollm2, text, template, pieces=True)
    shown = render(smollm2, text) if template else text
    assert "".join(encoded.pieces) == shown and encoded.chat_template == template
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in encoded.pieces)
    assert torch.equal(encoded.ids, encode(smollm2, text, template).ids)
    slow = Slow(smollm2.tokenizer)
    assert "".join(encode(replace(smollm2, tokenizer=slow), text, False, pieces=True).pieces) == text


def test_a_cut_gives_the_first_tokens_and_reads_no_more_than_it_needs(wide: LoadedModel) -> None:
    text = "and you 你好 " * 50
    whole = encode(replace(wide, facts=replace(wide.facts, max_position=10**6)), text, False, pieces=True)
    for most in (1, 7, 100, 512):
        part = encode(wide, text, False, most=most, pieces=True)
        assert part.tokens == most and torch.equal(part.ids, whole.ids[:, :most])
        assert text.startswith("".join(part.pieces)) and part.pieces[:-1] == whole.pieces[: most - 1]
    assert encode(wide, text, False, most=9999).tokens == 512  # the model's positions
    assert encode(wide, "and and", False, most=50).tokens == 2
    with pytest.raises(PromptError, match="at least 1 token, got 0"):
        encode(wide, text, False, most=0)

    read: list[int] = []

    class Long:
        """One token for every hundred characters."""

        chat_template = "{{ messages }}"

        def __call__(self, text: str, **_: Any) -> Any:
            read.append(len(text))
            return type("Ids", (), {"input_ids": [3] * (len(text) // 100)})()

    part = encode(replace(wide, tokenizer=Long()), "x" * 100_000, most=40)
    assert part.tokens == 40 and not part.chat_template  # a cut loses the template's end
    assert read == [640, 2560, 10240]


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{% for m in messages %}{{ m.content.x.y }}{% endfor %}", "fails"),
        ("{% for m in messages %}{{ raise_exception('only tools, please') }}{% endfor %}", "only tools, please"),
        ("{% for m in messages %}{{ m.content", "fails"),
        ("{% for m in messages %}hello{% endfor %}", "leaves the prompt's text out"),
        ({"tool_use": "{{ messages }}", "rag": "{{ messages }}"}, "several chat templates (rag, tool_use)"),
        ({}, "has no chat template"),
        (None, "has no chat template"),
    ],
)
def test_a_template_that_does_not_serve_is_one_sentence(wide: LoadedModel, template: Any, sentence: str) -> None:
    tokenizer = sentence_pieces()
    tokenizer.chat_template = template
    loaded = replace(wide, tokenizer=tokenizer)
    with pytest.raises(ModelError) as caught:
        encode(loaded, "and so on", True)
    assert sentence in str(caught.value) and "--no-template" in str(caught.value) and "\n" not in str(caught.value)
    assert encode(loaded, "and so on", False).tokens > 1


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}<u>{% for c in m.content if c.type == 'text' %}"
        "{{ c.text }}{% endfor %}</u>{% endfor %}",
        "{% for m in messages %}<u>{{ m.content[0]['text'] + '' }}</u>{% endfor %}",
        "{% for m in messages %}<u>{{ m.content | trim }}</u>{% endfor %}",
    ],
    ids=["reads a list", "raises for text", "trims"],
)
def test_templates_keep_the_text_whatever_form_they_read(wide: LoadedModel, template: str) -> None:
    tokenizer = sentence_pieces()
    tokenizer.chat_template = {"default": template, "tool_use": "{{ 1 }}"}
    loaded = replace(wide, tokenizer=tokenizer)
    assert render(loaded, " [/and] so on\n").replace(" [/and] so on\n", "[/and] so on") == "<u>[/and] so on</u>"
    assert encode(loaded, "and", pieces=True).pieces[-4:] == ("<", "/", "u", ">")


def test_ids_beyond_the_embedding_are_refused(tiny_llama: LoadedModel) -> None:
    with pytest.raises(PromptError, match=r"token id 97 and tiny Llama has embeddings for 0 to 96"):
        check_ids(tiny_llama, torch.tensor([[3, 97, 5]]))
    with pytest.raises(PromptError, match="token id -1 and"):
        check_ids(tiny_llama, torch.tensor([[3, -1, 5]]))
    with pytest.raises(PromptError, match="tokenizer that belongs to this model"):
        encode(replace(tiny_llama, tokenizer=sentence_pieces()), "and 你")


class _Panic(BaseException):
    """What pyo3 raises for a panic in Rust."""


@pytest.mark.parametrize("problem", [_Panic("index out\nof bounds"), TypeError("no"), _Panic()])
def test_a_tokenizer_that_fails_or_panics_is_one_sentence(tiny_llama: LoadedModel, problem: BaseException) -> None:
    class Damaged:
        chat_template = None
        is_fast = True

        def __call__(self, *_: Any, **__: Any) -> Any:
            raise problem

    loaded = replace(tiny_llama, tokenizer=Damaged())
    for work in (lambda: encode(loaded, "text", pieces=True), lambda: counter(loaded)("text")):
        with pytest.raises(ModelError, match=r"^the tokenizer of tiny Llama fails on this prompt \(") as caught:
            work()
        assert "\n" not in str(caught.value)


def test_a_person_can_still_interrupt_a_tokenizer(tiny_llama: LoadedModel) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode(replace(tiny_llama, tokenizer=interrupted), "text")


def test_one_hash_with_one_rule_for_half_characters(wide: LoadedModel) -> None:
    for text in TEXTS:
        assert text_sha256(text) == hashlib.sha256(text.encode()).hexdigest() == Prompt("a", "b", text, "file").sha256
    halves = ("\ud800", "\ud801", "\udc00", "a\ud800", "\ufffd", "?")
    assert len({text_sha256(text) for text in halves}) == len(halves)
    assert text_sha256("\ud800") == hashlib.sha256(b"\xed\xa0\x80").hexdigest()
    with pytest.raises(PromptError, match=r"half a character at place 4"):
        encode(wide, "and \ud800", False)
    with pytest.raises(ValueError, match="origin"):
        Prompt("a", "b", "c", "elsewhere")


def test_no_tokenizer_is_a_sentence_everywhere(tiny_llama: LoadedModel) -> None:
    for work in (lambda: encode(tiny_llama, "text"), lambda: counter(tiny_llama)):
        with pytest.raises(HeadscopeError, match="has no tokenizer"):
            work()
