"""Timing of the kernels against torch's own attention: one interleaved run, medians with spread.

Every setting passes a correctness gate (sampled rows against float64) before it is timed. The baseline is causal
SDPA, forced to cuDNN on CUDA. On random inputs vertical-slash attention is timed on a fixed clustered index, since
they have no slashes to find; its index time is that of building an index of the same budget on the same inputs, and
"with index" is the sum of the two. On planted inputs and on real captures the online index itself is timed, and what
it misses stands beside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from headscope.engine.attend.estimator import Estimator
from headscope.engine.attend.inputs import LayerInputs
from headscope.engine.base.errors import OptionError
from headscope.engine.bench import flex as bench_flex
from headscope.engine.bench.cases import CASES, Case, clustered_layout, plant, random_inputs
from headscope.engine.bench.shapes import Shape
from headscope.engine.bench.timing import Timing, baseline, gate, interleaved, machine
from headscope.engine.config.host import HostProfile
from headscope.engine.loss import mass
from headscope.engine.patterns.families import VerticalSlash
from headscope.engine.prompts.tokens import check_ids
from headscope.engine.runs.capture import chosen_layers, stream
from headscope.kernels import backends
from headscope.kernels.cells import counts, membership
from headscope.kernels.cells.layout import Layout
from headscope.kernels.cells.plan import TILE

if TYPE_CHECKING:
    from headscope.engine.model.load import LoadedModel

FIXED, ONLINE, EXACT = "fixed, clustered", "online", "by position"
"""Whose cells a sparse row computes: a fixed list's, those that the online index chose, or the pattern's own."""

_PLANTED = Case("planted vs 64/256", VerticalSlash(64, 256, sink=4, local=64))
_PLANTED_LENGTHS = range(1024, 2**17 + 1)
_LONG = 2**19
"""From here on the baseline takes many seconds, and is warmed up on a short piece."""


@dataclass(frozen=True)
class Row:
    """One timed thing. Times in milliseconds; `spread_ms` is the distance between the quartiles, `index_spread_ms` that
    of its index.

    `density` is computed over causal pairs; `tflops` counts 4 D operations per computed pair; `to_baseline` is the
    baseline's median over this one's, index apart; `with_index` the same with `index_ms` added. `index` says whose
    cells were computed, `missed_mean` and `missed_worst` what they miss: the mean over all heads, and the worst
    head's. `layer` is that of a real capture.
    """

    length: int
    batch: int
    name: str
    impl: str
    median_ms: float
    spread_ms: float
    density: float
    tflops: float
    to_baseline: float
    index_ms: float | None = None
    index_spread_ms: float | None = None
    with_index: float | None = None
    to_flex: float | None = None
    error: float | None = None
    note: str = ""
    index: str | None = None
    missed_mean: float | None = None
    missed_worst: float | None = None
    layer: int | None = None
    rounds: int = 0


@dataclass(frozen=True)
class Report:
    """All rows of one run, and the machine they were measured on.

    `dense_below` is the crossover per batch size that a host profile keeps, `crossovers` that of every sparse
    setting; `prompt` says which prompt real captures came from.
    """

    machine: dict[str, Any]
    shape: str
    dtype: str
    rows: tuple[Row, ...] = ()
    planted: tuple[dict[str, Any], ...] = ()
    dense_below: dict[int, int] = field(default_factory=dict)
    crossovers: dict[str, dict[int, int]] = field(default_factory=dict)
    prompt: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def run(
    shape_name: str,
    shape: Shape,
    lengths: Sequence[int],
    *,
    batches: Sequence[int] = (1,),
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | None = None,
    impl: str = "auto",
    cases: Sequence[Case] = CASES,
    repeats: int = 5,
    flex: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Times dense and sparse attention of one layer at every length and batch size, on random inputs.

    Lengths that do not fit memory are left out with a row that says so. Raises `HeadscopeError` when a kernel
    fails the correctness gate: a wrong kernel is not timed; `OptionError` when `impl` cannot serve here.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_impl(impl, shape.head_dim, dtype, device)
    rows: list[Row] = []
    planted: list[dict[str, Any]] = []
    for batch in batches:
        for length in lengths:
            progress(f"{shape_name}, batch {batch}, {length} tokens")
            try:
                layer = Timed(random_inputs(shape, batch, length, dtype, device), impl, repeats, progress)
                rows += layer.rows(cases, fixed=shape, flex=flex)
                if batch == batches[0] and length in _PLANTED_LENGTHS:
                    recall, row = _planted(layer)
                    planted.append(recall)
                    rows.append(row)
            except torch.OutOfMemoryError as problem:
                rows.append(_out_of_memory(length, batch, impl, problem))
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    kind = str(dtype).removeprefix("torch.")
    below = crossover(rows), crossovers(rows)
    return Report(machine(device), shape_name, kind, tuple(rows), tuple(planted), *below)


def a_few(layers: tuple[int, ...]) -> tuple[int, ...]:
    """At most four of the layers, evenly spread from first to last."""
    return layers if len(layers) <= 4 else tuple(layers[round(part * (len(layers) - 1) / 3)] for part in range(4))


def run_captures(
    loaded: LoadedModel,
    input_ids: torch.Tensor,
    *,
    lengths: Sequence[int] | None = None,
    layers: Iterable[int] | None = None,
    impl: str = "auto",
    cases: Sequence[Case] = CASES,
    repeats: int = 5,
    flex: bool = False,
    prompt: dict[str, Any] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Times the same settings on Q/K/V of a model's prefill of `input_ids` [1, S], with the online index.

    `lengths` are prefixes of the prompt, by default all of it; `layers` four evenly spread ones by default. Raises
    as `run` and `capture.stream`.
    """
    ids = check_ids(loaded, input_ids)
    wanted = tuple(lengths or (ids.shape[1],))
    if max(wanted) > ids.shape[1]:
        raise OptionError(f"--lengths asks for {max(wanted)} tokens and the prompt has {ids.shape[1]}")
    timed_layers = chosen_layers(loaded.facts, layers)
    if layers is None:
        timed_layers = a_few(timed_layers)
    check_impl(impl, loaded.facts.head_dim, loaded.dtype, loaded.device)
    rows: list[Row] = []
    for length in wanted:

        def visit(number: int, inputs: LayerInputs) -> None:
            progress(f"{loaded.name}, layer {number}, {inputs.rows} tokens")
            layer = Timed(inputs.contiguous(), impl, repeats, progress, number)
            rows.extend(layer.rows(cases, flex=flex))

        try:
            stream(loaded, ids[:, :length], visit, layers=timed_layers, logits=False)
        except torch.OutOfMemoryError as problem:
            rows.append(_out_of_memory(length, 1, impl, problem))
            if loaded.device.type == "cuda":
                torch.cuda.empty_cache()
    kind = str(loaded.dtype).removeprefix("torch.")
    return Report(machine(loaded.device), loaded.name, kind, tuple(rows), prompt=prompt)


def check_impl(impl: str, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """`OptionError` when the named implementation cannot serve here."""
    try:
        backends.choose(impl, torch.empty(1, 1, 1, head_dim, device=device, dtype=dtype))
    except ValueError as problem:
        raise OptionError(f"{problem}; auto takes the fastest that serves") from problem


def crossovers(rows: Sequence[Row]) -> dict[str, dict[int, int]]:
    """Per sparse setting on random inputs and batch size: the shortest measured length from which it wins.

    With the index included. Where it never wins, one more than the longest measured length.
    """
    shortest: dict[str, dict[int, int]] = {}
    of_case = [row for row in rows if row.with_index is not None and row.name != _PLANTED.name]
    for name in dict.fromkeys(row.name for row in of_case):
        for batch in sorted({row.batch for row in of_case if row.name == name}):
            named = [row for row in of_case if (row.name, row.batch) == (name, batch)]
            slower = [row.length for row in named if (row.with_index or 0.0) < 1.0]
            faster = [row.length for row in named if row.length > max(slower, default=0)]
            shortest.setdefault(name, {})[batch] = min(faster) if faster else max(slower) + 1
    return shortest


def crossover(rows: Sequence[Row]) -> dict[int, int]:
    """The crossover per batch size of the first vertical-slash setting, or of the first setting at all."""
    each = crossovers(rows)
    names = [name for name in each if name.startswith("vs")] or list(each)
    return each[names[0]] if names else {}


def host_profile(report: Report) -> HostProfile:
    """What the run says about this machine."""
    return HostProfile(machine=report.machine | {"shape": report.shape}, dense_below=report.dense_below)


@dataclass(frozen=True)
class Timed:
    """What one layer reads, contiguous, and how it is to be timed."""

    inputs: LayerInputs
    impl: str
    repeats: int
    progress: Callable[[str], None]
    layer: int | None = None

    @property
    def backend(self) -> backends.Backend:
        return backends.choose(self.impl, self.inputs.q)

    def rows(self, cases: Sequence[Case], fixed: Shape | None = None, flex: bool = False) -> list[Row]:
        """Baseline, dense and every case. `fixed` (the heads) times vertical-slash on clustered lists."""
        inputs, backend = self.inputs, self.backend
        q, k, v, scale, starts = inputs.q, inputs.k, inputs.v, inputs.scale, inputs.starts
        dense = backend.dense(q, k, v, scale, starts)
        checked = {"dense": _Checked(gate("dense", dense, inputs, None), None)}
        work: dict[str, Callable[[], Any]] = {
            "baseline": lambda: baseline(inputs),
            "dense": lambda: backend.dense(q, k, v, scale, starts),
        }
        layouts: dict[str, Layout] = {}
        for case in cases:
            layout = self.build(case)[1]
            if fixed is not None and case.clustered:
                layout = clustered_layout(fixed, inputs.batch, inputs.length, *case.clustered, q.device)
            layouts[case.name] = layout
            checked[case.name] = self._check(case.name, layout, dense[1])
            work[case.name] = lambda layout=layout: backend.attend(q, k, v, layout, scale)  # type: ignore[misc]
            work[f"index {case.name}"] = lambda case=case: self.build(case)  # type: ignore[misc]
        del dense
        # Everything else ran for the gate. A short piece is enough to load what a long baseline needs.
        warm = {"baseline": work["baseline"]}
        if inputs.length > _LONG:
            piece = LayerInputs(q[:, :, :4096], k[:, :, :4096], v[:, :, :4096], scale)
            warm["baseline"] = lambda: baseline(piece)
        flexed = self._flex(layouts) if flex else {}
        times = interleaved(work | flexed, self.repeats, q.device, warm | flexed)
        return self._rows(layouts, checked, times, {case.name: _choice(case, fixed is not None) for case in cases})

    def build(self, case: Case) -> tuple[Layout, Layout]:
        """The requested and the computed cells of an index of this case."""
        inputs = self.inputs
        plans = [case.pattern.plan(inputs.length)] * (inputs.batch * inputs.query_heads)
        layouts: tuple[Layout, Layout] = self.backend.build(
            inputs.q, inputs.k, plans, inputs.starts, inputs.scale, Estimator(), TILE
        )
        return layouts

    def _check(self, name: str, layout: Layout, dense_lse: torch.Tensor) -> _Checked:
        """Passes the gate, and what the layout misses."""
        inputs = self.inputs
        result = self.backend.attend(inputs.q, inputs.k, inputs.v, layout, inputs.scale)
        error = gate(name, result, inputs, layout)
        missed = mass.missed_mass(result[1], dense_lse).mean(-1, dtype=torch.float64)
        return _Checked(error, (float(missed.mean()), float(missed.max())))

    def _flex(self, layouts: dict[str, Layout]) -> dict[str, Callable[[], Any]]:
        if reason := bench_flex.reason_to_skip(self.inputs):
            self.progress(f"FlexAttention left out: {reason}")
            return {}
        flex_calls = bench_flex.calls(self.inputs, layouts)
        try:
            for call in flex_calls.values():
                call()
        except RuntimeError as problem:  # what its compiler raises derives from it
            self.progress(f"FlexAttention left out: {type(problem).__name__}: {str(problem)[:200]}")
            return {}
        return {f"flex {name}": call for name, call in flex_calls.items()}

    def _rows(
        self, layouts: dict[str, Layout], checked: dict[str, _Checked], times: dict[str, Timing], choice: dict[str, str]
    ) -> list[Row]:
        """Table rows from the timings of one layer."""
        batch, heads, length, dim = self.inputs.q.shape
        causal = batch * heads * length * (length + 1) // 2
        base = times["baseline"].median
        rows = []
        for name in ("baseline", "dense", *layouts):
            timing, passed = times[name], checked.get(name, _Checked(None, None))
            pairs = int(counts.pairs(layouts[name]).sum()) if name in layouts else causal
            index = times[f"index {name}"] if name in layouts else None
            flex = times.get(f"flex {name}")
            rows.append(
                Row(
                    length=length,
                    batch=batch,
                    name=name,
                    impl="sdpa" if name == "baseline" else self.backend.name,
                    median_ms=timing.median,
                    spread_ms=timing.spread,
                    density=pairs / causal,
                    tflops=4 * dim * pairs / timing.median / 1e9,
                    to_baseline=base / timing.median,
                    index_ms=None if index is None else index.median,
                    index_spread_ms=None if index is None else index.spread,
                    with_index=None if index is None else base / (timing.median + index.median),
                    to_flex=None if flex is None else flex.median / timing.median,
                    error=passed.error,
                    index=choice.get(name),
                    missed_mean=None if passed.missed is None else passed.missed[0],
                    missed_worst=None if passed.missed is None else passed.missed[1],
                    layer=self.layer,
                    rounds=timing.rounds,
                )
            )
        return rows


def _choice(case: Case, fixed: bool) -> str:
    if not case.pattern.online:
        return EXACT
    return FIXED if fixed and case.clustered else ONLINE


@dataclass(frozen=True)
class _Checked:
    """The error of the gate, and the missed mass (mean of all heads, worst head); None where there is none."""

    error: float | None
    missed: tuple[float, float] | None


def _planted(layer: Timed) -> tuple[dict[str, Any], Row]:
    """How much of a planted structure the online index finds, and what that takes."""
    length, inputs = layer.inputs.length, layer.inputs
    q, k, planted = plant(inputs.q[:1], inputs.k[:1])
    with_lines = replace(layer, inputs=LayerInputs(q, k, inputs.v[:1], inputs.scale))
    row = next(row for row in with_lines.rows([_PLANTED]) if row.name == _PLANTED.name)
    table = membership.tables(with_lines.build(_PLANTED)[0])
    shares = {
        "length": length,
        "columns_found": float(table.column[:, list(planted.columns)].float().mean()),
        "distances_found": float(table.band[:, list(planted.distances)].float().mean()),
    }
    return shares, row


def _out_of_memory(length: int, batch: int, impl: str, problem: Exception) -> Row:
    note = f"out of memory: {str(problem).split('.')[0]}; take a shorter length or a smaller batch"
    return Row(length, batch, "all", impl, float("inf"), 0.0, 0.0, 0.0, 0.0, note=note)
