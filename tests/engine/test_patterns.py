import pytest
from hypothesis import given
from hypothesis import strategies as st

from headscope.engine.attend.estimator import Estimator
from headscope.engine.patterns import families as patterns
from headscope.engine.patterns.families import AShape, BlockSparse, Dense, Fixed, Fraction, VerticalSlash
from tests.helpers.cases import random_pattern


@given(st.randoms(use_true_random=False), st.integers(1, 400))
def test_json_round_trip_is_exact(rng, length):
    pattern = random_pattern(rng, length)
    assert patterns.from_dict(pattern.to_dict()) == pattern


def test_fractions_resolve_with_the_length():
    budget = Fraction(of=0.05, least=64, most=4096)
    assert [budget.resolve(n) for n in (100, 2_000, 20_000, 200_000)] == [64, 100, 1000, 4096]
    plan = VerticalSlash(vertical=Fraction(0.1), slash=Fraction(0.2), sink=2).plan(50)
    assert (plan.vertical, plan.slash, plan.sink, plan.local) == (5, 10, 2, 1)


def test_budgets_beyond_the_length_mean_all():
    assert AShape(9, 100).plan(4).bands == ((0, 3),)
    assert AShape(9, 100).plan(4).columns == (0, 1, 2, 3)
    plan = VerticalSlash(10**6, 10**6).plan(7)
    assert (plan.vertical, plan.slash) == (7, 7)
    assert BlockSparse(99).plan(130).top_blocks == 3


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AShape(-1, 4), "AShape.sink"),
        (lambda: AShape(4, 0), "AShape.window"),
        (lambda: AShape(True, 4), "AShape.sink"),
        (lambda: VerticalSlash(4), "slash"),
        (lambda: VerticalSlash(4, 4, windows=2), "exactly one"),
        (lambda: VerticalSlash(4, 4, sink=5), "at least sink = 5"),
        (lambda: VerticalSlash(4, 4, local=5), "at least local = 5"),
        (lambda: VerticalSlash(4, 4, local=0), "VerticalSlash.local"),
        (lambda: VerticalSlash(2**40, 4), "VerticalSlash.vertical"),
        (lambda: BlockSparse(0), "BlockSparse.blocks"),
        (lambda: BlockSparse(1, 0), "BlockSparse.block_size"),
        (lambda: Fixed(columns=(-1,)), "Fixed.columns"),
        (lambda: Fixed(blocks=((0, 1),)), "above the diagonal"),
        (lambda: Fraction(0.0), "Fraction.of"),
        (lambda: Fraction(float("nan")), "Fraction.of"),
        (lambda: Fraction(0.5, least=9, most=3), "Fraction.most"),
        (lambda: Estimator(rows=0), "Estimator.rows"),
        (lambda: Estimator(where="front"), "Estimator.where"),
    ],
)
def test_nonsense_is_refused_by_name(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (None, "object"),
        ({}, "pattern must be one of"),
        ({"pattern": "star"}, "pattern must be one of"),
        ({"pattern": "dense", "window": 3}, "no field"),
        ({"pattern": "a-shape", "sink": 3}, "needs the fields"),
        ({"pattern": "a-shape", "sink": "3", "window": 4}, "AShape.sink"),
        ({"pattern": "a-shape", "sink": {"share": 0.1}, "window": 4}, "fraction"),
        ({"pattern": "a-shape", "sink": 1e3, "window": 4}, "AShape.sink"),
        ({"pattern": "fixed", "columns": 3}, "Fixed.columns"),
    ],
)
def test_hostile_entries_are_refused(entry, words):
    with pytest.raises(ValueError, match=words):
        patterns.from_dict(entry)


def test_labels_are_short_and_tell_the_budget():
    labels = [p.label for p in (Dense(), AShape(4, 64), VerticalSlash(64, Fraction(0.1)), BlockSparse(8, 128))]
    assert labels == ["dense", "a-shape 4/64", "vertical-slash 64/0.1n", "block-sparse 8x128"]
