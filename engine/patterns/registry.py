"""The families by kind. Registering one checks it, so that what is missing shows at import, not in an empty chart."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from headscope.engine.patterns.base import COLOURS, ORACLES, Look, Pattern
from headscope.engine.patterns.budgets import from_json

FAMILIES: dict[str, type[Pattern]] = {}
"""Every registered family, the simplest first."""

Family = TypeVar("Family", bound=Pattern)


def register(family: type[Family]) -> type[Family]:
    """Adds a family; `TypeError` lists everything that it lacks or shares with another."""
    problems = _missing(family) or _clashes(family)
    if problems:
        raise TypeError(f"The pattern family {family.__name__} cannot be registered: {'; '.join(problems)}.")
    FAMILIES[family.kind] = family
    ordered = sorted(FAMILIES.items(), key=lambda item: item[1].rank)
    FAMILIES.clear()
    FAMILIES.update(ordered)
    return family


def _missing(family: type[Pattern]) -> list[str]:
    """Traits that every family must give."""
    if "__dataclass_params__" not in vars(family):
        return ["it must be a frozen dataclass"]
    required = ("kind", "rank", "look", "oracle", "cost_as")
    problems = [f"it has no {name}" for name in required if not hasattr(family, name)]
    methods = ["plan", "exported"]
    methods += ["amounts"] if dataclasses.fields(family) else []
    methods += [] if family.one_prompt else ["default"]
    methods += ["scaled"] if family.fields else []
    methods += ["imported"] if family.foreign_name else []
    problems += [f"it has no {name}()" for name in methods if _inherited(family, name)]
    names = {each.name for each in dataclasses.fields(family)}
    described = {each.name for each in family.fields}
    problems += [f"its field {name} is not in the class" for name in sorted(described - names)]
    if not family.one_prompt:
        problems += [f"fields does not describe {name}" for name in sorted(names - described)]
    return problems


def _inherited(family: type[Pattern], name: str) -> bool:
    of_family, of_base = getattr(family, name), getattr(Pattern, name)
    return getattr(of_family, "__func__", of_family) is getattr(of_base, "__func__", of_base)


def _clashes(family: type[Pattern]) -> list[str]:
    """Traits that are not among the allowed ones, or are those of another family."""
    problems = []
    others = [other for other in FAMILIES.values() if other is not family]
    for name in ("kind", "rank"):
        problems += [f"{name} is that of {o.__name__}" for o in others if getattr(o, name) == getattr(family, name)]
    if family.foreign_name is not None:
        problems += [f"foreign_name is that of {o.__name__}" for o in others if o.foreign_name == family.foreign_name]
    for part in (each.name for each in dataclasses.fields(Look)):
        mine = getattr(family.look, part)
        problems += [f"look.{part} {mine!r} is that of {o.__name__}" for o in others if getattr(o.look, part) == mine]
    if family.look.colour not in COLOURS:
        problems.append(f"look.colour must be one of {', '.join(COLOURS)}, got {family.look.colour!r}")
    if family.oracle not in ORACLES:
        problems.append(f"oracle must be one of {', '.join(ORACLES)}, got {family.oracle!r}")
    if family.cost_as not in (family.kind, *FAMILIES):
        problems.append(f"cost_as must be a family that is registered before it, got {family.cost_as!r}")
    return problems


def from_dict(entry: Any) -> Pattern:
    """The pattern that `to_dict` wrote. `ValueError` names the field that does not fit."""
    if not isinstance(entry, dict):
        raise ValueError(f"a pattern must be an object, got {type(entry).__name__}")
    kind = entry.get("pattern")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(f"pattern must be one of {', '.join(FAMILIES)}, got {str(kind)[:40]!r}")
    family = FAMILIES[kind]
    names = [each.name for each in dataclasses.fields(family)]
    unknown = sorted(set(entry) - {*names, "pattern"})
    if unknown:
        raise ValueError(f"{kind} has no field {unknown[0][:40]!r}; it has {', '.join(sorted(names)) or 'none'}")
    values = {name: from_json(f"{kind}.{name}", value) for name, value in entry.items() if name != "pattern"}
    try:
        return family(**values)
    except TypeError:
        raise ValueError(f"{kind} needs the fields {', '.join(names)}") from None
