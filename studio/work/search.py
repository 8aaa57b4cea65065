"""A search in the studio: started as a job, kept as rows, moved to another target from the store alone.

No streamlit here. The engine's run folder lies beside the database, named by what is searched, so that a search that
was cancelled or killed goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from headscope.engine.attend.estimator import Estimator
from headscope.engine.base import files
from headscope.engine.base.errors import ConfigError, HeadscopeError
from headscope.engine.base.machine import hardware, versions
from headscope.engine.config.file import HeadConfig
from headscope.engine.search import cost as search_cost
from headscope.engine.search.check import Checked, Expected, check_prompt
from headscope.engine.search.cost import CostModel
from headscope.engine.search.front import Front
from headscope.engine.search.grid import FORMAT as GRID_FORMAT
from headscope.engine.search.grid import SAMPLING, Grid
from headscope.engine.search.measure import Step
from headscope.engine.search.results import (
    STATS,
    PromptResult,
    SearchError,
    SearchPrompt,
    Settings,
    keep_prompt,
    read_prompt,
)
from headscope.engine.search.run import choose, measure, read_run, summary, to_config
from headscope.engine.search.source import ModelSource, encode_prompts
from headscope.engine.search.table import Allocation, Prediction, Table, Target, allocate, fronts, predict
from headscope.studio.base import words
from headscope.studio.data import prompts as texts
from headscope.studio.data.draft import Draft
from headscope.studio.lab.jobs import Context
from headscope.studio.lab.lab import Lab
from headscope.studio.store.places import data_dir
from headscope.studio.store.rows import now
from headscope.studio.work.exports import patterns_of

COLUMNS = {
    "mean": "missed_mass_mean",
    "worst": "missed_mass_worst",
    "worst_row": "missed_mass_worst_row",
    "p99": "missed_mass_p99",
    "start": "missed_mass_start",
    "middle": "missed_mass_middle",
    "end": "missed_mass_end",
    "output_error": "output_error",
    "output_cosine": "output_cosine",
    "requested_pairs": "requested_pairs",
    "computed_pairs": "computed_pairs",
    "tile_cells": "tile_cells",
}
"""The engine's names of stored figures and the database's."""

WHOLE = ("worst_row", "requested_pairs", "computed_pairs", "tile_cells")


@dataclass(frozen=True)
class SearchRequest:
    """What a person asked for: samples by name, the length they are cut to (None: whole), the candidates."""

    model: str
    samples: tuple[str, ...]
    tokens: int | None
    grid: Grid
    chat: bool = False


@dataclass(frozen=True)
class StoredSearch:
    """A stored search, ready for any target.

    `cost` is what a choice minimises: `fitted`, the time on the machine of the search, or computed tiles. `fronts` are
    those under it and the default metric.
    """

    id: str
    model: str
    plan: dict[str, Any]
    facts: dict[str, Any]
    settings: Settings
    table: Table
    fitted: CostModel
    cost: CostModel
    fronts: list[Front]

    @property
    def unit(self) -> str:
        """What costs are counted in: `ms` or `tiles`."""
        return self.cost.unit

    def counting(self, unit: str) -> StoredSearch:
        """The same search with costs in `ms` of its machine, or in computed `tiles`."""
        cost = CostModel.tiles() if unit == "tiles" else self.fitted
        return replace(self, cost=cost, fronts=fronts(self.table, cost, Target(max_missed=1.0)))

    def in_ms(self, allocation: Allocation) -> Prediction:
        """What the choice is predicted to take on the machine of the search, whatever it minimises."""
        return predict(allocation.picked, self.table, self.fitted)

    def allocate(self, target: Target) -> Allocation:
        """The choice at a target; arithmetic on stored numbers."""
        same = target.metric == "mean" and target.weight == "none"
        return allocate(self.table, self.cost, target, self.fronts if same else None)

    def config(self, allocation: Allocation, target: Target) -> HeadConfig:
        """The head config of a choice, with its evidence."""
        return to_config(allocation, self.table, self.cost, target, self.settings, self.facts)


def parse_grid(text: str) -> Grid:
    """Candidates as a person edited them: a grid file, or one candidate a line. ConfigError says what is wrong."""
    stripped = text.strip()
    if stripped.startswith("{") and '"format"' in stripped:
        value = files.parse_json(stripped.encode("utf-8", "replace"), "The candidates")
        if not isinstance(value, dict) or value.get("format") != GRID_FORMAT:
            raise ConfigError(f'The candidates: a grid has "format": "{GRID_FORMAT}".')
        return Grid.from_list(value.get("candidates"), "The candidates")
    entries = []
    for number, line in enumerate(stripped.splitlines(), start=1):
        if line.strip():
            entries.append(files.parse_json(line.strip().rstrip(",").encode("utf-8", "replace"), f"Line {number}"))
    return Grid.from_list(entries, "The candidates")


def grid_text(grid: Grid) -> str:
    """One candidate a line, as `parse_grid` reads it."""
    return "\n".join(json.dumps(entry) for entry in grid.to_list())


def home() -> Path:
    """Where run folders lie, and the token ids of every prompt that a stored search was measured on."""
    return data_dir() / "searches"


def folder_of(request: SearchRequest, fingerprint: str, estimator: Estimator) -> Path:
    """The run folder: the same search again finds what was measured before."""
    named = [request.model, fingerprint, request.grid.digest(), estimator.to_dict(), request.chat]
    return home() / hashlib.sha256(json.dumps(named).encode()).hexdigest()[:16]


def run_search(lab: Lab, context: Context, request: SearchRequest, target: Target) -> str:
    """A job: measure, store the rows, store the winner as a version. The search's id."""
    loaded = lab.models.load(request.model, context)
    prompts = calibration(lab, request)
    source = ModelSource(loaded)
    settings = Settings(source.layers(None), request.grid, SAMPLING)
    folder = folder_of(request, loaded.fingerprint, SAMPLING)

    def told(step: Step) -> None:
        context.step(step.done, step.total, f"{step.words}, about {_span(step.seconds_left)} left")

    facts = loaded.facts.to_dict()
    results = measure(source, prompts, settings, folder, facts=facts, progress=told, cancel=lambda: context.cancelled)
    for prompt in prompts:
        keep_prompt(home(), prompt)
    context.step(1, 1, "Choosing")
    asked = {"samples": list(request.samples), "tokens": request.tokens, "chat": request.chat}
    return _keep(lab, request.model, asked, results, settings, facts, target, folder, hardware(loaded.device))


def take_in(lab: Lab, folder: Path, target: Target) -> str:
    """A run folder that `headscope search` wrote, as a stored search; its id. No model is needed."""
    results, settings, facts = read_run(folder)
    for result in results:
        prompt = read_prompt(folder, str(result.prompt["key"]))
        if prompt is not None:
            keep_prompt(home(), prompt)
    cost_file = folder / "cost-model.json"
    cost = CostModel.load(cost_file) if cost_file.exists() else None
    asked: dict[str, Any] = {"samples": [], "tokens": None, "chat": False, "folder": folder.name}
    return _keep(lab, str(facts.get("name")), asked, results, settings, facts, target, folder, "", cost)


def _keep(
    lab: Lab,
    model: str,
    asked: dict[str, Any],
    results: Sequence[PromptResult],
    settings: Settings,
    facts: dict[str, Any],
    target: Target,
    folder: Path,
    place: str,
    cost: CostModel | None = None,
) -> str:
    """Chooses at the target and stores rows, winner and search; the search's id."""
    fitted = cost or search_cost.fit(results, settings.grid, {"hardware": place, "versions": versions()})
    result = choose(results, settings, target, folder, facts, fitted, place)
    lab.store.add_model(str(facts["fingerprint"]), model, facts)
    winner = lab.store.save_config(f"search {now():%Y-%m-%d %H:%M}", result.config, note="chosen by a search")
    described = {
        "plan": asked,
        "facts": facts,
        "layers": list(settings.layers),
        "candidates": settings.grid.to_list(),
        "estimator": settings.estimator.to_dict(),
        "prompts": [dict(prompt) for prompt in result.table.prompts],
        "dense_ms": result.table.dense_ms.tolist(),
        "cost": fitted.to_dict(),
        "target": target.to_dict(),
    }
    return lab.store.add_search(model, winner.id, files.plain(described), result.summary, rows_of(result.table))


def calibration(lab: Lab, request: SearchRequest) -> list[SearchPrompt]:
    """The chosen samples as token ids. On the worker's thread, once the model is loaded."""
    loaded = lab.models.load(request.model)
    samples = [texts.sample(name) for name in request.samples]
    if not samples:
        raise SearchError("Choose at least one calibration prompt; three of different kinds are a good start.")
    for prompt in samples:
        lab.store.add_prompt(prompt.sha256, prompt.name, prompt.kind, prompt.text)
    return encode_prompts(loaded, samples, request.tokens, request.chat)


def rows_of(table: Table) -> pl.DataFrame:
    """Every figure of a table as rows, in the columns of the database."""
    prompts, layers, heads, candidates = table.stats["mean"].shape
    index = np.indices((prompts, layers, heads, candidates)).reshape(4, -1)
    columns: dict[str, Any] = {
        "prompt_sha256": [table.prompts[at]["key"] for at in index[0]],
        "layer": np.array(table.layers, dtype=np.int32)[index[1]],
        "head": index[2].astype(np.int32),
        "candidate": index[3].astype(np.int32),
    }
    for name in STATS:
        values = table.stats[name].reshape(-1)
        columns[COLUMNS[name]] = values.astype(np.int64) if name in WHOLE else values
    return pl.DataFrame(columns)


def load_search(lab: Lab, row: dict[str, Any]) -> StoredSearch:
    """A stored search from its rows. StoreError or SearchError if the rows are not all there."""
    stored = row["settings"]
    grid = Grid.from_list(stored["candidates"], "The stored search")
    settings = Settings(tuple(stored["layers"]), grid, Estimator.from_dict(stored["estimator"]))
    heads = int(stored["facts"]["query_heads"])
    shape = (len(stored["prompts"]), len(settings.layers), heads, len(grid))
    frame = lab.store.search_rows(row["id"])
    if frame.height != int(np.prod(shape)):
        raise SearchError("The measurements of this search are not all in the database: run the search again.")
    order = {prompt["key"]: at for at, prompt in enumerate(stored["prompts"])}
    frame = frame.with_columns(pl.col("prompt_sha256").replace_strict(order).alias("at"))
    frame = frame.sort("at", "layer", "head", "candidate")
    stats = {name: frame[COLUMNS[name]].to_numpy().astype(np.float64).reshape(shape) for name in STATS}
    table = Table(grid, settings.layers, tuple(stored["prompts"]), stats, np.array(stored["dense_ms"]))
    cost = CostModel.from_dict(stored["cost"], "The stored search")
    own_fronts = fronts(table, cost, Target(max_missed=1.0))
    return StoredSearch(
        row["id"], row["model"], stored["plan"], stored["facts"], settings, table, cost, cost, own_fronts
    )


def check_for_real(lab: Lab, context: Context, search: StoredSearch, config: HeadConfig) -> dict[str, Any]:
    """A job: the choice measured on its first calibration prompt, beside what was predicted for that prompt."""
    key = str(search.table.prompts[0]["key"])
    loaded = lab.models.load(search.model, context)
    if loaded.fingerprint != search.facts["fingerprint"]:
        raise HeadscopeError(f"The search was of another {search.model} than the one that is loaded: run it again.")
    prompt = read_prompt(home(), key)
    if prompt is None and search.plan["samples"]:  # searched before token ids were kept
        samples = tuple(search.plan["samples"])
        request = SearchRequest(search.model, samples, search.plan["tokens"], search.settings.grid, search.plan["chat"])
        prompt = next((each for each in calibration(lab, request) if each.key == key), None)
    if prompt is None:
        raise HeadscopeError(
            "The prompts of this search were not kept: give its `headscope search` command once more, which measures "
            "nothing again but keeps them in the run folder, and take the folder in."
        )
    layers, done = len(search.settings.layers), [0]

    def cancel() -> bool:
        done[0] += 1
        context.step(min(done[0], layers), layers, "Measuring the choice, layer by layer")
        return context.cancelled

    checked: Checked = check_prompt(ModelSource(loaded), prompt, config, search.settings.layers, cancel=cancel)
    return checked.to_dict()


def expected(search: StoredSearch, allocation: Allocation) -> Expected:
    """What the stored figures say of the first calibration prompt alone, in ms of the machine of the search."""
    return Expected.of(allocation.picked, search.table, search.fitted, 0)


def to_draft(lab: Lab, draft: Draft, config: HeadConfig, label: str) -> Draft:
    """The draft standing on the choice and its estimator; one undoable step. HeadscopeError if shapes differ."""
    patterns = patterns_of(config)
    if [len(row) for row in patterns] != [len(row) for row in draft.patterns]:
        raise HeadscopeError("The draft is for a model of another shape: open a run of the searched model first.")
    newest = lab.drafts.newest(draft)
    return lab.drafts.keep(newest.onto(label, None, patterns, config.estimator))


def sweep(search: StoredSearch, limits: tuple[float, ...]) -> list[dict[str, float]]:
    """Cost and loss at each largest missed mass: the curve that the slider runs along."""
    rows = []
    for limit in limits:
        predicted = search.allocate(Target(max_missed=limit)).prediction
        rows.append(
            {
                "limit": limit,
                f"attention_{search.unit}": predicted.attention_ms,
                f"dense_attention_{search.unit}": predicted.dense_attention_ms,
                "loss_mean": predicted.loss_mean,
                "computed_density": predicted.computed_pairs / max(1, predicted.causal_pairs),
            }
        )
    return rows


def figures(search: StoredSearch, allocation: Allocation, target: Target) -> dict[str, Any]:
    """The engine's summary of a choice."""
    return summary(allocation, search.table, search.cost, target)


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def heads_frame(search: StoredSearch, allocation: Allocation) -> pl.DataFrame:
    """The choice, one head a row."""
    ms, loss = search.table.head_ms(search.cost), search.table.loss()
    rows = []
    for at, layer in enumerate(search.table.layers):
        for head in range(search.table.heads):
            number = int(allocation.picked[at, head])
            rows.append(
                {
                    "layer": layer,
                    "head": head,
                    "pattern": words.label(search.settings.grid.candidates[number]),
                    "missed_mass_worst_prompt": float(loss[at, head, number]),
                    ("predicted_ms" if search.unit == "ms" else "computed_tiles"): float(ms[at, head, number]),
                }
            )
    return pl.DataFrame(rows)
