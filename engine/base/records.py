"""What a file must hold, as pydantic schemas, and pydantic's findings as one sentence that names the place.

Schemas are strict: nothing is converted, unknown fields are refused, numbers are finite. They only judge; the value
itself stays as it was read, so that what is saved again has the same bytes.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from headscope.engine.base.errors import ConfigError, HeadscopeError

Count = Annotated[int, Field(ge=0, lt=2**40)]
"""A number of tokens, cells or heads."""

Share = Annotated[float, Field(ge=0, le=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Milliseconds = Annotated[float, Field(ge=0, lt=1e12)]
NumberKey = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,8}$")]
"""A whole number from 1 as JSON has it in the place of a key, where everything is text."""

Words = Annotated[str, Field(pattern=r"\S", max_length=200)]
"""A text that is not blank."""

_PATTERNS = {r"^[1-9][0-9]{0,8}$": "a whole number from 1", r"\S": "a text that is not blank"}


class Record(BaseModel):
    """An object with exactly these fields."""

    model_config = ConfigDict(strict=True, extra="forbid")


class OpenRecord(BaseModel):
    """An object with at least these fields."""

    model_config = ConfigDict(strict=True, extra="ignore")


def check_format(value: Any, wanted: str, what: str, error: type[HeadscopeError] = ConfigError) -> None:
    """Raise `error` unless `value` is an object of this format; `what` is such as `a head config`."""
    if not isinstance(value, dict):
        raise error(f'{what} is a JSON object with "format": "{wanted}", this is {kind(value)}.')
    if value.get("format") != wanted:
        raise error(f'{what} is a JSON object with "format": "{wanted}", got {shown(value.get("format"))}.')


def check(
    schema: Any, value: Any, place: str, error: type[HeadscopeError] = ConfigError, *, whole: str | None = None
) -> None:
    """Raise `error` with the first thing in `value` that `schema` (a Record, or any type) does not allow.

    `place` begins the names of fields: `model` for model.layers, `layer 1 head 2` or a file's name with a colon.
    `whole` is what lacks a field, or has one too many, where that is not the place.
    """
    try:
        _adapter(schema).validate_python(value)
    except ValidationError as problem:
        raise error(_sentence(problem.errors(include_url=False)[0], schema, place, whole or place)) from None


@cache
def _adapter(schema: Any) -> TypeAdapter[Any]:
    own = isinstance(schema, type) and issubclass(schema, BaseModel)
    return TypeAdapter(schema) if own else TypeAdapter(schema, config=ConfigDict(strict=True))


def _sentence(finding: Any, schema: Any, place: str, whole: str) -> str:
    path, name, value = finding["loc"], finding["type"], finding["input"]
    if name == "missing":
        return f"{_join(place, path[:-1]) if path[:-1] else whole} lacks the field {path[-1]!r}."
    if name == "extra_forbidden":
        fields = getattr(schema, "model_fields", {}) if len(path) == 1 else {}
        rest = f"; it may hold {', '.join(fields)}" if fields else ""
        return f"{_join(place, path[:-1]) if path[:-1] else whole} has the unknown field {str(path[-1])[:60]!r}{rest}."
    if path[-1:] == ("[key]",):
        return f"{_join(place, path[:-2])}: the key {str(path[-2])[:40]!r} must be {_wanted(name, finding)}."
    size = f"one of {len(value)}" if name in ("too_short", "too_long") else shown(value)
    return f"{_join(place, path)} must be {_wanted(name, finding)}, got {size}."


def _wanted(name: str, finding: Any) -> str:
    limits = finding.get("ctx", {})
    words = {
        "model_type": "an object",
        "dict_type": "an object",
        "list_type": "a list",
        "is_instance_of": "a list",
        "sequence_str": "a list",
        "string_type": "text",
        "bool_type": "true or false",
        "int_type": "a whole number",
        "float_type": "a number",
        "finite_number": "a finite number",
        "greater_than": f"a number above {limits.get('gt', 0):g}",
        "greater_than_equal": f"a number of at least {limits.get('ge', 0):g}",
        "less_than": f"a number below {limits.get('lt', 0):g}",
        "less_than_equal": f"a number of at most {limits.get('le', 0):g}",
        "too_short": f"a list of at least {limits.get('min_length')} items",
        "too_long": f"a list of at most {limits.get('max_length')} items",
        "string_too_short": "a text that is not empty",
        "string_too_long": f"a text of at most {limits.get('max_length')} characters",
        "string_pattern_mismatch": _PATTERNS.get(str(limits.get("pattern")), "another text"),
    }
    return words.get(name, str(finding["msg"]))


def _join(place: str, path: tuple[Any, ...]) -> str:
    """`model`, ("rope", 3) as `model.rope[3]`; words, such as `layer 1 head 2`, get a colon."""
    inner = ""
    for part in path:
        inner += f"[{part}]" if isinstance(part, int) else f".{str(part)[:60]}"
    if place.endswith(":"):
        return f"{place} {inner.removeprefix('.')}"
    return f"{place}: {inner.removeprefix('.')}" if inner and " " in place else (place + inner).removeprefix(".")


def kind(value: Any) -> str:
    """What a JSON value is, in words."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "nothing (null)"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def shown(value: Any) -> str:
    """A value as an error shows it: numbers and texts themselves, cut short, and the kind of anything larger."""
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return repr(str(value)[:40]) if isinstance(value, str) else str(value)[:40]
    return str(value).lower() if isinstance(value, bool) else kind(value)
