"""Checks of a searched config on the machine: real times and losses, held-out prompts, one sample against several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from headscope.engine.attend.inputs import LayerInputs
from headscope.engine.base import files
from headscope.engine.base.heap import steady_heap
from headscope.engine.base.progress import Cancel
from headscope.engine.config.file import HeadConfig
from headscope.engine.loss.measure import dense_pass, measure_patterns
from headscope.engine.search.cost import CostModel
from headscope.engine.search.measure import BesideDense, Source, time_beside_dense
from headscope.engine.search.results import SearchPrompt
from headscope.engine.search.table import Allocation, Table, Target, allocate, best_uniform, mean_losses, predict


@dataclass(frozen=True)
class Checked:
    """One prompt under a config, measured: isolated losses per head, and the times of its attention in ms.

    `mean`, `worst` float64 [layers, heads]. `attention_ms` has an all-dense layer in the dense kernel, as the model
    runs it. Sparse and dense passes are timed in turn, as the cost model's samples were; the best of each per layer,
    summed.
    """

    prompt: str
    tokens: int
    layers: tuple[int, ...]
    mean: np.ndarray
    worst: np.ndarray
    output_error: np.ndarray
    computed_density: float
    attention_ms: float
    dense_attention_ms: float

    def to_dict(self) -> dict[str, Any]:
        """The figures of the prompt as a whole, JSON-ready."""
        at = np.unravel_index(int(self.mean.argmax()), self.mean.shape)
        return {
            "prompt": self.prompt,
            "tokens": self.tokens,
            "missed_mass_mean": float(self.mean.mean()),
            "missed_mass_worst_head": float(self.mean.max()),
            "worst_head": [self.layers[int(at[0])], int(at[1])],
            "missed_mass_worst_row": float(self.worst.max()),
            "output_error_mean": float(self.output_error.mean()),
            "computed_density": self.computed_density,
            "attention_ms": self.attention_ms,
            "dense_attention_ms": self.dense_attention_ms,
        }


def check_prompt(
    source: Source,
    prompt: SearchPrompt,
    config: HeadConfig,
    layers: Sequence[int],
    *,
    repeats: int = 5,
    impl: str = "auto",
    cancel: Cancel | None = None,
) -> Checked:
    """Measures a config on a prompt, whether or not it was calibrated on it.

    Times are the best of `repeats`; with 0 they are those of the one pass that measured the losses.
    """
    steady_heap()
    rows: list[tuple[Any, float, float]] = []

    def visit(layer: int, inputs: LayerInputs) -> None:
        patterns = config.patterns(layer)
        dense = dense_pass(inputs, impl, layer)
        measured = measure_patterns(inputs, patterns, layer=layer, estimator=config.estimator, impl=impl, dense=dense)
        timed = BesideDense(measured.index_ms, measured.kernel_ms, dense.ms)
        if repeats:
            timed = time_beside_dense(inputs, patterns, config.estimator, impl, repeats)
        runs_dense = all(pattern.is_dense for pattern in patterns)
        attention_ms = timed.dense_ms if runs_dense else timed.index_ms + timed.kernel_ms
        rows.append((measured.heads, attention_ms, timed.dense_ms))

    source.stream(prompt, visit, list(layers), cancel)
    heads = [row[0] for row in rows]

    def table(name: str) -> np.ndarray:
        return np.array([[getattr(head, name) for head in layer] for layer in heads], dtype=np.float64)

    return Checked(
        prompt=prompt.name,
        tokens=len(prompt.ids),
        layers=tuple(layers),
        mean=table("missed_mass_mean"),
        worst=table("missed_mass_worst"),
        output_error=table("output_error"),
        computed_density=float(table("computed_density").mean()),
        attention_ms=sum(row[1] for row in rows),
        dense_attention_ms=sum(row[2] for row in rows),
    )


@dataclass(frozen=True)
class Expected:
    """What the cost model says of one prompt: attention of the choice and all dense in ms, and the mean missed mass."""

    attention_ms: float
    dense_attention_ms: float
    missed_mass_mean: float

    @classmethod
    def of(cls, picked: np.ndarray, table: Table, cost: CostModel, at: int) -> Expected:
        """For candidate numbers [layers, heads] on prompt number `at` of the table."""
        alone = table.only([at])
        predicted = predict(picked, alone, cost)
        return cls(predicted.attention_ms, predicted.dense_attention_ms, float(mean_losses(picked, alone)[0]))

    def beside(self, dense_attention_ms: float) -> float:
        """The predicted time of the choice where all dense takes `dense_attention_ms`.

        A machine is faster at one time than at another; what a choice takes beside dense stays.
        """
        return self.attention_ms * dense_attention_ms / max(1e-9, self.dense_attention_ms)

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class Drift:
    """How far losses on other prompts lie from the calibrated ones, means over heads and the heads that drift most."""

    mean: float
    worst: float
    worst_head: tuple[int, int]
    by_prompt: tuple[dict[str, Any], ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "mean_drift": self.mean,
            "worst_drift": self.worst,
            "worst_head": list(self.worst_head),
            "prompts": list(self.by_prompt),
        }


def drift(checked: Sequence[Checked], calibrated: np.ndarray) -> Drift:
    """`calibrated` [layers, heads] is the loss that the search stored: the worst calibration prompt's mean.

    Drift is what a held-out prompt loses beyond that. Its mean counts heads that do better as negative.
    """
    rows = []
    beyond = np.stack([each.mean - calibrated for each in checked])
    for each, gap in zip(checked, beyond, strict=True):
        at = np.unravel_index(int(gap.argmax()), gap.shape)
        rows.append(
            each.to_dict()
            | {
                "mean_drift": float(gap.mean()),
                "worst_drift": float(gap.max()),
                "worst_drift_head": [each.layers[int(at[0])], int(at[1])],
            }
        )
    at = np.unravel_index(int(beyond.argmax()), beyond.shape)
    place = (checked[0].layers[int(at[1])], int(at[2]))
    return Drift(float(beyond.mean(axis=(1, 2)).max()), float(beyond.max()), place, tuple(files.plain(rows)))


def uniform_lead(
    source: Source,
    prompts: Sequence[SearchPrompt],
    checked: Sequence[Checked],
    table: Table,
    allocation: Allocation,
    config: HeadConfig,
    *,
    impl: str = "auto",
    cancel: Cancel | None = None,
) -> list[dict[str, Any]]:
    """Held-out prompts under the best single setting, at as many computed pairs as the searched config has there.

    The single setting is the one that calibration would have chosen: the two patterns of `best_uniform`, measured on
    each prompt, the loss read off the straight line between them.
    """
    best = best_uniform(table, allocation.prediction.computed_pairs)
    labels = {pattern.label: pattern for pattern in table.grid.candidates}
    rows = []
    for prompt, own in zip(prompts, checked, strict=True):
        ends: list[tuple[float, float]] = []
        for label in dict.fromkeys((best.below, best.above)):
            single = HeadConfig.uniform(config.model, labels[label], estimator=config.estimator)
            uniform = check_prompt(source, prompt, single, own.layers, repeats=0, impl=impl, cancel=cancel)
            ends.append((uniform.computed_density, float(uniform.mean.mean())))
        ends.sort()
        densities, losses = [end[0] for end in ends], [end[1] for end in ends]
        loss = float(np.interp(own.computed_density, densities, losses))
        searched = float(own.mean.mean())
        rows.append({"prompt": prompt.name, "searched": searched, "uniform": loss, "lead": loss - searched})
    return files.plain(rows)


def one_against_all(table: Table, cost: CostModel, target: Target) -> list[dict[str, Any]]:
    """What a search on each prompt alone would have chosen, judged on all prompts: is one sample enough?"""
    rows = []
    everything = allocate(table, cost, target)
    limit = target.max_missed
    for at, prompt in [*enumerate(table.prompts), (None, None)]:
        allocation = everything if at is None else allocate(table.only([at]), cost, target)
        missed = np.take_along_axis(table.stats["mean"], allocation.picked[None, :, :, None], 3)[..., 0]
        own = missed.max(0) if at is None else missed[at]
        rows.append(
            {
                "calibrated_on": "all prompts" if prompt is None else prompt["name"],
                "missed_mass_worst_prompt": float(mean_losses(allocation.picked, table).max()),
                "mean_drift": float((missed.max(0) - own).mean()),
                "worst_head_drift": float((missed.max(0) - own).max()),
                "heads_over_target": None if limit is None else int((missed.max(0) > limit + 1e-5).sum()),
                "computed_density": float(
                    np.take_along_axis(table.stats["computed_pairs"], allocation.picked[None, :, :, None], 3).sum()
                    / everything.prediction.causal_pairs
                ),
            }
        )
    return files.plain(rows)


def calibrated_losses(table: Table, picked: np.ndarray) -> np.ndarray:
    """[layers, heads]: the worst calibration prompt's mean missed mass of every chosen candidate."""
    return np.take_along_axis(table.stats["mean"].max(0), picked[:, :, None], 2)[:, :, 0]
