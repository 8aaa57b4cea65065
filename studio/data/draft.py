"""A person's working copy of a head config: a base, and edits that can be undone one by one.

Immutable: each change gives a new draft with a higher sequence, so that two tabs never overwrite each other's half.
The store keeps what a draft started from once, and each edit as it comes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from headscope.engine.attend.estimator import Estimator
from headscope.engine.patterns import families as patterns
from headscope.engine.patterns.families import Pattern

Head = tuple[int, int]
HeadPatterns = tuple[tuple[Pattern, ...], ...]
"""The pattern of every head, `[layer][head]`."""

SCOPES = ("this head", "its group", "its layer", "same pattern")


@dataclass(frozen=True)
class Edit:
    """One step: new patterns of some heads; or a version to stand on, with its name and id and its estimator."""

    label: str
    changes: tuple[tuple[Head, Pattern], ...]
    base: tuple[str, str | None] | None = None
    estimator: Estimator | None = None

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form; patterns are written once each."""
        numbers: dict[Pattern, int] = {}
        changes = [[layer, head, numbers.setdefault(pattern, len(numbers))] for (layer, head), pattern in self.changes]
        return {
            "label": self.label,
            "base": self.base,
            "patterns": [pattern.to_dict() for pattern in numbers],
            "changes": changes,
            "estimator": None if self.estimator is None else self.estimator.to_dict(),
        }

    @classmethod
    def from_dict(cls, body: Mapping[str, Any], known: Sequence[Pattern]) -> Edit:
        """The edit that `to_dict` wrote; `known` are the patterns that its numbers mean."""
        estimator = body.get("estimator")
        return cls(
            body["label"],
            tuple(((layer, head), known[number]) for layer, head, number in body["changes"]),
            None if body["base"] is None else (body["base"][0], body["base"][1]),
            None if estimator is None else Estimator.from_dict(estimator),
        )


@dataclass(frozen=True)
class Draft:
    """`base_name` and `base_id` name what it started from; `base[layer][head]` are its patterns then."""

    id: str
    base_name: str
    base_id: str | None
    base: HeadPatterns
    edits: tuple[Edit, ...] = ()
    sequence: int = 0
    base_estimator: Estimator = field(default_factory=Estimator)

    @cached_property
    def patterns(self) -> HeadPatterns:
        """The patterns now, `[layer][head]`."""
        patterns = [list(row) for row in self.base]
        for edit in self.edits:
            for (layer, head), pattern in edit.changes:
                patterns[layer][head] = pattern
        return tuple(tuple(row) for row in patterns)

    @cached_property
    def estimator(self) -> Estimator:
        """How the online index samples: as in the version that the draft stands on."""
        newest_first = (edit.estimator for edit in reversed(self.edits) if edit.estimator is not None)
        return next(newest_first, self.base_estimator)

    @cached_property
    def standing(self) -> tuple[str, str | None, int]:
        """Name and id of the version it stands on, and the edits made since."""
        name, row_id, since = self.base_name, self.base_id, 0
        for edit in self.edits:
            if edit.base is not None:
                (name, row_id), since = edit.base, 0
            else:
                since += 1
        return name, row_id, since

    @cached_property
    def unedited(self) -> Draft:
        """This draft at the version that it stands on, without the edits made since."""
        return replace(self, edits=self.edits[: len(self.edits) - self.standing[2]])

    @property
    def title(self) -> str:
        """Such as `v3 calm + 2 edits`."""
        name, _, since = self.standing
        return name if since == 0 else f"{name} + {since} edit{'s' if since > 1 else ''}"

    @cached_property
    def changed(self) -> frozenset[Head]:
        """Heads that differ from the version it stands on."""
        then = [list(row) for row in self.base]
        now = [list(row) for row in self.base]
        for edit in self.edits:
            for (layer, head), pattern in edit.changes:
                now[layer][head] = pattern
            if edit.base is not None:
                then = [list(row) for row in now]
        return frozenset(
            (layer, head)
            for layer, row in enumerate(now)
            for head, pattern in enumerate(row)
            if pattern != then[layer][head]
        )

    def edited(self, label: str, heads: Iterable[Head], pattern: Pattern) -> Draft:
        """The draft with `pattern` on these heads; itself if that changes nothing."""
        changes = tuple((head, pattern) for head in heads if self.patterns[head[0]][head[1]] != pattern)
        if not changes:
            return self
        return replace(self, edits=(*self.edits, Edit(label, changes)), sequence=self.sequence + 1)

    def undone(self) -> Draft:
        """The draft before its last edit."""
        return replace(self, edits=self.edits[:-1], sequence=self.sequence + 1) if self.edits else self

    def onto(self, name: str, row_id: str | None, patterns: HeadPatterns, estimator: Estimator) -> Draft:
        """The draft standing on a version: after a save, a restore, an import or a search. Undoable."""
        changes = tuple(
            ((layer, head), pattern)
            for layer, row in enumerate(patterns)
            for head, pattern in enumerate(row)
            if self.patterns[layer][head] != pattern
        )
        edit = Edit(name, changes, (name, row_id), estimator)
        return replace(self, edits=(*self.edits, edit), sequence=self.sequence + 1)

    def scope(self, where: str, layer: int, head: int, group: int) -> list[Head]:
        """The heads that a scope of `SCOPES` means, seen from one head; `group` is query heads per KV head."""
        mine = self.patterns[layer][head]
        if where == "its group":
            first = head // group * group
            return [(layer, other) for other in range(first, first + group)]
        if where == "its layer":
            return [(layer, other) for other in range(len(self.patterns[layer]))]
        if where == "same pattern":
            return [
                (row, col)
                for row, line in enumerate(self.patterns)
                for col, pattern in enumerate(line)
                if pattern == mine
            ]
        return [(layer, head)]

    def start_dict(self) -> dict[str, Any]:
        """A JSON-ready form of what the draft started from; patterns are written once each."""
        numbers: dict[Pattern, int] = {}
        base = [[numbers.setdefault(pattern, len(numbers)) for pattern in row] for row in self.base]
        return {
            "base_name": self.base_name,
            "base_id": self.base_id,
            "base_estimator": self.base_estimator.to_dict(),
            "patterns": [pattern.to_dict() for pattern in numbers],
            "base": base,
        }

    @classmethod
    def from_dict(
        cls, draft_id: str, sequence: int, body: Mapping[str, Any], edits: Sequence[Mapping[str, Any]] = ()
    ) -> Draft:
        """The draft of `start_dict` with the edits of `Edit.to_dict`.

        Older drafts hold their edits in the body, with the body's patterns; those from before estimators were kept have
        the default one.
        """
        known = [patterns.from_dict(entry) for entry in body["patterns"]]
        first = tuple(Edit.from_dict(entry, known) for entry in body.get("edits", ()))
        rest = tuple(Edit.from_dict(entry, [patterns.from_dict(one) for one in entry["patterns"]]) for entry in edits)
        base = tuple(tuple(known[index] for index in row) for row in body["base"])
        estimator = Estimator.from_dict(body.get("base_estimator", {}))
        return cls(draft_id, body["base_name"], body["base_id"], base, (*first, *rest), sequence, estimator)


def uniform(draft_id: str, name: str, pattern: Pattern, layers: int, heads: int) -> Draft:
    """A draft that gives every head the same pattern."""
    return Draft(draft_id, name, None, tuple((pattern,) * heads for _ in range(layers)))


def differences(first: HeadPatterns, second: HeadPatterns) -> list[tuple[int, int, Pattern, Pattern]]:
    """Heads whose pattern differs between two models of one shape: layer, head, first's, second's."""
    return [
        (layer, head, one, two)
        for layer, (row, other) in enumerate(zip(first, second, strict=True))
        for head, (one, two) in enumerate(zip(row, other, strict=True))
        if one != two
    ]


@lru_cache(maxsize=8192)
def pattern_key(pattern: Pattern) -> str:
    """A stable text of a pattern, for cache keys."""
    return json.dumps(pattern.to_dict(), sort_keys=True)
