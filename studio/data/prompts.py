"""Prompts of a session: the samples that come along, pasted and uploaded ones, and what a tokenizer makes of them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from headscope.engine.base.errors import PromptError
from headscope.engine.model.load import LoadedModel
from headscope.engine.prompts import tokens
from headscope.engine.prompts.prompt import Prompt
from headscope.engine.prompts.sources import SamplePrompt, checked_text, list_prompts
from headscope.engine.prompts.template import has_template
from headscope.engine.prompts.tokens import Encoded
from headscope.studio.base.words import size

LARGEST_BYTES = 8 * 2**20
"""Text above this is refused before anything reads it: a million tokens are about 4 MiB."""

FEWEST_TOKENS = 8


@cache
def samples() -> dict[str, SamplePrompt]:
    """The sample prompts by name, in their own order."""
    return {sample.name: sample for sample in list_prompts()}


@cache
def sample(name: str) -> Prompt:
    """A sample as a prompt."""
    return samples()[name].read()


def kind_of(name: str, sha256: str) -> str:
    """What sort of text a stored prompt is: that of the sample that it is, else its name."""
    return sample(name).kind if name in samples() and sample(name).sha256 == sha256 else name


def pasted(text: str) -> Prompt:
    """A prompt from a text box. PromptError if it is empty, too large, or holds halves of characters."""
    try:
        return _checked("pasted text", "pasted", text.encode("utf-8"), "The pasted text")
    except UnicodeEncodeError:
        raise PromptError("The pasted text holds halves of characters: paste it again as plain text.") from None


def uploaded(name: str, data: bytes) -> Prompt:
    """A prompt from a file. PromptError if it is empty, too large, or no UTF-8 text."""
    return _checked(Path(name).name[:80] or "upload", "uploaded", data, "The file")


def _checked(name: str, origin: str, data: bytes, words: str) -> Prompt:
    if len(data) > LARGEST_BYTES:
        raise PromptError(f"{words} has {size(len(data))}, and a prompt may have {size(LARGEST_BYTES)}: cut it first.")
    return Prompt(name, origin, checked_text(data, words), origin)


def encode(loaded: LoadedModel, text: str, chat: bool) -> Encoded:
    """Token ids with the text of each. PromptError if the model cannot take it (too short or long, no template)."""
    if chat and not has_template(loaded):
        raise PromptError(f"The model {loaded.name} has no chat template: switch the template off.")
    encoded = tokens.encode(loaded, text, chat, pieces=True)
    if encoded.tokens < FEWEST_TOKENS:
        raise PromptError(f"The prompt has {encoded.tokens} tokens, and a picture needs at least {FEWEST_TOKENS}.")
    return encoded


def rough_tokens(text: str) -> int:
    """A guess before the tokenizer is there: about 3.6 characters a token in English text and code."""
    return max(1, round(len(text) / 3.6))
