"""`headscope evaluate`: what a head config costs in answers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table as Shown

from headscope.engine.base.errors import OptionError, PromptError
from headscope.engine.cli import output as cli_output
from headscope.engine.cli.ending import nothing_begun
from headscope.engine.cli.options import MOST, Device, Dtype, Force, Json, Model, parse_numbers, told_lengths
from headscope.engine.cli.output import bar

if TYPE_CHECKING:
    from headscope.engine.config.file import HeadConfig
    from headscope.engine.model.load import LoadedModel
    from headscope.engine.search.results import SearchPrompt


def evaluate(
    model: Model,
    config: Annotated[Path, typer.Option("--config", help="The head config to judge.")],
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="A folder of texts for the logits; otherwise two sample prompts.")
    ] = None,
    lengths: Annotated[str, typer.Option("--lengths", help="Retrieval lengths in tokens.")] = "512,1024,2000",
    depths: Annotated[str, typer.Option("--depths", help="Where the answer stands, 0 to 1.")] = "0.1,0.5,0.9",
    kinds: Annotated[
        str, typer.Option("--kinds", help="Retrieval tasks; empty for none.")
    ] = "pass-key,number,needle,key-value",
    seeds: Annotated[int, typer.Option("--seeds", min=1, max=1000, help="Prompts per task, length and depth.")] = 2,
    continue_: Annotated[
        int, typer.Option("--continue", min=0, max=MOST, help="Greedy tokens to compare after each prompt.")
    ] = 32,
    by_layer: Annotated[
        bool, typer.Option("--by-layer", help="Also each layer alone, and the first k layers (two passes a layer).")
    ] = False,
    tokens: Annotated[int | None, typer.Option("--tokens", min=2, help="Cut the texts to this length.")] = None,
    json: Json = None,
    device: Device = None,
    dtype: Dtype = None,
    force: Force = False,
) -> None:
    """Compare sparse with dense: perplexity, logits, greedy continuation, and retrieval by length and depth.

    Tasks on which dense itself scores under 50 % are marked uninformative.
    """
    from headscope.engine.config.file import HeadConfig
    from headscope.engine.prompts.sources import list_prompts, read_folder

    cli_output.check_outputs(json=json)
    head_config = HeadConfig.load(config)
    ladder: dict[str, Any] = {
        "kinds": [kind.strip() for kind in kinds.split(",") if kind.strip()],
        "lengths": parse_numbers("--lengths", lengths, int),
        "depths": parse_numbers("--depths", depths, float),
        "seeds": range(seeds),
    }
    _check_ladder(ladder)  # before minutes are spent on the logits
    if prompts is not None:
        read_folder(prompts)  # before the model is loaded, which takes longer
    with nothing_begun():
        from headscope.engine.model.load import load_model
        from headscope.engine.runs.inspection import check_fits
        from headscope.engine.search.source import encode_prompts, load_prompts
    with bar(f"loading {model}") as progress:
        loaded = load_model(model, dtype=dtype, device=device, progress=progress)
    check_fits(head_config, loaded, force)
    if ladder["kinds"] and max(ladder["lengths"]) > loaded.facts.max_position:
        raise OptionError(
            f"--lengths asks for {max(ladder['lengths'])} tokens and {loaded.name} has {loaded.facts.max_position} "
            "positions: choose shorter ones"
        )
    if force:
        head_config = head_config.forced_onto(loaded)
    if prompts is not None:
        texts = load_prompts(loaded, prompts, tokens, False)
    else:
        samples = [each.read() for each in list_prompts() if each.name in ("prose", "code")]
        texts = encode_prompts(loaded, samples, tokens, False)
    for text in texts:
        if len(text.ids) < 2:
            raise PromptError(f"{text.name} has one token, and the first is never predicted: give a longer text")
    asked = ladder["lengths"] if ladder["kinds"] else []
    with told_lengths(head_config, [*(len(text.ids) for text in texts), *asked]) as warned:
        report = _measured(loaded, head_config, texts, ladder, continue_, by_layer)
    _show_quality(report)
    if json is not None:
        cli_output.write_json(json, {"config": head_config.digest(), "model": loaded.name, "warnings": warned} | report)


def _measured(
    loaded: LoadedModel,
    head_config: HeadConfig,
    texts: Sequence[SearchPrompt],
    ladder: dict[str, Any],
    continue_: int,
    by_layer: bool,
) -> dict[str, Any]:
    """The report: logits and continuations of the texts, hidden answers, and layer by layer where it is asked for."""
    import torch

    from headscope.engine.runs import evaluate as quality

    parts: list[list[Any]] = [[], [], []]
    with bar("comparing logits") as progress:
        for at, text in enumerate(texts):
            ids = torch.tensor([text.ids])
            parts[0].append(quality.quality(loaded, ids, head_config, text.name))
            if continue_:
                parts[1].append(quality.continuation(loaded, ids, head_config, text.name, continue_))
            progress(at + 1, len(texts))
    cells: list[quality.RetrievalCell] = []
    tasks: list[quality.RetrievalTask] = []
    if ladder["kinds"]:
        with bar("asking for hidden answers") as progress:
            cells, tasks = quality.retrieval(loaded, head_config, **ladder, progress=progress)
    if by_layer:
        with bar("layer by layer") as progress:
            parts[2] = quality.by_layer(loaded, torch.tensor([texts[0].ids]), head_config, progress=progress)
    return quality.report(parts[0], parts[1], cells, tasks, parts[2])


def _check_ladder(ladder: dict[str, Any]) -> None:
    from headscope.engine.prompts.retrieval import check_request

    if ladder["kinds"] and not (ladder["lengths"] and ladder["depths"]):
        raise OptionError('--lengths and --depths need a number each; --kinds "" leaves the hidden answers out')
    for kind, tokens, depth in product(ladder["kinds"], ladder["lengths"], ladder["depths"]):
        check_request(kind, tokens, depth)


def _show_quality(report: dict[str, Any]) -> None:
    console = cli_output.out()
    table = _table("logits", "prompt", "tokens", "perplexity dense", "sparse", "change", "KL mean", "KL last", "top-1")
    for row in report["quality"]:
        table.add_row(
            row["prompt"],
            str(row["tokens"]),
            f"{row['perplexity_dense']:.3f}",
            f"{row['perplexity_sparse']:.3f}",
            f"{100 * row['perplexity_change']:+.2f}%",
            f"{row['kl_mean']:.4f}",
            f"{row['kl_last']:.4f}",
            f"{100 * row['top1_agreement']:.1f}%",
        )
    console.print(table)
    for row in report["continuation"]:
        console.print(f"{row['prompt']}: the first {row['agree']} of {row['tokens']} greedy tokens agree")
    if report["tasks"]:
        table = _table("retrieval", "task", "tokens", "dense", "sparse", "")
        for row in report["tasks"]:
            mark = "" if row["informative"] else "uninformative: dense under 50 %"
            table.add_row(
                row["kind"], str(row["tokens"]), f"{100 * row['dense']:.0f}%", f"{100 * row['sparse']:.0f}%", mark
            )
        console.print(table)
    if report["layers"]:
        table = _table("layer by layer", "layer", "sparse in", "KL mean", "KL last", "top-1")
        for row in report["layers"]:
            table.add_row(
                str(row["layer"]),
                row["how"],
                f"{row['kl_mean']:.4f}",
                f"{row['kl_last']:.4f}",
                f"{100 * row['top1_agreement']:.1f}%",
            )
        console.print(table)


def _table(title: str, *columns: str) -> Shown:
    table = Shown(title=title, title_justify="left", pad_edge=False, box=SIMPLE_HEAD)
    for name in columns:
        table.add_column(name, justify="right" if name not in ("prompt", "task", "sparse in", "") else "left")
    return table
