"""Pattern search: measure every head under every candidate, choose budgets for the whole model, keep the evidence.

The measurements live in a run folder: one result file per prompt, the cost model, and the manifest that says what
was searched. Asking again with another target re-uses them; a run that was killed goes on where it was.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from headscope.engine.attend.estimator import Estimator
from headscope.engine.base import files, records
from headscope.engine.base.errors import ConfigError, PromptError
from headscope.engine.base.machine import hardware, versions
from headscope.engine.base.progress import Cancel
from headscope.engine.config.evidence import Evidence, prompt_set, provenance, read_provenance
from headscope.engine.config.file import HeadConfig, HeadEntry
from headscope.engine.patterns.families import Dense
from headscope.engine.search import cost as search_cost
from headscope.engine.search import stored
from headscope.engine.search.cost import CostModel
from headscope.engine.search.grid import SAMPLING, Grid, default_grid
from headscope.engine.search.measure import SearchProgress, Source, measure_prompts
from headscope.engine.search.ranks import Ranks
from headscope.engine.search.results import (
    PromptResult,
    SearchError,
    SearchPrompt,
    Settings,
    check_alike,
    read_result,
    read_results,
)
from headscope.engine.search.source import ModelSource
from headscope.engine.search.table import Allocation, Table, Target, allocate, best_uniform, mean_losses
from headscope.kernels.cells.plan import TILES_VERSION

if TYPE_CHECKING:
    from headscope.engine.model.load import LoadedModel

FORMAT = "headscope.search/1"


@dataclass(frozen=True)
class SearchResult:
    """A finished search. `summary` is JSON-ready and holds the figures that a report shows."""

    config: HeadConfig
    allocation: Allocation
    table: Table
    cost: CostModel
    target: Target
    folder: Path
    summary: dict[str, Any]


def search_config(
    loaded: LoadedModel,
    prompts: Sequence[SearchPrompt],
    target: Target,
    folder: str | os.PathLike[str],
    *,
    grid: Grid | None = None,
    estimator: Estimator | None = None,
    layers: Iterable[int] | None = None,
    cost: CostModel | None = None,
    impl: str = "auto",
    progress: SearchProgress | None = None,
    cancel: Cancel | None = None,
    parent: str | None = None,
    ranks: Ranks | None = None,
) -> SearchResult:
    """Searches the heads of `layers` (all full-attention ones by default) and returns config and evidence.

    `prompts` come from `search_source.load_prompts`. `folder` is the run folder; a finished one is not measured again.
    With `cost` that model is used as it is, so that the same results give the same heads; otherwise one is fitted to
    this machine's timings and saved beside them. With `ranks` (`Ranks.join()` under `torchrun`) the prompts are shared
    out, and every process returns the same result. Raises SearchError, ConfigError, OptionError, PromptError or
    Cancelled, each one sentence.
    """
    source = ModelSource(loaded)
    settings = Settings(source.layers(layers), grid or default_grid(), estimator or SAMPLING, source.check_impl(impl))
    target.check_layers(settings.layers)
    home, facts = Path(folder), loaded.facts.to_dict()
    results = measure(source, prompts, settings, home, facts=facts, progress=progress, cancel=cancel, ranks=ranks)
    return choose(results, settings, target, home, facts, cost, hardware(loaded.device), parent, ranks)


def measure(
    source: Source,
    prompts: Sequence[SearchPrompt],
    settings: Settings,
    folder: Path,
    *,
    facts: dict[str, Any],
    progress: SearchProgress | None = None,
    cancel: Cancel | None = None,
    ranks: Ranks | None = None,
) -> tuple[PromptResult, ...]:
    """Measures what is missing, shared out over `ranks` if there are others; returns all results, sorted by hash."""
    _check_prompts(prompts)
    ranks = ranks or Ranks()
    with ranks.together():
        if ranks.first:
            _check_manifest(folder, settings, facts)
    mine = sorted(prompts, key=lambda prompt: prompt.key)[ranks.rank :: ranks.count]
    with ranks.together(), _Alone(folder, ranks.rank):
        measure_prompts(source, mine, settings, folder, progress=progress, cancel=cancel)
    return read_results(folder, prompts, settings)


def choose(
    results: Sequence[PromptResult],
    settings: Settings,
    target: Target,
    folder: Path,
    facts: dict[str, Any],
    cost: CostModel | None = None,
    machine: str = "",
    parent: str | None = None,
    ranks: Ranks | None = None,
) -> SearchResult:
    """The allocation for stored results: no model is needed."""
    table = Table.of(results, settings.grid)
    if cost is None:
        cost = search_cost.fit(results, settings.grid, {"hardware": machine, "versions": versions()})
        if ranks is None or ranks.first:
            cost.save(folder / "cost-model.json")
    allocation = allocate(table, cost, target)
    config = to_config(allocation, table, cost, target, settings, facts, machine, parent)
    return SearchResult(config, allocation, table, cost, target, folder, summary(allocation, table, cost, target))


def _check_prompts(prompts: Sequence[SearchPrompt]) -> None:
    if not prompts:
        raise PromptError("A search needs at least one calibration prompt; three of different kinds are a good start.")
    names: dict[str, str] = {}
    for prompt in prompts:
        if prompt.key in names:
            raise PromptError(f"The prompts {names[prompt.key]} and {prompt.name} are the same tokens; drop one.")
        names[prompt.key] = prompt.name


def manifest(settings: Settings, facts: dict[str, Any]) -> dict[str, Any]:
    """What a run folder is about: results from another model or other settings must not mix with it."""
    return files.plain(
        {
            "format": FORMAT,
            "fingerprint": facts.get("fingerprint"),
            "facts": facts,
            "tiles": TILES_VERSION,
            "layers": list(settings.layers),
            "estimator": settings.estimator.to_dict(),
            "candidates": settings.grid.to_list(),
        }
    )


def read_run(folder: str | os.PathLike[str]) -> tuple[tuple[PromptResult, ...], Settings, dict[str, Any]]:
    """All results of a run folder, its settings and the model's facts. SearchError if it is none or has no results."""
    home = Path(folder)
    manifest = files.read_json(home / "search.json", SearchError)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise SearchError(f"{home} is no run folder of a search: its search.json says otherwise.")
    damaged = f"{home / 'search.json'} is damaged"
    records.check(stored.Manifest, manifest, f"{damaged}:", SearchError)
    records.check(stored.Facts, manifest["facts"], f"{damaged}: facts", SearchError)
    try:
        grid = Grid.from_list(manifest["candidates"], str(home))
        settings = Settings(tuple(manifest["layers"]), grid, Estimator.from_dict(manifest["estimator"]))
    except (ConfigError, ValueError) as problem:
        raise SearchError(f"{damaged}: {problem}") from problem
    paths = sorted((home / "results").glob("*.json"))
    if not paths:
        raise SearchError(f"{home} holds no finished prompt yet: run the search to its end first.")
    results = tuple(read_result(path, settings) for path in paths)
    check_alike(results, home)
    return results, settings, manifest["facts"]


def _check_manifest(folder: Path, settings: Settings, facts: dict[str, Any]) -> None:
    path = folder / "search.json"
    wanted = manifest(settings, facts)
    if path.exists():
        stored_manifest = files.read_json(path, SearchError)
        compared = [name for name in wanted if name != "facts"]  # the fingerprint stands for them
        different = [
            name
            for name in compared
            if not isinstance(stored_manifest, dict) or stored_manifest.get(name) != wanted[name]
        ]
        if different:
            raise SearchError(
                f"The run folder {folder} belongs to another search (its {', '.join(different)} differ): choose "
                "another folder, or delete it."
            )
        return
    if folder.is_file():
        raise SearchError(f"{folder} is a file; a run needs a folder.")
    files.write_atomic(path, files.indented(wanted, 0) + "\n", SearchError)


class _Alone:
    """A run folder serves one search at a time (each process of one search has its own lock)."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._lock = FileLock(str(folder / f".lock-{rank}"))
        self._folder = folder

    def __enter__(self) -> None:
        try:
            self._lock.acquire(timeout=0)
        except Timeout as problem:
            raise SearchError(
                f"Another search is at work in {self._folder}: wait for it, or choose another folder."
            ) from problem
        except OSError as problem:
            raise SearchError(
                f"{self._folder} cannot be written ({problem.strerror}): choose another folder."
            ) from problem

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def to_config(
    allocation: Allocation,
    table: Table,
    cost: CostModel,
    target: Target,
    settings: Settings,
    facts: dict[str, Any],
    machine: str = "",
    parent: str | None = None,
) -> HeadConfig:
    """The head config of an allocation; layers that were not searched stay dense."""
    place = {layer: at for at, layer in enumerate(table.layers)}
    ms = table.head_ms(cost)
    measured_on = prompt_set(table.prompts)
    rows = []
    for layer in range(int(facts["layers"])):
        if layer not in place:
            rows.append((HeadEntry(Dense()),) * int(facts["query_heads"]))
            continue
        at = place[layer]
        rows.append(
            tuple(
                HeadEntry(
                    allocation.pattern(table.grid, at, head), evidence(allocation, table, ms, at, head, measured_on)
                )
                for head in range(table.heads)
            )
        )
    record = provenance(
        "search",
        hardware=machine or str(cost.machine.get("hardware", "")),
        prompts=table.prompts,
        metric=f"missed mass {target.metric}, worst prompt, isolated",
        parent=parent,
        seed=0,
        candidates=settings.grid.to_list(),
        target=target.to_dict(),
        cost_model={"machine": cost.machine, "sha256": _digest(cost.to_dict())},
    )
    return HeadConfig(facts, files.plain(record), TILES_VERSION, settings.estimator, tuple(rows))


def evidence(allocation: Allocation, table: Table, ms: Any, at: int, head: int, measured_on: str) -> dict[str, Any]:
    """What justified a head's pattern: stored losses as measured, of the prompt that loses most, and the time.

    `measured_on` is the hash of all the prompts together.
    """
    number = int(allocation.picked[at, head])
    worst = int(table.stats["mean"][:, at, head, number].argmax())
    prompt = table.prompts[worst]
    tokens = int(prompt["tokens"])

    def stat(name: str) -> float:
        return float(table.stats[name][worst, at, head, number])

    return Evidence(
        missed_mass_mean=stat("mean"),
        missed_mass_worst=float(table.stats["worst"][:, at, head, number].max()),
        missed_mass_p99=stat("p99"),
        missed_mass_thirds=(stat("start"), stat("middle"), stat("end")),
        output_error=stat("output_error"),
        computed_density=stat("computed_pairs") / (tokens * (tokens + 1) / 2),
        computed_pairs=int(stat("computed_pairs")),
        time_share_ms=round(float(ms[at, head, number]), 6),
        tokens=tokens,
        loss="isolated",
        prompt=str(prompt["sha256"]),
        prompt_set=measured_on,
    ).to_dict()


def summary(allocation: Allocation, table: Table, cost: CostModel, target: Target) -> dict[str, Any]:
    """The figures of a search, JSON-ready."""
    prediction = allocation.prediction
    kinds: dict[str, int] = {}
    for number in allocation.picked.ravel():
        kind = table.grid.candidates[int(number)].kind
        kinds[kind] = kinds.get(kind, 0) + 1
    losses = mean_losses(allocation.picked, table)
    uniform = best_uniform(table, prediction.computed_pairs)
    value = {
        "target": target.to_dict(),
        "prompts": [dict(prompt) for prompt in table.prompts],
        "candidates": len(table.grid),
        "heads": int(allocation.picked.size),
        "families": {kind: kinds[kind] for kind in sorted(kinds)},
        "stayed_dense": [list(place) for place in allocation.stayed_dense],
        "missed_mass_by_prompt": [float(loss) for loss in losses],
        "missed_mass_worst_prompt": float(losses.max()),
        "uniform_at_equal_pairs": {"missed_mass_worst_prompt": uniform.loss, "between": [uniform.below, uniform.above]},
        "loss_mean": prediction.loss_mean,
        "loss_worst_head": prediction.loss_worst,
        "computed_density": prediction.computed_pairs / max(1, prediction.causal_pairs),
        "predicted": {
            "attention_ms": prediction.attention_ms,
            "dense_attention_ms": prediction.dense_attention_ms,
            "other_ms": prediction.other_ms,
            "speedup": prediction.speedup,
        },
        "dense_layers": list(prediction.dense_layers),
        "cost_fit": asdict(cost.fit),
        "cost_unit": cost.unit,
    }
    if allocation.choice.relaxed_loss is not None:
        value["relaxed_total_loss"] = allocation.choice.relaxed_loss
        value["total_loss"] = allocation.choice.loss
        value["gap"] = allocation.choice.gap
    return files.plain(value)


def _digest(value: Any) -> str:
    return hashlib.sha256(files.one_line(files.plain(value)).encode()).hexdigest()


def with_target(result: SearchResult, target: Target, settings: Settings, facts: dict[str, Any]) -> SearchResult:
    """The same measurements under another target: what a slider does."""
    allocation, before = allocate(result.table, result.cost, target), read_provenance(result.config.provenance)
    config = to_config(
        allocation, result.table, result.cost, target, settings, facts, before["hardware"], before["parent"]
    )
    text = summary(allocation, result.table, result.cost, target)
    return replace(result, config=config, allocation=allocation, target=target, summary=text)
