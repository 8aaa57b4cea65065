"""Q, K and V for a search from a real model, and the prompts that calibrate it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headscope.engine.attend.inputs import LayerVisitor
from headscope.engine.base.errors import OptionError, PromptError
from headscope.engine.base.progress import Cancel
from headscope.engine.base.timing import timed
from headscope.engine.prompts.prompt import Prompt
from headscope.engine.prompts.sources import read_folder
from headscope.engine.prompts.tokens import check_ids, encode
from headscope.engine.runs.capture import chosen_layers, stream
from headscope.engine.search.results import SearchPrompt
from headscope.kernels import backends

if TYPE_CHECKING:
    from headscope.engine.model.load import LoadedModel


class ModelSource:
    """A loaded model as a source: one dense prefill per prompt, each layer's tensors as they come."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded

    def layers(self, wanted: Iterable[int] | None) -> tuple[int, ...]:
        """The layers to search: all with full attention by default. OptionError names one that cannot be."""
        return chosen_layers(self.loaded.facts, wanted)

    def check_impl(self, impl: str) -> str:
        """`impl` if it can serve the model's device; OptionError otherwise."""
        probe = torch.empty(1, 1, 1, self.loaded.facts.head_dim, device=self.loaded.device, dtype=self.loaded.dtype)
        try:
            backends.choose(impl, probe)
        except ValueError as problem:
            raise OptionError(f"{problem}; auto takes the fastest that serves") from problem
        return impl

    def stream(self, prompt: SearchPrompt, visit: LayerVisitor, layers: Sequence[int], cancel: Cancel | None) -> None:
        """One dense prefill; ends after the last layer that is asked for."""
        stream(self.loaded, torch.tensor([prompt.ids]), visit, layers=layers, cancel=cancel, logits=False)

    def prefill_ms(self, prompt: SearchPrompt) -> float:
        """Wall time of one dense prefill with the model's own attention, the better of two."""
        ids = check_ids(self.loaded, torch.tensor([prompt.ids])).to(self.loaded.device)
        with torch.no_grad():
            return min(
                timed(lambda: self.loaded.model(input_ids=ids, use_cache=False, logits_to_keep=1), ids.device)[1]
                for _ in range(2)
            )


def load_prompts(
    loaded: LoadedModel, folder: str | Path, tokens: int | None = None, template: bool | None = None
) -> list[SearchPrompt]:
    """The .txt and .md files of a folder as calibration prompts, cut to `tokens` tokens if given."""
    return encode_prompts(loaded, read_folder(folder), tokens, template)


def encode_prompts(
    loaded: LoadedModel, prompts: Iterable[Prompt], tokens: int | None = None, template: bool | None = None
) -> list[SearchPrompt]:
    """Prompts as a search reads them, by their token ids. PromptError names the one that the model cannot take."""
    encoded = []
    for prompt in prompts:
        try:
            read = encode(loaded, prompt.text, template, most=tokens)
        except PromptError as problem:
            raise PromptError(f"{prompt.name}: {problem}") from problem
        ids = tuple(read.ids[0].tolist())
        encoded.append(SearchPrompt(prompt.name, prompt.kind, ids, prompt.sha256, read.chat_template))
    return encoded
