"""Pages through streamlit's AppTest: opening one, what it shows, and the lab behind it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from headscope.engine.base.places import ROOT
from headscope.engine.model.load import LoadedModel
from headscope.studio.data import prompts
from headscope.studio.lab.lab import Lab
from headscope.studio.ui.view import View
from tests.helpers.studio_toy import make_lab, toy

SESSION = "abcdefghij"


@pytest.fixture
def lab(tiny_llama: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    made = make_lab(toy(tiny_llama), tmp_path, monkeypatch)
    yield made
    made.close()


def page(name: str, view: View | None = None, **query: str) -> AppTest:
    test = AppTest.from_file(str(ROOT / "pages" / f"{name}.py"), default_timeout=60)
    if view is not None:
        test.session_state["view"] = view
    for key, value in query.items():
        test.query_params[key] = value
    return test.run()


def run_now(lab: Lab, prompt: prompts.Prompt | None = None, session: str = SESSION) -> str:
    """A run made without a page."""
    chosen = prompt or prompts.sample("prose")
    job = lab.worker.submit(
        session,
        "run",
        "Run",
        lambda context: lab.runs.make(context, "smollm2", chosen, False, lambda facts: lab.drafts.of(session, facts)),
    )
    assert job.finished.wait(60) and job.state == "done", job.error
    return job.result


def wait(lab: Lab, session: str = SESSION) -> None:
    job = lab.worker.latest(session)
    assert job is not None and job.finished.wait(60), "the job did not end"


def shown(test: AppTest) -> str:
    """All text of a page."""
    kinds = ("title", "subheader", "markdown", "caption", "text", "error", "warning", "info", "success", "code")
    return "\n".join(str(item.value) for kind in kinds for item in test.get(kind)).replace("\u00a0", " ")


def ok(test: AppTest) -> AppTest:
    assert not test.exception, test.exception
    return test
