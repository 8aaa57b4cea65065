"""The files of a search's run folder: its prompts by their token ids, and one result a prompt.

A result is named by the hash of its prompt's token ids, and the ids lie beside it, so that a choice can be measured
again without the texts.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headscope.engine.attend.estimator import Estimator
from headscope.engine.base import files, records
from headscope.engine.base.errors import HeadscopeError, PromptError
from headscope.engine.search import stored
from headscope.engine.search.grid import Grid

FORMAT = "headscope.search-result/1"
PROMPT_FORMAT = "headscope.search-prompt/1"

STATS = (
    "mean",
    "worst",
    "worst_row",
    "p99",
    "start",
    "middle",
    "end",
    "output_error",
    "output_cosine",
    "requested_pairs",
    "computed_pairs",
    "tile_cells",
)
"""What is kept of a head under a candidate. Losses are shares of probability; `tile_cells` are the cells that the
kernel touches: computed pairs, causal waste and padding."""

MIXED = 8
"""Mixed layers that are timed beside the uniform ones: a real config is a mix, and what a family costs its layer
once shows only where the families of layers differ."""

MOST_HEADS = 1024
"""Query heads of a layer, far more than models have: how large a file of results may be follows from it."""

_STAT_BYTES = 26
"""Most characters of one stored figure, with what parts it from the next."""


class SearchError(HeadscopeError):
    """A search that cannot start, go on, or reach its target."""


@dataclass(frozen=True)
class SearchPrompt:
    """A calibration prompt as a run folder keeps it, without its text: `ids` are its token ids, `sha256` that of the
    text, `kind` such as prose or code, `chat_template` whether it stands in one (None where that is not known).
    """

    name: str
    kind: str
    ids: tuple[int, ...]
    sha256: str
    chat_template: bool | None = None

    @property
    def key(self) -> str:
        """sha256 of the token ids: what a result file is named by."""
        return hashlib.sha256(torch.tensor(self.ids, dtype=torch.int64).numpy().tobytes()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """What provenance keeps; never the text."""
        known = {} if self.chat_template is None else {"chat_template": self.chat_template}
        return {
            "name": self.name,
            "kind": self.kind,
            "sha256": self.sha256,
            "tokens": len(self.ids),
            **known,
            "key": self.key,
        }


@dataclass(frozen=True)
class Settings:
    """What decides a measurement: which layers, candidates and estimator, on which implementation."""

    layers: tuple[int, ...]
    grid: Grid
    estimator: Estimator
    impl: str = "auto"


def result_path(folder: Path, prompt: SearchPrompt) -> Path:
    """Where the result of a prompt lies in a run folder."""
    return folder / "results" / f"{prompt.key}.json"


def prompt_path(folder: Path, key: str) -> Path:
    """Where the token ids of a prompt lie in a run folder."""
    return folder / "prompts" / f"{key}.json"


def keep_prompt(folder: Path, prompt: SearchPrompt) -> None:
    """Writes the prompt's token ids into the run folder, so that a choice can be measured without the texts."""
    path = prompt_path(folder, prompt.key)
    if not path.exists():
        value = {"format": PROMPT_FORMAT, "prompt": prompt.to_dict(), "ids": list(prompt.ids)}
        files.write_atomic(path, files.one_line(value) + "\n", SearchError)


def read_prompt(folder: Path, key: str) -> SearchPrompt | None:
    """A prompt that a run folder keeps, None where it keeps none; SearchError if it is damaged."""
    path = prompt_path(folder, key)
    if not path.exists():
        return None
    value = files.read_json(path, SearchError)
    records.check(stored.PromptFile, value, f"{path} is no prompt of a search:", SearchError)
    about = value["prompt"]
    prompt = SearchPrompt(
        about["name"], about["kind"], tuple(value["ids"]), about["sha256"], about.get("chat_template")
    )
    if prompt.key != key:
        raise SearchError(f"{path} holds other tokens than its name says; delete it and run the search again.")
    return prompt


@dataclass(frozen=True)
class PromptResult:
    """A result file. `layers` are as `measure_layer` made them, ascending."""

    prompt: dict[str, Any]
    prefill_ms: float
    layers: tuple[dict[str, Any], ...]

    @property
    def tokens(self) -> int:
        return int(self.prompt["tokens"])


def largest_result(layers: int, grid: Grid) -> int:
    """Bytes that results of so many layers can need; 126 layers of 128 heads under the default grid write 75 MB."""
    return files.LARGEST_FILE + layers * (len(grid) + MIXED) * MOST_HEADS * len(STATS) * _STAT_BYTES


def read_result(path: str | os.PathLike[str], settings: Settings) -> PromptResult:
    """The result of one prompt; SearchError if it is damaged or was measured under other settings."""
    value = files.read_json(path, SearchError, largest_result(len(settings.layers), settings.grid))
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise SearchError(f"{path} is no search result; delete it and run the search again.")
    records.check(stored.Result, value, f"{path} is damaged:", SearchError)
    if value.get("candidates") != files.plain(settings.grid.to_list()) or (
        value.get("estimator") != settings.estimator.to_dict()
    ):
        raise SearchError(f"{path} was measured with other candidates or another estimator; choose a new run folder.")
    layers = value["layers"]
    if [entry.get("layer") if isinstance(entry, dict) else None for entry in layers] != list(settings.layers):
        raise SearchError(f"{path} holds other layers than were asked for; choose a new run folder.")
    heads = {
        stored.check_layer(entry, layer, len(settings.grid), str(path), SearchError)
        for entry, layer in zip(layers, settings.layers, strict=True)
    }
    if len(heads) > 1:
        raise SearchError(f"{path} is damaged: its layers have different numbers of heads; run the search again.")
    return PromptResult(value["prompt"], float(value["prefill_ms"]), tuple(layers))


def check_alike(results: Sequence[PromptResult], folder: Path) -> None:
    """SearchError unless all results have the same number of heads, so that they make one table."""
    if len({len(result.layers[0]["rows"][0]["mean"]) for result in results if result.layers}) > 1:
        raise SearchError(f"{folder} holds results of different models; delete those of the other one.")


def read_results(folder: Path, prompts: Iterable[SearchPrompt], settings: Settings) -> tuple[PromptResult, ...]:
    """The results of all prompts, sorted by their hash, so that neither order nor process count matters."""
    results = []
    for prompt in sorted(prompts, key=lambda prompt: prompt.key):
        path = result_path(folder, prompt)
        if not path.exists():
            raise PromptError(f"The prompt {prompt.name} has no result in {folder}: run the search again.")
        results.append(read_result(path, settings))
    check_alike(results, folder)
    return tuple(results)
