"""The parts of a loaded transformers model that the integration needs, found by what they have, not by a name."""

from __future__ import annotations

from typing import Any


def attention_modules(model: Any) -> list[Any]:
    """The self-attention modules of the language model, by layer."""
    found = [
        module
        for module in model.modules()
        if "Attention" in type(module).__name__
        and isinstance(getattr(module, "layer_idx", None), int)
        and hasattr(module, "config")
    ]
    return sorted(found, key=lambda module: module.layer_idx)


def configs_of(model: Any) -> list[Any]:
    """Every config whose attention setting could change, once each."""
    todo = [module.config for module in model.modules() if hasattr(module, "config")]
    found: dict[int, Any] = {}
    while todo:
        config = todo.pop()
        if id(config) in found or not hasattr(config, "_attn_implementation"):
            continue
        found[id(config)] = config
        todo += [getattr(config, name, None) for name in getattr(config, "sub_configs", {}) or {}]
    return list(found.values())


def tensor_parallel_rank(module: Any) -> int:
    """This process's rank among those that share the heads of `module`; 0 without tensor parallel."""
    mesh = getattr(next(module.parameters()), "device_mesh", None)
    if mesh is None:
        return 0
    names = getattr(mesh, "mesh_dim_names", None) or ()
    return int(mesh.get_local_rank("tp") if "tp" in names else mesh.get_local_rank())
