"""What `headscope bench` prints: one table a mode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from headscope.engine.attend.estimator import Estimator

if TYPE_CHECKING:
    from headscope.engine.bench.layers import Report
    from headscope.engine.bench.prefill import PrefillReport
    from headscope.engine.bench.sampling import SamplingPoint, Total


def kernel_table(report: Report, width: int = 130) -> Table:
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
    table = _titled(
        title=f"{report.shape}, {report.dtype}; baseline {baseline}; {where}",
        narrow=narrow,
        caption="\n".join(notes) or None,
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


def prefill_table(report: PrefillReport, width: int = 130) -> Table:
    """Whole prefills, one setting a row: the parts of eq. 13 in seconds."""
    narrow = width < 118
    where = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    table = _titled(
        title=f"whole prefill, {report.model}, {report.dtype}, random weights; {where}",
        narrow=narrow,
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


def sampling_table(points: Sequence[SamplingPoint], totals: Sequence[Total]) -> Table:
    """One row an estimator: captured mass and that of worst rows at every share of the cells, and its index time."""
    shares = sorted({point.share for point in points})
    whole = {total.estimator: total for total in totals}
    table = _titled(
        title="captured mass, and the mean of heads' worst rows, at equal requested cells",
    )
    table.add_column("estimator")
    for name in (
        *(f"{share:.0%} of cells" for share in shares),
        "index\nms",
        *(["index and\nkernel ms"] if whole else []),
    ):
        table.add_column(name, justify="right", no_wrap=True)
    rows: dict[Estimator, dict[float, SamplingPoint]] = {}
    for point in points:
        rows.setdefault(point.estimator, {})[point.share] = point
    for estimator, by_share in rows.items():
        figures = [f"{by_share[share].captured:.3f}, {by_share[share].worst_row:.3f}" for share in shares]
        figures.append(f"{by_share[shares[0]].index_ms:.2f}")
        if whole:
            total = whole[estimator]
            figures.append(f"{total.total_ms:.2f}" if total.reached else "out of reach")
        table.add_row(_estimator(estimator), *figures)
    return table


def _estimator(estimator: Estimator) -> str:
    """`64 rows, half, overlap removed`: what differs from the default is named."""
    usual = Estimator().to_dict()
    rest = [
        f"{name} {value}"
        for name, value in estimator.to_dict().items()
        if name not in ("rows", "where") and value != usual[name]
    ]
    return ", ".join([f"{estimator.rows} rows", estimator.where, *rest])


def rate_table(report: dict[str, Any]) -> Table:
    """The winners of a timed search: what the cost model said of each, and what it took."""
    table = _titled(
        title=f"{report['shape']}, {report['tokens']} tokens, {report['candidates']} candidates, {report['impl']}: "
        f"{report['heads_per_second']:.2f} heads a second",
    )
    table.add_column("target")
    for name in ("missed", "density", "predicted\nms", "measured\nms", "dense\nms"):
        table.add_column(name, justify="right", no_wrap=True)
    for winner in report["winners"]:
        target = winner["target"]
        most, speedup = target["max_missed"], target["speedup"]
        table.add_row(
            f"no head above {most:.1%}" if most is not None else f"speed-up {speedup:.2f}",
            f"{winner['missed_mass_mean']:.2%}",
            f"{winner['computed_density']:.1%}",
            *(f"{winner[name]:.2f}" for name in ("predicted_ms", "measured_ms", "dense_ms")),
        )
    return table


def _titled(title: str, narrow: bool = False, caption: str | None = None) -> Table:
    return Table(
        title=title,
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        caption=caption,
        caption_justify="left",
        padding=(0, 0, 0, 1) if narrow else (0, 1),
    )


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
