"""What one browser tab looks at, and how it meets the URL. Everything that comes from a URL is checked."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headscope.engine.model.packaged import PACKAGED
from headscope.studio.data import prompts
from headscope.studio.data.results import METRICS, Run

if TYPE_CHECKING:
    from headscope.engine.search.check import Expected
    from headscope.studio.work.compare import Comparison
    from headscope.studio.work.exports import RoundTrip
    from headscope.studio.work.search import StoredSearch

FIRST_SAMPLE = "code"

LINK = ("s", "model", "prompt", "run", "layer", "head", "metric")
"""The query parameters of a view; a page may have others of its own."""


@dataclass
class SearchForm:
    """What is asked of the next search; `grid` is text, None for the default candidates."""

    samples: tuple[str, ...] = ("code", "prose", "dialogue")
    length: str = "512"
    grid: str | None = None
    limit: float = 0.02


@dataclass
class TargetForm:
    """Where the slider of a stored search stands. `by` is "loss" or "speed", `cost` "ms" or "tiles"."""

    by: str = "loss"
    limit: float = 0.02
    speedup: float = 1.0
    cost: str = "ms"


@dataclass(frozen=True)
class CheckedChoice:
    """A choice that was measured for real: of which search, its name, and the figures predicted and measured."""

    search_id: str
    name: str
    predicted: Expected
    measured: dict[str, Any]


@dataclass
class SearchView:
    """The search page's part of a view. `search_id` is the one looked at, `taken` the last job whose result is here.

    `search` is the one that is open, `by_tiles` the same with tiles as the cost, `sweep` its curve with what it is of.
    """

    form: SearchForm = field(default_factory=SearchForm)
    target: TargetForm = field(default_factory=TargetForm)
    search_id: str = ""
    taken: str = ""
    search: StoredSearch | None = None
    by_tiles: StoredSearch | None = None
    sweep: tuple[tuple[str, str], list[dict[str, float]]] | None = None
    checked: CheckedChoice | None = None


@dataclass
class View:
    """One tab's choices. `session` names the draft and the job, and stays in the URL across reloads.

    `linked` says that the URL named a head, `fresh` that the run was just made or opened. `notice` is said once, `lost`
    (why the run that was asked for is not shown) until a run is open.
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
    linked: bool = False
    fresh: bool = False
    prompt_tokens: tuple[tuple[str, str, bool], int] | None = None
    curve: tuple[str, int, int] | None = None
    comparison: Comparison | None = None
    export: tuple[str, RoundTrip] | None = None
    search: SearchView = field(default_factory=SearchView)
    told: set[str] = field(default_factory=set)
    born: float = field(default_factory=time.monotonic)

    def go(self, layer: int, head: int) -> None:
        """Looks at another head."""
        self.layer, self.head, self.crop = layer, head, None

    def open(self, run_id: str) -> None:
        """Looks at a run, at its worst head first."""
        self.run_id, self.fresh = run_id, True


def from_query(query: Mapping[str, str]) -> View:
    """A view from query parameters: what is not exactly right is left at its default."""
    session = query.get("s", "")
    view = View(session if re.fullmatch(r"[a-z0-9]{10}", session) else secrets.token_hex(5))
    if query.get("model") in PACKAGED:
        view.model = query["model"]
    if query.get("prompt") in prompts.samples():
        view.sample = query["prompt"]
    if re.fullmatch(r"[a-f0-9]{12}", query.get("run", "")):
        view.run_id = query["run"]
    if query.get("metric") in METRICS:
        view.metric = query["metric"]
    for name in ("layer", "head"):
        if re.fullmatch(r"\d{1,4}", query.get(name, "")):
            setattr(view, name, int(query[name]))
            view.linked = True
    return view


def to_query(view: View, run: Run | None) -> dict[str, str]:
    """The query parameters that bring a person back here. A page that opens no run links to the one last looked at."""
    query = {"s": view.session, "model": view.model, "prompt": view.sample if view.source == "sample" else ""}
    if run is not None:
        query |= {"model": run.row.model, "prompt": run.prompt_name if run.prompt_name in prompts.samples() else ""}
    if view.run_id:
        query |= {"run": view.run_id, "layer": str(view.layer), "head": str(view.head), "metric": view.metric}
    return {name: value for name, value in query.items() if value}
