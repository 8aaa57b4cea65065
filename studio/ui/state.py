"""What one browser tab looks at, kept under one non-widget key, and how it meets the URL.

Widget values vanish when a page is not drawn, so the truth is here: before a widget is drawn it is set from the
view, and its callback writes back. The URL carries a session's name and the place looked at; everything that comes
from a URL is checked.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import streamlit as st

from headscope.engine.base.errors import HeadscopeError, PromptError
from headscope.engine.config.facts import ModelFacts
from headscope.engine.model.packaged import PACKAGED
from headscope.engine.runs.inspection import starting_config
from headscope.studio.base import words
from headscope.studio.charts.theme import Theme, theme
from headscope.studio.store.store import default_path
from headscope.studio.work import prompts
from headscope.studio.work.draft import Draft, Grid
from headscope.studio.work.lab import Lab
from headscope.studio.work.results import METRICS, Run
from headscope.studio.work.shelf import Shelf

T = TypeVar("T")

FIRST_SAMPLE = "code"

LINK = ("s", "model", "prompt", "run", "layer", "head", "metric")
"""The query parameters of a view; a page may have others of its own."""


@dataclass
class View:
    """One tab's choices. `session` names the draft and the job, and stays in the URL across reloads.

    `notice` is said once, `lost` (why the run that was asked for is not shown) until a run is open.
    """

    session: str
    model: str = "smollm2"
    source: str = "sample"
    sample: str = FIRST_SAMPLE
    pasted: str = ""
    upload: prompts.Prompt | None = None
    upload_problem: str = ""
    chat: bool = False
    run_id: str = ""
    layer: int = 0
    head: int = 0
    metric: str = "missed_mass_mean"
    order: str = "worst first"
    logarithmic: bool = True
    look: str = "missed places"
    crop: tuple[int, int] | None = None
    version: str = ""
    notice: str = ""
    lost: str = ""
    good_news: str = ""
    last_click: tuple[int, int] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)
    born: float = field(default_factory=time.monotonic)

    def go(self, layer: int, head: int) -> None:
        """Looks at another head."""
        self.layer, self.head, self.crop = layer, head, None


@st.cache_resource(max_entries=1, show_spinner=False)
def lab() -> Lab:
    """The one lab of this process."""
    return Lab(default_path(), Shelf.default())


def view() -> View:
    """This tab's view; made from the URL on its first run."""
    if "view" not in st.session_state:
        st.session_state["view"] = from_query({name: st.query_params[name] for name in st.query_params})
    found: View = st.session_state["view"]
    return found


def from_query(query: Mapping[str, str]) -> View:
    """A view from query parameters: what is not exactly right is left at its default."""
    session = query.get("s", "")
    made = View(session if re.fullmatch(r"[a-z0-9]{10}", session) else secrets.token_hex(5))
    if query.get("model") in PACKAGED:
        made.model = query["model"]
    if query.get("prompt") in prompts.samples():
        made.sample = query["prompt"]
    if re.fullmatch(r"[a-f0-9]{12}", query.get("run", "")):
        made.run_id = query["run"]
    if query.get("metric") in METRICS:
        made.metric = query["metric"]
    for name in ("layer", "head"):
        if re.fullmatch(r"\d{1,4}", query.get(name, "")):
            setattr(made, name, int(query[name]))
            made.extra["linked"] = True
    return made


def to_query(seen: View, run: Run | None) -> dict[str, str]:
    """The query parameters that bring a person back here. A page that opens no run links to the one last looked at."""
    query = {"s": seen.session, "model": seen.model, "prompt": seen.sample if seen.source == "sample" else ""}
    if run is not None:
        query |= {"model": run.row.model, "prompt": run.prompt_name if run.prompt_name in prompts.samples() else ""}
    if seen.run_id:
        query |= {"run": seen.run_id, "layer": str(seen.layer), "head": str(seen.head), "metric": seen.metric}
    return {name: value for name, value in query.items() if value}


def keep_link(seen: View, run: Run | None) -> None:
    """Writes the place looked at into the URL, beside what the page itself keeps there."""
    wanted = to_query(seen, run)
    for name in LINK:
        if name in st.query_params and name not in wanted:
            del st.query_params[name]
    if any(st.query_params.get(name) != value for name, value in wanted.items()):
        st.query_params.update(wanted)


def prompt(seen: View) -> prompts.Prompt:
    """The chosen prompt. PromptError with one sentence if there is none."""
    if seen.source == "paste":
        return prompts.pasted(seen.pasted)
    if seen.source == "upload":
        if seen.upload_problem:
            raise PromptError(seen.upload_problem)
        if seen.upload is None:
            raise PromptError("Choose a text file first.")
        return seen.upload
    return prompts.sample(seen.sample)


def current_run(held: Lab, seen: View) -> Run | None:
    """The run looked at, with layer and head inside it; None if there is none or it cannot be had, which is said."""
    linked = bool(seen.extra.get("linked"))
    if not seen.run_id and linked and seen.source == "sample":
        # A link made elsewhere names model and prompt: the latest run of both stands for it.
        sha = prompts.sample(seen.sample).sha256
        seen.run_id = next(
            (row.id for row in held.store.runs() if row.prompt_sha256 == sha and row.model == seen.model), ""
        )
    run = _opened(held, seen) if seen.run_id else None
    if run is None:
        if seen.lost:
            st.warning(words.plain_markdown(seen.lost), icon=":material/link_off:")
        return None
    seen.lost = ""
    seen.layer = min(seen.layer, run.facts.layers - 1)
    seen.head = min(seen.head, run.facts.query_heads - 1)
    return run


def _opened(held: Lab, seen: View) -> Run | None:
    """The run that the view names; if it cannot be had, the view names none and `lost` says why."""
    run_id, problem, run = seen.run_id, "", None
    try:
        if held.has_run(run_id):
            run = held.run(run_id)
        else:
            with st.spinner("Opening the run"):
                run = held.run(run_id)
    except HeadscopeError as error:
        problem = str(error)
    if run is None:
        seen.run_id = ""
        seen.extra.pop("linked", None)  # no other run may stand for it without a word
        seen.lost = problem or (
            f"The run {run_id} is not kept here: run its prompt again on the Heads page, or open an earlier run there."
        )
    return run


def start_grid(facts: ModelFacts) -> Grid:
    """The patterns before anybody tuned: the engine's start, dense where a layer has its own kind of attention."""
    config = starting_config(facts)
    return tuple(config.patterns(layer) for layer in range(facts.layers))


def draft_of(held: Lab, session: str, facts: ModelFacts) -> Draft:
    """The session's working copy for a model."""
    draft_id = f"{session}-{facts.fingerprint[:12]}"
    known = held.draft(draft_id)
    shape = (facts.layers, facts.query_heads)
    if known is not None and (len(known.base), len(known.base[0])) == shape:
        return known
    return held.keep_draft(Draft(draft_id, "start", None, start_grid(facts)))


def colours() -> Theme:
    """The palette that fits the browser's mode."""
    return theme(st.context.theme.type)


def bind(key: str, value: T, write: Callable[[T], None]) -> dict[str, Any]:
    """Arguments that tie a widget to the view: its key, set to `value` now, and a callback that writes back."""
    st.session_state[key] = value
    return {"key": key, "on_change": lambda: write(st.session_state[key])}


def land(held: Lab, seen: View, run: Run, draft: Draft) -> None:
    """Looks at the worst head when a run was just made or opened."""
    if seen.extra.pop("fresh", False):
        grid = held.grid(run.id, draft.patterns, draft.estimator)
        values = [[float("nan") if one is None else one.missed_mass_mean for one in row] for row in grid]
        seen.go(*worst_order(values)[0])
        seen.last_click = None
        keep_link(seen, run)


def worst_order(values: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """Heads from the largest value to the smallest; those not measured last."""
    flat = [(layer, head, value) for layer, row in enumerate(values) for head, value in enumerate(row)]
    flat.sort(key=lambda item: (item[2] != item[2], -item[2] if item[2] == item[2] else 0.0, item[0], item[1]))
    return [(layer, head) for layer, head, _ in flat]
