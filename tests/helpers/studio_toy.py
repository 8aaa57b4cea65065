"""A small model with a tokenizer, and a lab around it, so that pages are tested in seconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headscope.engine.model.load import LoadedModel
from headscope.studio.lab import models
from headscope.studio.lab.lab import Lab
from headscope.studio.lab.shelf import Shelf
from headscope.studio.ui import state

PIECE = 24
"""Characters a token, so that the sample prompts fit the toy's 512 positions."""


class ToyTokenizer:
    """Cuts text into pieces of 24 characters; ids are made from them and decode to a short word."""

    chat_template = "{{ messages }}"
    is_fast = True
    pad_token_id = 0
    eos_token_id = 2

    def __init__(self) -> None:
        self._pieces: dict[int, str] = {}

    def __call__(self, text: str, **_: Any) -> Any:
        ids, offsets = [], []
        for start in range(0, len(text), PIECE):
            piece = text[start : start + PIECE]
            token = 3 + sum(piece.encode("utf-8", "replace")) % 90
            self._pieces.setdefault(token, piece)
            ids.append(token)
            offsets.append((start, start + len(piece)))
        return type("Encoding", (), {"input_ids": ids, "offset_mapping": offsets})()

    def apply_chat_template(self, turns: list[dict[str, str]], **_: Any) -> str:
        return "[user turn begins here] " + turns[0]["content"] + " [the assistant's turn] "

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(self._pieces.get(int(token), f"w{int(token)}") for token in torch.as_tensor(ids).reshape(-1))


def toy(tiny: LoadedModel) -> LoadedModel:
    """The tiny model under the default model's name, with the toy tokenizer."""
    facts = replace(tiny.facts, name="smollm2")
    return LoadedModel(tiny.model, ToyTokenizer(), "smollm2", facts.fingerprint, facts)


def make_lab(loaded: LoadedModel, folder: Path, patch: pytest.MonkeyPatch, path: Path | None = None) -> Lab:
    """A lab on a database in `folder`, whose models all are `loaded`, put where the pages look for it."""
    patch.setattr(models, "load_model", lambda name, progress=None: loaded)
    made = Lab(path or folder / "studio.duckdb", Shelf(folder / "captures", 2**30))
    patch.setattr(state, "lab", lambda: made)
    return made
