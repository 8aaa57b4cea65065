"""Colours of the figures, for light and for dark.

Mass has one sequential scale whose lightness is monotone, so it reads without hue; what is missed or selected is
orange, which the common colour-vision deficiencies keep apart from blue; patterns differ in shape as well. A pattern
family names a glyph, a marker and a colour role; the themes hold a colour for every role.
"""

from __future__ import annotations

from dataclasses import dataclass

from headscope.engine.patterns.base import COLOURS
from headscope.engine.patterns.families import FAMILIES

Scale = list[list[float | str]]


@dataclass(frozen=True)
class Theme:
    """The palette of one mode. `mass` runs from nothing to all; `roles` holds a colour for every role of a family."""

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
    roles: dict[str, str]

    def __post_init__(self) -> None:
        if tuple(self.roles) != COLOURS:
            raise ValueError(f"The {self.name} theme needs a colour for each of {', '.join(COLOURS)}, in that order.")

    @property
    def patterns(self) -> dict[str, str]:
        """The colour of every pattern family."""
        return {kind: self.roles[family.look.colour] for kind, family in FAMILIES.items()}

    @property
    def mass_scale(self) -> Scale:
        """`mass` as a plotly scale."""
        return _scale(self.mass)


def _scale(colours: tuple[str, ...]) -> Scale:
    return [[index / (len(colours) - 1), colour] for index, colour in enumerate(colours)]


MARKS: dict[str, str] = {kind: family.look.marker for kind, family in FAMILIES.items()}
"""A pattern's plotly marker: shapes differ, so colour is never the only sign."""

GLYPHS: dict[str, str] = {kind: family.look.glyph for kind, family in FAMILIES.items()}
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
    roles={
        "grey": "#5f6772",
        "violet": "#8d60c9",
        "blue": "#1f6f9f",
        "orange": "#c2570c",
        "green": "#13926b",
        "rose": "#b12a4b",
        "gold": "#ae8d32",
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
    roles={
        "grey": "#89a2b4",
        "violet": "#b297ff",
        "blue": "#6fb8dc",
        "orange": "#f0924a",
        "green": "#8cc89b",
        "rose": "#f66d92",
        "gold": "#e5c558",
    },
)


def theme(name: str | None) -> Theme:
    """The palette by name; anything but "dark" is light."""
    return DARK if name == "dark" else LIGHT
