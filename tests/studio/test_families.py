"""Every registered family as the studio shows and edits it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from headscope.engine.patterns.families import FAMILIES, AShape, BlockSparse, Fixed, Fraction, Pattern, VerticalSlash
from headscope.studio.base import words
from headscope.studio.charts import charts
from headscope.studio.charts.overview import overview as draw_overview
from headscope.studio.charts.theme import DARK, GLYPHS, LIGHT, MARKS, Theme
from headscope.studio.data import editor
from tests.engine.test_families import EVERY
from tests.studio.test_charts import contrast

DEFICIENCIES = {
    "none": np.eye(3),
    "protan": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deutan": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritan": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
"""Linear sRGB as it is seen (Machado, Oliveira and Fernandes, 2009, severity 1)."""

LEAST_DISTANCE = 0.06
"""In OKLab, where 0.02 is just noticeable."""


def seen(colour: str, deficiency: np.ndarray) -> np.ndarray:
    """A colour in OKLab (Ottosson, 2020), as a deficiency shows it."""
    parts = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    cones = np.array(
        [
            [0.4122214708, 0.5363325363, 0.0514459929],
            [0.2119034982, 0.6806995451, 0.1073969566],
            [0.0883024619, 0.2817188376, 0.6299787005],
        ]
    ) @ np.clip(deficiency @ linear, 0, 1)
    lab = np.array(
        [
            [0.2104542553, 0.7936177850, -0.0040720468],
            [1.9779984951, -2.4285922050, 0.4505937099],
            [0.0259040371, 0.7827717662, -0.8086757660],
        ]
    )
    return lab @ np.cbrt(cones)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=lambda one: one.name)
@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_colour_roles_are_told_apart_with_any_colour_vision(palette: Theme, deficiency: str) -> None:
    lab = {role: seen(colour, DEFICIENCIES[deficiency]) for role, colour in palette.roles.items()}
    for one, other in itertools.combinations(lab, 2):
        assert np.linalg.norm(lab[one] - lab[other]) >= LEAST_DISTANCE, (one, other)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=lambda one: one.name)
def test_colour_roles_stand_out_from_the_paper(palette: Theme) -> None:
    for role, colour in palette.roles.items():
        assert min(contrast(colour, palette.background), contrast(colour, palette.panel)) >= 2.8, role


def test_every_family_has_a_mark_of_its_own_in_both_themes() -> None:
    assert list(MARKS) == list(GLYPHS) == list(FAMILIES)
    assert len(set(MARKS.values())) == len(set(GLYPHS.values())) == len(FAMILIES)
    for palette in (LIGHT, DARK):
        assert list(palette.patterns) == list(FAMILIES) and len(set(palette.patterns.values())) == len(FAMILIES)


def test_a_theme_without_a_colour_for_a_role_is_refused() -> None:
    roles = dict(list(LIGHT.roles.items())[:-1])
    with pytest.raises(ValueError, match="needs a colour for each of grey, violet"):
        Theme("thin", *["#ffffff"] * 8, ("#ffffff", "#000000"), roles)


@pytest.mark.parametrize("pattern", EVERY, ids=lambda one: one.label)
def test_an_editor_builds_what_it_shows(pattern: Pattern) -> None:
    values = {} if pattern.one_prompt else editor.values_of(pattern)
    assert editor.build(pattern.kind, values) == pattern
    assert words.label(pattern).startswith(pattern.kind)
    for field in editor.fields_of(pattern):
        assert field.label and field.help
        if isinstance(values[field.name], int):
            changed = editor.build(pattern.kind, {**values, field.name: values[field.name] + 1})
            assert changed != pattern and words.label(changed)


def test_labels_come_from_one_source() -> None:
    assert words.label(AShape(4, 2048)) == "a-shape 4 / 2,048"
    assert words.label(VerticalSlash(64, Fraction(0.1))) == "vertical-slash 64 / 10 %"
    assert words.label(VerticalSlash(64, windows=4)) == "vertical-slash 64 / 4 windows"
    assert words.label(BlockSparse(8, 64)) == "block-sparse 8 × 64"
    assert words.label(Fixed((1, 2), (0,))) == "fixed 2 columns, 1 distances, 0 blocks"


def test_a_sweep_and_its_chart_hold_every_family_that_a_person_may_choose() -> None:
    swept = editor.sweep(AShape(4, 64), 4096)
    assert {one.kind for one in swept} == set(editor.KINDS[1:])
    points = [(one.kind, words.label(one), 0.1 * at, 1.0, 0.1) for at, one in enumerate(swept)]
    drawn = charts.trade_off(points, words.label(swept[0]), False, LIGHT)
    assert {trace.name for trace in drawn.data} >= set(editor.KINDS[1:])
    grid = [list(FAMILIES)]
    overview = draw_overview(np.zeros((1, len(FAMILIES))), grid, grid, (0, 0), set(), "missed mass, mean", LIGHT)
    assert {trace.name for trace in overview.data} >= set(FAMILIES)
