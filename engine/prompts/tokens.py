"""From a prompt's text to token ids that a model can take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headscope.engine.base.errors import PromptError, UnusableModel

if TYPE_CHECKING:
    from headscope.engine.model.load import LoadedModel


def has_template(loaded: LoadedModel) -> bool:
    """Whether the tokenizer brings a chat template."""
    return bool(getattr(loaded.tokenizer, "chat_template", None))


def encode(loaded: LoadedModel, text: str, template: bool | None = None) -> torch.Tensor:
    """Token ids int64 [1, S] of `text`, as one user turn of the chat template or plain.

    `template` None uses the chat template where the tokenizer has one. Raises PromptError when nothing is left of
    the text or it exceeds the model's positions, ModelError when the model has no tokenizer or no template.
    """
    if loaded.tokenizer is None:
        raise UnusableModel(f"{loaded.name} has no tokenizer: add its tokenizer files to the folder")
    if not text.strip():
        raise PromptError("the prompt is empty or blank: give at least a word")
    if template and not has_template(loaded):
        raise UnusableModel(f"{loaded.name} has no chat template: use --no-template")
    if template or (template is None and has_template(loaded)):
        turns = [{"role": "user", "content": text}]
        text = loaded.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids = loaded.tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False).input_ids
    else:
        ids = loaded.tokenizer(text, return_tensors="pt", verbose=False).input_ids
    return check_ids(loaded, ids)


def check_ids(loaded: LoadedModel, input_ids: torch.Tensor) -> torch.Tensor:
    """Token ids as int64 [1, S], or PromptError: empty, more than one sequence, or beyond the model's positions."""
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
    return ids.to(torch.int64)
