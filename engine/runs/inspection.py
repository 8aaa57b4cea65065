"""One prefill of a prompt in which every head is measured under a head config (isolated losses)."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from headscope.engine.attend.inputs import LayerInputs
from headscope.engine.base.errors import ConfigMismatch
from headscope.engine.base.machine import hardware
from headscope.engine.base.memory import PeakMemory
from headscope.engine.base.progress import Cancel, Progress
from headscope.engine.config.evidence import Evidence, provenance, read_provenance
from headscope.engine.config.facts import ModelFacts
from headscope.engine.config.file import HeadConfig
from headscope.engine.loss.measure import HeadMeasurement, LayerMeasurement, measure_patterns
from headscope.engine.patterns.families import Fraction, VerticalSlash
from headscope.engine.runs.capture import stream

if TYPE_CHECKING:
    from headscope.engine.model.load import LoadedModel


@dataclass(frozen=True)
class Inspection:
    """Measured heads and layers, and what the run took. `seconds` covers prefill and measuring, not the model load.

    `peak_mib` is the process's largest memory during the run (the GPU's, on a GPU), `peak_above_mib` that less what
    was in use when it began.
    """

    heads: tuple[HeadMeasurement, ...]
    layers: tuple[dict[str, Any], ...]
    config: HeadConfig
    tokens: int
    seconds: float
    peak_mib: float
    peak_above_mib: float

    def worst(self, count: int) -> tuple[HeadMeasurement, ...]:
        """The heads that miss most on average, worst first."""
        return tuple(sorted(self.heads, key=lambda head: (-head.missed_mass_mean, head.layer, head.head))[:count])


def starting_config(facts: ModelFacts) -> HeadConfig:
    """A sensible start where no config is given: every head vertical-slash with budgets that grow with the prompt."""
    pattern = VerticalSlash(vertical=Fraction(0.06, least=32), slash=Fraction(0.12, least=64), sink=4, local=32)
    return HeadConfig.uniform(facts, pattern, provenance={"made_by": "starting point, not searched"})


def check_fits(config: HeadConfig, loaded: LoadedModel, force_weights: bool = False) -> None:
    """ConfigMismatch with every reason why the config must not run on this model."""
    reasons = config.check(loaded, force_weights=force_weights)
    if reasons:
        raise ConfigMismatch(loaded.name, reasons)


def inspect_prompt(
    loaded: LoadedModel,
    input_ids: torch.Tensor,
    config: HeadConfig | None = None,
    layers: Iterable[int] | None = None,
    *,
    force_weights: bool = False,
    impl: str = "auto",
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> Inspection:
    """Prefills `input_ids` [1, S] once, dense, and measures the heads of the chosen layers under `config`.

    One layer's tensors are held at a time. Raises as `capture.stream`, and ConfigMismatch.
    """
    inspected = config or starting_config(loaded.facts)
    check_fits(inspected, loaded, force_weights)
    heads: list[HeadMeasurement] = []
    rows: list[dict[str, Any]] = []

    def visit(layer: int, inputs: LayerInputs) -> None:
        patterns = inspected.patterns(layer)
        measured = measure_patterns(inputs, patterns, layer=layer, estimator=inspected.estimator, impl=impl)
        heads.extend(measured.heads)
        rows.append(measured.to_dict())

    began = time.perf_counter()
    with PeakMemory(loaded.device) as memory:
        stream(loaded, input_ids, visit, layers=layers, progress=progress, cancel=cancel, logits=False)
    seconds = time.perf_counter() - began
    tokens = int(torch.as_tensor(input_ids).shape[-1])
    return Inspection(tuple(heads), tuple(rows), inspected, tokens, seconds, memory.peak_mib, memory.above_mib)


def in_situ(
    loaded: LoadedModel,
    input_ids: torch.Tensor,
    config: HeadConfig,
    progress: Progress | None = None,
) -> tuple[LayerMeasurement, ...]:
    """Losses of every head on the tensors that it meets when the layers before it are sparse too."""
    measured: list[LayerMeasurement] = []

    def visit(layer: int, inputs: LayerInputs) -> None:
        measured.append(measure_patterns(inputs, config.patterns(layer), layer=layer, estimator=config.estimator))

    stream(loaded, input_ids, visit, config=config, progress=progress, logits=False)
    return tuple(measured)


def with_evidence(inspection: Inspection, loaded: LoadedModel, prompt: dict[str, Any]) -> HeadConfig:
    """The inspected config with what was measured beside each head, for the model at hand.

    `prompt` describes it in provenance; see `evidence.prompt_record`. Who made the patterns, and what a search or a
    person kept of that, stays.
    """
    evidence = {(head.layer, head.head): Evidence.of(head, prompt).to_dict() for head in inspection.heads}
    config = inspection.config
    heads = tuple(
        tuple(replace(entry, evidence=evidence.get((layer, head), entry.evidence)) for head, entry in enumerate(row))
        for layer, row in enumerate(config.heads)
    )
    before = read_provenance(config.provenance)
    record = provenance(
        str(before.get("made_by", "a file, measured by inspect")),
        hardware=hardware(loaded.device),
        device=str(loaded.device),
        dtype=str(loaded.dtype).removeprefix("torch."),
        prompts=[prompt],
        metric="missed_mass_mean, isolated",
        parent=before.get("parent"),
    )
    return replace(config, heads=heads, provenance=before | record, model=config.model | loaded.facts.to_dict())
