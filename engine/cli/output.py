"""What the commands print: progress on stderr, tables and text on stdout, JSON into files."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from headscope.engine.base import files
from headscope.engine.base.errors import HeadscopeError, OptionError
from headscope.engine.config.check import WEIGHTS

if TYPE_CHECKING:
    from headscope.engine.loss.measure import HeadMeasurement

SILENCE = 60.0
"""Seconds after which a long step says again how far it is, where there is no terminal to draw a bar on."""


class Move(Protocol):
    """Moves a progress bar to `done` of `total`; `words` say what is at work."""

    def __call__(self, done: int, total: int, words: str = "") -> None: ...


def out() -> Console:
    """Standard output; wide enough for the tables when it is a file or a pipe. Names in it are never markup."""
    width = None if sys.stdout.isatty() else 130
    return Console(file=sys.stdout, width=width, highlight=False, soft_wrap=False, markup=False, emoji=False)


def force_hint(reasons: Sequence[str]) -> str:
    """How a person gets past these reasons why a config does not fit, where that is possible."""
    return " (--force accepts that)" if all(reason.startswith(WEIGHTS) for reason in reasons) else ""


def note(text: str) -> None:
    """A line on stderr."""
    print(text, file=sys.stderr)


@contextmanager
def bar(what: str) -> Iterator[Move]:
    """A progress bar on stderr that is moved by calling it; without a terminal a line now, and one a minute."""
    if not sys.stderr.isatty():
        note(f"{what} ...")
        yield _told(what)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as shown:
        task = shown.add_task(what, total=None)

        def move(done: int, total: int, words: str = "") -> None:
            shown.update(task, completed=done, total=total, description=f"{what}: {words}" if words else what)

        yield move


def _told(what: str) -> Move:
    """Progress as lines: the first after `SILENCE` seconds, so that short steps say nothing."""
    last = [time.monotonic()]

    def move(done: int, total: int, words: str = "") -> None:
        if time.monotonic() - last[0] >= SILENCE:
            last[0] = time.monotonic()
            note(f"{what}: {done}/{total}{f' ({words})' if words else ''} ...")

    return move


@contextmanager
def steps(what: str) -> Iterator[Callable[[str], None]]:
    """Lines on stderr, one for each step of a work of unknown length; in a terminal a spinner goes on below them."""
    if not sys.stderr.isatty():
        yield note
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as shown:
        shown.add_task(what, total=None)
        yield lambda text: shown.console.print(text, markup=False, highlight=False)


def check_outputs(*, folder: Path | None = None, **paths: Path | None) -> None:
    """Refuses outputs that cannot be written, before anything is measured for them.

    Keywords are option names; `folder` is the run folder of a search. Raises OptionError where two name the same
    place, HeadscopeError for one that cannot be written.
    """
    places: dict[Path, str] = {}
    for option, path in {"run": folder, **paths}.items():
        if path is None:
            continue
        files.check_writable(path / "search.json" if option == "run" else path, HeadscopeError)
        place = path.resolve()
        if place in places:
            raise OptionError(f"--{places[place]} and --{option} name the same place: give each its own")
        places[place] = option


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
