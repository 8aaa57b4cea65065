"""`headscope bench`: the kernels against torch's own attention on this machine."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from headscope.engine import bench as benching
from headscope.engine import cli_output
from headscope.engine.bench_cases import CASES, SHAPES
from headscope.engine.errors import OptionError

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def bench(
    lengths: Annotated[
        str | None,
        typer.Option("--lengths", help="Tokens, comma-separated; K and M are 1,024 and its square. E.g. 8K,32K,128K."),
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
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Timed rounds.")] = 5,
    flex: Annotated[bool, typer.Option("--flex", help="Time FlexAttention on the same tiles too (up to 64K).")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all rows to this file.")] = None,
    host_profile: Annotated[
        bool, typer.Option("--host", help="Write the host profile: below which length this machine stays dense.")
    ] = False,
) -> None:
    """Time dense and sparse attention of one layer against SDPA (forced to cuDNN on CUDA), in one interleaved run.

    Every kernel passes a check against float64 before it is timed. Vertical-slash settings are timed on a fixed
    clustered index; "with index" adds the time of building an index of the same budget.
    """
    cuda = torch.cuda.is_available()
    if shape not in SHAPES:
        raise OptionError(f"--shape must be one of {', '.join(SHAPES)}, got {shape!r}")
    kind = dtype or ("bf16" if cuda else "fp32")
    if kind not in _DTYPES:
        raise OptionError(f"--dtype must be one of {', '.join(_DTYPES)}, got {kind!r}")
    chosen = [case for case in CASES if cases is None or cases in case.name]
    if not chosen:
        raise OptionError(f"--cases {cases!r} names none of {', '.join(case.name for case in CASES)}")
    tokens = _numbers("--lengths", lengths or ("4K,8K,32K,128K" if cuda else "512,1K"))
    report = benching.run(
        shape, SHAPES[shape], tokens, batches=_numbers("--batch", batch), dtype=_DTYPES[kind], impl=impl,
        cases=chosen, repeats=repeats, flex=flex, progress=cli_output.note,
    )  # fmt: skip
    console = cli_output.out()
    console.print(_table(report, console.width))
    for found in report.planted:
        cli_output.note(
            f"planted structure at {found['length']} tokens: the index finds {found['columns_found']:.0%} of the "
            f"columns and {found['distances_found']:.0%} of the distances"
        )
    if json_file is not None:
        cli_output.write_json(json_file, _finite(report.to_dict()))
    if host_profile:
        path = benching.host_profile(report).save()
        cli_output.note(f"Wrote {path}: dense below {report.dense_below} tokens per batch size.")
    elif report.dense_below:
        for size, below in report.dense_below.items():
            longest = max(row.length for row in report.rows if row.batch == size)
            never = f"sparse did not win up to {longest} tokens"
            cli_output.note(f"batch {size}: " + (never if below > longest else f"sparse wins from {below} tokens"))


def _numbers(option: str, text: str) -> list[int]:
    """Whole numbers, with K and M."""
    found = []
    for part in text.upper().replace(" ", "").split(","):
        factor = {"K": 1024, "M": 1024 * 1024}.get(part[-1:], 1)
        digits = part if factor == 1 else part[:-1]
        if not digits.isdecimal() or not 1 <= int(digits) * factor <= 2**24:
            raise OptionError(f"{option} must be whole numbers such as 8K,128K, got {text[:60]!r}")
        found.append(int(digits) * factor)
    return sorted(set(found))


def _table(report: benching.Report, width: int = 130) -> Table:
    """One row a measurement; below 118 columns the less needed are left out."""
    narrow = width < 118
    left_out = {"impl", "spread\nms", "TF/s", "error"} if narrow else set()
    if all(row.to_flex is None for row in report.rows):
        left_out.add("x\nflex")
    baseline = "cuDNN" if report.machine["device"] == "cuda" else "SDPA on the CPU"
    where = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    table = Table(
        title=f"{report.shape}, {report.dtype}; baseline {baseline}; {where}", title_justify="left", box=SIMPLE_HEAD,
        pad_edge=False, show_edge=False, caption_justify="left",
        caption="impl, spread, TF/s and error: in a terminal of 118 columns, or with --json" if narrow else None,
    )  # fmt: skip
    headers = (
        "tokens",
        "batch",
        "what",
        "impl",
        "median\nms",
        "spread\nms",
        "TF/s",
        "density",
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
            table.add_row(str(row.length), str(row.batch), row.note)
            continue
        shown = (
            str(row.length), str(row.batch), row.name, row.impl, f"{row.median_ms:.3f}", f"{row.spread_ms:.3f}",
            f"{row.tflops:.1f}", f"{row.density:.1%}", f"{row.to_baseline:.2f}", _number(row.index_ms, ".3f"),
            _number(row.with_index, ".2f"), _number(row.to_flex, ".2f"), _number(row.error, ".1e"),
        )  # fmt: skip
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
