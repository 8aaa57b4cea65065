"""Timing of the kernels against torch's own attention: one interleaved run, medians with spread.

Every setting passes a correctness gate (sampled rows against float64) before it is timed. The baseline is causal
SDPA, forced to cuDNN on CUDA. Vertical-slash attention is timed on a fixed clustered index, since random inputs
have no slashes to find; its index time is that of building an index of the same budget on the same inputs, and
"with index" is the sum of the two.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from headscope.engine.bench_cases import CASES, Case, Shape, clustered_layout, plant, random_qkv
from headscope.engine.errors import HeadscopeError, OptionError
from headscope.engine.estimator import Estimator
from headscope.engine.host import HostProfile
from headscope.engine.patterns import VerticalSlash
from headscope.kernels import backends, counts, membership
from headscope.kernels.layout import TILE, Layout

_GATE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}
"""Largest relative error of the sampled rows."""


@dataclass(frozen=True)
class Row:
    """One timed thing. Times in milliseconds; `spread_ms` is the distance between the quartiles.

    `density` is computed over causal pairs; `tflops` counts 4 D operations per computed pair; `to_baseline` is the
    baseline's median over this one's, index apart; `with_index` the same with `index_ms` added.
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
    with_index: float | None = None
    to_flex: float | None = None
    error: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Report:
    """All rows of one run, and the machine they were measured on."""

    machine: dict[str, Any]
    shape: str
    dtype: str
    rows: tuple[Row, ...] = ()
    planted: tuple[dict[str, Any], ...] = ()
    dense_below: dict[int, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def machine(device: torch.device) -> dict[str, Any]:
    """Hardware and versions."""
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": str(device.type),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "hardware": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
        }  # fmt: skip
    else:
        facts |= {"hardware": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    return facts


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
    """Times dense and sparse attention of one layer at every length and batch size.

    Lengths that do not fit memory are left out with a row that says so. Raises `HeadscopeError` when a kernel
    fails the correctness gate: a wrong kernel is not timed; `OptionError` when `impl` cannot serve here.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        backends.choose(impl, torch.empty(1, 1, 1, shape.head_dim, device=device, dtype=dtype))
    except ValueError as problem:
        raise OptionError(f"{problem}; auto takes the fastest that serves") from problem
    rows: list[Row] = []
    planted: list[dict[str, Any]] = []
    for batch in batches:
        for length in lengths:
            progress(f"{shape_name}, batch {batch}, {length} tokens")
            try:
                rows += _one_length(shape, batch, length, dtype, device, impl, cases, repeats, flex)
                if batch == batches[0] and 1024 <= length <= 2**17:
                    planted.append(_planted(shape, length, dtype, device, impl))
            except torch.OutOfMemoryError as problem:
                rows.append(_out_of_memory(length, batch, impl, problem))
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    return Report(
        machine(device), shape_name, str(dtype).removeprefix("torch."), tuple(rows), tuple(planted), crossover(rows)
    )


def crossover(rows: Sequence[Row]) -> dict[int, int]:
    """Per batch size the shortest measured length from which vertical-slash, index included, beats the baseline.

    Taken over the first vertical-slash case. Where it never wins, one more than the longest measured length.
    """
    found: dict[int, int] = {}
    for batch in sorted({row.batch for row in rows}):
        timed = sorted((r for r in rows if r.batch == batch and r.with_index is not None), key=lambda r: r.length)
        named = [row for row in timed if row.name == timed[0].name]
        if not named:
            continue
        slower = [row.length for row in named if (row.with_index or 0.0) < 1.0]
        faster = [row.length for row in named if row.length > max(slower, default=0)]
        found[batch] = faster[0] if faster else max(slower) + 1
    return found


def host_profile(report: Report) -> HostProfile:
    """What the run says about this machine."""
    return HostProfile(machine=report.machine | {"shape": report.shape}, dense_below=report.dense_below)


def _one_length(
    shape: Shape, batch: int, length: int, dtype: torch.dtype, device: torch.device, impl: str,
    cases: Sequence[Case], repeats: int, flex: bool,
) -> list[Row]:  # fmt: skip
    q, k, v = random_qkv(shape, batch, length, dtype, device)
    scale = shape.head_dim**-0.5
    starts = (0,) * batch
    backend = backends.choose(impl, q)
    errors = {"dense": _gate("dense", backend.dense(q, k, v, scale, starts), q, k, v, scale, None)}
    work: dict[str, Callable[[], Any]] = {
        "baseline": lambda: baseline(q, k, v),
        "dense": lambda: backend.dense(q, k, v, scale, starts),
    }
    layouts: dict[str, Layout] = {}
    for case in cases:
        builder = _builder(backend, case, q, k, starts, scale)
        layout = builder()[1]
        if case.clustered and isinstance(case.pattern, VerticalSlash):
            vertical, slash = case.pattern.vertical, case.pattern.slash
            assert isinstance(vertical, int) and isinstance(slash, int)
            layout = clustered_layout(shape, batch, length, vertical, slash, device)
        layouts[case.name] = layout
        errors[case.name] = _gate(case.name, backend.attend(q, k, v, layout, scale), q, k, v, scale, layout)
        work[case.name] = lambda layout=layout: backend.attend(q, k, v, layout, scale)  # type: ignore[misc]
        work[f"index {case.name}"] = builder
    flexed = _flex(q, k, v, layouts, device) if flex else {}
    times = interleaved(work | {f"flex {name}": call for name, call in flexed.items()}, repeats, device)
    return _rows(shape, batch, length, backend.name, layouts, errors, times)


def _rows(
    shape: Shape, batch: int, length: int, impl: str, layouts: dict[str, Layout], errors: dict[str, float],
    times: dict[str, tuple[float, float]],
) -> list[Row]:  # fmt: skip
    """Table rows of one length from medians and spreads."""
    causal = batch * shape.query_heads * length * (length + 1) // 2
    base = times["baseline"][0]
    rows = []
    for name in ("baseline", "dense", *layouts):
        median, spread = times[name]
        pairs = int(counts.pairs(layouts[name]).sum()) if name in layouts else causal
        index = times.get(f"index {name}", (None,))[0]
        rows.append(
            Row(
                length=length,
                batch=batch,
                name=name,
                impl="sdpa" if name == "baseline" else impl,
                median_ms=median,
                spread_ms=spread,
                density=pairs / causal,
                tflops=4 * shape.head_dim * pairs / median / 1e9,
                to_baseline=base / median,
                index_ms=index,
                with_index=None if index is None else base / (median + index),
                to_flex=times[f"flex {name}"][0] / median if f"flex {name}" in times else None,
                error=errors.get(name),
            )
        )
    return rows


def _builder(
    backend: backends.Backend, case: Case, q: torch.Tensor, k: torch.Tensor, starts: tuple[int, ...], scale: float
) -> Callable[[], tuple[Layout, Layout]]:
    plans = [case.pattern.plan(k.shape[2])] * (q.shape[0] * q.shape[1])
    return lambda: backend.build(q, k, plans, starts, scale, Estimator(), TILE)


def baseline(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal SDPA; cuDNN and nothing else on CUDA."""
    if q.device.type == "cuda":
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def interleaved(
    work: dict[str, Callable[[], Any]], repeats: int, device: torch.device
) -> dict[str, tuple[float, float]]:
    """(median, quartile distance) in milliseconds of each entry, warmed up first, taken in turns."""
    for call in work.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeats):
        for name, call in work.items():
            times[name].append(_time(call, device))
    return {name: _summary(values) for name, values in times.items()}


def _time(call: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        before = time.perf_counter()
        call()
        return (time.perf_counter() - before) * 1e3
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    first.record()
    call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last))


def _summary(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], 0.0
    quartiles = statistics.quantiles(values, n=4, method="inclusive")
    return statistics.median(values), quartiles[2] - quartiles[0]


def _gate(
    name: str, result: tuple[torch.Tensor, torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    scale: float, layout: Layout | None,
) -> float:  # fmt: skip
    """Relative error of sampled rows of the first and last head against float64; `HeadscopeError` beyond the bound."""
    length = k.shape[2]
    rows = torch.tensor(sorted({0, length // 3, length // 2, max(0, length - 65), length - 1}), device=q.device)
    columns = torch.arange(length, device=q.device)
    table = membership.tables(layout) if layout is not None else None
    worst = 0.0
    for head in {0, q.shape[1] - 1}:
        mask = columns[None, :] <= rows[:, None]
        if layout is not None and table is not None:
            mask = membership.cells(layout, table, slice(head, head + 1), rows, columns)[0]
        keys, values = (x[0, head // (q.shape[1] // k.shape[1])].double() for x in (k, v))
        scores = (q[0, head, rows].double() @ keys.T * scale).masked_fill(~mask, -torch.inf)
        expected = scores.softmax(-1) @ values
        error = (result[0][0, head, rows].double() - expected).norm() / expected.norm()
        # Compared before `max`, which would lose a NaN.
        if not float(error) <= _GATE[q.dtype]:
            raise HeadscopeError(f"{name} at {length} tokens is wrong by {error:.1e} (relative), so it is not timed")
        worst = max(worst, float(error))
    return worst


def _planted(shape: Shape, length: int, dtype: torch.dtype, device: torch.device, impl: str) -> dict[str, Any]:
    """How much of a planted structure the online index finds."""
    q, k, _ = random_qkv(shape, 1, length, dtype, device, seed=1)
    q, k, planted = plant(q, k)
    backend = backends.choose(impl, q)
    pattern = VerticalSlash(min(64, length), min(256, length), sink=4, local=64)
    plans = [pattern.plan(length)] * shape.query_heads
    requested, _ = backend.build(q, k, plans, (0,), shape.head_dim**-0.5, Estimator(), TILE)
    table = membership.tables(requested)
    return {
        "length": length,
        "columns_found": float(table.column[:, list(planted.columns)].float().mean()),
        "distances_found": float(table.band[:, list(planted.distances)].float().mean()),
    }


def _flex(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layouts: dict[str, Layout], device: torch.device
) -> dict[str, Callable[[], Any]]:
    """FlexAttention over the 128 x 128 tiles that hold any cell of the layout: its own granularity."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    if device.type != "cuda" or k.shape[2] % 128 or k.shape[2] > 2**16:
        return {}
    compiled = torch.compile(flex_attention, dynamic=False)
    calls: dict[str, Callable[[], Any]] = {}
    for name, layout in layouts.items():
        tiles = _tiles(layout)
        count = tiles.sum(-1, dtype=torch.int32)
        order = tiles.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
        mask = BlockMask.from_kv_blocks(count, order, BLOCK_SIZE=128, mask_mod=lambda b, h, row, column: row >= column)
        calls[name] = lambda mask=mask: compiled(q, k, v, block_mask=mask, enable_gqa=True)  # type: ignore[misc]
    return calls


def _tiles(layout: Layout) -> torch.Tensor:
    """bool [B, H, n / 128, n / 128]: tiles that hold a cell."""
    table = membership.tables(layout)
    side = layout.kv_len // 128
    columns = torch.arange(layout.kv_len, device=layout.device)
    found = torch.zeros(layout.batch, layout.heads, side, side, dtype=torch.bool, device=layout.device)
    for sequence in range(layout.batch):
        for head in range(layout.heads):
            number = sequence * layout.heads + head
            for block in range(side):
                rows = torch.arange(block * 128, block * 128 + 128, device=layout.device)
                near = columns[: (block + 1) * 128]
                cells = membership.cells(layout, table, slice(number, number + 1), rows, near)[0]
                found[sequence, head, block, : block + 1] = cells.any(0).view(-1, 128).any(-1)
    return found


def _out_of_memory(length: int, batch: int, impl: str, problem: Exception) -> Row:
    note = f"out of memory: {str(problem).split('.')[0]}; take a shorter length or a smaller batch"
    return Row(length, batch, "all", impl, float("inf"), 0.0, 0.0, 0.0, 0.0, note=note)
