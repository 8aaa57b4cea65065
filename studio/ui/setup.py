"""Choosing what to run, and running it: the first thing a new person sees."""

from __future__ import annotations

import polars as pl
import streamlit as st

from headscope.engine.base.errors import HeadscopeError, PromptError
from headscope.engine.model.packaged import PACKAGED
from headscope.studio.base import words
from headscope.studio.data import prompts
from headscope.studio.ui import state, widgets
from headscope.studio.ui.context import PageContext
from headscope.studio.work.estimates import estimate

SOURCES = {"sample": "Sample", "paste": "Paste", "upload": "Upload"}


def first_visit(page: PageContext) -> None:
    """No run is open: say what this is, offer a sample and the button, and what was run before."""
    st.title("What does every attention head lose?", anchor=False)
    st.markdown(
        "headscope runs your prompt through the model once, replays every head with sparse attention, and shows what "
        "each one misses. Fix the worst heads by hand and take the config home."
    )
    if widgets.progress(page) is None:
        choose(page)
    earlier(page)


def choose(page: PageContext) -> None:
    """Model, prompt, template; then what it will cost, and Run."""
    left, right = st.columns([1, 2], gap="large")
    with left:
        _model(page)
    with right:
        st.segmented_control(
            "Prompt",
            list(SOURCES),
            format_func=SOURCES.__getitem__,
            required=True,
            **state.bind("source", page.view.source, lambda value: setattr(page.view, "source", value)),
        )
        {"sample": _sample, "paste": _paste, "upload": _upload}[page.view.source](page)
    _run(page)


def _model(page: PageContext) -> None:
    names = list(dict.fromkeys([*PACKAGED, page.view.model, *(row.model for row in page.lab.store.runs())]))

    def write(value: str | None) -> None:
        if value:
            page.view.model = value.strip()

    st.selectbox(
        "Model",
        names,
        accept_new_options=_is_local(),
        **state.bind("model", page.view.model, write),
        help="A packaged model, or type a local folder, a GGUF file or a hub id",
    )
    if page.view.model in PACKAGED:
        st.caption(PACKAGED[page.view.model].note)
    st.toggle(
        "Wrap in the chat template",
        **state.bind("chat", page.view.chat, lambda value: setattr(page.view, "chat", value)),
        help="On: the prompt becomes a user's turn, as a chat model meets it. Off: plain text.",
    )


def _is_local() -> bool:
    """Whether only this machine can reach the server; then a path typed into a box is the person's own business."""
    return st.get_option("server.address") in ("127.0.0.1", "localhost", "::1")


def _sample(page: PageContext) -> None:
    known = prompts.samples()
    st.selectbox(
        "Sample",
        list(known),
        format_func=lambda name: f"{known[name].kind}: {known[name].title}",
        label_visibility="collapsed",
        **state.bind("sample", page.view.sample, lambda value: setattr(page.view, "sample", value)),
    )
    st.caption(f"What to look for: {known[page.view.sample].look_for}")
    with st.popover("Read it", icon=":material/article:"):
        st.code(prompts.sample(page.view.sample).text, language=None, wrap_lines=True, height=360)


def _paste(page: PageContext) -> None:
    st.text_area(
        "Prompt text",
        height=190,
        label_visibility="collapsed",
        placeholder="Paste a prompt of some hundred tokens",
        **state.bind("pasted", page.view.pasted, lambda value: setattr(page.view, "pasted", value)),
    )


def _upload(page: PageContext) -> None:
    def taken() -> None:
        file = st.session_state["upload"]
        page.view.upload, page.view.upload_problem = None, ""
        if file is None:
            return
        try:
            page.view.upload = prompts.uploaded(file.name, file.getvalue())
        except PromptError as error:
            page.view.upload_problem = str(error)

    st.file_uploader(
        "A text file in UTF-8, up to 8 MB", type=None, key="upload", on_change=taken, label_visibility="collapsed"
    )
    if page.view.upload is not None:
        st.text(f"{page.view.upload.name}: {words.count(len(page.view.upload.text), 'character')}")


def _run(page: PageContext) -> None:
    """The line of facts and the button. A prompt that cannot run says why, and the button is off."""
    problem, facts = "", ""
    prompt = None
    try:
        prompt = state.prompt(page.view)
        facts = _facts(page, prompt)
    except PromptError as error:
        problem = str(error)
    with st.container(horizontal=True, vertical_alignment="center", gap="medium"):
        pressed = st.button(
            "Run",
            type="primary",
            icon=":material/play_arrow:",
            key="run",
            width=120,
            disabled=prompt is None or bool(problem) or page.busy,
        )
        if problem and not (page.view.source != "sample" and not page.view.pasted and page.view.upload is None):
            st.error(words.plain_markdown(problem))
        else:
            st.text(problem or facts)
    if pressed and prompt is not None:
        start(page, prompt)
        st.rerun()


def start(page: PageContext, prompt: prompts.Prompt) -> None:
    """Submits the run of this session; a refusal becomes the page's notice."""
    lab, view = page.lab, page.view
    name, chat, session = view.model, view.chat, view.session
    try:
        lab.worker.submit(
            session,
            "run",
            "Run",
            lambda context: lab.runs.make(context, name, prompt, chat, lambda facts: lab.drafts.of(session, facts)),
        )
    except HeadscopeError as error:
        view.notice = str(error)


def _facts(page: PageContext, prompt: prompts.Prompt) -> str:
    """What the run will take; the model is loaded meanwhile if it is on this machine, since figures need it."""
    view, models = page.view, page.lab.models
    loaded = models.loaded(view.model)
    if loaded is None:
        models.warm(view.model)
        _wait_for(page)
        return f"about {prompts.rough_tokens(prompt.text):,} tokens; exact figures once {view.model} is loaded"
    key = (view.model, prompt.sha256, view.chat)
    if view.prompt_tokens is None or view.prompt_tokens[0] != key:
        view.prompt_tokens = key, prompts.encode(loaded, prompt.text, view.chat).tokens
    tokens = view.prompt_tokens[1]
    weights = sum(part.numel() * part.element_size() for part in loaded.model.parameters())
    runs = page.lab.store.runs()
    guess = estimate(loaded.facts, loaded.dtype.itemsize, weights, tokens, str(loaded.device), runs)
    return f"{words.count(tokens, 'token')} · {guess.sentence}"


def _wait_for(page: PageContext) -> None:
    """Draws the page again when the load that is under way has ended, with the model or without."""
    models, name = page.lab.models, page.view.model
    if not models.is_warming(name):
        return

    @st.fragment(run_every=0.5)
    def poll() -> None:
        if not models.is_warming(name):
            st.rerun()

    poll()


def earlier(page: PageContext) -> None:
    """Earlier runs, to open again without a new prefill."""
    rows = page.lab.store.runs(12)
    if not rows:
        return
    st.subheader("Earlier runs", anchor=False)
    named = [page.lab.store.prompt(row.prompt_sha256) for row in rows]
    frame = pl.DataFrame(
        {
            "when": [row.created_at for row in rows],
            "model": [row.model for row in rows],
            "prompt": ["" if prompt is None else prompt["name"] for prompt in named],
            "tokens": [row.tokens for row in rows],
            "took": [words.milliseconds(row.capture_ms + row.measure_ms) for row in rows],
            "capture": ["on disk" if page.lab.captures.shelf.has(row.id) else "gone" for row in rows],
        }
    )

    def picked() -> None:
        picked_rows = st.session_state["earlier"]["selection"]["rows"]
        if picked_rows and picked_rows[0] < len(rows):
            page.view.open(rows[picked_rows[0]].id)

    st.dataframe(
        frame,
        key="earlier",
        on_select=picked,
        selection_mode="single-row",
        hide_index=True,
        alt="Earlier runs; choose a row to open it",
    )
    st.caption("Choose a row to open it. Its numbers are in the database; pictures need the capture.")
