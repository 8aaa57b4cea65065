"""Whole prefills of a decoder with random weights: dense SDPA against sparse, in one interleaved run.

What a layer takes is split as in eq. 13: projections (with the norm and RoPE before attention), index, attention, and
the rest (residuals, the second norm, the MLP). Embedding and the last position's logits are left out. Random weights
have no slashes to find, so vertical-slash attention runs over fixed clustered lists of the same budgets
(`bench_cases.planted_layout`), while an index of those budgets is built, and timed, on the layer's own Q/K.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch

from headscope.engine.bench import check_impl
from headscope.engine.bench_cases import SHAPES, Shape, planted_layout, random_qkv
from headscope.engine.bench_timing import baseline, gate, machine, summary
from headscope.engine.errors import OptionError
from headscope.engine.estimator import Estimator
from headscope.engine.host import HostProfile
from headscope.engine.memory import PeakMemory
from headscope.engine.patterns import Pattern, VerticalSlash
from headscope.kernels import backends, counts
from headscope.kernels.layout import TILE, Layout

PARTS = ("projections", "index", "attention", "other")

_CHUNK = 16384
"""Tokens that projections and the MLP take at a time: their inner results stay below a few GiB at any length."""

_LONG, _FEW = 2**17, 4
"""Beyond so many tokens only so many layers are timed, and the total is scaled."""

_ENOUGH_S = 40.0


@dataclass(frozen=True)
class ModelShape:
    """A decoder's sizes."""

    layers: int
    hidden: int
    mlp: int
    heads: Shape
    rope_theta: float = 500000.0


MODELS = {
    "llama3-8b": ModelShape(32, 4096, 14336, SHAPES["llama3-8b"]),
    "mistral-7b": ModelShape(32, 4096, 14336, SHAPES["mistral-7b"], 1e6),
    "smollm2": ModelShape(30, 576, 1536, SHAPES["smollm2"], 1e5),
}


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
    """Times whole prefills of one sequence, dense and under every setting, in turns.

    `timed_layers` layers with weights of their own are run (by default all, four beyond 128K tokens). A length that
    `host` keeps dense runs dense under a setting too, as `apply` does. Raises `OptionError` for settings that do not
    fit, `HeadscopeError` when a kernel fails its check against float64.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_impl(impl, model.heads.head_dim, dtype, device)
    chosen = tuple(settings) if settings is not None else default_settings(model)
    for setting in chosen:
        sizes = {len(row) for row in setting.patterns}
        if len(setting.patterns) != model.layers or sizes != {model.heads.query_heads}:
            raise OptionError(
                f"{setting.name} has {len(setting.patterns)} layers of {sorted(sizes)} heads; {name} has "
                f"{model.layers} of {model.heads.query_heads}"
            )
    names = ["dense", *(setting.name for setting in chosen)]
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
            rows += _one_length(decoder, length, chosen, impl, repeats, host or HostProfile())
        except torch.OutOfMemoryError as problem:
            rows.append(_out_of_memory(length, model, count, problem))
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return PrefillReport(machine(device), name, str(dtype).removeprefix("torch."), tuple(rows))


class Clock:
    """Time of the parts of a run: `lap(part)` books what passed since the lap before. No sync until `read`."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []
        self.lap("")

    def lap(self, part: str) -> None:
        """Ends a stretch of `part`."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((part, event))
        else:
            self._marks.append((part, time.perf_counter()))

    def read(self) -> dict[str, float]:
        """Milliseconds of every part."""
        if self._cuda:
            torch.cuda.synchronize()
        total = dict.fromkeys(PARTS, 0.0)
        for (_, before), (part, after) in zip(self._marks[:-1], self._marks[1:], strict=True):
            total[part] += before.elapsed_time(after) if self._cuda else (after - before) * 1e3
        return total


Attention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, Clock], torch.Tensor]
"""From layer, q [1, Hq, n, D], k and v [1, Hkv, n, D] to the output; books its own laps."""


@dataclass(frozen=True)
class Weights:
    """One layer: qkv [(Hq + 2 Hkv) D, hidden], out [hidden, Hq D], gate and up [2 mlp, hidden], down [hidden, mlp]."""

    qkv: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor]


class Decoder:
    """`count` decoder layers with random weights of their own: RMSNorm, RoPE, GQA, gated MLP."""

    def __init__(self, model: ModelShape, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self.model, self.dtype, self.device = model, dtype, device
        generator = torch.Generator(device=device).manual_seed(0)
        heads = model.heads

        def draw(*size: int) -> torch.Tensor:
            return torch.empty(*size, dtype=dtype, device=device).normal_(0, 0.02, generator=generator)

        def layer() -> Weights:
            ones = torch.ones(model.hidden, dtype=dtype, device=device)
            width = heads.query_heads * heads.head_dim
            return Weights(
                draw(width + 2 * heads.kv_heads * heads.head_dim, model.hidden), draw(model.hidden, width),
                draw(2 * model.mlp, model.hidden), draw(model.hidden, model.mlp), (ones, ones),
            )  # fmt: skip

        self.weights = [layer() for _ in range(count)]

    def run(self, length: int, attention: Attention, layers: int | None = None) -> dict[str, float]:
        """Milliseconds of every part of a prefill of `length` random embeddings through the first `layers` layers."""
        generator = torch.Generator(device=self.device).manual_seed(length)
        x = torch.empty(length, self.model.hidden, dtype=self.dtype, device=self.device)
        x.normal_(generator=generator)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        clock = Clock(self.device)
        self.forward(x, attention, clock, layers)
        return clock.read()

    @torch.no_grad()
    def forward(
        self, x: torch.Tensor, attention: Attention, clock: Clock | None = None, layers: int | None = None
    ) -> torch.Tensor:
        """Hidden states x [n, hidden] after the layers, in place: no layer keeps its keys for the next."""
        clock = clock or Clock(self.device)
        cos, sin = self._rotation(len(x))
        for number, weights in enumerate(self.weights[:layers]):
            q, k, v = self._project(weights, x, cos, sin)
            clock.lap("projections")
            out = attention(number, q, k, v, clock)
            del q, k, v
            self._close(weights, x, out, clock)
            del out
        return x

    def _rotation(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [length, D / 2] of RoPE."""
        half = self.model.heads.head_dim // 2
        frequency = self.model.rope_theta ** -(torch.arange(half, device=self.device) / half)
        angle = torch.arange(length, device=self.device)[:, None] * frequency
        return angle.cos().to(self.dtype), angle.sin().to(self.dtype)

    def _project(
        self, weights: Weights, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k (after RoPE) and v of a layer, contiguous per head."""
        heads, length = self.model.heads, len(x)
        counts_of = (heads.query_heads, heads.kv_heads, heads.kv_heads)
        q, k, v = (x.new_empty(1, count, length, heads.head_dim) for count in counts_of)
        for first in range(0, length, _CHUNK):
            part = slice(first, min(first + _CHUNK, length))
            mixed = self._norm(x[part], weights.norms[0]) @ weights.qkv.T
            queries, keys, values = mixed.view(len(mixed), -1, heads.head_dim).transpose(0, 1).split(counts_of)
            _rotate(queries, cos[part], sin[part], q[0, :, part])
            _rotate(keys, cos[part], sin[part], k[0, :, part])
            v[0, :, part] = values
        return q, k, v

    def _close(self, weights: Weights, x: torch.Tensor, out: torch.Tensor, clock: Clock) -> None:
        """Adds the output projection and the MLP to `x`, in place, a piece of the tokens at a time."""
        for first in range(0, len(x), _CHUNK):
            part = slice(first, min(first + _CHUNK, len(x)))
            x[part] += out[0, :, part].transpose(0, 1).flatten(1) @ weights.out.T
        clock.lap("projections")
        for first in range(0, len(x), _CHUNK):
            part = slice(first, min(first + _CHUNK, len(x)))
            gate_up = self._norm(x[part], weights.norms[1]) @ weights.gate_up.T
            opened = torch.nn.functional.silu(gate_up[:, : self.model.mlp]).mul_(gate_up[:, self.model.mlp :])
            x[part] += opened @ weights.down.T
        clock.lap("other")

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (self.model.hidden,), weight, 1e-5)


def dense_attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, clock: Clock) -> torch.Tensor:
    """The baseline as the decoder calls it."""
    out = baseline(q, k, v)
    clock.lap("attention")
    return out


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
    """RoPE on x [H, n, D] by halves, into `out`."""
    first, second = x.chunk(2, -1)
    half = first.shape[-1]
    out[..., :half] = first * cos - second * sin
    out[..., half:] = second * cos + first * sin


def _one_length(
    decoder: Decoder, length: int, settings: Sequence[Setting], impl: str, repeats: int, host: HostProfile
) -> list[PrefillRow]:
    made = {"dense": _Attention.dense()}
    for setting in settings:
        below = host.dense_below_tokens(1)
        kept = length < below
        made[setting.name] = (
            _Attention.dense(f"dense by the host profile (below {below})")
            if kept
            else _Attention.sparse(decoder, length, setting, impl)
        )
    for attention in made.values():
        decoder.run(length, attention, layers=1)
    parts: dict[str, list[dict[str, float]]] = {name: [] for name in made}
    peaks = dict.fromkeys(made, 0.0)
    began = time.perf_counter()
    for done in range(repeats):
        if done and time.perf_counter() - began > _ENOUGH_S:
            break
        for name, attention in made.items():
            with PeakMemory(decoder.device) as memory:
                parts[name].append(decoder.run(length, attention))
            peaks[name] = max(peaks[name], memory.peak_mib)
    return [_row(decoder, length, name, made, parts, peaks[name]) for name in made]


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
        q, k, v = random_qkv(shape, 1, length, decoder.dtype, decoder.device)
        backend, scale = backends.choose(impl, q), shape.head_dim**-0.5
        plans, layouts = [], []
        pairs = 0
        for number, patterns in enumerate(setting.patterns[: len(decoder.weights)]):
            plans.append(tuple(pattern.plan(length) for pattern in patterns))
            built = backend.build(q, k, list(plans[-1]), (0,), scale, setting.estimator, TILE)[1]
            layouts.append(planted_layout(built, patterns, seed=number))
            pairs += int(counts.pairs(layouts[-1]).sum())
        error = gate(setting.name, backend.attend(q, k, v, layouts[0], scale), q, k, v, scale, layouts[0])
        causal = len(layouts) * shape.query_heads * length * (length + 1) // 2
        return cls(backend, tuple(plans), tuple(layouts), setting.estimator, pairs / causal, error)

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, clock: Clock) -> torch.Tensor:
        if self.backend is None:
            return dense_attention(layer, q, k, v, clock)
        scale = q.shape[-1] ** -0.5
        self.backend.build(q, k, list(self.plans[layer]), (0,), scale, self.estimator, TILE)
        clock.lap("index")
        out = self.backend.attend(q, k, v, self.layouts[layer], scale)[0].to(q.dtype)
        clock.lap("attention")
        return out


def _row(
    decoder: Decoder, length: int, name: str, made: dict[str, _Attention],
    parts: dict[str, list[dict[str, float]]], peak: float,
) -> PrefillRow:  # fmt: skip
    attention, timed = made[name], len(decoder.weights)
    scale = decoder.model.layers / timed
    total = summary([sum(run.values()) * scale for run in parts[name]])
    of = {part: median(run[part] for run in parts[name]) * scale for part in PARTS}
    share = (of["index"] + of["attention"]) / sum(of.values())
    notes = [attention.note] if attention.note else []
    if scale > 1:
        notes.append(f"{timed} of {decoder.model.layers} layers timed, scaled")
    return PrefillRow(
        length=length, setting=name, impl="sdpa" if attention.backend is None else attention.backend.name,
        layers=decoder.model.layers, layers_timed=timed, rounds=total.rounds, total_ms=total.median,
        spread_ms=total.spread, projections_ms=of["projections"], index_ms=of["index"], attention_ms=of["attention"],
        other_ms=of["other"], share=share, ceiling=1 / (1 - share) if name == "dense" else None,
        density=attention.density,
        to_dense=median(sum(run.values()) for run in parts["dense"]) * scale / total.median,
        peak_mib=peak, error=attention.error, note="; ".join(notes),
    )  # fmt: skip


def _out_of_memory(length: int, model: ModelShape, timed: int, problem: Exception) -> PrefillRow:
    note = f"out of memory: {str(problem).split('.')[0]}; take a shorter length or fewer --timed-layers"
    none = float("inf")
    return PrefillRow(
        length=length, setting="all", impl="", layers=model.layers, layers_timed=timed, rounds=0, total_ms=none,
        spread_ms=0.0, projections_ms=none, index_ms=none, attention_ms=none, other_ms=none, share=0.0, ceiling=None,
        density=0.0, to_dense=0.0, peak_mib=none, note=note,
    )  # fmt: skip
