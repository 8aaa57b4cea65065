"""What the database holds, as the rest of the studio sees it."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from headscope.engine.config.file import HeadConfig


@dataclass(frozen=True)
class RunRow:
    """One prefill that was captured and measured."""

    id: str
    model: str
    fingerprint: str
    prompt_sha256: str
    tokens: int
    chat_template: bool
    device: str
    dtype: str
    impl: str
    tiles: str
    estimator: dict[str, Any]
    capture_ms: float
    measure_ms: float
    versions: dict[str, Any]
    created_at: datetime


@dataclass(frozen=True)
class ConfigRow:
    """One immutable version: a head config, and what the studio knows about it beside the file."""

    id: str
    number: int
    name: str
    parent_id: str | None
    run_id: str | None
    note: str
    created_at: datetime
    config: HeadConfig

    @property
    def title(self) -> str:
        """Such as `v3 calm`."""
        return f"v{self.number} {self.name}"


@dataclass(frozen=True)
class DraftRow:
    """A stored draft: its newest sequence, what it started from, and the edits since, oldest first."""

    sequence: int
    body: dict[str, Any]
    edits: tuple[dict[str, Any], ...]


def new_id() -> str:
    """A short random name for a row."""
    return uuid.uuid4().hex[:12]


def now() -> datetime:
    """The time to the second, UTC without a zone, as the tables hold it."""
    return datetime.now(UTC).replace(tzinfo=None, microsecond=0)
