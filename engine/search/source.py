"""Q, K and V for a search from a real model, and the prompts that calibrate it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headscope.engine.base.errors import OptionError, PromptError
from headscope.engine.prompts.sources import list_prompts, read_folder
from headscope.engine.prompts.tokens import check_ids, encode
from headscope.engine.runs.capture import chosen_layers, stream
from headscope.engine.search.measure import Cancel, SearchPrompt, Visit
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

    def stream(self, prompt: SearchPrompt, visit: Visit, layers: Sequence[int], cancel: Cancel | None) -> None:
        """One dense prefill; ends after the last layer that is asked for."""
        ids = torch.tensor([prompt.ids])
        stream(self.loaded, ids, visit, layers=layers, cancel=cancel, logits=False)

    def prefill_ms(self, prompt: SearchPrompt) -> float:
        """Wall time of one dense prefill with the model's own attention, the better of two."""
        ids = check_ids(self.loaded, torch.tensor([prompt.ids])).to(self.loaded.device)
        best = float("inf")
        for _ in range(2):
            began = time.perf_counter()
            with torch.no_grad():
                logits = self.loaded.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
            float(logits[0, -1, 0])  # waits for the device
            best = min(best, (time.perf_counter() - began) * 1e3)
        return best


def load_prompts(
    loaded: LoadedModel, folder: str | Path, tokens: int | None = None, template: bool | None = None
) -> list[SearchPrompt]:
    """The .txt and .md files of a folder as calibration prompts, cut to `tokens` tokens if given.

    A file's kind is that of the sample prompt it is, or else its name without the extension.
    """
    samples = {sample.path.resolve(): sample.kind for sample in list_prompts()}
    texts = read_folder(folder)
    kinds = {name: samples.get((Path(folder) / name).resolve(), Path(name).stem) for name in texts}
    return encode_prompts(loaded, texts, kinds, tokens, template)


def encode_prompts(
    loaded: LoadedModel,
    texts: Mapping[str, str],
    kinds: Mapping[str, str],
    tokens: int | None = None,
    template: bool | None = None,
) -> list[SearchPrompt]:
    """Named texts as calibration prompts. PromptError names the one that the model cannot take."""
    if tokens is not None and tokens < 1:
        raise PromptError(f"Prompts are cut to at least 1 token, got {tokens}.")
    made = []
    for name, text in texts.items():
        limit = loaded.facts.max_position or None
        # A text that will be cut may be longer than the model takes; the rest is never read.
        shown = text if tokens is None else text[: max(64, tokens * 16)]
        try:
            ids = _token_ids(loaded, shown, template) if tokens is not None else encode(loaded, text, template)[0]
        except PromptError as problem:
            raise PromptError(f"{name}: {problem}") from problem
        ids = ids[: min(tokens or len(ids), limit or len(ids))]
        sha = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        made.append(SearchPrompt(name, kinds.get(name, name), tuple(ids.tolist()), sha))
    return made


def _token_ids(loaded: LoadedModel, text: str, template: bool | None) -> torch.Tensor:
    """Ids of a text that is about to be cut: plain unless a template is asked for, since a cut loses its end."""
    if template:
        return encode(loaded, text, True)[0]
    if loaded.tokenizer is None:
        return encode(loaded, text, False)[0]
    return loaded.tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
