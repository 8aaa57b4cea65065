"""What a page draws: handed whole to everything that draws a part of it."""

from __future__ import annotations

from dataclasses import dataclass

from headscope.engine.patterns.families import Pattern
from headscope.studio.charts.theme import Theme
from headscope.studio.data.draft import Draft
from headscope.studio.data.results import HeadCase, Run
from headscope.studio.lab.jobs import Job
from headscope.studio.lab.lab import Lab
from headscope.studio.ui.view import View


@dataclass(frozen=True)
class PageContext:
    """The lab that all sessions share, this tab's view, and the colours that fit the browser."""

    lab: Lab
    view: View
    theme: Theme

    @property
    def job(self) -> Job | None:
        """The session's latest job, ended or not."""
        return self.lab.worker.latest(self.view.session)

    @property
    def busy(self) -> bool:
        """Whether the session has a job under way: it may have one at a time."""
        job = self.job
        return job is not None and job.open


@dataclass(frozen=True)
class RunContext(PageContext):
    """A page with an open run and the session's draft for its model."""

    run: Run
    draft: Draft

    @property
    def pattern(self) -> Pattern:
        """The draft's pattern of the head looked at."""
        return self.draft.patterns[self.view.layer][self.view.head]

    def case(self, pattern: Pattern | None = None) -> HeadCase:
        """The head looked at, under the draft's pattern or another."""
        return HeadCase(self.run, self.view.layer, self.view.head, pattern or self.pattern, self.draft.estimator)
