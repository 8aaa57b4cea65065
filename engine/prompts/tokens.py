"""From a prompt's text to token ids that a model can take: the one way for every command, the search and the studio."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from headscope.engine.base.errors import HeadscopeError, ModelError, PromptError, UnusableModel
from headscope.engine.prompts.pieces import ends_by_decoding, pieces_at
from headscope.engine.prompts.template import has_template, render

if TYPE_CHECKING:
    from headscope.engine.model.load import LoadedModel

_MOST_CHARACTERS_A_TOKEN = 16
"""How much of a long text is tokenized first where it is cut; more is read if that gives too few tokens."""


@dataclass(frozen=True)
class Encoded:
    """A prompt as a model reads it.

    `ids` int64 [1, S]; `chat_template` says whether the text stands in the model's template. `pieces`, where they were
    asked for, are the texts of the S tokens: joined, they are the text that was tokenized, template and all, or its
    beginning after a cut.
    """

    ids: torch.Tensor
    chat_template: bool
    pieces: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """How many tokens."""
        return int(self.ids.shape[1])


def encode(
    loaded: LoadedModel, text: str, template: bool | None = None, *, most: int | None = None, pieces: bool = False
) -> Encoded:
    """`text` as token ids, as one user turn of the chat template or plain, cut to the first `most` tokens if given.

    `template` None uses the chat template where the tokenizer has one, but not for a prompt that is cut, since a cut
    loses the template's end. A cut prompt ends at the model's positions at the latest. Raises PromptError when nothing
    is left of the text, when it holds half characters or exceeds the model's positions, ModelError when the model has
    no tokenizer, no usable template, or a tokenizer that fails or belongs to another model.
    """
    _check_text(loaded, text)
    if most is not None and most < 1:
        raise PromptError(f"Prompts are cut to at least 1 token, got {most}.")
    templated = template if template is not None else most is None and has_template(loaded)
    shown = render(loaded, text) if templated else text
    if most is None:
        ids, ends = _tokenize(loaded, shown, not templated, pieces)
        texts = pieces_at(shown, ends)
    else:
        most = min(most, loaded.facts.max_position or most)
        ids, ends, shown = _first_tokens(loaded, shown, not templated, pieces, most)
        texts = pieces_at(shown[: ends[-1]] if ends and len(ids) == most else shown, ends)
    return Encoded(check_ids(loaded, torch.tensor([ids], dtype=torch.int64)), templated, texts)


def counter(loaded: LoadedModel) -> Callable[[str], Sequence[int]]:
    """The plain token ids of texts of any length, for those who fit a text to a number of tokens."""

    def count(text: str) -> Sequence[int]:
        _check_text(loaded, text)
        return _tokenize(loaded, text, True, False)[0]

    _check_tokenizer(loaded)
    return count


def check_ids(loaded: LoadedModel, input_ids: torch.Tensor) -> torch.Tensor:
    """Token ids as int64 [1, S], or PromptError: empty, several sequences, beyond the positions or the vocabulary."""
    ids = torch.as_tensor(input_ids)
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or ids.shape[0] != 1 or ids.dtype not in (torch.int32, torch.int64):
        raise PromptError(f"a prompt is one sequence of token ids [1, S], got {ids.dtype} {tuple(ids.shape)}")
    if ids.shape[1] == 0:
        raise PromptError("the prompt is empty: give at least one token")
    most = loaded.facts.max_position
    if most and ids.shape[1] > most:
        raise PromptError(
            f"the prompt has {ids.shape[1]} tokens and {loaded.name} has {most} positions: shorten it, or use a model "
            "with more positions"
        )
    rows = int(loaded.model.get_input_embeddings().weight.shape[0])
    least, largest = (int(value) for value in torch.aminmax(ids))
    if least < 0 or largest >= rows:
        raise PromptError(
            f"the prompt holds the token id {largest if largest >= rows else least} and {loaded.name} has embeddings "
            f"for 0 to {rows - 1}: use the tokenizer that belongs to this model"
        )
    return ids.to(torch.int64)


def _check_tokenizer(loaded: LoadedModel) -> None:
    if loaded.tokenizer is None:
        raise UnusableModel(f"{loaded.name} has no tokenizer: add its tokenizer files to the folder")


def _check_text(loaded: LoadedModel, text: str) -> None:
    _check_tokenizer(loaded)
    if not text.strip():
        raise PromptError("the prompt is empty or blank: give at least a word")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as problem:
        raise PromptError(
            f"the prompt holds half a character at place {problem.start} (a lone surrogate): save it as UTF-8 text"
        ) from problem


def _first_tokens(
    loaded: LoadedModel, text: str, special: bool, pieces: bool, most: int
) -> tuple[list[int], list[int], str]:
    """The first `most` token ids of a text, where they end, and as much of the text as was read for them.

    The rest of a long text is never read: one whose beginning gives more than enough tokens is not needed whole.
    """
    size = max(64, most * _MOST_CHARACTERS_A_TOKEN)
    while True:
        shown = text[:size]
        ids, ends = _tokenize(loaded, shown, special, pieces)
        if len(ids) > most or size >= len(text):
            return ids[:most], ends[:most], shown
        size *= 4


def _tokenize(loaded: LoadedModel, text: str, special: bool, offsets: bool) -> tuple[list[int], list[int]]:
    """Token ids of a text, and the character where each of them ends if `offsets` are asked for."""
    tokenizer = loaded.tokenizer
    options: dict[str, Any] = {} if special else {"add_special_tokens": False}
    with _explained(loaded):
        if not offsets:
            return list(tokenizer(text, verbose=False, **options).input_ids), []
        if getattr(tokenizer, "is_fast", False):
            encoding = tokenizer(text, verbose=False, return_offsets_mapping=True, **options)
            return list(encoding.input_ids), [end for _, end in encoding.offset_mapping]
        ids = list(tokenizer(text, verbose=False, **options).input_ids)
        return ids, ends_by_decoding(tokenizer.decode, ids, text)


@contextmanager
def _explained(loaded: LoadedModel) -> Iterator[None]:
    """Turns whatever a tokenizer raises into a ModelError; a damaged one panics in Rust with a bare BaseException."""
    try:
        yield
    except (HeadscopeError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        why = " ".join(str(error).split())[:160].rstrip(" .:") or "no reason given"
        raise ModelError(
            f"the tokenizer of {loaded.name} fails on this prompt ({type(error).__name__}: {why}): its files are "
            "damaged or belong to another model, so fetch them again"
        ) from error
