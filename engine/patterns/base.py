"""What every pattern family says of itself.

A family is a frozen dataclass of budgets and a set of traits. The rest of headscope asks the traits and never which
class it has before it: charts take the look, the editor the fields, a search the rank and the cost family, exports
the foreign form. `registry.register` refuses a family that lacks one of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from headscope.engine.patterns.budgets import Budget, Fraction, check_count, check_most, to_json
from headscope.engine.patterns.foreign import ForeignHead
from headscope.kernels.cells.plan import TILE, HeadPlan, max_windows

COLOURS = ("grey", "violet", "blue", "orange", "green", "rose", "gold")
"""The colour roles that a family may take, one each. The studio's themes hold a colour for every role, light and dark,
told apart under the common colour-vision deficiencies."""

ORACLES = ("own", "lines", "a-shape", "blocks")
"""What the loss split compares a family with at equal cells: its own cells (nothing to choose), the best columns and
distances, the best sink and window, or the heaviest blocks."""


@dataclass(frozen=True)
class Look:
    """How figures show a family: a glyph for text, a plotly marker of the same shape, and a colour role."""

    glyph: str
    marker: str
    colour: str


@dataclass(frozen=True)
class Field:
    """One number of a family, for its own check and for an editor.

    `name` is that in the class, `label` has the unit. `least` and `most` bound it. With `share` it may be a
    `Fraction` of the length, and with `grows` it becomes one where a person asks for shares. An editor offers
    numbers from `offered` on (`least` if None), and a click changes them by `step` (by their size if None).
    """

    name: str
    label: str
    help: str
    least: int
    most: int | None = None
    share: bool = True
    grows: bool = True
    offered: int | None = None
    step: int | None = None

    def check(self, owner: str, value: Any) -> None:
        """`ValueError` naming the field, what was got and what is allowed."""
        name = f"{owner}.{self.name}"
        if self.share and isinstance(value, Fraction):
            return
        check_count(name, value, self.least)
        if self.most is not None:
            check_most(name, value, self.most)


@dataclass(frozen=True)
class Variant:
    """A switch between two forms of a family, such as distances or windows: what it says, and whether it is on."""

    label: str
    help: str
    on: bool


@dataclass(frozen=True)
class Pattern:
    """Base of the pattern families; use one of the subclasses.

    Traits without a value here must be given by every family.
    """

    kind: ClassVar[str]
    """The name of the family in files, tables and labels."""

    rank: ClassVar[int]
    """Simplicity: of equal choices the one with the smaller sum of ranks wins. No two families share one."""

    look: ClassVar[Look]

    fields: ClassVar[tuple[Field, ...]] = ()
    """Every number of the family, in the order of an editor."""

    joint: ClassVar[str] = "/"
    """What stands between the budgets in a label."""

    oracle: ClassVar[str]
    """One of `ORACLES`."""

    cost_as: ClassVar[str]
    """The family whose times a cost model gives to this one if it was fitted before this one existed; the families that
    every cost model holds name themselves."""

    foreign_name: ClassVar[str | None] = None
    """What MInference and SGLang call this family, if they have it."""

    is_dense: ClassVar[bool] = False
    """Whether it is every causal cell at any length: a layer of such heads runs in the dense kernel."""

    online: ClassVar[bool] = False
    """Whether its cells are chosen for the input at hand; the others are exact, known from the length alone."""

    sampled: ClassVar[bool] = False
    """Whether an estimator's sampled rows choose its cells."""

    one_prompt: ClassVar[bool] = False
    """Whether it holds positions of one prompt, so that no search and no editor offers it."""

    def __post_init__(self) -> None:
        optional = {each.name for each in dataclasses.fields(self) if each.default is None}
        for each in self.fields:
            value = getattr(self, each.name)
            if value is not None or each.name not in optional:
                each.check(type(self).__name__, value)

    def plan(self, length: int) -> HeadPlan:
        """The cells and online budgets of this pattern for a sequence of `length` tokens."""
        raise NotImplementedError(f"{type(self).__name__} has no plan")

    @classmethod
    def default(cls, length: int) -> Self:
        """A fair start for a person who chooses this family at a prompt of `length` tokens."""
        raise NotImplementedError(f"{cls.__name__} has no default")

    def scaled(self, factor: float, length: int) -> Self | None:
        """The same family with its main budgets times `factor`, for curves; None where there is nothing to scale."""
        return None

    @property
    def active_fields(self) -> tuple[Field, ...]:
        """The fields that this form of the family uses."""
        return self.fields

    @property
    def variant(self) -> Variant | None:
        """The switch between two forms of the family, if it has two."""
        return None

    def switched(self, on: bool) -> Self:
        """The form of the family that its switch gives."""
        return self

    def amounts(self) -> tuple[tuple[Budget, str], ...]:
        """The budgets of a label, each with its unit ("" where the family's name tells it)."""
        return ()

    def budgets(self, number: Callable[[Budget], str] = str, joint: str | None = None) -> str:
        """The budgets as text, such as `64/256`; `number` writes one, `joint` stands between two."""
        texts = (f"{number(amount)} {unit}".strip() for amount, unit in self.amounts())
        return (self.joint if joint is None else joint).join(texts)

    @property
    def label(self) -> str:
        """A short text such as `vertical-slash 64/256`."""
        return f"{self.kind} {self.budgets()}".strip()

    def covers_all(self, length: int) -> bool:
        """Whether it keeps every cell of a sequence of `length` tokens, so that it is dense in disguise."""
        plan = self.plan(length)
        if plan.top_blocks:
            return plan.top_blocks >= -(-length // plan.block_size)
        if plan.windows:
            return plan.windows >= max_windows(length, TILE) - 1 or plan.vertical >= length
        if plan.slash:
            return plan.slash >= length or plan.vertical >= length
        if len(plan.columns) >= length:
            return True
        return any(low == 0 and high + 1 + len(plan.columns) >= length for low, high in plan.bands)

    def exported(self, tool: str) -> ForeignHead:
        """This head as `tool` (`minference` or `sglang`) writes it, or the nearest it can, with what is lost."""
        raise NotImplementedError(f"{type(self).__name__} has no export")

    @classmethod
    def imported(cls, tool: str, first: int, second: int) -> Self:
        """What the code of `tool` runs for `[foreign_name, first, second]`. `ValueError` where it runs nothing."""
        raise NotImplementedError(f"{cls.__name__} has no import")

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form that `from_dict` turns back into an equal pattern."""
        names = [each.name for each in dataclasses.fields(self)]
        entries = {name: to_json(getattr(self, name)) for name in names}
        return {"pattern": self.kind} | {name: value for name, value in entries.items() if value is not None}
