"""A person's working copy of a head config: a base, and edits that can be undone one by one.

Immutable: each change gives a new draft with a higher sequence, so that the store can keep every state and two
tabs never overwrite each other's half.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from headscope.engine.attend.estimator import Estimator
from headscope.engine.patterns import families as patterns
from headscope.engine.patterns.families import Pattern

Head = tuple[int, int]
Grid = tuple[tuple[Pattern, ...], ...]

SCOPES = ("this head", "its group", "its layer", "same pattern")


@dataclass(frozen=True)
class Edit:
    """One step: new patterns of some heads; or a version to stand on, with its name and id and its estimator."""

    label: str
    changes: tuple[tuple[Head, Pattern], ...]
    base: tuple[str, str | None] | None = None
    estimator: Estimator | None = None


@dataclass(frozen=True)
class Draft:
    """`base_name` and `base_id` name what it started from; `base[layer][head]` are its patterns then."""

    id: str
    base_name: str
    base_id: str | None
    base: Grid
    edits: tuple[Edit, ...] = ()
    sequence: int = 0
    base_estimator: Estimator = field(default_factory=Estimator)

    @cached_property
    def patterns(self) -> Grid:
        """The patterns now, `[layer][head]`."""
        grid = [list(row) for row in self.base]
        for edit in self.edits:
            for (layer, head), pattern in edit.changes:
                grid[layer][head] = pattern
        return tuple(tuple(row) for row in grid)

    @cached_property
    def estimator(self) -> Estimator:
        """How the online index samples: as in the version that the draft stands on."""
        chosen = (edit.estimator for edit in reversed(self.edits) if edit.estimator is not None)
        return next(chosen, self.base_estimator)

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

    def onto(self, name: str, row_id: str | None, grid: Grid, estimator: Estimator) -> Draft:
        """The draft standing on a version: after a save, a restore, an import or a search. Undoable."""
        changes = tuple(
            ((layer, head), pattern)
            for layer, row in enumerate(grid)
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

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form; patterns are written once each."""
        names: dict[Pattern, int] = {}

        def place(pattern: Pattern) -> int:
            return names.setdefault(pattern, len(names))

        base = [[place(pattern) for pattern in row] for row in self.base]
        edits = [
            {
                "label": edit.label,
                "base": edit.base,
                "changes": [[layer, head, place(pattern)] for (layer, head), pattern in edit.changes],
                "estimator": None if edit.estimator is None else edit.estimator.to_dict(),
            }
            for edit in self.edits
        ]
        return {
            "base_name": self.base_name,
            "base_id": self.base_id,
            "base_estimator": self.base_estimator.to_dict(),
            "patterns": [pattern.to_dict() for pattern in names],
            "base": base,
            "edits": edits,
        }

    @classmethod
    def from_dict(cls, draft_id: str, sequence: int, body: Mapping[str, Any]) -> Draft:
        """The draft that `to_dict` wrote; drafts from before estimators were kept have the default one."""
        known = [patterns.from_dict(entry) for entry in body["patterns"]]
        edits = tuple(
            Edit(
                entry["label"],
                tuple(((layer, head), known[index]) for layer, head, index in entry["changes"]),
                None if entry["base"] is None else (entry["base"][0], entry["base"][1]),
                None if entry.get("estimator") is None else Estimator.from_dict(entry["estimator"]),
            )
            for entry in body["edits"]
        )
        base = tuple(tuple(known[index] for index in row) for row in body["base"])
        first = Estimator.from_dict(body.get("base_estimator", {}))
        return cls(draft_id, body["base_name"], body["base_id"], base, edits, sequence, first)


def uniform(draft_id: str, name: str, pattern: Pattern, layers: int, heads: int) -> Draft:
    """A draft that gives every head the same pattern."""
    return Draft(draft_id, name, None, tuple((pattern,) * heads for _ in range(layers)))


def differences(first: Grid, second: Grid) -> list[tuple[int, int, Pattern, Pattern]]:
    """Heads whose pattern differs between two grids of one shape: layer, head, first's, second's."""
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
