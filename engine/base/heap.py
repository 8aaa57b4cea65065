"""A heap that keeps what it has, so that the time of a layer follows what it computes.

glibc gives freed memory back to the system beyond a limit that depends on everything a process freed before. Attention
in plain torch then fetches its scratch page by page again for every batch: up to 40,000 page faults a layer, a fifth
to a half of its time, in one process and not in the next.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

_TRIM, _MAP = -1, -3
"""M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h."""

_KEPT = 128 * 2**20
_MAPPED_FROM = 32 * 2**20
"""The largest that every version of glibc accepts."""


@cache
def steady_heap() -> bool:
    """Lets this process keep up to 128 MiB of freed heap. False where the C library has no such settings."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MAP, _MAPPED_FROM)) and bool(mallopt(_TRIM, _KEPT))
