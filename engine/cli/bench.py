"""`headscope bench`: the kernels against torch's own attention on this machine, and whole prefills."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from headscope.engine.base.errors import OptionError
from headscope.engine.bench.shapes import SHAPES
from headscope.engine.cli import output as cli_output
from headscope.engine.cli.ending import nothing_begun
from headscope.engine.cli.options import parse_layers, parse_lengths, read_given
from headscope.engine.cli.output import bar, steps

if TYPE_CHECKING:
    import torch

    from headscope.engine.bench.layers import Report
    from headscope.engine.bench.prefill import PrefillReport, Setting
    from headscope.engine.prompts.prompt import Prompt

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def bench(
    lengths: Annotated[
        str | None,
        typer.Option("--lengths", help="Tokens, comma-separated; K and M are 1,024 and its square. E.g. 8K,32K,1M."),
    ] = None,
    shape: Annotated[str, typer.Option("--shape", help=f"Heads of a layer: {', '.join(SHAPES)}.")] = "llama3-8b",
    batch: Annotated[str, typer.Option("--batch", help="Batch sizes, comma-separated.")] = "1",
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="bf16, fp16 or fp32 (default: bf16, fp32 on a CPU).")
    ] = None,
    impl: Annotated[str, typer.Option("--impl", help="auto, gluon, triton or torch.")] = "auto",
    cases: Annotated[
        str | None, typer.Option("--cases", help="Part of the names of the sparse settings to run.")
    ] = None,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, max=1000, help="Timed rounds; fewer where they take long.")
    ] = 5,
    flex: Annotated[
        bool, typer.Option("--flex", help="Time FlexAttention on the same tiles too (CUDA, up to 256K).")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all rows to this file.")] = None,
    host_profile: Annotated[
        bool, typer.Option("--host", help="Write the host profile: below which length this machine stays dense.")
    ] = False,
    model: Annotated[
        str | None, typer.Option("--model", help="Time Q/K/V captured from this model on --prompt, not random ones.")
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt", help="A text file, sample prompt, or - (standard input); --lengths takes its beginnings."
        ),
    ] = None,
    layers: Annotated[
        str | None, typer.Option("--layers", help="Layers to capture, such as 0,4-7; otherwise four.")
    ] = None,
    prefill: Annotated[
        bool, typer.Option("--prefill", help="Whole prefills with random weights, split into their parts.")
    ] = False,
    config: Annotated[
        list[Path] | None,
        typer.Option("--config", help="With --prefill: a head config (ours or MInference's) to time; may be repeated."),
    ] = None,
    timed_layers: Annotated[
        int | None,
        typer.Option("--timed-layers", min=1, max=1000, help="With --prefill: layers that run; totals are scaled."),
    ] = None,
) -> None:
    """Time dense and sparse attention of one layer against SDPA (forced to cuDNN on CUDA), in one interleaved run.

    Every kernel passes a check against float64 before it is timed. On random inputs vertical-slash settings are timed
    on a fixed clustered index; "index in" adds the time of building an index of the same budget. With --model and
    --prompt the online index itself is timed on real Q/K/V, with what it misses. With --prefill whole prefills are
    timed, vertical-slash 1000/6096 in every head and each --config, dense below what the host profile says.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise OptionError(f"--dtype must be one of {', '.join(_DTYPES)}, got {dtype[:40]!r}")
    _check_together(model, prompt, layers, prefill, host_profile, config, timed_layers)
    if shape not in SHAPES:
        raise OptionError(f"--shape must be one of {', '.join(SHAPES)}, got {shape[:40]!r}")
    asked = None if lengths is None else parse_lengths("--lengths", lengths)
    batches = parse_lengths("--batch", batch)
    wanted = None if layers is None else parse_layers(layers)
    cli_output.check_outputs(json=json_file, host=_host_path() if host_profile else None)
    given = None if prompt is None else read_given(prompt)
    with nothing_begun():
        import torch

        from headscope.engine.bench import layers as benching
        from headscope.engine.bench.cases import CASES
    cuda = torch.cuda.is_available()
    kind: torch.dtype = getattr(torch, _DTYPES[dtype or ("bf16" if cuda else "fp32")])
    if prefill:
        _prefill(shape, asked, kind, impl, repeats, config or [], timed_layers, json_file)
        return
    chosen = [case for case in CASES if cases is None or cases in case.name]
    if not chosen:
        raise OptionError(f"--cases {cases!r} names none of {', '.join(case.name for case in CASES)}")
    options: dict[str, Any] = {"impl": impl, "cases": chosen, "repeats": repeats, "flex": flex}
    if model is not None and given is not None:
        report = _captured(model, given, wanted, asked, None if dtype is None else kind, options)
    else:
        tokens = asked or parse_lengths("--lengths", "4K,8K,12K,16K,32K,128K" if cuda else "512,1K")
        with steps("timing") as progress:
            report = benching.run(
                shape, SHAPES[shape], tokens, batches=batches, dtype=kind, progress=progress, **options
            )
    console = cli_output.out()
    console.print(_table(report, console.width))
    for found in report.planted:
        cli_output.note(
            f"planted structure at {found['length']} tokens: the index finds {found['columns_found']:.0%} of the "
            f"columns and {found['distances_found']:.0%} of the distances"
        )
    if json_file is not None:
        cli_output.write_json(json_file, _finite(report.to_dict()))
    _tell_crossovers(report)
    if host_profile:
        path = benching.host_profile(report).save()
        cli_output.note(f"Wrote {path}: dense below {report.dense_below} tokens per batch size.")


def _host_path() -> Path:
    from headscope.engine.config.host import default_path

    return default_path()


def _check_together(
    model: str | None,
    prompt: str | None,
    layers: str | None,
    prefill: bool,
    host: bool,
    config: list[Path] | None,
    timed_layers: int | None,
) -> None:
    """`OptionError` for options that do not go together."""
    if (model is None) != (prompt is None):
        raise OptionError("--model and --prompt go together: real captures need both")
    if layers is not None and model is None:
        raise OptionError("--layers goes with --model: it says which layers to capture")
    if prefill and model is not None:
        raise OptionError("--prefill runs random weights of --shape: leave --model out")
    if host and (prefill or model is not None):
        raise OptionError("--host is measured on random inputs: leave --prefill and --model out")
    if not prefill and (config or timed_layers is not None):
        raise OptionError("--config and --timed-layers go with --prefill")


def _captured(
    model: str,
    given: Prompt,
    layers: tuple[int, ...] | None,
    lengths: list[int] | None,
    dtype: torch.dtype | None,
    options: dict[str, Any],
) -> Report:
    """Real Q/K/V: the model prefills the prompt, or its beginnings, layer by layer."""
    from headscope.engine.bench.layers import run_captures
    from headscope.engine.config.evidence import prompt_record
    from headscope.engine.model.load import load_model
    from headscope.engine.prompts.tokens import encode

    with bar(f"loading {model}") as progress:
        loaded = load_model(model, dtype=dtype, progress=progress)
    ids = encode(loaded, given.text, template=False).ids
    facts = prompt_record(given.name, given.kind, given.sha256, int(ids.shape[1]), False)
    with steps("timing") as note:
        return run_captures(loaded, ids, lengths=lengths, layers=layers, prompt=facts, progress=note, **options)


def _prefill(
    shape: str,
    lengths: list[int] | None,
    dtype: torch.dtype,
    impl: str,
    repeats: int,
    configs: list[Path],
    timed_layers: int | None,
    json_file: Path | None,
) -> None:
    import torch

    from headscope.engine.bench import decoder as bench_decoder
    from headscope.engine.bench import prefill as bench_prefill
    from headscope.engine.config.host import HostProfile

    if shape not in bench_decoder.MODELS:
        raise OptionError(f"--prefill runs the shapes {', '.join(bench_decoder.MODELS)}, got {shape!r}")
    sizes = bench_decoder.MODELS[shape]
    settings = bench_prefill.default_settings(sizes) + tuple(_setting(path) for path in configs)
    tokens = lengths or parse_lengths("--lengths", "4K,32K,128K" if torch.cuda.is_available() else "1K")
    host = HostProfile.load()
    with steps("timing") as progress:
        report = bench_prefill.run_prefill(
            shape,
            sizes,
            tokens,
            settings,
            timed_layers=timed_layers,
            dtype=dtype,
            impl=impl,
            repeats=repeats,
            host=host,
            progress=progress,
        )
    console = cli_output.out()
    console.print(_prefill_table(report, console.width))
    for row in report.rows:
        if row.note:
            cli_output.note(f"{row.length} tokens, {row.setting}: {row.note}")
    if json_file is not None:
        cli_output.write_json(json_file, _finite(report.to_dict()))


def _setting(path: Path) -> Setting:
    """A head config file, ours or MInference's, as a setting."""
    from headscope.engine.base import files
    from headscope.engine.bench.prefill import Setting
    from headscope.engine.config import interop
    from headscope.engine.config.file import HeadConfig

    value = files.read_json(path)
    ours = interop.detect(value, str(path)) == "headscope"
    made = (
        HeadConfig.from_dict(value, str(path)) if ours else interop.import_foreign(value, "minference", name=path.name)
    )
    patterns = tuple(made.patterns(layer) for layer in range(len(made.heads)))
    return Setting(path.stem[:40], patterns, made.estimator)


def _tell_crossovers(report: Report) -> None:
    for name, below in report.crossovers.items():
        for size, tokens in below.items():
            timed = (r.length for r in report.rows if r.batch == size and r.name == name and r.with_index is not None)
            longest = max(timed)
            never = f"{name} did not win up to {longest} tokens"
            text = never if tokens > longest else f"{name} wins from {tokens} tokens, index included"
            cli_output.note(f"batch {size}: {text}")


def _table(report: Report, width: int = 130) -> Table:
    """One row a measurement; below 118 columns the less needed are left out."""
    from headscope.engine.bench.layers import FIXED

    narrow = width < 118
    left_out = {"impl", "spread\nms", "TF/s", "error"} if narrow else set()
    if all(row.to_flex is None for row in report.rows):
        left_out.add("x\nflex")
    if all(row.layer is None for row in report.rows):
        left_out.add("layer")
    if len({row.batch for row in report.rows}) == 1 and (narrow or "layer" not in left_out):
        left_out.add("batch")
    baseline = "cuDNN" if report.machine["device"] == "cuda" else "SDPA on the CPU"
    where = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    notes = ["impl, spread, TF/s and error: in a terminal of 118 columns, or with --json"] if narrow else []
    if any(row.index == FIXED for row in report.rows):
        notes.append("* on a fixed clustered index; the index time is that of building one of the same budget")
    table = Table(
        title=f"{report.shape}, {report.dtype}; baseline {baseline}; {where}",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        caption_justify="left",
        caption="\n".join(notes) or None,
        padding=(0, 0, 0, 1) if narrow else (0, 1),
    )
    headers = (
        "tokens",
        "layer",
        "batch",
        "what",
        "impl",
        "median\nms",
        "spread\nms",
        "TF/s",
        "density",
        "missed",
        "x\nbase",
        "index\nms",
        "x base,\nindex in",
        "x\nflex",
        "error",
    )
    for name in headers:
        if name not in left_out:
            table.add_column(name, justify="left" if name in ("what", "impl") else "right", no_wrap=True)
    for row in report.rows:
        if row.note:
            cells = {"tokens": str(row.length), "batch": str(row.batch), "what": row.note}
            table.add_row(*(cells.get(name, "") for name in headers if name not in left_out))
            continue
        what = row.name + ("*" if row.index == FIXED else "")
        shown = (
            str(row.length),
            "" if row.layer is None else str(row.layer),
            str(row.batch),
            what,
            row.impl,
            f"{row.median_ms:.3f}",
            f"{row.spread_ms:.3f}",
            f"{row.tflops:.1f}",
            f"{row.density:.1%}",
            _number(row.missed_mean, ".2%"),
            f"{row.to_baseline:.2f}",
            _number(row.index_ms, ".3f"),
            _number(row.with_index, ".2f"),
            _number(row.to_flex, ".2f"),
            _number(row.error, ".1e"),
        )
        table.add_row(*(text for name, text in zip(headers, shown, strict=True) if name not in left_out))
    return table


def _prefill_table(report: PrefillReport, width: int = 130) -> Table:
    """Whole prefills, one setting a row: the parts of eq. 13 in seconds."""
    narrow = width < 118
    where = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    table = Table(
        title=f"whole prefill, {report.model}, {report.dtype}, random weights; {where}",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        padding=(0, 0, 0, 1) if narrow else (0, 1),
    )
    headers = (
        "tokens",
        "what",
        "total s",
        "proj.",
        "index",
        "attention",
        "other",
        "share",
        "x dense",
        "density",
        "GiB",
    )
    left_out = {"proj.", "other", "share"} if narrow else set()
    for name in headers:
        if name not in left_out:
            table.add_column(name, justify="left" if name == "what" else "right", no_wrap=name != "what")
    for row in report.rows:
        if not math.isfinite(row.total_ms):
            shown: tuple[str, ...] = (str(row.length), row.note, *[""] * 9)
        else:
            parts = (row.total_ms, row.projections_ms, row.index_ms, row.attention_ms, row.other_ms)
            shown = (
                str(row.length),
                row.setting,
                *(f"{part / 1e3:.3f}" for part in parts),
                f"{row.share:.0%}",
                f"{row.to_dense:.2f}",
                f"{row.density:.1%}",
                f"{row.peak_mib / 1024:.1f}",
            )
        table.add_row(*(text for name, text in zip(headers, shown, strict=True) if name not in left_out))
    return table


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _finite(value: Any) -> Any:
    """The same value with null for what JSON cannot say."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
