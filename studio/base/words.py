"""Numbers with units, and findings as sentences."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence

from headscope.engine.attend.estimator import Estimator
from headscope.engine.patterns.families import Budget, Fraction, Pattern

_TIMES = (("ms", 1.0, 1, 10), ("ms", 1.0, 0, 1000), ("s", 1e3, 1, 10), ("s", 1e3, 0, 60))
"""Unit, its milliseconds, digits behind the point, and the number of units that is written in the next line's way."""

_SIZES = (("B", 1, 0, 1024), ("KiB", 2**10, 0, 1024), ("MiB", 2**20, 0, 1024), ("GiB", 2**30, 1, float("inf")))
"""The same for bytes."""


ADDRESS = re.compile(r"https?:/|www\.|\w@", re.IGNORECASE)
"""How what markdown takes for an address begins."""

UNSEEN = "\u2060"
"""Word joiner: no width, and no line breaks there."""


def percent(value: float) -> str:
    """A share as text: 0.2923 is "29.2 %", 0.0004 is "0.04 %" (with no-break spaces).

    Only an exact 0 or 1 is "0 %" or "100 %"; what is nearer to them than the last digit is "< 0.01 %" or "> 99.99 %".
    """
    if not math.isfinite(value):
        return "not measured"
    if value in (-1, 0, 1):
        return f"{int(value) * 100}\u00a0%"
    if value < 0:
        text = percent(-value)
        turned = {"<": ">", ">": "<"}.get(text[0])
        return f"-{text}" if turned is None else f"{turned}\u00a0-{text[2:]}"
    share = value * 100
    if share < 0.01:
        return "<\u00a00.01\u00a0%"
    # The fewest digits that tell the share from 100 %, and below 1 % two.
    for digits in (0, 1, 2) if share > 100 else (1, 2):
        rounded = round(share, digits)
        if (rounded < 1 and digits < 2) or rounded == 100:
            continue
        return f"{share:.{digits}f}\u00a0%"
    return ">\u00a0100\u00a0%" if share > 100 else ">\u00a099.99\u00a0%"


def milliseconds(value: float) -> str:
    """A time as text: "0.42 ms", "38 ms", "1.3 s", "2 min 5 s"."""
    if not math.isfinite(value):
        return "not measured"
    if 0 < value < 0.001:
        return "<\u00a00.001\u00a0ms"
    short = f"{value:.2g}"
    if float(short) < 1:
        return f"{short}\u00a0ms"
    if text := _in_units(value, _TIMES):
        return text
    minutes, seconds = divmod(round(value / 1000), 60)
    return f"{minutes}\u00a0min {seconds}\u00a0s"


def size(value: float) -> str:
    """Bytes as text: "312 MiB", "1.4 GiB"."""
    return _in_units(value, _SIZES)


def _in_units(value: float, units: Sequence[tuple[str, float, int, float]]) -> str:
    """The value in the first unit that it fits in once it is rounded; empty if it fits in none."""
    for name, unit, digits, limit in units:
        if round(value / unit, digits) < limit:
            return f"{value / unit:.{digits}f}\u00a0{name}"
    return ""


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
    """Text that markdown shows as it is: no marks, and no links either.

    Addresses become links after escapes are read, so a character of no width parts them where they begin.
    """
    text = ADDRESS.sub(lambda start: start[0][:-1] + UNSEEN + start[0][-1], text)
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

    `near` and `far` are shares of the missed mass less than 64 and at least 256 tokens back. ValueError where a figure
    is not finite: nothing good may be said of it, and a measurement refuses it before.
    """
    if not all(math.isfinite(value) for value in (mean, worst, *thirds, near, far)):
        raise ValueError("a finding needs finite figures: measure the head again in bfloat16 or float32")
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
