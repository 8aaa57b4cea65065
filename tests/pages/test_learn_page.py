"""The learn page as a person meets it: its numbers, read off the page, against the article's."""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
from streamlit.testing.v1 import AppTest

from headscope.studio.lab.jobs import Context, Worker
from headscope.studio.lessons.contents import CHAPTERS
from headscope.studio.lessons.maths import real_heads, tiles, time_split
from headscope.studio.ui import state

PAGE = Path(__file__).resolve().parents[2] / "pages" / "learn.py"


def page(chapter: int | str, **state: object) -> AppTest:
    """The page with one chapter open, run once."""
    at = AppTest.from_file(PAGE, default_timeout=60)
    at.query_params["chapter"] = str(chapter)
    for key, value in state.items():
        at.session_state[key.replace("_", "-")] = value
    return at.run()


def value(at: AppTest, label: str) -> str:
    """The number shown under a label."""
    return next(metric.value for metric in at.metric if metric.label == label)


def floats(text: str) -> tuple[float, ...]:
    """All numbers in a text."""
    return tuple(float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", text))


def answer(at: AppTest) -> str:
    """What the expander under the question holds."""
    return next(one for one in at.expander if one.label == "Show the answer").markdown[0].value


@pytest.mark.parametrize("chapter", [one.number for one in CHAPTERS])
def test_every_chapter_opens_with_formula_source_picture_and_question(chapter: int) -> None:
    at = page(chapter)
    assert not at.exception
    assert at.header[0].value == f"{chapter} · {CHAPTERS[chapter - 1].title}"
    assert len(at.latex) == 1
    assert any("2407.02490" in caption.value for caption in at.caption)
    assert at.get("plotly_chart")
    assert answer(at)


@pytest.mark.parametrize("text", ["0", "11", "-3", "three", "１"])
def test_an_address_that_names_no_chapter_opens_the_first(text: str) -> None:
    assert page(text).header[0].value.startswith("1 ·")


def test_rerunning_any_chapter_is_quick() -> None:
    # Processor time, so that a busy machine does not decide.
    for chapter in CHAPTERS:
        at = page(chapter.number)
        began = time.process_time()
        at.run()
        assert time.process_time() - began < 2, f"chapter {chapter.number}"


def test_dense_cells() -> None:
    at = page(1)
    assert value(at, "cells the engine counts") == value(at, "n (n + 1) / 2") == "78"
    at.slider(key="dense-n").set_value(8).run()
    assert value(at, "cells the engine counts") == "36"


def test_a_shape_reads_21_cells() -> None:
    at = page(2)
    assert value(at, "cells") == "21"
    at.slider(key="ashape-window").set_value(8).run()
    assert value(at, "cells") == "36"


def test_query_6_by_hand() -> None:
    at = page(3)
    assert value(at, "row 6 reads") == "{1, 4, 6}"
    assert floats(value(at, "weights")) == pytest.approx((0.422, 0.155, 0.422), abs=1e-9)
    assert floats(value(at, "output")) == pytest.approx((1.266, 0.732), abs=2e-3)
    assert any("(1.266, 0.732)" in caption.value and "rounds" in caption.value for caption in at.caption)
    assert "1,536" in answer(at)


def test_buttons_change_what_row_6_reads() -> None:
    at = page(3)
    at.pills(key="vslash-columns").set_value([1, 3]).run()
    assert value(at, "row 6 reads") == "{1, 3, 4, 6}"
    at.pills(key="vslash-distances").set_value([]).run()
    assert value(at, "row 6 reads") == "{1, 3}"
    at.pills(key="vslash-columns").set_value([]).run()
    assert not at.exception
    assert any("reads nothing" in info.value for info in at.info)


def test_forgetting_to_de_duplicate_is_shown_to_be_wrong() -> None:
    at = page(3)
    at.toggle(key="vslash-forget").set_value(True).run()
    assert any("nothing is read twice" in info.value for info in at.info)
    next(button for button in at.button if button.label.startswith("Add column 6")).click().run()
    assert value(at, "row 6 reads").count("6") == 2
    assert at.error and at.error[0].value.startswith("Wrong.")
    assert "(1.267, 0.733)" in at.error[0].value


def test_a_row_near_the_start_has_its_far_distance_cut() -> None:
    at = page(3)
    at.slider(key="vslash-row").set_value(1).run()
    assert value(at, "row 1 reads") == "{1}"
    assert any("1 − 2 = -1" in caption.value for caption in at.caption)


def test_block_drawing() -> None:
    at = page(4)
    assert value(at, "cells read") == "20"
    assert "20 cells" in answer(at)


def test_stepping_through_tiles_ends_at_the_softmax() -> None:
    at = page(5)
    for _ in range(2):
        at.button(key="online-next").click().run()
    assert at.button(key="online-next").disabled
    whole = next(caption.value for caption in at.caption if caption.value.startswith("Merging the tiles"))
    merged_x, merged_y, x, y = floats(whole)[2:]
    assert (merged_x, merged_y) == pytest.approx((x, y), abs=1e-6)
    assert floats(value(at, "output p / l")) == pytest.approx((x, y), abs=1e-3)


def test_moving_the_sampled_rows_finds_the_early_key() -> None:
    at = page(6)
    assert value(at, "columns") == "{0}"
    assert any("**lost**" in text.value for text in at.markdown)
    at.slider(key="est8-rows").set_value(3).run()
    assert value(at, "columns") == "{3}"
    assert any("**kept**" in text.value for text in at.markdown)


def test_two_chapters_open_without_a_model() -> None:
    at = page(6)
    at.segmented_control(key="est-prompt").set_value("two chapters").run()
    assert not at.exception
    assert "27" in value(at, "columns")
    at.segmented_control(key="est48-where").set_value("spread").run()
    assert {"6", "27"} <= set(re.findall(r"\d+", value(at, "columns")))


def test_tiles_never_compute_less_than_was_asked() -> None:
    at = page(7)
    asked = value(at, "requested")
    for width in ("1", "2", "4", "16"):
        at.segmented_control(key="tiles-width").set_value(width).run()
        assert value(at, "requested") == asked
        assert int(value(at, "computed").replace(",", "")) >= int(asked.replace(",", ""))


def test_captured_mass_from_two_lses() -> None:
    at = page(8)
    assert value(at, "captured = exp(difference)") == value(at, "kept weights added up")


def test_the_layer_is_2_86_times_as_fast() -> None:
    at = page(9)
    assert value(at, "speed-up") == "2.86×"
    assert value(at, "ceiling 1 / (1 − f)") == "5.00×"
    assert value(at, "kernel alone") == "8.0×"


def test_a_guess_is_judged_by_the_computed_answer() -> None:
    at = page(9)
    at.number_input(key="time-guess").set_value(8).run()
    assert not at.success
    at.number_input(key="time-guess").set_value(5).run()
    assert at.success


def test_real_heads_say_what_to_do_without_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSCOPE_CACHE", str(tmp_path))
    at = page(10)
    assert not at.exception
    assert any("headscope fetch smollm2" in info.value for info in at.info)
    assert not any(button.key == "real-run" for button in at.button)


def until(at: AppTest, reached: Callable[[], bool]) -> None:
    """Reruns the page until something is so, as its progress bar does."""
    for _ in range(200):
        if reached():
            return
        time.sleep(0.02)
        at.run()
    raise AssertionError("it never came to that")


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker of its own in place of the lab, and a model that is there."""
    one = SimpleNamespace(worker=Worker(), models=SimpleNamespace(load=lambda name, context: None))
    monkeypatch.setattr(state, "lab", lambda: one)
    monkeypatch.setattr(real_heads, "fetched", lambda model: True)
    yield one
    one.worker.close()


def test_measuring_real_heads_shows_progress_and_can_be_cancelled(held: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(loaded: object, prompt: str, context: Context) -> tuple[()]:
        while True:
            context.step(3, 10, f"Reading {prompt}: layer 3 of 10")
            time.sleep(0.01)

    monkeypatch.setattr(real_heads, "live", slow)
    at = page(10)
    at.button(key="real-run").click().run()
    until(at, lambda: any("layer 3 of 10" in one.proto.text for one in at.get("progress")))
    assert not any(button.key == "real-run" for button in at.button)
    next(button for button in at.button if button.label == "Cancel").click().run()
    until(at, lambda: any(info.value.startswith("Cancelled") for info in at.info))
    assert any(button.key == "real-run" for button in at.button)
    assert not at.exception


def test_what_stops_the_measurement_is_said(held: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(loaded: object, prompt: str, context: Context) -> tuple[()]:
        raise MemoryError

    monkeypatch.setattr(real_heads, "live", broken)
    at = page(10)
    at.button(key="real-run").click().run()
    until(at, lambda: any("not enough memory" in error.value for error in at.error))
    assert any(button.key == "real-run" for button in at.button)


@pytest.mark.parametrize(
    ("chapter", "key", "maths", "shown"),
    [(7, "tiles", tiles, "tile widths"), (9, "time", time_split, "2,048 tokens")],
)
def test_times_are_taken_on_the_device_thread_and_never_beside_a_run(
    chapter: int, key: str, maths: Any, shown: str, held: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, may_end = [], threading.Event()
    timer = "timed" if maths is tiles else "measure_heads"
    real = getattr(maths, timer)

    def watched(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return real(*args, **options)

    monkeypatch.setattr(maths, timer, watched)
    run = held.worker.submit("somebody else", "run", "Run", lambda context: may_end.wait(60))
    at = page(chapter)
    assert any("Nothing is timed while a run is under way" in caption.value for caption in at.caption)
    assert shown in at.button(key=f"{key}-run").label
    at.button(key=f"{key}-run").click().run()
    until(at, lambda: any("1 run before this one" in one.proto.text for one in at.get("progress")))
    assert run.open and not threads
    may_end.set()
    until(at, lambda: any(button.key == f"{key}-run" for button in at.button))
    assert set(threads) == {"headscope-device"}
    assert not at.exception and not any("Nothing is timed" in caption.value for caption in at.caption)
    told = [*at.markdown, *at.caption]
    assert any(one.value.startswith(("Width", "Here width", "Best at")) for one in told)


def query(at: AppTest) -> dict[str, str]:
    """The address's parameters; AppTest gives what the script wrote as text, what it was given as a list."""
    return {name: text if isinstance(text, str) else text[-1] for name, text in at.query_params.items()}


def test_the_address_keeps_session_and_run_beside_the_pages_own_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened() -> None:
        raise AssertionError("a lesson opens no database")

    monkeypatch.setattr(state, "lab", opened)
    link = {
        "s": "abcdefghij",
        "model": "gemma3-270m",
        "prompt": "prose",
        "run": "0123456789ab",
        "layer": "2",
        "head": "1",
        "metric": "missed_mass_worst",
    }
    seen = state.from_query(link)
    own = {"chapter": "2", "ashape-n": "16", "ashape-sink": "3"}
    at = AppTest.from_file(PAGE, default_timeout=60)
    at.session_state["view"] = seen
    for name, text in own.items():
        at.query_params[name] = text
    at.run()
    assert not at.exception and query(at) == link | own
    assert state.from_query(query(at)) == dataclasses.replace(seen, born=ANY)
    at.button(key="learn-to-1").click().run()
    assert not at.exception and at.header[0].value.startswith("3 ·")
    assert query(at).items() >= (link | {"chapter": "3"}).items()


def test_a_bare_address_gets_the_sessions_name() -> None:
    at = page(4)
    session = at.session_state["view"].session
    assert query(at)["s"] == session and query(at)["chapter"] == "4"
    assert not at.run().exception and query(at)["s"] == session
