"""`headscope inspect`: what every head loses on one prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headscope.engine.base.files import printable
from headscope.engine.cli import output as cli_output
from headscope.engine.cli.ending import nothing_begun
from headscope.engine.cli.options import (
    Device,
    Dtype,
    Force,
    Json,
    Model,
    PromptSource,
    Template,
    load,
    parse_layers,
    run_facts,
    told_lengths,
)
from headscope.engine.cli.output import bar, note


def inspect(
    model: Model,
    prompt: PromptSource,
    config: Annotated[
        Path | None, typer.Option("--config", help="The head config to measure; otherwise a sensible start.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option("--layers", help="Layers to measure, such as 0,4-7; otherwise all.")
    ] = None,
    json: Json = None,
    save: Annotated[
        Path | None, typer.Option("--save", help="Keep the config, with these measurements as its evidence.")
    ] = None,
    worst: Annotated[int, typer.Option("--worst", min=1, help="How many heads the table shows.")] = 15,
    template: Template = None,
    device: Device = None,
    dtype: Dtype = None,
    force: Force = False,
) -> None:
    """Prefill a prompt once and measure what every head would miss under a head config.

    Missed mass is the share of a row's attention that the pattern leaves out (mean over the prompt, worst row, 99th
    percentile, thirds); below 0.001 % it is float32 rounding. Losses are isolated: each head alone, on the tensors of
    a dense prefill.
    """
    from headscope.engine.config.file import HeadConfig

    cli_output.check_outputs(json=json, save=save)
    head_config = None if config is None else HeadConfig.load(config)
    wanted = None if layers is None else parse_layers(layers)
    loaded, text, encoded = load(model, prompt, template, device, dtype)
    with nothing_begun():
        from headscope.engine.config.evidence import prompt_record
        from headscope.engine.runs.inspection import check_fits, inspect_prompt, with_evidence
    if head_config is not None:
        check_fits(head_config, loaded, force)
    with (
        told_lengths(head_config, [encoded.tokens]) as warned,
        bar(f"measuring {encoded.tokens} tokens, layer by layer") as progress,
    ):
        result = inspect_prompt(loaded, encoded.ids, head_config, wanted, force_weights=force, progress=progress)
    described = prompt_record(text.name, text.kind, text.sha256, encoded.tokens, encoded.chat_template)
    impl = ", ".join(sorted({row["impl"] for row in result.layers}))
    run = {
        **run_facts(loaded, described),
        "config": result.config.digest(),
        "config_source": "starting point" if config is None else printable(config),
        "warnings": warned,
        "impl": impl,
        "seconds": result.seconds,
        "peak_mib": result.peak_mib,
        "peak_above_start_mib": result.peak_above_mib,
    }
    heads = result.worst(worst)
    title = f"{len(heads)} worst of {len(result.heads)} heads, {loaded.name}, {result.tokens} tokens"
    console = cli_output.out()
    console.print(cli_output.heads_table(heads, title, console.width))
    mean = sum(head.missed_mass_mean for head in result.heads) / max(1, len(result.heads))
    console.print(
        f"mean missed mass {100 * mean:.2f}% (isolated) over {len(result.heads)} heads; {result.seconds:.1f} s, "
        f"peak memory {result.peak_mib:.0f} MiB ({result.peak_above_mib:.0f} above the start), kernels: {impl}"
    )
    if json is not None:
        measured = [head.to_dict() for head in result.heads]
        cli_output.write_json(json, {"run": run, "heads": measured, "layers": list(result.layers)})
    if save is not None:
        with_evidence(result, loaded, described).save(save)
    for path in (json, save):
        if path is not None:
            note(f"wrote {path}")
