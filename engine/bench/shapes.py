"""Layers of known models, by name. Needs no torch, so that the command line's help can list them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Heads of one layer."""

    query_heads: int
    kv_heads: int
    head_dim: int


SHAPES = {
    "llama3-8b": Shape(32, 8, 128),
    "qwen2.5-7b": Shape(28, 4, 128),
    "qwen3-8b": Shape(32, 8, 128),
    "mistral-7b": Shape(32, 8, 128),
    "phi3-mini": Shape(32, 32, 96),
    "smollm2": Shape(9, 3, 64),
    "gemma3-270m": Shape(4, 1, 256),
}
