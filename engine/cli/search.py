"""`headscope search`: find a head config, check it, and say why each head got its pattern."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headscope.engine.attend.estimator import Estimator
from headscope.engine.base.errors import ConfigError
from headscope.engine.cli import output as cli_output
from headscope.engine.cli.ending import nothing_begun
from headscope.engine.cli.options import Device, Dtype, Json, Model, Template, parse_layers
from headscope.engine.cli.output import bar, note

if TYPE_CHECKING:
    from headscope.engine.model.load import LoadedModel
    from headscope.engine.search.results import SearchPrompt, Settings
    from headscope.engine.search.run import SearchResult
    from headscope.engine.search.table import Target


class Metric(StrEnum):
    """Which loss of a head counts; always that of its worst prompt."""

    mean = "mean"
    worst = "worst"
    p99 = "p99"
    start = "start"
    middle = "middle"
    end = "end"


class Weight(StrEnum):
    """What losses are weighted by in totals."""

    none = "none"
    output = "output"
    logits = "logits"


def _write_grid(path: Path | None) -> None:
    from headscope.engine.search.grid import default_grid

    if path is not None:
        note(f"wrote {default_grid().save(path)}: edit it and pass it with --grid")
        raise typer.Exit()


def search(
    model: Model,
    prompts: Annotated[Path, typer.Option("--prompts", help="A folder of .txt or .md files to calibrate on.")],
    out: Annotated[Path, typer.Option("--out", help="The head config to write.")],
    max_missed: Annotated[
        float | None, typer.Option("--max-missed", help="No head misses more than this share, such as 0.02.")
    ] = None,
    speedup: Annotated[
        float | None, typer.Option("--speedup", help="Dense over sparse prefill time to reach, such as 1.5.")
    ] = None,
    run: Annotated[
        Path | None, typer.Option("--run", help="Folder of the measurements; by default OUT.run. Resumable.")
    ] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", min=1, help="Cut every prompt to this length.")] = None,
    grid: Annotated[Path | None, typer.Option("--grid", help="Candidates to measure; see --write-grid.")] = None,
    write_grid: Annotated[
        Path | None,
        typer.Option(
            "--write-grid", is_eager=True, callback=_write_grid, help="Write the candidates to this file, to edit."
        ),
    ] = None,
    cost_model: Annotated[
        str | None,
        typer.Option(
            "--cost-model",
            help="Use this file as it is, or tiles to count computed tiles whatever the machine; by default a model is "
            "fitted to this machine.",
        ),
    ] = None,
    estimator: Annotated[
        str | None, typer.Option("--estimator", help="How the index samples, such as rows=64,where=tail,overlap=keep.")
    ] = None,
    layers: Annotated[str | None, typer.Option("--layers", help="Layers to search, such as 0,4-7.")] = None,
    layer_limit: Annotated[
        list[str] | None, typer.Option("--layer-limit", help="LAYER=SHARE: a lower limit for one layer; repeatable.")
    ] = None,
    metric: Annotated[Metric, typer.Option("--metric", help="Which loss counts.")] = Metric.mean,
    weight: Annotated[Weight, typer.Option("--weight", help="What losses are weighted by in totals.")] = Weight.none,
    held_out: Annotated[
        Path | None, typer.Option("--held-out", help="A folder of other prompts on which the winner is checked.")
    ] = None,
    explain: Annotated[int, typer.Option("--explain", min=0, help="Explain this many of the worst heads.")] = 8,
    impl: Annotated[str, typer.Option("--impl", help="auto, triton, gluon or torch.")] = "auto",
    json: Json = None,
    template: Template = None,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Search the pattern and budget of every head, and write them with their evidence.

    Every prompt is prefilled once, dense; every head runs every candidate. A run that was stopped goes on where it
    was, and another target needs no new measurements. Under torchrun the prompts are shared out.
    """
    from headscope.engine.prompts.sources import read_folder
    from headscope.engine.search.grid import Grid, default_grid

    folder = Path(f"{out}.run") if run is None else run
    cli_output.check_outputs(folder=folder, out=out, json=json)
    candidates = default_grid() if grid is None else Grid.load(grid)
    limits = _limits(layer_limit or ())
    sampling = parse_estimator(estimator)
    wanted = None if layers is None else parse_layers(layers)
    with nothing_begun():
        from headscope.engine.model.load import load_model
        from headscope.engine.search import run as engine
        from headscope.engine.search.cost import CostModel
        from headscope.engine.search.ranks import Ranks
        from headscope.engine.search.results import Settings
        from headscope.engine.search.source import ModelSource, load_prompts
    target = _target(max_missed, speedup, metric, Weight.none, limits)
    cost = None if cost_model is None else CostModel.tiles() if cost_model == "tiles" else CostModel.load(cost_model)
    for each in (prompts, held_out):
        if each is not None:
            read_folder(each)  # before the model is loaded, which takes longer
    ranks = Ranks.join()
    with bar(f"loading {model}") as progress:
        loaded = load_model(model, dtype=dtype, device=device, progress=progress)
    calibration = load_prompts(loaded, prompts, tokens, template)
    others = [] if held_out is None else load_prompts(loaded, held_out, tokens, template)
    began = time.perf_counter()
    with bar(f"searching on {len(calibration)} prompts") as move:
        result = engine.search_config(
            loaded,
            calibration,
            target,
            folder,
            grid=candidates,
            estimator=sampling,
            layers=wanted,
            cost=cost,
            impl=impl,
            progress=lambda step: move(step.done, step.total, f"{step.words}, about {step.seconds_left:.0f} s left"),
            ranks=ranks,
        )
    if not ranks.first:
        return
    settings = Settings(result.table.layers, candidates, sampling, impl)
    if weight is not Weight.none:
        result = _weighted(result, loaded, calibration, settings, target, weight)
    result.config.save(out)
    report = dict(result.summary) | {"seconds": time.perf_counter() - began, "digest": result.config.digest()}
    source = ModelSource(loaded)
    report["checked"] = _checks(source, result, calibration, others, settings)
    report["explained"] = _explained(source, result, calibration, explain)
    if json is not None:
        cli_output.write_json(json, report)
    _show(report)
    note(f"wrote {out}; the measurements are in {folder}")


def _target(
    max_missed: float | None,
    speedup: float | None,
    metric: Metric,
    weight: Weight,
    limits: tuple[tuple[int, float], ...],
) -> Target:
    from headscope.engine.search.table import Target

    if (max_missed is None) == (speedup is None):
        raise ConfigError("give either --max-missed or --speedup, and exactly one of them")
    return Target(max_missed, speedup, metric.value, weight.value, limits)


def _limits(texts: Sequence[str]) -> tuple[tuple[int, float], ...]:
    limits: dict[int, float] = {}
    for text in texts:
        match = re.fullmatch(r"\s*([0-9]{1,5})\s*=\s*([0-9.eE+-]{1,30})\s*", text)
        try:
            if match is None:
                raise ValueError
            limits[int(match[1])] = float(match[2])
        except ValueError:
            raise ConfigError(
                f"--layer-limit {text[:40]!r} is not understood: write LAYER=SHARE such as 0=0.005"
            ) from None
    return tuple(sorted(limits.items()))


def parse_estimator(text: str | None) -> Estimator:
    """`rows=64,where=half` on top of the search's default; ConfigError for anything else."""
    from headscope.engine.search.grid import SAMPLING

    values: dict[str, Any] = SAMPLING.to_dict()
    for part in (text or "").split(","):
        if not part.strip():
            continue
        name, _, value = (item.strip() for item in part.partition("="))
        values[name] = int(value) if value.isascii() and value.isdecimal() and len(value) < 6 else value
    try:
        return Estimator.from_dict(values)
    except ValueError as problem:
        raise ConfigError(f"--estimator: {problem}") from problem


def _weighted(
    result: SearchResult,
    loaded: LoadedModel,
    prompts: Sequence[SearchPrompt],
    settings: Settings,
    target: Target,
    weight: Weight,
) -> SearchResult:
    """The allocation again, with losses weighted; for the logits every layer's effect is measured on one prompt."""
    from dataclasses import replace

    import torch

    from headscope.engine.runs import evaluate as quality
    from headscope.engine.search.check import calibrated_losses
    from headscope.engine.search.run import with_target

    layer_weights = None
    if weight is Weight.logits:
        losses = calibrated_losses(result.table, result.allocation.picked).mean(1)
        with bar("measuring each layer's effect on the logits"):
            layer_weights = quality.layer_weights(
                loaded, torch.tensor([prompts[0].ids]), result.config, result.table.layers, losses.tolist()
            )
    weighted = replace(target, weight=weight.value, layer_weights=layer_weights)
    return with_target(result, weighted, settings, loaded.facts.to_dict())


def _checks(
    source: Any,
    result: SearchResult,
    calibration: Sequence[SearchPrompt],
    others: Sequence[SearchPrompt],
    settings: Settings,
) -> dict[str, Any]:
    """The winner timed and measured for real on a calibration prompt, and on held-out ones."""
    from headscope.engine.search.check import (
        Expected,
        calibrated_losses,
        check_prompt,
        drift,
        one_against_all,
        uniform_lead,
    )

    options: dict[str, Any] = {"impl": settings.impl}
    with bar("checking the winner"):
        first = min(calibration, key=lambda prompt: prompt.key)
        own = check_prompt(source, first, result.config, settings.layers, **options)
        held_out = [
            check_prompt(source, prompt, result.config, settings.layers, repeats=0, **options) for prompt in others
        ]
    at = next(at for at, each in enumerate(result.table.prompts) if each["key"] == first.key)
    expected = Expected.of(result.allocation.picked, result.table, result.cost, at)
    checks: dict[str, Any] = {"calibration": own.to_dict() | {"predicted": expected.to_dict()}}
    if result.cost.unit == "ms":
        checks["calibration"]["predicted_attention_ms"] = expected.beside(own.dense_attention_ms)
    if held_out:
        stored = calibrated_losses(result.table, result.allocation.picked)
        checks["held_out"] = drift(held_out, stored).to_dict()
        with bar("the best single setting on the held-out prompts"):
            checks["held_out"]["against_uniform"] = uniform_lead(
                source, others, held_out, result.table, result.allocation, result.config, **options
            )
    if len(calibration) > 1:
        checks["one_prompt_or_all"] = one_against_all(result.table, result.cost, result.target)
    return checks


def _explained(source: Any, result: SearchResult, calibration: Sequence[SearchPrompt], count: int) -> list[Any]:
    from headscope.engine.search.check import calibrated_losses
    from headscope.engine.search.explain import blame, explain, splits

    if not count:
        return []
    losses = calibrated_losses(result.table, result.allocation.picked)
    order = sorted(
        ((layer, head) for layer in range(losses.shape[0]) for head in range(losses.shape[1])),
        key=lambda place: (-losses[place], place),
    )[:count]
    places = [(result.table.layers[at], head) for at, head in order]
    with bar("explaining the worst heads"):
        parts = splits(source, min(calibration, key=lambda prompt: prompt.key), result.config, places)
    explanations = explain(result.table, result.cost, result.target, result.allocation, places)
    rows = []
    for each in explanations:
        split = parts[each.layer, each.head]
        rows.append(each.to_dict() | {"split": vars(split) | {"steps": list(split.steps)}, "blame": blame(split)})
    return rows


def _show(report: dict[str, Any]) -> None:
    console = cli_output.out()
    predicted, uniform = report["predicted"], report["uniform_at_equal_pairs"]
    families = ", ".join(f"{count} {kind}" for kind, count in report["families"].items())
    console.print(
        f"{report['heads']} heads: {families}; {len(report['stayed_dense'])} with no candidate in reach stay dense"
    )
    console.print(
        f"missed mass {100 * report['missed_mass_worst_prompt']:.2f}% on the worst prompt (best single setting at "
        f"equal computed pairs {100 * uniform['missed_mass_worst_prompt']:.2f}%), "
        f"{100 * report['computed_density']:.1f}% of the causal pairs computed"
    )
    checked = report["checked"]["calibration"]
    measured = f"measured {checked['attention_ms']:.0f} ms, dense {checked['dense_attention_ms']:.0f} ms"
    if report["cost_unit"] == "ms":
        console.print(
            f"attention of {checked['prompt']} predicted {checked['predicted_attention_ms']:.0f} ms beside that dense "
            f"time, {measured}; predicted speed-up of the whole prefill {predicted['speedup']:.2f}; cost model off by "
            f"{100 * report['cost_fit']['mixed_error']:.0f}% (median of mixed layers)"
        )
    else:
        share = predicted["attention_ms"] / max(1e-9, predicted["dense_attention_ms"])
        console.print(f"attention counts {100 * share:.0f}% of the tiles of dense; on this machine {measured}")
    console.print(
        f"missed mass of {checked['prompt']} predicted {100 * checked['predicted']['missed_mass_mean']:.2f}%, "
        f"measured {100 * checked['missed_mass_mean']:.2f}%"
    )
    if report["dense_layers"] and report["cost_unit"] == "ms":
        console.print(
            f"{len(report['dense_layers'])} layers stay dense: no mix in reach is predicted faster at these lengths "
            "(headscope bench --host finds the length where sparse wins; --cost-model tiles asks for fewest tiles)"
        )
    if "held_out" in report["checked"]:
        held_out = report["checked"]["held_out"]
        layer, head = held_out["worst_head"]
        console.print(
            f"held-out prompts: mean drift {held_out['mean_drift']:+.4f}, worst {held_out['worst_drift']:+.4f} at "
            f"layer {layer} head {head}; less missed than the best single setting by "
            + ", ".join(f"{row['lead']:+.4f} ({row['prompt']})" for row in held_out["against_uniform"])
        )
    for row in report["checked"].get("one_prompt_or_all", []):
        over = "" if row["heads_over_target"] is None else f", {row['heads_over_target']} heads above the target"
        console.print(
            f"calibrated on {row['calibrated_on']}: worst prompt misses "
            f"{100 * row['missed_mass_worst_prompt']:.2f}%{over}"
        )
    for row in report["explained"]:
        console.print(f"layer {row['layer']} head {row['head']}: {row['sentence']} {row['blame']}".rstrip())
