"""Trying a draft on the whole model, on the page."""

from __future__ import annotations

import polars as pl
import streamlit as st

from headscope.engine.base.errors import HeadscopeError
from headscope.engine.runs.answer import Answer
from headscope.studio.base import words
from headscope.studio.charts import charts
from headscope.studio.ui import state, widgets
from headscope.studio.ui.state import View
from headscope.studio.work.compare import NEW_TOKENS, Comparison, compare
from headscope.studio.work.draft import Draft
from headscope.studio.work.lab import Lab
from headscope.studio.work.results import Run


def whole_model(held: Lab, seen: View, run: Run, draft: Draft) -> None:
    """The button, and what came of the last trial of this run."""
    st.subheader("Does the answer survive?", anchor=False)
    job = held.worker.latest(seen.session)
    with st.container(horizontal=True, vertical_alignment="center"):
        if st.button(
            "Run the model with this draft",
            key="compare",
            icon=":material/play_arrow:",
            disabled=job is not None and job.open,
        ):
            try:
                held.worker.submit(
                    seen.session, "compare", "Comparing", lambda context: compare(held, context, run, draft)
                )
            except HeadscopeError as error:
                seen.notice = str(error)
            st.rerun()
        st.caption(
            f"Dense and sparse, {NEW_TOKENS} new tokens each, then a second sparse prefill that measures every head in "
            "place. Decoding is dense in both."
        )
    made = seen.extra.get("comparison")
    if isinstance(made, Comparison) and made.run_id == run.id:
        show(made)


def show(made: Comparison) -> None:
    """Answers side by side, and the numbers between them."""
    ratio = made.dense.ttft_ms / max(1e-9, made.sparse.ttft_ms)
    same = "The first token is the same" if made.same_first else "The first token differs"
    st.markdown(
        f"{same}; the next-token distribution moved by {made.kl:.4f} nats (KL). The first token came after "
        f"{words.milliseconds(made.sparse.ttft_ms)} sparse and {words.milliseconds(made.dense.ttft_ms)} dense: "
        f"{f'{ratio:.2f} times as fast' if ratio >= 1 else f'{1 / ratio:.2f} times as slow'}."
    )
    st.text(f"draft tried: {made.title}")
    left, right = st.columns(2, gap="large")
    _answer(left, "Dense", made.dense, made.top_dense)
    _answer(right, "Sparse, this draft", made.sparse, made.top_sparse)
    row = st.container(horizontal=True, gap="small")
    row.metric("next-token KL", f"{made.kl:.4f} nats", help="KL(dense || sparse) of the first new token", width=152)
    row.metric(
        "TTFT, dense", words.milliseconds(made.dense.ttft_ms), help="Prefill and the choice of one token", width=152
    )
    row.metric("TTFT, sparse", words.milliseconds(made.sparse.ttft_ms), help="Index time included", width=152)
    mean = sum(made.in_situ) / max(1, len(made.in_situ))
    alone = sum(made.isolated) / max(1, len(made.isolated))
    row.metric(
        "missed in situ, mean",
        words.percent(mean),
        delta=f"isolated {words.percent(alone)}",
        delta_color="off",
        delta_arrow="off",
        width=152,
    )
    widgets.figure(
        charts.by_layer(made.layers, made.isolated, made.in_situ, state.colours()),
        "by-layer",
        f"Missed mass by layer. Mean isolated {words.percent(alone)}, in situ {words.percent(mean)}.",
        lambda: pl.DataFrame({"layer": made.layers, "isolated": made.isolated, "in_situ": made.in_situ}),
    )


def _answer(
    place: st.delta_generator.DeltaGenerator, name: str, answer: Answer, top: tuple[tuple[str, float], ...]
) -> None:
    with place:
        st.markdown(f"**{name}**")
        st.code(answer.text or "(nothing but an end of text)", language=None, wrap_lines=True)
        best = ", ".join(f"{token!r} {words.percent(share)}" for token, share in top[:3])
        st.text(f"next token: {best}\n{len(answer.token_ids)} tokens in {words.milliseconds(answer.total_ms)}")
