"""Peak memory of a piece of work."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress

import psutil
import torch

_MIB = 1 << 20


class PeakMemory:
    """`with PeakMemory(device) as memory:` then `memory.peak_mib` and `memory.above_mib` (peak less the start).

    On a GPU it is what torch allocated there; on a CPU the resident memory of this process. Where the system cannot
    reset its high-water mark (outside Linux), the peak is that of the whole process so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self.peak_mib = 0.0
        self.above_mib = 0.0
        self._start = 0.0

    def __enter__(self) -> PeakMemory:
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)
            self._start = torch.cuda.memory_allocated(self._cuda) / _MIB
        else:
            with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # resets the high-water mark
            self._start = psutil.Process().memory_info().rss / _MIB
        return self

    def __exit__(self, *_: object) -> None:
        if self._cuda is not None:
            self.peak_mib = torch.cuda.max_memory_allocated(self._cuda) / _MIB
        else:
            self.peak_mib = _high_water() or _whole_process()
        self.above_mib = max(0.0, self.peak_mib - self._start)


def _high_water() -> float:
    """Most resident memory since the mark was reset, in MiB; 0 where the system keeps none. psutil does not read it."""
    with suppress(OSError), open("/proc/self/status") as lines:
        for line in lines:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return 0.0


def _whole_process() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / _MIB if sys.platform == "darwin" else peak / 1024
