"""The sessions' working copies, in memory whatever happens and in the store if it can."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from headscope.engine.config.facts import ModelFacts
from headscope.engine.runs.inspection import starting_config
from headscope.studio.base.errors import StoreError
from headscope.studio.data.draft import Draft, Edit, HeadPatterns
from headscope.studio.lab.database import Database
from headscope.studio.lab.memo import Memo

DRAFTS = 256


@dataclass(frozen=True)
class _Kept:
    """A draft, and whether the store holds it as a start with edits, so that the next edit is one row more."""

    draft: Draft
    stored: bool


class Drafts:
    """Drafts by id. The newest state counts; a start without edits needs no place in the store."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._drafts: Memo[_Kept] = Memo(DRAFTS)
        self._lock = threading.RLock()

    def get(self, draft_id: str) -> Draft | None:
        """A session's working copy, from memory or the store."""
        with self._lock:
            known = self._drafts.get(draft_id)
            if known is not None:
                return known.draft
            row = self._database.store.draft(draft_id)
            if row is None:
                return None
            draft = Draft.from_dict(draft_id, row.sequence, row.body, row.edits)
            return self._drafts.put(draft_id, _Kept(draft, stored="edits" not in row.body)).draft

    def of(self, session: str, facts: ModelFacts) -> Draft:
        """The session's working copy for a model; a new one starts with the engine's patterns."""
        draft_id = f"{session}-{facts.fingerprint[:12]}"
        known = self.get(draft_id)
        if known is not None and (len(known.base), len(known.base[0])) == (facts.layers, facts.query_heads):
            return known
        return self.keep(Draft(draft_id, "start", None, start_patterns(facts)))

    def newest(self, draft: Draft) -> Draft:
        """The draft as it is now: edits of another tab are in it."""
        return self.get(draft.id) or draft

    def keep(self, draft: Draft) -> Draft:
        """Makes this the session's working copy."""
        with self._lock:
            known = self._drafts.get(draft.id)
            if known is not None and known.draft.sequence >= draft.sequence:
                draft = replace(draft, sequence=known.draft.sequence + 1)
            stored = False
            with suppress(StoreError):
                stored = self._store(known, draft)
            self._drafts.put(draft.id, _Kept(draft, stored))
        return draft

    def _store(self, known: _Kept | None, draft: Draft) -> bool:
        """Writes what is new about a draft: the edits that it does not share with the one that is stored."""
        store = self._database.store
        if known is not None and known.stored and _same_start(known.draft, draft):
            shared = _shared(known.draft.edits, draft.edits)
            store.put_draft_edits(draft.id, draft.sequence, shared, [edit.to_dict() for edit in draft.edits[shared:]])
            return True
        if not draft.edits and (known is None or not known.draft.edits):
            return False
        store.put_draft(draft.id, draft.sequence, draft.start_dict(), [edit.to_dict() for edit in draft.edits])
        return True

    def store_all(self) -> None:
        """Writes every draft in memory to the store as it is now: after another database was opened."""
        with self._lock:
            for key, known in self._drafts.items():
                self._drafts.put(key, _Kept(known.draft, self._store(None, known.draft)))


def start_patterns(facts: ModelFacts) -> HeadPatterns:
    """The patterns before anybody tuned: the engine's start, dense where a layer has its own kind of attention."""
    config = starting_config(facts)
    return tuple(config.patterns(layer) for layer in range(facts.layers))


def _same_start(one: Draft, other: Draft) -> bool:
    return (one.base, one.base_name, one.base_id, one.base_estimator) == (
        other.base,
        other.base_name,
        other.base_id,
        other.base_estimator,
    )


def _shared(one: Sequence[Edit], other: Sequence[Edit]) -> int:
    """How many edits from the first on are the same."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
