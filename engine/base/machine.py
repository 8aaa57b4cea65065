"""What a figure was measured on: versions of what computes, and the hardware."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def versions() -> dict[str, str]:
    """Versions of headscope and of what computes for it."""
    packages = {"python": platform.python_version()}
    for name in ("headscope", "torch", "transformers", "triton"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return packages


def hardware(device: torch.device) -> str:
    """Such as `cpu, 2 threads` or the GPU's name."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} cpu, {torch.get_num_threads()} threads"
