"""Tables as files to take home."""

from __future__ import annotations

import polars as pl

FORMULA = "^[=+\\-@\\t\\r]"
"""How a cell begins that a spreadsheet would run."""


def csv(frame: pl.DataFrame) -> bytes:
    """A frame as CSV whose texts no spreadsheet takes for a formula: an apostrophe stands before such a text."""
    texts = frame.select(
        pl.when(pl.col(name).str.contains(FORMULA)).then("'" + pl.col(name)).otherwise(pl.col(name)).alias(name)
        for name, kind in frame.schema.items()
        if kind == pl.String
    )
    return frame.with_columns(texts.get_columns()).write_csv().encode()
