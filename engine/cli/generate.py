"""`headscope generate`: an answer with sparse prefill, beside the dense one where that is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

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
    read_config,
    run_facts,
    told_lengths,
)
from headscope.engine.cli.output import bar, note

if TYPE_CHECKING:
    from headscope.engine.config.file import HeadConfig
    from headscope.engine.config.host import HostProfile
    from headscope.engine.loss.measure import LayerMeasurement
    from headscope.engine.runs.answer import Answer


def generate(
    model: Model,
    prompt: PromptSource,
    config: Annotated[
        Path | None, typer.Option("--config", help="A head config or a config set; otherwise a sensible start.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Tokens of the answer at most.")] = 64,
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
    from headscope.engine.config.sets import ConfigSet

    cli_output.check_outputs(json=json)
    given_config = None if config is None else read_config(config)
    host = HostProfile.load()
    loaded, text, encoded = load(model, prompt, template, device, dtype)
    with nothing_begun():
        from headscope.engine.config.evidence import prompt_record
        from headscope.engine.runs.answer import answer, next_token_kl
        from headscope.engine.runs.inspection import check_fits, in_situ, starting_config
    served = given_config or starting_config(loaded.facts)
    ids, length = encoded.ids, encoded.tokens
    single = served.pick(length) if isinstance(served, ConfigSet) else served
    why_dense = _why_dense(single, host, length)
    if given_config is not None and single is not None:
        check_fits(single, loaded, force)  # before a dense answer is waited for
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens}
    dense = None
    if compare:
        with bar("dense answer") as progress:
            dense = answer(loaded, ids, None, on_token=lambda n: progress(n, max_new_tokens), **options)
    own = None if given_config is None or why_dense else single
    with told_lengths(own, [length]) as warned, bar("sparse answer") as progress:
        sparse = answer(
            loaded,
            ids,
            served,
            host=host,
            force_weights=force,
            on_token=lambda n: progress(n, max_new_tokens),
            **options,
        )
    described = prompt_record(text.name, text.kind, text.sha256, length, encoded.chat_template)
    report: dict[str, Any] = {
        "run": run_facts(loaded, described) | {"warnings": warned},
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


def _why_dense(config: HeadConfig | None, host: HostProfile, length: int) -> str | None:
    """Why `apply` leaves a prompt of this length dense, or None."""
    if config is None:
        return f"no config of the set covers {length} tokens"
    below = host.dense_below_tokens(1)
    return f"this machine's host profile keeps prompts under {below} tokens dense" if length < below else None


def _show(name: str, answer: Answer) -> None:
    console = cli_output.out()
    then = "" if answer.decode_ms_per_token is None else f", then {answer.decode_ms_per_token:.1f} ms a token"
    console.print(Text.assemble((name, "bold"), f": TTFT {answer.ttft_ms:.0f} ms{then}"))
    console.print(answer.text + "\n")
    if answer.left_alone:
        note(f"layers that keep the model's own attention: {sorted(answer.left_alone)}")


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
