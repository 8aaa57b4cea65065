"""Figures: under 2 MB at any length, titled, with units, hover and nothing of a prompt read as markup."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from headscope.engine.attend.inputs import LayerInputs
from headscope.engine.loss import measure
from headscope.engine.patterns.families import AShape, BlockSparse, Dense, Fraction, VerticalSlash
from headscope.kernels.cells import reference
from headscope.studio.base import words
from headscope.studio.charts import charts
from headscope.studio.charts.maps import pooled_map
from headscope.studio.charts.overview import overview
from headscope.studio.charts.profile import profile_chart
from headscope.studio.charts.theme import DARK, GLYPHS, LIGHT, MARKS, theme
from headscope.studio.data import editor
from headscope.studio.data.maps import causal_pairs, edges, head_maps
from headscope.studio.data.profiles import MOST_SPANS, Profile

LIMIT = 2 * 2**20


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2."""
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=lambda one: one.name)
def test_the_mass_scale_reads_without_hue_and_text_has_contrast(palette) -> None:
    steps = [luminance(colour) for colour in palette.mass]
    assert steps == sorted(steps, reverse=palette.name == "light")
    assert contrast(palette.ink, palette.background) > 7
    assert contrast(palette.faint, palette.background) > 4.5
    assert contrast(palette.missed, palette.background) > 3
    assert contrast(palette.accent, palette.background) > 4.5


def test_patterns_differ_in_shape_and_colour_in_both_themes() -> None:
    assert len(set(MARKS.values())) == len(set(GLYPHS.values())) == len(MARKS)
    for palette in (LIGHT, DARK):
        assert len(set(palette.patterns.values())) == len(MARKS)
    assert theme("dark") is DARK and theme("light") is LIGHT and theme(None) is LIGHT


def test_no_colour_is_one_that_streamlit_replaces() -> None:
    """Streamlit takes #000001 to #000040 for its own theme's colours."""
    replaced = {f"#{number:06d}" for number in range(1, 41)}
    for palette in (LIGHT, DARK):
        used = {palette.ink, palette.faint, palette.accent, palette.missed, *palette.mass, *palette.patterns.values()}
        assert not used & replaced


def profile(length: int) -> Profile:
    limits = edges(0, length, min(length, MOST_SPANS))
    share = np.full(len(limits) - 1, 1 / (len(limits) - 1))
    return Profile(limits, share, np.ones_like(share), share)


def figures(layers: int, heads: int, cells: int, rows: int) -> dict[str, object]:
    rng = np.random.default_rng(0)
    values = rng.random((layers, heads))
    values[0, 0] = np.nan
    kinds = [[list(MARKS)[(layer + head) % len(MARKS)] for head in range(heads)] for layer in range(layers)]
    spans = edges(0, rows, cells)
    grid = np.where(np.tri(cells, dtype=bool), rng.random((cells, cells)), np.nan).astype(np.float32)
    points = [(kind, f"{kind} {cost}", cost, cost * 10, 1 - cost) for kind in MARKS for cost in (0.1, 0.5, 0.9)]
    return {
        "overview": overview(values, kinds, kinds, (1, 1), {(1, 0)}, "missed mass, mean", LIGHT),
        "dense": pooled_map(grid, spans, spans, "Dense", LIGHT),
        "computed": pooled_map(grid, spans, spans, "Computed", DARK, computed=grid),
        "missed": pooled_map(grid, spans, spans, "Missed", LIGHT, logarithmic=False, marked=[(3, 2)]),
        "along": charts.missed_along(
            rng.random(rows), edges(0, rows, 160), LIGHT, hover=["x" * 80] * 160, before=rng.random(rows)
        ),
        "profile": profile_chart(profile(rows), "By column", "key position (token)", LIGHT, logarithmic=True),
        "areas": charts.areas((10**12, 5, 0, 7), LIGHT),
        "trade-off": charts.trade_off(points, points[0][1], False, LIGHT),
        "by layer": charts.by_layer(list(range(layers)), [0.1] * layers, [0.2] * layers, LIGHT),
        "loss": charts.loss_steps((0.1, 0.2, -0.05, -0.02), ("a", "b", "c", "d"), LIGHT),
    }


@pytest.mark.parametrize("size", [(30, 9, 128, 2048), (80, 64, 256, 131_072)])
def test_every_figure_is_small_titled_and_has_axis_names(size: tuple[int, int, int, int]) -> None:
    for name, figure in figures(*size).items():
        assert len(figure.to_json()) < LIMIT, name
        assert figure.layout.title.text, name
        assert figure.layout.xaxis.title.text, name
        if name != "areas":
            assert figure.layout.yaxis.title.text, name


def test_legends_name_the_pattern_now_and_follow_the_order_of_the_bar() -> None:
    drawn = figures(4, 3, 16, 64)
    assert drawn["trade-off"].data[-1].name == "now"
    assert drawn["areas"].layout.legend.traceorder == "normal"
    assert drawn["areas"].data[0].name.startswith("blocks")


def test_the_overview_takes_clicks_through_invisible_squares_in_row_major_order() -> None:
    values = np.arange(12, dtype=float).reshape(4, 3) / 12
    labels = [["p"] * 3 for _ in range(4)]
    figure = overview(values, labels, [["dense"] * 3] * 4, (3, 2), (), "missed mass, mean", LIGHT)
    heat = figure.data[0]
    cells = next(trace for trace in figure.data if trace.name == "cells")
    assert heat.hoverinfo == "skip" and cells.marker.opacity == 0
    assert cells.unselected.marker.opacity == 0 and cells.selected.marker.opacity == 0
    assert list(cells.x) == [0, 1, 2] * 4 and list(cells.y) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert "Layer 3 · Head 2" in cells.text[-1] and words.percent(11 / 12) in cells.text[-1]
    assert (figure.layout.shapes[0].x0, figure.layout.shapes[0].y0) == (1.5, 2.5)


def test_beyond_4096_heads_the_click_layer_is_left_out() -> None:
    values = np.zeros((80, 64))
    grid = [["dense"] * 64] * 80
    assert all(t.name != "cells" for t in overview(values, grid, grid, None, (), "m", LIGHT).data)


def test_all_maps_share_one_scale_whatever_their_values() -> None:
    spans = edges(0, 64, 8)
    small = pooled_map(np.full((8, 8), 1e-3), spans, spans, "a", LIGHT)
    large = pooled_map(np.full((8, 8), 0.9), spans, spans, "b", LIGHT)
    assert (small.data[0].zmin, small.data[0].zmax) == (large.data[0].zmin, large.data[0].zmax) == (-4.0, 0.0)
    assert np.allclose(np.asarray(small.data[0].customdata)[..., 0], 1e-3), "hover shows the share, not its logarithm"


def test_text_of_a_prompt_is_inert_in_hover() -> None:
    text = words.inert('<a href="https://example.org">x</a> & <b>')
    figure = charts.missed_along(np.zeros(4), (0, 2, 4), LIGHT, hover=[text, "y"])
    assert "<a" not in json.loads(figure.to_json())["data"][1]["text"][0]


@pytest.mark.parametrize(
    "pattern", [VerticalSlash(24, 40, sink=2), AShape(3, 30), BlockSparse(2, 16), Dense()], ids=lambda one: one.kind
)
@pytest.mark.parametrize("crop", [None, (90, 180)])
def test_maps_equal_the_float64_reference(pattern, crop) -> None:
    torch.manual_seed(3)
    length = 203
    q, k, v = (torch.randn(1, 1, length, 16) * 2 for _ in range(3))
    inputs = LayerInputs(q, k, v)
    dense = measure.dense_pass(inputs)
    result = measure.measure_patterns(inputs, [pattern], dense=dense)
    found = head_maps(inputs, dense.lse, result.index, result.missed[0, 0], rows=crop, cells=10)
    causal = torch.ones(length, length).tril().bool()
    truth = reference.probabilities(q, k, causal[None, None], 16**-0.5)[0, 0].numpy()
    inside = result.index.computed_mask()[0, 0].numpy()
    r0, r1 = crop or (0, length)
    assert found.row_edges == edges(r0, r1, 10) and found.column_edges == edges(0, length, 10)
    for a, (top, bottom) in enumerate(zip(found.row_edges, found.row_edges[1:], strict=False)):
        for b, (left, right) in enumerate(zip(found.column_edges, found.column_edges[1:], strict=False)):
            cells = np.s_[top:bottom, left:right]
            pairs = causal.numpy()[cells].sum()
            if pairs == 0:
                assert np.isnan(found.dense[a, b]) and np.isnan(found.missed[a, b])
                continue
            rows = bottom - top
            assert found.dense[a, b] == pytest.approx(truth[cells].sum() / rows, abs=2e-5)
            assert found.missed[a, b] == pytest.approx((truth * ~inside)[cells].sum() / rows, abs=2e-5)
            assert found.computed[a, b] == pytest.approx(inside[cells].sum() / pairs, abs=1e-6)
    lost = truth * ~inside
    assert result.missed[0, 0].numpy() == pytest.approx(lost.sum(1), abs=2e-5)
    for place in found.places:
        assert place.probability == pytest.approx(lost[place.query, place.key], abs=2e-5)
        assert lost[place.query].max() == pytest.approx(place.probability, abs=2e-5)
    if found.places:
        assert found.places[0].probability == pytest.approx(lost.max(), abs=2e-5)


def test_causal_pairs_of_a_grid_add_up() -> None:
    grid = causal_pairs(edges(5, 40, 7), edges(0, 40, 9))
    assert grid.sum() == sum(row + 1 for row in range(5, 40))
    assert grid[0, -1] == 0


def test_percentages_and_times_read_well() -> None:
    said = {0.2923: "29.2 %", 0.0: "0 %", 0.00042: "0.04 %", 0.00001: "< 0.01 %", 1.0: "100 %", -0.02: "-2.0 %"}
    for value, text in said.items():
        assert words.percent(value).replace("\u00a0", " ") == text
    assert words.percent(float("nan")) == "not measured"
    times = {0.42: "0.42 ms", 5.25: "5.2 ms", 38.4: "38 ms", 1300: "1.3 s", 125_000: "2 min 5 s"}
    for value, text in times.items():
        assert words.milliseconds(value).replace("\u00a0", " ") == text


def test_a_finding_names_where_and_how_much() -> None:
    said = words.finding(0.29, 0.975, 1204, (0.1, 0.2, 0.6), near=0.1, far=0.8).replace("\u00a0", " ")
    assert said == (
        "Misses 29.0 % of its probability, most of it 256 tokens back or further; the worst row, token 1,204, misses "
        "97.5 %. The end of the prompt suffers most (60.0 %)."
    )
    assert "keeps all" in words.finding(0.0, 0.0, 0, (0, 0, 0), 0, 0)


def test_messages_never_read_as_markdown() -> None:
    said = words.plain_markdown("no file called <b>*x*</b> [a](http://e)")
    assert said.startswith("No file called \\<b\\>\\*x\\*") and "[a](" not in said


def test_excerpts_are_one_line_with_the_token_marked() -> None:
    pieces = ["def", " load", "(", "x", ")", ":\n", "   ", " return"]
    assert words.excerpt(pieces, 7, before=3) == "…): ⏎ ‹ return›"
    assert words.excerpt(pieces, 0) == "‹def›"


def test_the_editor_builds_what_it_shows() -> None:
    for pattern in (
        Dense(),
        AShape(4, 64),
        VerticalSlash(8, 32, 2, 4),
        BlockSparse(3, 32),
        VerticalSlash(8, windows=3, sink=1),
        VerticalSlash(Fraction(0.1), Fraction(0.2)),
    ):
        assert editor.build(pattern.kind, editor.values_of(pattern)) == pattern
    share = editor.as_share(64, 1000, True)
    assert isinstance(share, Fraction) and editor.as_share(share, 1000, False) == 64
    swept = editor.sweep(AShape(4, 64), 1000)
    assert swept[0] == AShape(4, 64) and len(set(swept)) == len(swept)
    assert {one.kind for one in swept} == set(editor.KINDS[1:])
