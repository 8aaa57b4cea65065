"""Trying a draft on the whole model, on the page."""

from __future__ import annotations

import polars as pl
import streamlit as st

from headscope.engine.base.errors import HeadscopeError
from headscope.engine.runs.answer import Answer
from headscope.studio.base import words
from headscope.studio.charts import charts
from headscope.studio.ui import widgets
from headscope.studio.ui.context import PageContext, RunContext
from headscope.studio.work.compare import NEW_TOKENS, Comparison, compare


def whole_model(page: RunContext) -> None:
    """The button, and what came of the last trial of this run."""
    lab, view, run, draft = page.lab, page.view, page.run, page.draft
    st.subheader("Does the answer survive?", anchor=False)
    with st.container(horizontal=True, vertical_alignment="center"):
        if st.button("Run the model with this draft", key="compare", icon=":material/play_arrow:", disabled=page.busy):
            try:
                lab.worker.submit(
                    view.session, "compare", "Comparing", lambda context: compare(lab, context, run, draft)
                )
            except HeadscopeError as error:
                view.notice = str(error)
            st.rerun()
        st.caption(
            f"Dense and sparse, {NEW_TOKENS} new tokens each, then a second sparse prefill that measures every head in "
            "place. Decoding is dense in both."
        )
    if view.comparison is not None and view.comparison.run_id == run.id:
        show(page, view.comparison)


def show(page: PageContext, comparison: Comparison) -> None:
    """Answers side by side, and the numbers between them."""
    ratio = comparison.dense.ttft_ms / max(1e-9, comparison.sparse.ttft_ms)
    same = "The first token is the same" if comparison.same_first else "The first token differs"
    sparse, dense = words.milliseconds(comparison.sparse.ttft_ms), words.milliseconds(comparison.dense.ttft_ms)
    st.markdown(
        f"{same}; the next-token distribution moved by {comparison.kl:.4f} nats (KL). The first token came after "
        f"{sparse} sparse and {dense} dense: "
        f"{f'{ratio:.2f} times as fast' if ratio >= 1 else f'{1 / ratio:.2f} times as slow'}."
    )
    st.text(f"draft tried: {comparison.title}")
    left, right = st.columns(2, gap="large")
    _answer(left, "Dense", comparison.dense, comparison.top_dense)
    _answer(right, "Sparse, this draft", comparison.sparse, comparison.top_sparse)
    row = st.container(horizontal=True, gap="small")
    row.metric(
        "next-token KL", f"{comparison.kl:.4f} nats", help="KL(dense || sparse) of the first new token", width=152
    )
    row.metric(
        "TTFT, dense",
        words.milliseconds(comparison.dense.ttft_ms),
        help="Prefill and the choice of one token",
        width=152,
    )
    row.metric("TTFT, sparse", words.milliseconds(comparison.sparse.ttft_ms), help="Index time included", width=152)
    mean = sum(comparison.in_situ) / max(1, len(comparison.in_situ))
    alone = sum(comparison.isolated) / max(1, len(comparison.isolated))
    row.metric(
        "missed in situ, mean",
        words.percent(mean),
        delta=f"isolated {words.percent(alone)}",
        delta_color="off",
        delta_arrow="off",
        width=152,
    )
    widgets.figure(
        charts.by_layer(comparison.layers, comparison.isolated, comparison.in_situ, page.theme),
        "by-layer",
        f"Missed mass by layer. Mean isolated {words.percent(alone)}, in situ {words.percent(mean)}.",
        lambda: pl.DataFrame(
            {"layer": comparison.layers, "isolated": comparison.isolated, "in_situ": comparison.in_situ}
        ),
    )


def _answer(
    place: st.delta_generator.DeltaGenerator, name: str, answer: Answer, top: tuple[tuple[str, float], ...]
) -> None:
    with place:
        st.markdown(f"**{name}**")
        st.code(answer.text or "(nothing but an end of text)", language=None, wrap_lines=True)
        best = ", ".join(f"{token!r} {words.percent(share)}" for token, share in top[:3])
        st.text(f"next token: {best}\n{len(answer.token_ids)} tokens in {words.milliseconds(answer.total_ms)}")
