"""The parts of a loaded transformers model that the integration needs, found by what they have, not by a name."""

from __future__ import annotations

from collections import Counter
from typing import Any

from headscope.engine.base.errors import ModelError
from headscope.engine.config.facts import FULL, served_kind


def attention_modules(model: Any) -> list[Any]:
    """The self-attention modules of the language model, by layer."""
    modules = [
        module
        for module in model.modules()
        if "Attention" in type(module).__name__
        and isinstance(getattr(module, "layer_idx", None), int)
        and hasattr(module, "config")
    ]
    return sorted(modules, key=lambda module: module.layer_idx)


def shared_modules(model: Any) -> set[int]:
    """Ids of the modules that stand in several places of the model, so that one number cannot name their layer."""
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    return {module for module, count in places.items() if count > 1}


def configs_of(model: Any) -> list[Any]:
    """Every config whose attention setting could change, once each."""
    todo = [module.config for module in model.modules() if hasattr(module, "config")]
    configs: dict[int, Any] = {}
    while todo:
        config = todo.pop()
        if id(config) in configs or not hasattr(config, "_attn_implementation"):
            continue
        configs[id(config)] = config
        todo += [getattr(config, name, None) for name in getattr(config, "sub_configs", {}) or {}]
    return list(configs.values())


def reason_to_leave(module: Any) -> str | None:
    """Why an attention module is not plain causal attention, as far as it can be seen without a call, or None."""
    kinds = getattr(module.config, "layer_types", None)
    kind = served_kind(kinds[module.layer_idx]) if kinds and module.layer_idx < len(kinds) else FULL
    if "sliding" in kind or "chunked" in kind:
        return "sliding-window or chunked layer"
    if kind != FULL:
        return f"{kind} layer"
    if getattr(module, "sinks", None) is not None:
        return "learned attention sink"
    if getattr(module, "attn_logit_softcapping", None) is not None:
        return "soft-capped logits"
    if not getattr(module, "is_causal", True):
        return "not causal"
    return None


def tensor_parallel_rank(module: Any) -> int:
    """This process's rank among those that share the heads of `module`; 0 without tensor parallel."""
    mesh = _mesh(module)
    if mesh is None:
        return 0
    names = getattr(mesh, "mesh_dim_names", None) or ()
    return int(mesh.get_local_rank("tp") if "tp" in names else mesh.get_local_rank())


def is_parallel(module: Any) -> bool:
    """Whether several processes share the weights of `module`."""
    return _mesh(module) is not None


def check_tensor_parallel(modules: list[Any], heads: int) -> None:
    """ModelError where the heads are split over a number of processes that does not divide them.

    Families whose plan does not split the columns of `q_proj` keep all heads on every process.
    """
    for module in modules:
        mesh = _mesh(module)
        plan = getattr(module.config, "base_model_tp_plan", None) or {}
        if mesh is None or not any(place.endswith("q_proj") and how == "colwise" for place, how in plan.items()):
            continue
        names = getattr(mesh, "mesh_dim_names", None) or ()
        ranks = int(mesh.size(names.index("tp")) if "tp" in names else mesh.size())
        kv_heads = getattr(module.config, "num_key_value_heads", None) or heads
        if heads % ranks or kv_heads % ranks:
            raise ModelError(
                f"{heads} query heads and {kv_heads} KV heads do not divide over {ranks} tensor-parallel processes: "
                "use a number that divides both"
            )


def _mesh(module: Any) -> Any:
    """The device mesh over which a module's weights are spread, or None; quantised modules may have no parameters."""
    return getattr(next(module.parameters(), None), "device_mesh", None)
