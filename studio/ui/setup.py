"""Choosing what to run, and running it: the first thing a new person sees."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress

import polars as pl
import streamlit as st

from headscope.engine.base.errors import HeadscopeError, PromptError
from headscope.engine.config.facts import FULL
from headscope.engine.loss.measure import HeadMeasurement
from headscope.engine.model.packaged import PACKAGED
from headscope.engine.patterns.families import Pattern
from headscope.studio.base import words
from headscope.studio.ui import state, widgets
from headscope.studio.ui.state import View
from headscope.studio.work import prompts
from headscope.studio.work.draft import Draft
from headscope.studio.work.estimates import estimate
from headscope.studio.work.lab import QUICK_HEADS, Lab
from headscope.studio.work.results import Run

SOURCES = {"sample": "Sample", "paste": "Paste", "upload": "Upload"}


def first_visit(held: Lab, seen: View) -> None:
    """No run is open: say what this is, offer a sample and the button, and what was run before."""
    st.title("What does every attention head lose?", anchor=False)
    st.markdown(
        "headscope runs your prompt through the model once, replays every head with sparse attention, and shows what "
        "each one misses. Fix the worst heads by hand and take the config home."
    )
    if widgets.progress(held, seen) is None:
        choose(held, seen)
    earlier(held, seen)


def choose(held: Lab, seen: View) -> None:
    """Model, prompt, template; then what it will cost, and Run."""
    left, right = st.columns([1, 2], gap="large")
    with left:
        _model(held, seen)
    with right:
        st.segmented_control(
            "Prompt",
            list(SOURCES),
            format_func=SOURCES.__getitem__,
            required=True,
            **state.bind("source", seen.source, lambda value: setattr(seen, "source", value)),
        )
        {"sample": _sample, "paste": _paste, "upload": _upload}[seen.source](seen)
    _run(held, seen)


def _model(held: Lab, seen: View) -> None:
    names = list(dict.fromkeys([*PACKAGED, seen.model, *(row.model for row in held.store.runs())]))

    def chosen(value: str | None) -> None:
        if value:
            seen.model = value.strip()

    st.selectbox(
        "Model",
        names,
        accept_new_options=_is_local(),
        **state.bind("model", seen.model, chosen),
        help="A packaged model, or type a local folder, a GGUF file or a hub id",
    )
    if seen.model in PACKAGED:
        st.caption(PACKAGED[seen.model].note)
    st.toggle(
        "Wrap in the chat template",
        **state.bind("chat", seen.chat, lambda value: setattr(seen, "chat", value)),
        help="On: the prompt becomes a user's turn, as a chat model meets it. Off: plain text.",
    )


def _is_local() -> bool:
    """Whether only this machine can reach the server; then a path typed into a box is the person's own business."""
    return st.get_option("server.address") in ("127.0.0.1", "localhost", "::1")


def _sample(seen: View) -> None:
    known = prompts.samples()
    st.selectbox(
        "Sample",
        list(known),
        format_func=lambda name: f"{known[name].kind}: {known[name].title}",
        label_visibility="collapsed",
        **state.bind("sample", seen.sample, lambda value: setattr(seen, "sample", value)),
    )
    st.caption(f"What to look for: {known[seen.sample].look_for}")
    with st.popover("Read it", icon=":material/article:"):
        st.code(prompts.sample(seen.sample).text, language=None, wrap_lines=True, height=360)


def _paste(seen: View) -> None:
    st.text_area(
        "Prompt text",
        height=190,
        label_visibility="collapsed",
        placeholder="Paste a prompt of some hundred tokens",
        **state.bind("pasted", seen.pasted, lambda value: setattr(seen, "pasted", value)),
    )


def _upload(seen: View) -> None:
    def taken() -> None:
        file = st.session_state["upload"]
        seen.upload, seen.upload_problem = None, ""
        if file is None:
            return
        try:
            seen.upload = prompts.uploaded(file.name, file.getvalue())
        except PromptError as error:
            seen.upload_problem = str(error)

    st.file_uploader(
        "A text file in UTF-8, up to 8 MB", type=None, key="upload", on_change=taken, label_visibility="collapsed"
    )
    if seen.upload is not None:
        st.text(f"{seen.upload.name}: {words.count(len(seen.upload.text), 'character')}")


def _run(held: Lab, seen: View) -> None:
    """The line of facts and the button. A prompt that cannot run says why, and the button is off."""
    problem, facts = "", ""
    prompt = None
    try:
        prompt = state.prompt(seen)
        facts = _facts(held, seen, prompt)
    except PromptError as error:
        problem = str(error)
    with st.container(horizontal=True, vertical_alignment="center", gap="medium"):
        job = held.worker.latest(seen.session)
        pressed = st.button(
            "Run",
            type="primary",
            icon=":material/play_arrow:",
            key="run",
            width=120,
            disabled=prompt is None or bool(problem) or (job is not None and job.open),
        )
        if problem and not (seen.source != "sample" and not seen.pasted and seen.upload is None):
            st.error(words.plain_markdown(problem))
        else:
            st.text(problem or facts)
    if pressed and prompt is not None:
        start(held, seen, prompt)
        st.rerun()


def start(held: Lab, seen: View, prompt: prompts.Prompt) -> None:
    """Submits the run of this session; a refusal becomes the page's notice."""
    name, chat, session = seen.model, seen.chat, seen.session
    try:
        held.worker.submit(
            session,
            "run",
            "Run",
            lambda context: held.run_prompt(
                context, name, prompt, chat, lambda facts: state.draft_of(held, session, facts)
            ),
        )
    except HeadscopeError as error:
        seen.notice = str(error)


def _facts(held: Lab, seen: View, prompt: prompts.Prompt) -> str:
    loaded = held.loaded(seen.model)
    if loaded is None:
        _warm(held, seen.model)
        _wait_for(held, seen.model)
        return f"about {prompts.rough_tokens(prompt.text):,} tokens; exact figures once {seen.model} is loaded"
    key = (seen.model, prompt.sha256, seen.chat)
    if seen.extra.get("counted", (None, 0))[0] != key:
        seen.extra["counted"] = (key, prompts.encode(loaded, prompt.text, seen.chat).tokens)
    tokens = seen.extra["counted"][1]
    weights = sum(part.numel() * part.element_size() for part in loaded.model.parameters())
    guess = estimate(loaded.facts, loaded.dtype.itemsize, weights, tokens, str(loaded.device), held.store.runs())
    return f"{words.count(tokens, 'token')} · {guess.sentence}"


def _warm(held: Lab, name: str) -> None:
    """Loads a packaged model that is already on this machine, so that its figures are there before Run."""
    if not held.may_warm(name):
        return

    def load() -> None:
        with suppress(HeadscopeError):
            held.worker.quick(lambda: held.load(name), timeout=300)

    threading.Thread(target=load, name="headscope-warm", daemon=True).start()


def _wait_for(held: Lab, name: str) -> None:
    if not held.is_warming(name):
        return

    @st.fragment(run_every=0.5)
    def poll() -> None:
        if held.loaded(name) is not None:
            st.rerun()

    poll()


def earlier(held: Lab, seen: View) -> None:
    """Runs of before, to open again without a new prefill."""
    rows = held.store.runs(12)
    if not rows:
        return
    st.subheader("Earlier runs", anchor=False)
    named = [held.store.prompt(row.prompt_sha256) for row in rows]
    frame = pl.DataFrame(
        {
            "when": [row.created_at for row in rows],
            "model": [row.model for row in rows],
            "prompt": ["" if prompt is None else prompt["name"] for prompt in named],
            "tokens": [row.tokens for row in rows],
            "took": [words.milliseconds(row.capture_ms + row.measure_ms) for row in rows],
            "capture": ["on disk" if held.shelf.has(row.id) else "gone" for row in rows],
        }
    )

    def picked() -> None:
        chosen = st.session_state["earlier"]["selection"]["rows"]
        if chosen and chosen[0] < len(rows):
            seen.run_id, seen.extra["fresh"] = rows[chosen[0]].id, True

    st.dataframe(
        frame,
        key="earlier",
        on_select=picked,
        selection_mode="single-row",
        hide_index=True,
        alt="Earlier runs; choose a row to open it",
    )
    st.caption("Choose a row to open it. Its numbers are in the database; pictures need the capture.")


def measured(held: Lab, seen: View, run: Run, draft: Draft) -> list[list[HeadMeasurement | None]]:
    """Every head of the draft as measured on this run; a few that are missing are measured now, many as a job."""
    grid = held.grid(run.id, draft.patterns, draft.estimator)
    missing = [
        (layer, head, draft.patterns[layer][head])
        for layer, row in enumerate(grid)
        for head, one in enumerate(row)
        if one is None and run.facts.layer_types[layer] == FULL
    ]
    if not missing:
        return grid
    if len(missing) > QUICK_HEADS:
        measure_missing(held, seen, run, draft, missing)
        return grid
    try:
        held.worker.quick(lambda: held.measure(run, missing, estimator=draft.estimator))
    except HeadscopeError as error:
        st.error(words.plain_markdown(str(error)))
    return held.grid(run.id, draft.patterns, draft.estimator)


def measure_missing(held: Lab, seen: View, run: Run, draft: Draft, missing: Sequence[tuple[int, int, Pattern]]) -> None:
    """Many heads have a pattern that was never measured on this run: measure them as a job."""
    job = held.worker.latest(seen.session)
    if job is not None and job.open:
        return
    if (
        job is not None
        and job.kind == "measure"
        and job.state in ("failed", "cancelled")
        and not st.session_state.get("again")
    ):
        st.button(f"Measure the {words.count(len(missing), 'head')} that changed", key="again")
        return
    wanted = list(missing)
    held.worker.submit(
        seen.session,
        "measure",
        f"Measuring {len(wanted)} heads",
        lambda context: held.measure(run, wanted, context, estimator=draft.estimator),
    )
    st.rerun()
