"""The mask function that transformers calls under our attention: the stock mask of every layer, made when looked at.

A layer that is left alone, or a model that works on its mask before attention, gets exactly what the stock mask
function of its own attention makes. A plain causal mask, which a served layer does not need as q_len x kv_len cells,
is handed out as a `CausalMask`: a tensor in name that turns into the stock one at the first touch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from headscope.engine.base.errors import ModelError
from headscope.engine.model.rows import Rows, rows_behind

_METADATA = {
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda")
    ),
    torch.Tensor.dim,
    torch.Tensor.size,
    torch.Tensor.is_floating_point,
}


class CausalMask(torch.Tensor):
    """The stock mask [B, 1, q_len, kv_len] of a plain causal call, whose cells exist only once they are looked at.

    `make` returns the stock tensor; `padding` [B, seen tokens] is true where a token is real. Every operation runs on
    the stock tensor and returns plain tensors, so that only an untouched mask reaches the attention function as a
    `CausalMask`.
    """

    make: Callable[[], torch.Tensor]
    padding: torch.Tensor | None
    written: int
    changed: bool
    _stock: torch.Tensor | None
    _rows: Rows | None

    @staticmethod
    def __new__(
        cls,
        make: Callable[[], torch.Tensor],
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device | str,
        padding: torch.Tensor | None,
        written: int,
    ) -> CausalMask:
        mask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device(device))
        mask.make, mask.padding, mask.written = make, padding, written
        mask.changed, mask._stock, mask._rows = False, None, None
        return mask

    def stock(self) -> torch.Tensor:
        """The tensor that the model would have had; made once."""
        if self._stock is None:
            self._stock = self.make()
        return self._stock

    def moved(self, device: torch.device) -> CausalMask:
        """The same mask for layers on another device (models spread by `device_map`)."""
        shape = (int(self.shape[0]), 1, int(self.shape[2]), int(self.shape[3]))
        mask = CausalMask(lambda: self.stock().to(device), shape, self.dtype, device, self.padding, self.written)
        mask._rows, mask.changed = self._rows, self.changed
        return mask

    def rows(self) -> Rows:
        """Where each sequence starts and how many keys are written, read from the device once for all layers."""
        if self._rows is None:
            self._rows = rows_behind(self.padding, int(self.shape[0]), self.written)
        return self._rows

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _METADATA:
                return func(*args, **(kwargs or {}))
            if func is torch.Tensor.to and isinstance(args[0], CausalMask):
                place = _place(args[0], *args[1:], **(kwargs or {}))
                if place is not None:
                    return args[0] if place == args[0].device else args[0].moved(place)
            if args and isinstance(args[0], CausalMask) and _writes(func):
                args[0].changed = True
            return func(*_stock_of(args), **_stock_of(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*_stock_of(args), **_stock_of(kwargs or {}))


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__"))


def _place(mask: Any, *arguments: Any, **options: Any) -> torch.device | None:
    """The device that `mask.to(...)` asks for, or None where it asks for more than a device."""
    options.pop("non_blocking", None)
    wanted = [item for item in (*arguments, *options.values()) if item != mask.dtype]
    if set(options) - {"dtype", "device"} or len(wanted) > 1:
        return None
    if not wanted:
        return mask.device
    return torch.device(wanted[0]) if isinstance(wanted[0], (str, int, torch.device)) else None


def _stock_of(value: Any) -> Any:
    """`value` with every CausalMask in it, in tuples, lists and dicts too, replaced by its stock tensor."""
    if isinstance(value, CausalMask):
        return value.stock()
    if isinstance(value, dict):
        return {name: _stock_of(item) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_stock_of(item) for item in value)
    return value


class _CellsAreNeeded(Exception):
    """The stock mask function did not skip its mask."""


def _ask_for_cells(*_: Any) -> Any:
    raise _CellsAreNeeded


def mask_function(base: str) -> Callable[..., torch.Tensor | None]:
    """The mask function that goes with our attention over the stock attention `base`.

    It returns what the stock one returns: None where that skips its mask, else the same tensor, at once for anything
    but a plain causal prefill. Raises ModelError for packed sequences.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

    @torch.compiler.disable
    def prefill(stock: Callable[..., Any], cells: Callable[..., Any], call: dict[str, Any]) -> torch.Tensor | None:
        if call.get("local_size") is not None or int(call["kv_offset"]) or not _is_plain(cells, causal_mask_function):
            return stock(mask_function=cells, **call)
        try:
            return stock(mask_function=_ask_for_cells, **call)
        except _CellsAreNeeded:
            q_length, kv_length = call["q_length"], call["kv_length"]
            return CausalMask(
                lambda: stock(mask_function=cells, **call),
                (call["batch_size"], 1, q_length, kv_length),
                call.get("dtype", torch.float32) if base == "eager" else torch.bool,
                call.get("device", "cpu"),
                call["attention_mask"],
                min(int(call["q_offset"]) + q_length, kv_length),
            )

    def mask(
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: Any = 0,
        kv_offset: Any = 0,
        mask_function: Callable[..., Any] = causal_mask_function,
        attention_mask: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor | None:
        call: dict[str, Any] = {
            "batch_size": batch_size,
            "q_length": q_length,
            "kv_length": kv_length,
            "q_offset": q_offset,
            "kv_offset": kv_offset,
            "attention_mask": attention_mask,
            **options,
        }
        stock = ALL_MASK_ATTENTION_FUNCTIONS[base]
        if q_length == 1:  # decoding is the stock attention's, also inside a compiled graph
            return stock(mask_function=mask_function, **call)
        return prefill(stock, mask_function, call)

    return mask


def _is_plain(function: Any, causal: Any) -> bool:
    """Whether a mask function, composed of closures by transformers, keeps every key up to a row's own position.

    ModelError for packed sequences. A compiled forward cannot tell whether there are any, and composes for them
    anyway: then its numbers of the sequences are all one.
    """
    if function is causal:
        return True
    kind = getattr(function, "__qualname__", "").partition(".")[0]
    parts = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    if kind == "packed_sequence_mask_function":
        if all(bool((part == part[:, :1]).all()) for part in parts if isinstance(part, torch.Tensor)):
            return True
        raise ModelError(
            "packed sequences and masks other than plain causal ones are not served: give each sequence its "
            "own row of the batch, padded on the left"
        )
    inner = [
        item for part in parts for item in (part if isinstance(part, (tuple, list)) else (part,)) if callable(item)
    ]
    # Every part is asked, so that packed sequences are refused wherever they stand.
    plain = [_is_plain(item, causal) for item in inner]
    return kind in ("and_masks", "remap_positions_for_packed_sequence") and all(plain)
