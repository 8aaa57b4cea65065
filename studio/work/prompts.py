"""Prompts of a session: the samples that come along, pasted and uploaded ones, and what a tokenizer makes of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from headscope.engine.base.errors import PromptError
from headscope.engine.model.load import LoadedModel
from headscope.engine.prompts.sources import SamplePrompt, checked_text, list_prompts
from headscope.engine.prompts.tokens import encode as engine_encode
from headscope.engine.prompts.tokens import has_template
from headscope.studio.base.words import size

LARGEST_BYTES = 8 * 2**20
"""Text above this is refused before anything reads it: a million tokens are about 4 MiB."""

FEWEST_TOKENS = 8


@dataclass(frozen=True)
class Prompt:
    """A text and where it came from; `kind` is "sample", "pasted" or "uploaded"."""

    name: str
    kind: str
    text: str

    @property
    def sha256(self) -> str:
        """Hash of the text alone."""
        return hashlib.sha256(self.text.encode("utf-8")).hexdigest()


@dataclass(frozen=True)
class Encoded:
    """A prompt as a model reads it: ids int64 [1, n] and the text of each token."""

    ids: torch.Tensor
    pieces: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """How many tokens."""
        return int(self.ids.shape[1])


@cache
def samples() -> dict[str, SamplePrompt]:
    """The sample prompts by name, in their own order."""
    return {sample.name: sample for sample in list_prompts()}


@cache
def sample(name: str) -> Prompt:
    """A sample as a prompt."""
    return Prompt(name, "sample", samples()[name].read())


def pasted(text: str) -> Prompt:
    """A prompt from a text box. PromptError if it is empty, too large, or holds halves of characters."""
    try:
        return _checked("pasted text", "pasted", text.encode("utf-8"), "The pasted text")
    except UnicodeEncodeError:
        raise PromptError("The pasted text holds halves of characters: paste it again as plain text.") from None


def uploaded(name: str, data: bytes) -> Prompt:
    """A prompt from a file. PromptError if it is empty, too large, or no UTF-8 text."""
    return _checked(Path(name).name[:80] or "upload", "uploaded", data, "The file")


def _checked(name: str, kind: str, data: bytes, words: str) -> Prompt:
    if len(data) > LARGEST_BYTES:
        raise PromptError(f"{words} has {size(len(data))}, and a prompt may have {size(LARGEST_BYTES)}: cut it first.")
    return Prompt(name, kind, checked_text(data, words))


def encode(loaded: LoadedModel, text: str, chat: bool) -> Encoded:
    """Token ids and pieces. PromptError if the model cannot take it (too short, too long, no chat template)."""
    if chat and not has_template(loaded):
        raise PromptError(f"The model {loaded.name} has no chat template: switch the template off.")
    ids = engine_encode(loaded, text, chat)
    if ids.shape[1] < FEWEST_TOKENS:
        raise PromptError(f"The prompt has {ids.shape[1]} tokens, and a picture needs at least {FEWEST_TOKENS}.")
    return Encoded(ids, tuple(loaded.tokenizer.batch_decode([[token] for token in ids[0].tolist()])))


def rough_tokens(text: str) -> int:
    """A guess before the tokenizer is there: about 3.6 characters a token in English text and code."""
    return max(1, round(len(text) / 3.6))
