"""Numbers as words: what is rounded never reads as an exact bound, and no unit shows what the next one is for."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headscope.studio.base.words import escaped, finding, milliseconds, percent, plain_markdown, size

_MS = {"ms": 1.0, "s": 1e3, "min": 6e4}
_BYTES = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}


def parts(text: str) -> list[tuple[str, str]]:
    """Numbers and units of a text, in order."""
    return re.findall(r"(-?[\d.]+)\u00a0([a-zA-Z%]+)", text)


def told(text: str, units: dict[str, float]) -> float:
    """What a text says, in the smallest unit."""
    return sum(float(number) * units[unit] for number, unit in parts(text))


def digit(number: str) -> float:
    """What the last digit of a number stands for."""
    return 10.0 ** -len(number.partition(".")[2])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 %"),
        (-0.0, "0 %"),
        (1, "100 %"),
        (-1, "-100 %"),
        (0.9996, "99.96 %"),
        (0.999999, "> 99.99 %"),
        (1.000001, "> 100 %"),
        (1.0004, "100.04 %"),
        (2.104, "210 %"),
        (0.2923, "29.2 %"),
        (0.0004, "0.04 %"),
        (0.00001, "< 0.01 %"),
        (-0.00001, "> -0.01 %"),
        (0.009996, "1.0 %"),
        (-0.02, "-2.0 %"),
        (float("nan"), "not measured"),
    ],
)
def test_shares(value: float, text: str) -> None:
    assert percent(value).replace("\u00a0", " ") == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 ms"),
        (1e-9, "< 0.001 ms"),
        (0.0042, "0.0042 ms"),
        (0.999, "1.0 ms"),
        (9.96, "10 ms"),
        (38, "38 ms"),
        (999.7, "1.0 s"),
        (9_960, "10 s"),
        (59_999, "1 min 0 s"),
        (119_900, "2 min 0 s"),
        (125_000, "2 min 5 s"),
        (float("nan"), "not measured"),
    ],
)
def test_times(value: float, text: str) -> None:
    assert milliseconds(value).replace("\u00a0", " ") == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (100, "100 B"),
        (2000, "2 KiB"),
        (2**20 - 1, "1 MiB"),
        (2**30 - 1, "1.0 GiB"),
        (312 * 2**20, "312 MiB"),
    ],
)
def test_sizes(value: float, text: str) -> None:
    assert size(value).replace("\u00a0", " ") == text


@given(st.floats(-3, 3) | st.floats(0.99, 1.01) | st.floats(-0.001, 0.001))
def test_a_share_is_0_or_100_percent_only_when_it_is(value: float) -> None:
    text = percent(value)
    [(number, _)] = parts(text)
    if "<" in text or ">" in text:
        assert (value * 100 < float(number)) == ("<" in text)
        assert abs(value * 100 - float(number)) <= 0.0101
        return
    assert abs(value * 100 - float(number)) <= 0.5001 * digit(number)
    assert (float(number) in (0, 100, -100)) == (value in (0, 1, -1))


@given(st.floats(0.001, 1e8) | st.floats(990, 1010) | st.floats(59_000, 61_000) | st.floats(9_900, 10_100))
def test_a_time_is_in_its_unit(value: float) -> None:
    text = milliseconds(value)
    shown = parts(text)
    number, unit = shown[-1]
    step = digit(number) if value >= 0.995 else 10 ** -len(f"{value:.2g}".partition(".")[2])
    assert abs(told(text, _MS) - value) <= 0.5001 * step * _MS[unit]
    for number, unit in shown:
        assert float(number) < {"ms": 1000, "s": 60, "min": float("inf")}[unit]
        assert "." not in number or float(number) < 10


@given(st.integers(0, 2**45) | st.integers(2**20 - 2000, 2**20 + 2000) | st.integers(2**30 - 2**20, 2**30 + 2**20))
def test_a_size_is_in_its_unit(value: int) -> None:
    [(number, unit)] = parts(size(value))
    assert abs(told(size(value), _BYTES) - value) <= 0.5001 * digit(number) * _BYTES[unit]
    assert unit == "GiB" or float(number) < 1024
    assert (float(number) == 0) == (value == 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_never_a_finding(bad: float) -> None:
    assert "nothing to gain" in finding(0.0, 0.0, 3, (0.0, 0.0, 0.0), 0.0, 0.0)
    for figures in ((bad, 0.0, 3, (0.0,) * 3, 0.0, 0.0), (0.0, bad, 3, (0.0,) * 3, 0.0, 0.0)):
        with pytest.raises(ValueError, match="bfloat16 or float32"):
            finding(*figures)
    with pytest.raises(ValueError, match="finite figures"):
        finding(0.0, 0.0, 3, (0.0, bad, 0.0), 0.0, 0.0)
    assert percent(bad) == milliseconds(bad) == "not measured"


AUTOLINK = re.compile(r"https?://|www\.|[-.\w+]+@[-\w]+", re.IGNORECASE)
"""What markdown makes links of once escapes are read (GFM)."""


@pytest.mark.parametrize(
    "address", ["https://x.example/a?b=1", "HTTP://x.example", "www.x.example", "me.a+b@x.example"]
)
def test_no_address_in_a_message_becomes_a_link(address: str) -> None:
    for text in (escaped(f"a file {address} here"), plain_markdown(f"There is no file {address}")):
        read = re.sub(r"\\(.)", r"\1", text)
        assert not AUTOLINK.search(read) and address in read.replace("\u2060", "")
