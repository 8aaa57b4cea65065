"""The time that a piece of work takes, its device included."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def timed(work: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """The result of `work` and its wall time in ms, the device's queue drained before and after."""
    drain(device)
    began = time.perf_counter()
    result = work()
    drain(device)
    return result, (time.perf_counter() - began) * 1e3


def drain(device: torch.device) -> None:
    """Waits until a GPU has done what was queued; a CPU has by then."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
