"""What a table that is taken home may hold."""

from __future__ import annotations

import polars as pl
import pytest

from headscope.studio.data.tables import csv


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r"])
def test_no_text_is_a_formula_for_a_spreadsheet(start: str) -> None:
    text = f'{start}HYPERLINK("http://x.example","y")'
    frame = pl.DataFrame({"token": [text, "plain", None, "a=b"], "missed": [-0.5, 1.0, 0.0, 2.0]})
    back = pl.read_csv(csv(frame), raise_if_empty=False)
    assert back["token"].to_list() == ["'" + text, "plain", None, "a=b"]
    assert back["missed"].to_list() == [-0.5, 1.0, 0.0, 2.0], "a number is no formula"


def test_a_table_without_texts_is_as_it_was() -> None:
    frame = pl.DataFrame({"row": [0, 1], "missed": [0.25, -0.5]})
    assert csv(frame) == frame.write_csv().encode()
    assert csv(frame.clear()) == frame.clear().write_csv().encode()
