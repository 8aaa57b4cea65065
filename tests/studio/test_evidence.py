"""The studio's evidence and provenance are the engine's record."""

from __future__ import annotations

import torch

from headscope.engine.config.evidence import Evidence, prompt_set, read_evidence, read_provenance
from headscope.engine.model.load import LoadedModel
from headscope.engine.prompts.prompt import text_sha256
from headscope.engine.runs.inspection import inspect_prompt, starting_config
from headscope.studio.data import prompts
from headscope.studio.data.draft import Draft
from headscope.studio.data.results import Run
from headscope.studio.store.store import RunRow, now
from headscope.studio.work import exports


def test_a_draft_is_stored_with_the_engines_record(tiny_llama: LoadedModel) -> None:
    sample = prompts.sample("prose")
    row = RunRow(
        id="run",
        model="tiny",
        fingerprint=tiny_llama.fingerprint,
        prompt_sha256=sample.sha256,
        tokens=60,
        chat_template=True,
        device="cpu",
        dtype="float32",
        impl="torch",
        tiles="tiles/1",
        estimator={},
        capture_ms=1.0,
        measure_ms=1.0,
        versions={"torch": "2", "hardware": "a machine"},
        created_at=now(),
    )
    run = Run(row, "prose", sample.text, (), tiny_llama.facts, False)
    start = starting_config(tiny_llama.facts)
    draft = Draft("id", "start", None, tuple(start.patterns(layer) for layer in range(3)))
    ids = torch.randint(3, 97, (1, 60), generator=torch.Generator().manual_seed(6))
    head = inspect_prompt(tiny_llama, ids, layers=[1]).heads[2]
    record = {"name": "prose", "kind": sample.kind, "sha256": sample.sha256, "tokens": 60, "chat_template": True}

    evidence = exports.evidence(head, run)
    assert set(evidence) == set(Evidence.__dataclass_fields__) and read_evidence(evidence) == evidence
    assert evidence["run"] == "run" and evidence["loss"] == "isolated" and evidence["prompt"] == sample.sha256
    assert evidence["missed_mass_p99"] == head.missed_mass_p99 and evidence["tokens"] == 60
    assert evidence["missed_mass_thirds"] == list(head.missed_mass_thirds)

    provenance = exports.provenance(run, draft)
    assert read_provenance(provenance) == provenance and provenance["made_by"] == "by hand in the studio"
    assert provenance["hardware"] == "a machine" and provenance["versions"] == {"torch": "2"}
    assert provenance["device"] == "cpu" and provenance["dtype"] == "float32"
    assert provenance["prompts"] == [record] and provenance["prompt_set"] == prompt_set([record])
    assert provenance["lengths"] == [60] and provenance["stands_on"] == "start" and provenance["edits"] == 0


def test_a_stored_prompt_that_only_shares_a_samples_name_has_its_own_kind() -> None:
    assert prompts.kind_of("prose", text_sha256("another text")) == "prose"
    assert prompts.kind_of("key_value", text_sha256("another text")) == "key_value"
    assert prompts.kind_of("key_value", prompts.sample("key_value").sha256) == prompts.samples()["key_value"].kind
