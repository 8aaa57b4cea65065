"""What a number was measured with: versions and machine, for provenance."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch


@cache
def versions() -> dict[str, Any]:
    """Versions of the program and its libraries, and the hardware's name."""
    found: dict[str, Any] = {"python": platform.python_version()}
    for name in ("headscope", "torch", "transformers", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    cuda = torch.cuda.is_available()
    found["hardware"] = (
        torch.cuda.get_device_name(0) if cuda else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    )
    return found
