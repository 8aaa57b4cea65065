"""From a draft or a stored version to a head config file and back, with proof that the file says the same.

An export counts as good only after the engine has loaded the file, found that it fits the model, and measured
every head again from it on the stored capture with the numbers that the evidence claims.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headscope.engine.base import files
from headscope.engine.base.errors import ConfigError
from headscope.engine.config import evidence as record
from headscope.engine.config import interop
from headscope.engine.config.evidence import Evidence, prompt_record
from headscope.engine.config.facts import ModelFacts
from headscope.engine.config.file import HeadConfig, HeadEntry
from headscope.engine.loss.mass import MISSED_MASS_FLOOR
from headscope.engine.loss.measure import HeadMeasurement
from headscope.kernels.cells.plan import TILES_VERSION
from headscope.studio.data import prompts
from headscope.studio.data.draft import Draft, HeadPatterns
from headscope.studio.data.results import Run
from headscope.studio.lab.jobs import Context
from headscope.studio.lab.lab import Lab
from headscope.studio.store.rows import ConfigRow

MOST_HEADS = 2**16
"""Heads that a config may have to be taken in: several times those of the largest models."""


@dataclass(frozen=True)
class RoundTrip:
    """What came of checking an export: the file's text, what was compared, and why it is not good, if so."""

    text: str
    file_name: str
    heads: int
    largest_difference: float
    problems: tuple[str, ...]
    run_id: str

    @property
    def good(self) -> bool:
        """Whether the file may be handed out as checked."""
        return not self.problems


def evidence(measurement: HeadMeasurement, run: Run) -> dict[str, Any]:
    """What justified a head's pattern: numbers as measured, and where."""
    return Evidence.of(measurement, prompt_of(run), run=run.id).to_dict()


def prompt_of(run: Run) -> dict[str, Any]:
    """The run's prompt, as evidence and provenance name it."""
    sha256 = run.row.prompt_sha256
    kind = prompts.kind_of(run.prompt_name, sha256)
    return prompt_record(run.prompt_name, kind, sha256, run.row.tokens, run.row.chat_template)


def save_draft(lab: Lab, draft: Draft, run: Run, name: str, note: str) -> tuple[ConfigRow, Draft]:
    """Stores the draft as a version with parent and evidence; the draft then stands on it. StoreError loses nothing."""
    _, parent, _ = draft.standing
    row = lab.store.save_config(name, draft_config(lab, draft, run), parent_id=parent, run_id=run.id, note=note)
    return row, lab.drafts.keep(draft.onto(row.title, row.id, draft.patterns, draft.estimator))


def draft_config(lab: Lab, draft: Draft, run: Run) -> HeadConfig:
    """The draft as the engine's config, each head with what was measured of it on the run."""
    known = lab.measurements.grid(run.id, draft.patterns, draft.estimator)
    heads = tuple(
        tuple(
            HeadEntry(pattern, None if measurement is None else evidence(measurement, run))
            for pattern, measurement in zip(patterns, row, strict=True)
        )
        for patterns, row in zip(draft.patterns, known, strict=True)
    )
    return HeadConfig(run.facts.to_dict(), provenance(run, draft), TILES_VERSION, draft.estimator, heads)


def provenance(run: Run, draft: Draft) -> dict[str, Any]:
    """How a version made by hand came to be, and on what: a version, a search's choice or the start."""
    base, parent, edits = draft.standing
    then = {name: version for name, version in run.row.versions.items() if name != "hardware"}
    return record.provenance(
        "by hand in the studio",
        hardware=str(run.row.versions.get("hardware", "")),
        device=run.row.device,
        dtype=run.row.dtype,
        prompts=[prompt_of(run)],
        metric="missed mass, isolated",
        parent=parent,
        versions_then=then,
        stands_on=base,
        edits=edits,
    )


def patterns_of(config: HeadConfig) -> HeadPatterns:
    """A config's patterns."""
    return tuple(config.patterns(layer) for layer in range(len(config.heads)))


def to_file(row: ConfigRow) -> HeadConfig:
    """A stored version as it goes into a file, with its place among the versions."""
    named = {"config": row.id, "version": row.number, "title": row.name}
    return replace(row.config, provenance=row.config.provenance | named)


def read_import(name: str, data: bytes, facts: ModelFacts | None) -> HeadConfig:
    """A config from an uploaded file. ConfigError with every reason if it is malformed or for another model."""
    value = files.parse_json(data, name[:80])
    if interop.detect(value, name[:80]) != "headscope":
        raise ConfigError(f"{name[:80]} is a config of MInference or SGLang: run headscope convert on it first.")
    config = HeadConfig.from_dict(value, name[:80])
    heads = sum(len(row) for row in config.heads)
    if heads > MOST_HEADS:
        raise ConfigError(
            f"{name[:80]} has {heads:,} heads, and the studio takes in up to {MOST_HEADS:,}: give the file to the "
            "engine itself."
        )
    if facts is not None:
        reasons = config.check(facts)
        if reasons:
            raise ConfigError("This config does not fit the model: " + "; ".join(reasons) + ".")
    return config


def round_trip(lab: Lab, context: Context, row: ConfigRow, run: Run | None) -> RoundTrip:
    """A job: write the version to a file, load it with the engine, compare, and measure every head again from it."""
    config = to_file(row)
    with tempfile.TemporaryDirectory(prefix="headscope-export-") as folder:
        path = config.save(Path(folder) / f"headscope-v{row.number}.json")
        text = path.read_text("utf-8")
        loaded = HeadConfig.load(path)
    problems = []
    if loaded != config:
        problems.append("the engine reads something else from the file than was written")
    heads, largest = 0, 0.0
    if run is None:
        why = "its run is no longer kept here" if row.run_id else "it comes from a search or a file, not from a run"
        problems.append(f"{why}, so no head could be measured again: restore it as a run's draft, then save and check")
    else:
        problems += loaded.check(run.facts)
    if run is not None and not problems:
        heads, largest, differing = _measure_again(lab, context, loaded, run)
        problems += differing
    return RoundTrip(
        text, f"headscope-v{row.number}.json", heads, largest, tuple(problems), "" if run is None else run.id
    )


def _measure_again(lab: Lab, context: Context, config: HeadConfig, run: Run) -> tuple[int, float, list[str]]:
    """Heads compared, largest difference in missed mass, and what differs; the evidence must be of this very run."""
    wanted = [
        (layer, head, entry.pattern)
        for layer, line in enumerate(config.heads)
        for head, entry in enumerate(line)
        if entry.evidence is not None and entry.evidence.get("run") == run.id
    ]
    if not wanted:
        return 0, 0.0, ["its evidence is of another run: open that run, then check again"]
    measured = lab.measurements.measure(run, wanted, context, remember=False, estimator=config.estimator)
    largest, differing = 0.0, []
    for one in measured:
        claimed = config.heads[one.layer][one.head].evidence or {}
        gaps = [abs(getattr(one, name) - claimed[name]) for name in ("missed_mass_mean", "missed_mass_worst")]
        largest = max(largest, *gaps)
        if max(gaps) > MISSED_MASS_FLOOR or one.computed_pairs != claimed["computed_pairs"]:
            differing.append(f"L{one.layer} H{one.head}")
    if differing:
        named = ", ".join(differing[:6]) + (" and more" if len(differing) > 6 else "")
        return len(measured), largest, [f"measured again, {len(differing)} heads differ from their evidence: {named}"]
    return len(measured), largest, []
