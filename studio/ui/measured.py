"""Having every head of a draft measured, while the page waits or as a job."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from headscope.engine.base.errors import HeadscopeError
from headscope.engine.config.facts import FULL
from headscope.engine.loss.measure import HeadMeasurement
from headscope.engine.patterns.families import Pattern
from headscope.studio.base import words
from headscope.studio.lab.measurements import QUICK_HEADS
from headscope.studio.ui.context import RunContext

MeasuredGrid = list[list[HeadMeasurement | None]]
"""Every head as measured, by layer and head; None where it is not."""


def measured(page: RunContext) -> MeasuredGrid:
    """Every head of the draft as measured on this run; a few that are missing are measured now, many as a job."""
    run, draft, measurements = page.run, page.draft, page.lab.measurements
    grid = measurements.grid(run.id, draft.patterns, draft.estimator)
    missing = [
        (layer, head, draft.patterns[layer][head])
        for layer, row in enumerate(grid)
        for head, one in enumerate(row)
        if one is None and run.facts.layer_types[layer] == FULL
    ]
    if not missing:
        return grid
    if len(missing) > QUICK_HEADS:
        _measure_as_job(page, missing)
        return grid
    try:
        page.lab.worker.quick(lambda: measurements.measure(run, missing, estimator=draft.estimator))
    except HeadscopeError as error:
        st.error(words.plain_markdown(str(error)))
    return measurements.grid(run.id, draft.patterns, draft.estimator)


def _measure_as_job(page: RunContext, missing: Sequence[tuple[int, int, Pattern]]) -> None:
    """Many heads have a pattern that was never measured on this run: measure them as a job."""
    job = page.job
    if job is not None and job.open:
        return
    gave_up = job is not None and job.kind == "measure" and job.state in ("failed", "cancelled")
    if gave_up and not st.session_state.get("again"):
        st.button(f"Measure the {words.count(len(missing), 'head')} that changed", key="again")
        return
    run, estimator, wanted = page.run, page.draft.estimator, list(missing)
    page.lab.worker.submit(
        page.view.session,
        "measure",
        f"Measuring {len(wanted)} heads",
        lambda context: page.lab.measurements.measure(run, wanted, context, estimator=estimator),
    )
    st.rerun()
