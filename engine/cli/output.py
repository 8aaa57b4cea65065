"""What the commands print: progress on stderr, tables and text on stdout, JSON into files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from headscope.engine.base import files
from headscope.engine.base.errors import HeadscopeError
from headscope.engine.config.check import WEIGHTS
from headscope.engine.loss.measure import HeadMeasurement


def out() -> Console:
    """Standard output; wide enough for the tables when it is a file or a pipe."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else 130, highlight=False, soft_wrap=False)


def force_hint(reasons: Sequence[str]) -> str:
    """How a person gets past these reasons why a config does not fit, where that is possible."""
    return " (--force accepts that)" if all(reason.startswith(WEIGHTS) for reason in reasons) else ""


def note(text: str) -> None:
    """A line on stderr."""
    print(text, file=sys.stderr)


@contextmanager
def bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr that is moved by calling it with done and total; one line without a terminal."""
    if not sys.stderr.isatty():
        note(f"{what} ...")
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as shown:
        task = shown.add_task(what, total=None)

        def move(done: int, total: int) -> None:
            shown.update(task, completed=done, total=total)

        yield move


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a file whole or not at all."""
    files.write_atomic(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n", HeadscopeError)


def heads_table(heads: Sequence[HeadMeasurement], title: str, width: int = 130) -> Table:
    """Heads, one a row, with what they miss and what they compute; below 108 columns the less needed are left out."""
    narrow = width < 108
    left_out = ("missed\np99", "start/mid/end\n%") if narrow else ()
    table = Table(
        title=title,
        title_justify="left",
        caption="p99 and thirds: in a terminal of 108 columns, or with --json" if narrow else None,
        caption_justify="left",
        show_edge=False,
        pad_edge=False,
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in ("layer", "head"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("pattern", overflow="fold", min_width=14)
    names = (
        "missed\nmean",
        "missed\nworst row",
        "missed\np99",
        "start/mid/end\n%",
        "output\nerror",
        "asked/done\ndensity %",
    )
    for name in names:
        if name not in left_out:
            table.add_column(name, justify="right", no_wrap=True)
    for head in heads:
        shown = (
            _percent(head.missed_mass_mean),
            f"{_percent(head.missed_mass_worst)} @{head.missed_mass_worst_row}",
            _percent(head.missed_mass_p99),
            "/".join(f"{100 * part:.1f}" for part in head.missed_mass_thirds),
            f"{head.output_error:.3f}",
            f"{100 * head.requested_density:.1f}/{100 * head.computed_density:.1f}",
        )
        kept = (text for name, text in zip(names, shown, strict=True) if name not in left_out)
        table.add_row(str(head.layer), str(head.head), head.pattern.label, *kept)
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
