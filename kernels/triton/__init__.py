"""Attention, index and measurement in plain Triton: NVIDIA GPUs from sm_80 on."""
