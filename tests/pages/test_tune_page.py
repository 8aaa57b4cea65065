"""The Tune page: edits that survive, fields that mean what they show, and the curve and the whole model behind it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headscope.engine.patterns.families import AShape, Dense, VerticalSlash
from headscope.studio.base import words
from headscope.studio.data import editor
from headscope.studio.data.results import worst_order
from headscope.studio.lab.lab import Lab
from headscope.studio.ui.view import View
from tests.helpers import studio_pages
from tests.helpers.studio_pages import SESSION, ok, page, run_now, shown, wait

lab = studio_pages.lab


def test_three_edits_in_a_row_all_survive_and_undo_takes_them_back(lab: Lab) -> None:
    view = View(SESSION, run_id=run_now(lab), layer=1, head=2)
    test = ok(page("tune", view))
    ok(test.segmented_control(key="kind").set_value("a-shape").run())
    ok(test.number_input(key="budget-window-1-2").set_value(40).run())
    ok(test.number_input(key="budget-sink-1-2").set_value(9).run())
    run = lab.runs.open(view.run_id)
    draft = lab.drafts.of(SESSION, run.facts)
    assert draft.patterns[1][2] == AShape(9, 40)
    assert draft.title == "start + 3 edits"
    again = ok(page("tune", View(SESSION, run_id=view.run_id, layer=1, head=2)))
    assert (
        again.number_input(key="budget-window-1-2").value == 40 and again.number_input(key="budget-sink-1-2").value == 9
    )
    known = lab.measurements.known(view.run_id, 1, 2, AShape(9, 40))
    metrics = {item.label: item.value for item in again.metric}
    assert metrics["misses, mean"] == words.percent(known.missed_mass_mean)
    ok(again.button(key="undo").click().run())
    assert again.number_input(key="budget-sink-1-2").value == 4
    ok(again.button(key="undo").click().run())
    ok(again.button(key="undo").click().run())
    assert again.button(key="undo").disabled
    assert lab.drafts.of(SESSION, run.facts).changed == frozenset()


def test_edit_switch_page_and_come_back(lab: Lab) -> None:
    view = View(SESSION, run_id=run_now(lab), layer=0, head=5)
    ok(page("tune", view).segmented_control(key="kind").set_value("block-sparse").run())
    heads = ok(page("heads", view))
    assert "block-sparse 1 × 64" in shown(heads)
    assert page("tune", view).segmented_control(key="kind").value == "block-sparse"


def test_every_family_can_be_chosen_and_shows_its_own_fields(lab: Lab) -> None:
    view = View(SESSION, run_id=run_now(lab), layer=1, head=3)
    test, run = ok(page("tune", view)), lab.runs.open(view.run_id)
    for kind in editor.KINDS:
        ok(test.segmented_control(key="kind").set_value(kind).run())
        pattern = editor.default(kind, run.row.tokens)
        assert lab.drafts.of(SESSION, run.facts).patterns[1][3] == pattern
        assert {item.label for item in test.number_input} >= {field.label for field in editor.fields_of(pattern)}
        assert words.label(pattern) in shown(test)


def test_a_pattern_spreads_to_group_layer_and_alike(lab: Lab) -> None:
    view = View(SESSION, run_id=run_now(lab), layer=1, head=4)
    test = ok(page("tune", view))
    ok(test.segmented_control(key="kind").set_value("dense").run())
    ok(test.button(key="scope-its group").click().run())
    run = lab.runs.open(view.run_id)
    assert [p.kind for p in lab.drafts.of(SESSION, run.facts).patterns[1]] == ["vertical-slash"] * 3 + ["dense"] * 3
    ok(test.button(key="scope-its layer").click().run())
    assert all(p == Dense() for p in lab.drafts.of(SESSION, run.facts).patterns[1])
    ok(test.button(key="scope-same pattern").click().run())
    assert all(p == Dense() for row in lab.drafts.of(SESSION, run.facts).patterns for p in row)
    assert "keeps all of its attention" in shown(test)
    ok(test.button(key="undo").click().run())
    assert lab.drafts.of(SESSION, run.facts).patterns[0][0].kind == "vertical-slash"


def test_budgets_as_shares_and_windows_and_a_budget_that_does_not_fit(lab: Lab) -> None:
    view = View(SESSION, run_id=run_now(lab), layer=1, head=1)
    test = ok(page("tune", view))
    assert test.toggle(key="share").value, "the start is a share of the prompt"
    ok(test.toggle(key="share").set_value(False).run())
    ok(test.toggle(key="windowed").set_value(True).run())
    pattern = lab.drafts.of(SESSION, lab.runs.open(view.run_id).facts).patterns[1][1]
    assert pattern.windows == 4
    ok(test.toggle(key="windowed").set_value(False).run())
    ok(test.number_input(key="budget-local-1-1").set_value(258).run())
    assert "does not fit" in shown(test) and "local" in shown(test)
    assert test.number_input(key="budget-local-1-1").value == 16


def test_a_field_means_what_it_shows_beside_shares(lab: Lab) -> None:
    """Counts stay counts beside a share, and a share keeps its floor."""
    view = View(SESSION, run_id=run_now(lab), layer=0, head=1)
    facts = lab.runs.open(view.run_id).facts
    test = ok(page("tune", view))

    def enter(name: str, number: float | None) -> VerticalSlash:
        ok(test.number_input(key=f"budget-{name}-0-1").set_value(number).run())
        return lab.drafts.of(SESSION, facts).patterns[0][1]

    start = lab.drafts.of(SESSION, facts).patterns[0][1]
    assert start.vertical.least == 32 and start.slash.least == 64
    assert enter("vertical", 8.0).vertical == replace(start.vertical, of=0.08)
    ok(test.toggle(key="windowed").set_value(True).run())
    assert test.number_input(key="budget-windows-0-1").label == "Windows (of 128)"
    changed = enter("windows", 2)
    assert changed.windows == 2 and changed.vertical == replace(start.vertical, of=0.08)
    ok(test.toggle(key="windowed").set_value(False).run())
    assert enter("slash", 90).slash == 90
    before = lab.drafts.of(SESSION, facts)
    assert enter("vertical", None) == before.patterns[0][1], "an emptied field is no edit"
    assert test.number_input(key="budget-vertical-0-1").value == 8.0
    assert lab.drafts.of(SESSION, facts).title == before.title


def test_two_tabs_may_edit_one_head(lab: Lab) -> None:
    run = run_now(lab)
    view = [View(SESSION, run_id=run, layer=0, head=2) for _ in range(2)]
    first, second = (ok(page("tune", one)) for one in view)
    ok(second.number_input(key="budget-slash-0-2").set_value(20.0).run())
    ok(first.number_input(key="budget-sink-0-2").set_value(6).run())
    pattern = lab.drafts.of(SESSION, lab.runs.open(run).facts).patterns[0][2]
    assert pattern.slash.of == pytest.approx(0.2) and pattern.sink == 6


def test_the_worst_first_queue_keeps_its_order_while_heads_are_mended(lab: Lab) -> None:
    run = lab.runs.open(run_now(lab))
    grid = lab.measurements.grid(run.id, lab.drafts.of(SESSION, run.facts).patterns)
    order = worst_order([[one.missed_mass_mean for one in row] for row in grid])
    view = View(SESSION, run_id=run.id, layer=order[0][0], head=order[0][1])
    test = ok(page("tune", view))
    for place in order[:3]:
        assert (view.layer, view.head) == place
        ok(test.segmented_control(key="kind").set_value("dense").run())
        ok(test.button(key="tune-next").click().run())
    assert (view.layer, view.head) == order[3]


def test_the_curve_and_the_reason_draw(lab: Lab) -> None:
    test = ok(page("tune", View(SESSION, run_id=run_now(lab), layer=2, head=0)))
    ok(test.button(key="curve").click().run())
    ok(test.toggle(key="why").set_value(True).run())
    assert any(text in shown(test) for text in ("More budget", "Another pattern", "More sampling", "The loss is small"))


def test_the_whole_model_runs_with_the_draft(lab: Lab) -> None:
    view = View(SESSION, run_id=run_now(lab), layer=0, head=0)
    test = ok(page("tune", view))
    ok(test.button(key="compare").click().run())
    wait(lab)
    ok(test.run())
    made = view.comparison
    assert made.kl >= 0 and made.dense.ttft_ms > 0 and made.sparse.ttft_ms > 0
    assert len(made.in_situ) == len(made.isolated) == 3
    # Before the first sparse layer nothing differs, so its loss in place is its isolated one.
    assert made.in_situ[0] == pytest.approx(made.isolated[0], abs=1e-5)
    labels = {item.label for item in test.metric}
    assert {"next-token KL", "TTFT, dense", "TTFT, sparse", "missed in situ, mean"} <= labels
    assert lab.store.latencies(view.run_id)[0]["body"]["kl"] == made.kl
