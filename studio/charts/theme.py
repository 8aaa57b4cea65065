"""Colours of the figures, for light and for dark.

Mass has one sequential scale whose lightness is monotone, so it reads without hue; what is missed or selected is
orange, which the common colour-vision deficiencies keep apart from blue; patterns differ in shape as well.
"""

from __future__ import annotations

from dataclasses import dataclass

Scale = list[list[float | str]]


@dataclass(frozen=True)
class Theme:
    """The palette of one mode. `mass` runs from nothing to all."""

    name: str
    background: str
    panel: str
    ink: str
    faint: str
    grid: str
    accent: str
    missed: str
    wash: str
    mass: tuple[str, ...]
    patterns: dict[str, str]

    @property
    def mass_scale(self) -> Scale:
        """`mass` as a plotly scale."""
        return _scale(self.mass)


def _scale(colours: tuple[str, ...]) -> Scale:
    return [[index / (len(colours) - 1), colour] for index, colour in enumerate(colours)]


MARKS: dict[str, str] = {
    "dense": "square-open",
    "a-shape": "triangle-up",
    "vertical-slash": "cross-thin-open",
    "block-sparse": "square",
    "fixed": "diamond-open",
}
"""A pattern's plotly marker: shapes differ, so colour is never the only sign."""

GLYPHS: dict[str, str] = {
    "dense": "□",
    "a-shape": "▲",
    "vertical-slash": "✛",
    "block-sparse": "■",
    "fixed": "◇",
}
"""The same marks in text."""

LIGHT = Theme(
    name="light",
    background="#ffffff",
    panel="#f5f7f9",
    ink="#1b2733",
    faint="#5d6b78",
    grid="#e3e8ed",
    accent="#1f6f9f",
    missed="#c2570c",
    wash="#e8853a",
    mass=("#f4f7f9", "#d5e6ee", "#a3cddd", "#62a9c6", "#2d7fab", "#1a5585", "#0c2a4f"),
    patterns={
        "dense": "#5d6b78",
        "a-shape": "#8a5fa8",
        "vertical-slash": "#1f6f9f",
        "block-sparse": "#c2570c",
        "fixed": "#3d7a4d",
    },
)

DARK = Theme(
    name="dark",
    background="#0f151b",
    panel="#17202a",
    ink="#e6ecf1",
    faint="#9aa8b4",
    grid="#26323d",
    accent="#6fb8dc",
    missed="#f0924a",
    wash="#e8853a",
    mass=("#151d26", "#17354d", "#1a5577", "#2a7ea1", "#54a9c0", "#9bd2d6", "#f1f8ea"),
    patterns={
        "dense": "#9aa8b4",
        "a-shape": "#c5a0df",
        "vertical-slash": "#6fb8dc",
        "block-sparse": "#f0924a",
        "fixed": "#86c79a",
    },
)


def theme(name: str | None) -> Theme:
    """The palette by name; anything but "dark" is light."""
    return DARK if name == "dark" else LIGHT
