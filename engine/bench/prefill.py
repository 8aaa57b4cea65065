"""Whole prefills of a decoder with random weights: dense SDPA against sparse, in one interleaved run.

The decoder and the split of its time are `bench_decoder`'s. Random weights have no slashes to find, so vertical-slash
attention runs over fixed clustered lists of the same budgets (`bench_cases.planted_layout`), while an index of those
budgets is built, and timed, on the layer's own Q/K.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch

from headscope.engine.attend.estimator import Estimator
from headscope.engine.attend.inputs import LayerInputs
from headscope.engine.base.errors import OptionError
from headscope.engine.base.memory import PeakMemory
from headscope.engine.bench.cases import planted_layout, random_inputs
from headscope.engine.bench.decoder import PARTS, Clock, Decoder, ModelShape
from headscope.engine.bench.layers import check_impl
from headscope.engine.bench.timing import baseline, gate, machine, summary
from headscope.engine.config.host import HostProfile
from headscope.engine.patterns.families import Pattern, VerticalSlash
from headscope.kernels import backends
from headscope.kernels.cells import counts
from headscope.kernels.cells.layout import Layout
from headscope.kernels.cells.plan import TILE

_LONG, _FEW = 2**17, 4
"""Beyond so many tokens only so many layers are timed, and the total is scaled."""

_ENOUGH_S = 40.0


@dataclass(frozen=True)
class Setting:
    """A name and the patterns `[layer][query head]` of the timed layers, with the sampling their index is built by."""

    name: str
    patterns: tuple[tuple[Pattern, ...], ...] = ()
    estimator: Estimator = field(default_factory=Estimator)


@dataclass(frozen=True)
class PrefillRow:
    """One setting at one length. Times in milliseconds for all `layers`, scaled up from `layers_timed`.

    `share` is what index and attention take of the total; `ceiling` of a dense row is 1 / (1 - share). `density` is
    the mean over layers and heads, `to_dense` the dense total over this one, `peak_mib` the largest memory in use,
    weights included (of the timed layers alone), `error` the gate's.
    """

    length: int
    setting: str
    impl: str
    layers: int
    layers_timed: int
    rounds: int
    total_ms: float
    spread_ms: float
    projections_ms: float
    index_ms: float
    attention_ms: float
    other_ms: float
    share: float
    ceiling: float | None
    density: float
    to_dense: float
    peak_mib: float
    error: float | None = None
    note: str = ""


@dataclass(frozen=True)
class PrefillReport:
    """All rows of one run."""

    machine: dict[str, Any]
    model: str
    dtype: str
    rows: tuple[PrefillRow, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def uniform(model: ModelShape, name: str, pattern: Pattern) -> Setting:
    """One pattern in every head."""
    return Setting(name, ((pattern,) * model.heads.query_heads,) * model.layers)


def default_settings(model: ModelShape) -> tuple[Setting, ...]:
    """Vertical-slash 1000/6096 in every head, the budgets that MInference takes by default."""
    return (uniform(model, "vs 1000/6096", VerticalSlash(1000, 6096, sink=4, local=64)),)


def run_prefill(
    name: str,
    model: ModelShape,
    lengths: Sequence[int],
    settings: Sequence[Setting] | None = None,
    *,
    timed_layers: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | None = None,
    impl: str = "auto",
    repeats: int = 3,
    host: HostProfile | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> PrefillReport:
    """Times whole prefills of one sequence, dense and under every setting, interleaved.

    `timed_layers` layers with weights of their own are run (by default all, four beyond 128K tokens). A length that
    `host` keeps dense runs dense under a setting too, as `apply` does. Raises `OptionError` for settings that do not
    fit, `HeadscopeError` when a kernel fails its check against float64.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_impl(impl, model.heads.head_dim, dtype, device)
    timed_settings = tuple(settings) if settings is not None else default_settings(model)
    for setting in timed_settings:
        sizes = {len(row) for row in setting.patterns}
        if len(setting.patterns) != model.layers or sizes != {model.heads.query_heads}:
            raise OptionError(
                f"{setting.name} has {len(setting.patterns)} layers of {sorted(sizes)} heads; {name} has "
                f"{model.layers} of {model.heads.query_heads}"
            )
    names = ["dense", *(setting.name for setting in timed_settings)]
    if len(set(names)) < len(names):
        raise OptionError(f"settings need names of their own, and dense is taken: got {', '.join(names[1:])}")
    rows: list[PrefillRow] = []
    decoder: Decoder | None = None
    for length in lengths:
        count = min(model.layers, timed_layers or (model.layers if length <= _LONG else _FEW))
        progress(f"{name}, {length} tokens, {count} of {model.layers} layers")
        try:
            if decoder is None or len(decoder.weights) != count:
                decoder = None  # lets go of the other weights first
                decoder = Decoder(model, count, dtype, device)
            rows += _one_length(decoder, length, timed_settings, impl, repeats, host or HostProfile())
        except torch.OutOfMemoryError as problem:
            rows.append(_out_of_memory(length, model, count, problem))
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return PrefillReport(machine(device), name, str(dtype).removeprefix("torch."), tuple(rows))


def dense_attention(layer: int, inputs: LayerInputs, clock: Clock) -> torch.Tensor:
    """The baseline as the decoder calls it."""
    out = baseline(inputs)
    clock.lap("attention")
    return out


def _one_length(
    decoder: Decoder, length: int, settings: Sequence[Setting], impl: str, repeats: int, host: HostProfile
) -> list[PrefillRow]:
    attentions = {"dense": _Attention.dense()}
    for setting in settings:
        below = host.dense_below_tokens(1)
        kept = length < below
        attentions[setting.name] = (
            _Attention.dense(f"dense by the host profile (below {below})")
            if kept
            else _Attention.sparse(decoder, length, setting, impl)
        )
    for attention in attentions.values():
        decoder.run(length, attention, layers=1)
    parts: dict[str, list[dict[str, float]]] = {name: [] for name in attentions}
    peaks = dict.fromkeys(attentions, 0.0)
    began = time.perf_counter()
    for done in range(repeats):
        if done and time.perf_counter() - began > _ENOUGH_S:
            break
        # A new order each round, since a power-limited card is slower after heavy work.
        for name in random.sample(list(attentions), len(attentions)):
            with PeakMemory(decoder.device) as memory:
                parts[name].append(decoder.run(length, attentions[name]))
            peaks[name] = max(peaks[name], memory.peak_mib)
    return [_row(decoder, length, name, attentions, parts, peaks[name]) for name in attentions]


@dataclass(frozen=True)
class _Attention:
    """One way to attend, as the decoder calls it: SDPA, or a built index and the attention over a planted one."""

    backend: backends.Backend | None
    plans: tuple[tuple[Any, ...], ...] = ()
    layouts: tuple[Layout, ...] = ()
    estimator: Estimator = field(default_factory=Estimator)
    density: float = 1.0
    error: float | None = None
    note: str = ""

    @classmethod
    def dense(cls, note: str = "") -> _Attention:
        return cls(None, note=note)

    @classmethod
    def sparse(cls, decoder: Decoder, length: int, setting: Setting, impl: str) -> _Attention:
        """Plants the layouts of every timed layer; the first one must pass the gate."""
        shape = decoder.model.heads
        inputs = random_inputs(shape, 1, length, decoder.dtype, decoder.device)
        q, k, scale = inputs.q, inputs.k, inputs.scale
        backend = backends.choose(impl, q)
        plans, layouts = [], []
        pairs = 0
        for number, patterns in enumerate(setting.patterns[: len(decoder.weights)]):
            plans.append(tuple(pattern.plan(length) for pattern in patterns))
            built = backend.build(q, k, list(plans[-1]), (0,), scale, setting.estimator, TILE)[1]
            layouts.append(planted_layout(built, patterns, seed=number))
            pairs += int(counts.pairs(layouts[-1]).sum())
        error = gate(setting.name, backend.attend(q, k, inputs.v, layouts[0], scale), inputs, layouts[0])
        causal = len(layouts) * shape.query_heads * length * (length + 1) // 2
        return cls(backend, tuple(plans), tuple(layouts), setting.estimator, pairs / causal, error)

    def __call__(self, layer: int, inputs: LayerInputs, clock: Clock) -> torch.Tensor:
        if self.backend is None:
            return dense_attention(layer, inputs, clock)
        q, k, scale = inputs.q, inputs.k, inputs.scale
        self.backend.build(q, k, list(self.plans[layer]), (0,), scale, self.estimator, TILE)
        clock.lap("index")
        out = self.backend.attend(q, k, inputs.v, self.layouts[layer], scale)[0].to(q.dtype)
        clock.lap("attention")
        return out


def _row(
    decoder: Decoder,
    length: int,
    name: str,
    attentions: dict[str, _Attention],
    parts: dict[str, list[dict[str, float]]],
    peak: float,
) -> PrefillRow:
    attention, timed = attentions[name], len(decoder.weights)
    scale = decoder.model.layers / timed
    total = summary([sum(run.values()) * scale for run in parts[name]])
    of = {part: median(run[part] for run in parts[name]) * scale for part in PARTS}
    share = (of["index"] + of["attention"]) / sum(of.values())
    notes = [attention.note] if attention.note else []
    if scale > 1:
        notes.append(f"{timed} of {decoder.model.layers} layers timed, scaled")
    return PrefillRow(
        length=length,
        setting=name,
        impl="sdpa" if attention.backend is None else attention.backend.name,
        layers=decoder.model.layers,
        layers_timed=timed,
        rounds=total.rounds,
        total_ms=total.median,
        spread_ms=total.spread,
        projections_ms=of["projections"],
        index_ms=of["index"],
        attention_ms=of["attention"],
        other_ms=of["other"],
        share=share,
        ceiling=1 / (1 - share) if name == "dense" else None,
        density=attention.density,
        to_dense=median(sum(run.values()) for run in parts["dense"]) * scale / total.median,
        peak_mib=peak,
        error=attention.error,
        note="; ".join(notes),
    )


def _out_of_memory(length: int, model: ModelShape, timed: int, problem: Exception) -> PrefillRow:
    note = f"out of memory: {str(problem).split('.')[0]}; take a shorter length or fewer --timed-layers"
    none = float("inf")
    return PrefillRow(
        length=length,
        setting="all",
        impl="",
        layers=model.layers,
        layers_timed=timed,
        rounds=0,
        total_ms=none,
        spread_ms=0.0,
        projections_ms=none,
        index_ms=none,
        attention_ms=none,
        other_ms=none,
        share=0.0,
        ceiling=None,
        density=0.0,
        to_dense=0.0,
        peak_mib=none,
        note=note,
    )
