"""Cost model, fronts and allocation against brute force and known answers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from headscope.engine.base.errors import ConfigError, OptionError
from headscope.engine.patterns.families import AShape, BlockSparse, Dense, Pattern, VerticalSlash
from headscope.engine.search.check import Expected
from headscope.engine.search.cost import ALWAYS, TILE_CELLS, CostModel, fit, nonnegative_least_squares
from headscope.engine.search.front import Front, Point, hull, least_loss, least_time, pareto
from headscope.engine.search.grid import Grid
from headscope.engine.search.results import STATS, PromptResult, SearchError
from headscope.engine.search.speed import Layers, fastest_ms, least_loss_of_layers
from headscope.engine.search.table import Table, Target, allocate, best_uniform, fronts, mean_losses

GRID = Grid((AShape(4, 64), VerticalSlash(32, sink=4, windows=2), BlockSparse(4)))
TRUE = {
    "layer": 3.0,
    "dense": (0.4, 0.05),
    "a-shape": (0.1, 0.02),
    "vertical-slash": (1.5, 0.03),
    "block-sparse": (0.3, 0.04),
}


def layer_ms(patterns: list[Pattern], cells: list[int]) -> float:
    parts = [TRUE[p.kind][0] + TRUE[p.kind][1] * c / TILE_CELLS for p, c in zip(patterns, cells, strict=True)]  # type: ignore[index]
    return float(TRUE["layer"]) + sum(parts)  # type: ignore[arg-type]


def made_results(noise: float = 0.0, prompts: int = 2, layers: int = 4, heads: int = 3) -> list[PromptResult]:
    """Results with known losses and with times of the known model, disturbed upwards in one layer of five."""
    rng = random.Random(7)
    results = []
    for number in range(prompts):
        rows_of_layers = []
        for layer in range(layers):
            rows = []
            for at, pattern in enumerate(GRID.candidates):
                cells = [TILE_CELLS * rng.randrange(20, 300) if at else TILE_CELLS * 272 for _ in range(heads)]
                loss = [0.0 if at == 0 else rng.random() * 0.1 / at for _ in range(heads)]
                ms = layer_ms([pattern] * heads, cells) * (1 + (noise * rng.random() if rng.random() < 0.2 else 0.0))
                row: dict[str, object] = dict.fromkeys(STATS, loss)
                rows.append(
                    row | {"tile_cells": cells, "computed_pairs": cells, "index_ms": 0.25 * ms, "kernel_ms": 0.75 * ms}
                )
            mixed = []
            for _ in range(3):
                picked = [rng.randrange(len(GRID)) for _ in range(heads)]
                cells = [rows[n]["tile_cells"][h] for h, n in enumerate(picked)]  # type: ignore[index]
                ms = layer_ms([GRID.candidates[n] for n in picked], cells)
                mixed.append({"picked": picked, "index_ms": 0.0, "kernel_ms": ms})
            rows_of_layers.append({"layer": layer, "dense_ms": 12.0, "rows": rows, "mixed": mixed})
        prompt = {"name": f"p{number}", "sha256": str(number), "tokens": 2048, "kind": "made", "key": str(number)}
        results.append(PromptResult(prompt, 100.0, tuple(rows_of_layers)))
    return results


def test_the_cost_model_recovers_the_coefficients_that_made_the_times() -> None:
    model = fit(made_results(), GRID, {})
    for family in ALWAYS:
        assert model.heads[family]["tile"] == pytest.approx(TRUE[family][1], rel=0.02) or family == "dense"  # type: ignore[index]
    assert model.fit.median_error < 1e-6
    # Dense heads always touch as many tiles here, so that only their sum is known.
    assert model.head_ms(Dense(), 2048, 272 * TILE_CELLS) == pytest.approx(0.4 + 272 * 0.05, rel=0.02)
    assert model.dense_layer_ms(2048, 3) == pytest.approx(12.0)
    assert model.other_ms(2048) == pytest.approx(100 - 4 * 12.0)


def test_disturbed_timings_are_left_out_and_counted() -> None:
    calm, disturbed = fit(made_results(), GRID, {}), fit(made_results(noise=5.0), GRID, {})
    assert disturbed.fit.left_out > 0
    for pattern in GRID.candidates:
        cells = (272 if pattern == Dense() else 160) * TILE_CELLS  # where there are measurements
        assert disturbed.head_ms(pattern, 2048, cells) == pytest.approx(calm.head_ms(pattern, 2048, cells), rel=0.05)


@limits(max_examples=40, deadline=None)
@given(st.integers(0, 10_000))
def test_nonnegative_least_squares_meets_its_optimality_conditions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(12, 5)), rng.normal(size=12)
    x = nonnegative_least_squares(a, b)
    gradient = a.T @ (b - a @ x)
    assert (x >= 0).all() and (gradient <= 1e-6).all() and np.abs(gradient * x).max() < 1e-6


def test_a_cost_model_survives_its_file_and_bad_ones_are_refused(tmp_path: Path) -> None:
    model = fit(made_results(), GRID, {"hardware": "test"})
    assert CostModel.load(model.save(tmp_path / "cost.json")) == model
    (tmp_path / "bad.json").write_text('{"format": "headscope.cost-model/1"}')
    with pytest.raises(ConfigError, match="lacks the field 'layer_ms'"):
        CostModel.load(tmp_path / "bad.json")
    text = (tmp_path / "cost.json").read_text().replace('"layer_ms": ', '"layer_ms": -')
    (tmp_path / "negative.json").write_text(text)
    with pytest.raises(ConfigError, match="at least 0"):
        CostModel.load(tmp_path / "negative.json")


def test_a_slow_spell_of_the_machine_does_not_enter_the_model() -> None:
    calm, slow = made_results(), made_results()
    for result in slow:
        for number, layer in enumerate(result.layers):
            factor = 2.0 if number % 2 else 1.0  # every other layer was measured while something else ran
            for entry in (*layer["rows"], *layer["mixed"]):
                entry["dense_ms"] = 12.0 * factor
                entry["index_ms"] *= factor
                entry["kernel_ms"] *= factor
            layer["dense_ms"] = 12.0 * factor
    one, other = fit(calm, GRID, {}), fit(slow, GRID, {})
    assert other.dense == pytest.approx(one.dense)
    assert other.fit.median_error < 1e-6 and other.fit.mixed_error < 1e-6
    for family in ALWAYS:
        assert other.heads[family] == pytest.approx(one.heads[family], rel=1e-6, abs=1e-9)


def points(rng: random.Random, count: int) -> list[Point]:
    made = [Point(0, 10.0, 0.0, (0, 0))]
    return made + [Point(n, rng.uniform(0.5, 12), rng.uniform(0.0, 0.3), (1 + n % 3, n)) for n in range(1, count)]


@limits(max_examples=60, deadline=None)
@given(st.integers(0, 100_000))
def test_nothing_beats_a_point_of_the_front_and_the_hull_is_convex(seed: int) -> None:
    every = points(random.Random(seed), 9)
    best = pareto(every)
    for point in every:
        beaten = any(
            o.ms <= point.ms and o.loss <= point.loss and (o.ms, o.loss) != (point.ms, point.loss) for o in every
        )
        assert beaten or point in best
    assert all(a.ms < b.ms and a.loss > b.loss for a, b in itertools.pairwise(best))
    slopes = [(b.loss - a.loss) / (b.ms - a.ms) for a, b in itertools.pairwise(hull(best))]
    assert slopes == sorted(slopes)


@limits(max_examples=60, deadline=None)
@given(st.integers(0, 100_000), st.floats(0.05, 1.0))
def test_least_loss_lies_between_the_relaxed_bound_and_the_stated_gap(seed: int, share: float) -> None:
    rng = random.Random(seed)
    made = [Front.of(0, head, points(rng, 5)) for head in range(4)]
    low = sum(front.points[0].ms for front in made)
    budget = low + share * (sum(front.points[-1].ms for front in made) - low)
    found = least_loss(made, budget)
    best = min(
        sum(p.loss for p in chosen)
        for chosen in itertools.product(*(front.every for front in made))
        if sum(p.ms for p in chosen) <= budget + 1e-9
    )
    assert found.relaxed_loss is not None and found.gap is not None
    assert found.ms <= budget + 1e-9
    # Ties may trade 1e-4 of loss a head for a simpler pattern.
    assert found.relaxed_loss <= best + 1e-9 and best <= found.loss + 4e-4 + 1e-9
    assert found.loss <= found.relaxed_loss + found.gap + 1e-9
    largest_step = (
        max(a.loss - b.loss for front in made for a, b in itertools.pairwise(hull(front.points))) if made else 0
    )
    assert found.gap <= largest_step + 5e-4


def test_least_time_takes_the_fastest_within_the_limit_and_ties_the_simpler() -> None:
    every = [
        Point(0, 10.0, 0.0, (0, 0)),
        Point(1, 2.02, 0.01, (1, 1)),
        Point(2, 2.0, 0.009, (2, 2)),
        Point(3, 1.0, 0.2, (3, 3)),
    ]
    front = Front.of(5, 0, every)
    assert least_time([front], 0.02).points[0].number == 1
    assert least_time([front], 0.3).points[0].number == 3
    assert least_time([front], 0.001).points[0].number == 0
    assert least_time([front], 0.3, {5: 0.02}).points[0].number == 1
    with pytest.raises(OptionError, match="share"):
        least_time([front], 1.5)


def test_a_budget_that_nothing_meets_says_what_the_fastest_takes() -> None:
    with pytest.raises(SearchError, match="fastest takes 1"):
        least_loss([Front.of(0, 0, [Point(0, 1.0, 0.0, (0, 0))])], 0.5)


def test_max_missed_holds_for_every_head_and_prompt() -> None:
    table, model = Table.of(made_results(), GRID), fit(made_results(), GRID, {})
    found = allocate(table, model, Target(max_missed=0.03))
    taken = np.take_along_axis(table.stats["mean"], found.picked[None, :, :, None], 3)
    assert taken.max() <= 0.03 + 1e-5
    for layer, head in found.stayed_dense:
        assert found.picked[layer, head] == 0
        assert (table.stats["mean"].max(0)[layer, head, 1:] > 0.03).all()


def test_a_layer_limit_binds_its_layer_alone() -> None:
    table, model = Table.of(made_results(), GRID), fit(made_results(), GRID, {})
    free = allocate(table, model, Target(max_missed=0.05))
    bound = allocate(table, model, Target(max_missed=0.05, layer_limits=((2, 0.0),)))
    assert (bound.picked[2] == 0).all()
    assert (np.delete(bound.picked, 2, 0) == np.delete(free.picked, 2, 0)).all()
    with pytest.raises(OptionError, match="layer 9"):
        allocate(table, model, Target(max_missed=0.05, layer_limits=((9, 0.0),)))


def test_a_speedup_is_reached_and_more_speed_costs_more_loss() -> None:
    table = Table.of(made_results(), GRID)
    model = CostModel.tiles()
    losses = []
    for speedup in (1.2, 1.6, 2.2):
        found = allocate(table, model, Target(speedup=speedup))
        assert found.prediction.speedup >= speedup * (1 - 1e-9)
        assert found.choice.gap is not None and found.choice.gap >= 0
        losses.append(found.prediction.loss_mean)
    assert losses == sorted(losses) and losses[0] < losses[-1]
    with pytest.raises(SearchError, match=r"reaches a speed-up of 1000\.00"):
        allocate(table, model, Target(speedup=1000.0))


def test_layers_that_are_faster_dense_become_dense_for_a_speedup() -> None:
    results = made_results()
    table, fitted = Table.of(results, GRID), fit(results, GRID, {})
    slow = CostModel(500.0, fitted.heads, fitted.dense, fitted.other)
    found = allocate(table, slow, Target(speedup=1.0))
    assert (found.picked == 0).all() and found.prediction.loss_worst == 0
    assert found.prediction.dense_layers == table.layers


@limits(max_examples=30, deadline=None)
@given(st.floats(0.0, 60.0), st.floats(0.0, 1.0))
def test_least_time_is_never_predicted_slower_than_dense(layer_ms: float, limit: float) -> None:
    results = made_results(layers=2)
    table, fitted = Table.of(results, GRID), fit(results, GRID, {})
    model = CostModel(layer_ms, fitted.heads, fitted.dense, fitted.other)
    said = allocate(table, model, Target(max_missed=limit)).prediction
    assert said.attention_ms <= said.dense_attention_ms * (1 + 1e-9)
    assert said.loss_worst <= limit + 1e-5


@limits(max_examples=30, deadline=None)
@given(st.integers(0, 100_000), st.floats(0.0, 1.0))
def test_least_loss_of_layers_lies_between_its_bound_and_the_stated_gap(seed: int, share: float) -> None:
    rng = random.Random(seed)
    kinds = ["dense", "a-shape", "a-shape", "block-sparse"]
    costs = {kind: rng.uniform(0.0, 3.0) for kind in kinds}

    def base(names: Iterable[str]) -> float:
        return 1.0 + sum(costs[name] for name in sorted(set(names)))

    layers = Layers([Front.of(n // 2, n % 2, points(rng, 4)) for n in range(4)], 2, kinds, base, 20.0, {})

    def taken(chosen: Sequence[Point]) -> float:
        rows = (chosen[:2], chosen[2:])
        return sum(
            sum(p.ms for p in row) + base(kinds[p.number] for p in row) if any(p.number for p in row) else 20.0
            for row in rows
        )

    every = [(taken(some), sum(p.loss for p in some)) for some in itertools.product(*(f.every for f in layers.fronts))]
    fastest = min(ms for ms, _ in every)
    assert fastest_ms(layers) == pytest.approx(fastest)
    budget = fastest + share * (40.0 - fastest)
    best = min(loss for ms, loss in every if ms <= budget + 1e-9)
    found = least_loss_of_layers(layers, budget)
    assert taken(found.points) <= budget + 1e-6 and found.relaxed_loss is not None and found.gap is not None
    assert found.relaxed_loss <= best + 1e-6 and best <= found.loss + 4e-4
    assert found.loss == pytest.approx(found.relaxed_loss + found.gap)


def test_the_uniform_bound_passes_through_measured_settings() -> None:
    table = Table.of(made_results(), GRID)
    shape = table.stats["mean"].shape[1:3]
    for number in range(len(GRID)):
        pairs = int(table.stats["computed_pairs"][..., number].sum())
        assert best_uniform(table, pairs).loss <= float(mean_losses(np.full(shape, number), table).max()) + 1e-12


def test_targets_are_checked() -> None:
    for wrong in (
        {},
        {"max_missed": 0.1, "speedup": 2.0},
        {"max_missed": 2.0},
        {"speedup": -1.0},
        {"speedup": float("nan")},
        {"max_missed": 0.1, "layer_limits": ((0, 7.0),)},
    ):
        with pytest.raises(OptionError):
            Target(**wrong)
    with pytest.raises(OptionError, match="weight for each layer"):
        Target(max_missed=0.1, weight="logits")
    with pytest.raises(OptionError, match="metric is one of"):
        fronts(Table.of(made_results(), GRID), CostModel.tiles(), Target(max_missed=0.1, metric="median"))


def test_a_family_that_costs_its_layer_more_than_it_saves_is_not_used() -> None:
    results = made_results()
    table = Table.of(results, GRID)
    plain = CostModel.tiles()
    heads = {family: dict(entry) for family, entry in plain.heads.items()}
    heads["vertical-slash"]["layer"] = 150.0
    dear = CostModel(0.0, heads, plain.dense, plain.other)
    target = Target(max_missed=0.06)
    found = allocate(table, dear, target)
    kinds = [pattern.kind for pattern in GRID.candidates]
    for at in range(len(table.layers)):
        best = np.inf
        for picked in itertools.product(range(len(GRID)), repeat=table.heads):
            if all(table.loss()[at, head, number] <= 0.06 for head, number in enumerate(picked)):
                ms = sum(table.head_ms(dear)[at, head, number] for head, number in enumerate(picked))
                best = min(best, ms + dear.base_ms(kinds[number] for number in picked))
        mine = found.picked[at]
        taken = sum(table.head_ms(dear)[at, head, number] for head, number in enumerate(mine))
        taken += dear.base_ms(kinds[number] for number in mine)
        assert best <= taken <= best * 1.02**2 + 1e-9  # ties of heads and layers prefer the simpler
    assert (allocate(table, plain, target).picked != found.picked).any()


def test_a_prediction_is_read_beside_the_dense_time_of_the_moment() -> None:
    table, model = Table.of(made_results(), GRID), fit(made_results(), GRID, {})
    picked = allocate(table, CostModel.tiles(), Target(max_missed=0.05)).picked
    said = Expected.of(picked, table, model, 0)
    assert said.dense_attention_ms == pytest.approx(4 * 12.0)
    assert said.beside(2 * said.dense_attention_ms) == pytest.approx(2 * said.attention_ms)
    assert said.missed_mass_mean == pytest.approx(mean_losses(picked, table)[0])
