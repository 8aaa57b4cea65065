"""Numbers with units, and findings as sentences."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from headscope.engine.attend.estimator import Estimator
from headscope.engine.patterns.families import Budget, Fraction, Pattern


def percent(value: float) -> str:
    """A share as text: 0.2923 is "29.2 %", 0.0004 is "0.04 %", 0 is "0 %" (with no-break spaces)."""
    if value != value:
        return "not measured"
    size = abs(value) * 100
    if size == 0:
        return "0\u00a0%"
    if size < 0.01:
        return "<\u00a00.01\u00a0%"
    return f"{value * 100:.{2 if size < 1 else 1 if size < 99.95 else 0}f}\u00a0%"


def milliseconds(value: float) -> str:
    """A time as text: "0.42 ms", "38 ms", "1.3 s", "2 min 5 s"."""
    if value < 10:
        return f"{value:.2g}\u00a0ms" if value < 1 else f"{value:.1f}\u00a0ms"
    if value < 1000:
        return f"{value:.0f}\u00a0ms"
    seconds = value / 1000
    if seconds < 60:
        return f"{seconds:.1f}\u00a0s" if seconds < 10 else f"{seconds:.0f}\u00a0s"
    return f"{int(seconds // 60)}\u00a0min {int(seconds % 60)}\u00a0s"


def size(value: float) -> str:
    """Bytes as text: "312 MiB", "1.4 GiB"."""
    if value < 2**20:
        return f"{value / 2**10:.0f}\u00a0KiB"
    return f"{value / 2**20:.0f}\u00a0MiB" if value < 2**30 else f"{value / 2**30:.1f}\u00a0GiB"


def count(value: int, one: str, many: str | None = None) -> str:
    """ "1 edit", "2,048 tokens"."""
    return f"{value:,} {one if value == 1 else many or one + 's'}"


def budget(value: Budget | None) -> str:
    """A budget as text: "256", or "6 %" for a share of the prompt."""
    if isinstance(value, Fraction):
        return f"{value.of * 100:.3g} %"
    return "" if value is None else f"{value:,}"


def budgets(pattern: Pattern) -> str:
    """The budgets of a pattern, short: "64 / 256", "64 / 4 windows", "8 × 64"."""
    joint = {"/": " / ", "x": " × "}
    return pattern.budgets(budget, joint.get(pattern.joint, pattern.joint))


def label(pattern: Pattern) -> str:
    """A pattern in full: "vertical-slash 64 / 256"."""
    return f"{pattern.kind} {budgets(pattern)}".strip()


def sampling(estimator: Estimator) -> str:
    """An estimator in full: "64 rows (tail), probability, columns sum, slashes sum, overlap keep"."""
    return (
        f"{estimator.rows} rows ({estimator.where}), {estimator.statistic}, columns {estimator.columns}, "
        f"slashes {estimator.slashes}, overlap {estimator.overlap}"
    )


def inert(text: str) -> str:
    """Text that plotly shows as it is: hover labels otherwise read tags."""
    return html.escape(text, quote=False)


def plain_markdown(text: str, name: str = "") -> str:
    """A sentence for a message box, with everything that markdown would read taken as text.

    A first word that is a name (of a file, a field) stays as it is written: one that is more than letters, as on the
    command line, or one that begins with the given `name`.
    """
    text = text.strip()
    named = bool(name) and text.startswith(name)
    if not named and text.partition(" ")[0].rstrip(",;:").isalpha():
        text = text[:1].upper() + text[1:]
    return escaped(text + ("" if text.endswith((".", "?", "!")) else "."))


def escaped(text: str) -> str:
    """Text that markdown shows as it is."""
    return re.sub(r"([\\`*_{}\[\]()<>#+\-.!|$~:])", r"\\\1", text)


def excerpt(tokens: Sequence[str], position: int, before: int = 5, after: int = 0) -> str:
    """The token at `position` with what leads up to it, on one line, the token itself in ‹ ›."""
    low, high = max(0, position - before), min(len(tokens), position + after + 1)
    lead = "".join(tokens[low:position])
    tail = "".join(tokens[position + 1 : high])
    line = f"{'…' if low else ''}{lead}‹{tokens[position]}›{tail}"
    return " ".join(line.replace("\n", " ⏎ ").replace("\t", " ").split())


def finding(mean: float, worst: float, worst_row: int, thirds: Sequence[float], near: float, far: float) -> str:
    """What a head loses, in one sentence or two.

    `near` and `far` are shares of the missed mass less than 64 and at least 256 tokens back.
    """
    if mean < 0.0005 and worst < 0.01:
        return "This head keeps all of its attention: nothing to gain here but time."
    scale = "Misses" if mean >= 0.01 else "Misses only"
    where = ""
    if far >= 0.6:
        where = ", most of it 256 tokens back or further"
    elif near >= 0.6:
        where = ", most of it within the last 64 tokens"
    elif mean >= 0.01:
        where = ", spread over all distances"
    start, middle, end = thirds
    highest = max(start, middle, end)
    name = ("start", "middle", "end")[(start, middle, end).index(highest)]
    part = f" The {name} of the prompt suffers most ({percent(highest)})." if highest > 1.5 * mean else ""
    return (
        f"{scale} {percent(mean)} of its probability{where}; the worst row, token {worst_row:,}, "
        f"misses {percent(worst)}.{part}"
    )
