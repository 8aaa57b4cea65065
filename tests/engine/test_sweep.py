"""Two thousand random calls against float64; a hundred of them in every run."""

from __future__ import annotations

import pytest

from tests.helpers.sweep import check


@pytest.mark.parametrize("first", range(0, 100, 10))
def test_a_hundred_calls_agree_with_float64(first: int) -> None:
    for seed in range(first, first + 10):
        check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 2000, 100))
def test_two_thousand_calls_agree_with_float64(first: int) -> None:
    for seed in range(first, first + 100):
        check(seed)
