"""`headscope bench`: planted structure is found, wrong kernels are refused, the crossover reads the rows."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from headscope.engine import bench
from headscope.engine.bench_cases import SHAPES, clustered_layout
from headscope.engine.cli_bench import bench as command
from headscope.engine.errors import HeadscopeError
from headscope.kernels import counts, membership


def _row(length: int, with_index: float) -> bench.Row:
    return bench.Row(length, 1, "vs", "torch", 1.0, 0.0, 0.1, 1.0, 2.0, index_ms=0.1, with_index=with_index)


def test_command_writes_json(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(command)
    target = tmp_path / "bench.json"
    options = [
        "--lengths",
        "256,1K",
        "--shape",
        "smollm2",
        "--cases",
        "vs 30/800",
        "--repeats",
        "1",
        "--json",
        str(target),
    ]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    report = json.loads(target.read_text())
    assert {row["name"] for row in report["rows"]} == {"baseline", "dense", "vs 30/800"}
    assert all(row["median_ms"] > 0 for row in report["rows"])
    sparse = [row for row in report["rows"] if row["name"] == "vs 30/800" and row["length"] == 1024]
    assert 0 < sparse[0]["density"] <= 1 and sparse[0]["index_ms"] > 0 and sparse[0]["error"] < 1e-5
    assert report["planted"][0]["columns_found"] == 1.0 and report["planted"][0]["distances_found"] == 1.0


def test_gate_refuses_a_wrong_result() -> None:
    q, k, v = (torch.randn(1, 2, 64, 16) for _ in range(3))
    with pytest.raises(HeadscopeError, match="not timed"):
        bench._gate("dense", (torch.zeros_like(q), torch.zeros(1, 2, 64)), q, k, v, 0.25, None)
    with pytest.raises(HeadscopeError, match="not timed"):
        bench._gate("dense", (torch.full_like(q, torch.nan), torch.zeros(1, 2, 64)), q, k, v, 0.25, None)


def test_crossover() -> None:
    assert bench.crossover([_row(1024, 0.5), _row(2048, 0.9), _row(4096, 1.2), _row(8192, 2.0)]) == {1: 4096}
    assert bench.crossover([_row(1024, 1.5), _row(2048, 0.9)]) == {1: 2049}
    assert bench.crossover([_row(1024, 1.5)]) == {1: 1024}
    unmeasured = dataclasses.replace(_row(1024, 1.0), with_index=None)
    assert bench.crossover([unmeasured]) == {}


def test_clustered_layout_is_repeatable_and_within_causal() -> None:
    shape = SHAPES["smollm2"]
    one, two = (clustered_layout(shape, 1, 2000, 40, 400, torch.device("cpu")) for _ in range(2))
    assert torch.equal(one.windows, two.windows) and torch.equal(one.columns, two.columns)
    pairs = counts.pairs(one)
    assert bool((pairs < counts.causal_pairs(one)[:, None]).all())
    assert int(pairs.sum()) == int(membership.mask(one).sum())
