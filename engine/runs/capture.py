"""Post-RoPE queries, keys and values of a real prefill: handed to a visitor layer by layer, or kept."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import psutil
import torch
from pydantic import Field

from headscope.engine.attend.finite import check_layer
from headscope.engine.attend.inputs import LayerInputs, LayerVisitor
from headscope.engine.base import files, records
from headscope.engine.base.errors import Cancelled, CaptureError, OptionError
from headscope.engine.base.progress import Cancel, Progress
from headscope.engine.base.records import OpenRecord
from headscope.engine.config.facts import FULL, ModelFacts
from headscope.engine.config.file import HeadConfig
from headscope.engine.model.apply import SparsePrefill
from headscope.engine.model.hook import Call, Hook
from headscope.engine.prompts.tokens import check_ids

if TYPE_CHECKING:
    from headscope.engine.model.load import LoadedModel

FORMAT = "headscope.capture/1"


@dataclass(frozen=True)
class Room:
    """Bytes that a capture may take on the device, in host memory and on disk; None is half of what is free."""

    device: int | None = None
    host: int | None = None
    disk: int | None = None

    def resolve(self, device: torch.device) -> dict[str, int]:
        """Bytes per place, fastest first. On a CPU there is no device apart from the host."""
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
        places = {
            "device": free // 2 if self.device is None else self.device,
            "host": psutil.virtual_memory().available // 2 if self.host is None else self.host,
            "disk": shutil.disk_usage(tempfile.gettempdir()).free // 2 if self.disk is None else self.disk,
        }
        if device.type == "cpu":
            del places["device"]
        return places


class _Facts(OpenRecord):
    """What capture.json holds."""

    model: str
    fingerprint: str
    tokens: Annotated[int, Field(ge=1, lt=2**31)]
    scales: dict[Annotated[str, Field(pattern=r"^[0-9]{1,5}$")], Annotated[float, Field(gt=0, lt=1e6)]]


class _Enough(Exception):
    """Ends a forward after the last layer that anybody asked for."""


def stream(
    loaded: LoadedModel,
    input_ids: torch.Tensor,
    visit: LayerVisitor,
    *,
    layers: Iterable[int] | None = None,
    config: HeadConfig | None = None,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    logits: bool = True,
) -> torch.Tensor | None:
    """One prefill of `input_ids` [1, S]; `visit` gets what each chosen layer reads, one layer at a time.

    The forward is dense, or sparse under `config` (then a layer's tensors are those it meets in situ). Returns the
    float32 logits [vocabulary] of the last position; with `logits=False` it returns None and stops after the last
    chosen layer. `layers` defaults to every full-attention layer. `cancel` is asked at each layer.

    Raises PromptError for a prompt that does not fit, OptionError for layers that cannot be chosen, CaptureError for
    one that turns out not to be plain causal attention, ModelError for one whose tensors are not finite, Cancelled.
    """
    ids = check_ids(loaded, input_ids)
    wanted = chosen_layers(loaded.facts, layers)
    last = -1 if logits or not wanted else wanted[-1]
    sparse = SparsePrefill(config, None) if config is not None else None

    def handler(call: Call) -> torch.Tensor | None:
        if cancel is not None and cancel():
            raise Cancelled("the run was cancelled, and nothing of it was kept")
        if call.layer in wanted:
            if call.left:
                raise CaptureError(f"layer {call.layer} cannot be captured ({call.left}): leave it out of --layers")
            inputs = LayerInputs(call.q, call.k, call.wide_v, call.scale)
            check_layer(call.layer, inputs)
            visit(call.layer, inputs)
        if progress is not None:
            progress(call.layer + 1, loaded.facts.layers)
        if call.layer == last:
            raise _Enough
        return None if sparse is None else sparse(call)

    with torch.no_grad(), Hook(loaded.model, handler):
        try:
            result = loaded.model(input_ids=ids.to(loaded.device), use_cache=False, logits_to_keep=1)
        except _Enough:
            return None
    return result.logits[0, -1].float()


def chosen_layers(facts: ModelFacts, layers: Iterable[int] | None) -> tuple[int, ...]:
    """Ascending layer numbers; all full-attention layers by default. OptionError names the ones that do not serve."""
    full = tuple(layer for layer, kind in enumerate(facts.layer_types) if kind == FULL)
    if layers is None:
        return full
    wanted = tuple(sorted(set(layers)))
    outside = [layer for layer in wanted if layer not in range(facts.layers)]
    if outside or not wanted:
        raise OptionError(f"{facts.name} has layers 0 to {facts.layers - 1}, got {files.listing(outside) or 'none'}")
    left = [layer for layer in wanted if layer not in full]
    if left:
        raise OptionError(
            f"layers {files.listing(left)} of {facts.name} are {facts.layer_types[left[0]]} layers, which keep the "
            "model's own attention: leave them out"
        )
    return wanted


class Capture:
    """Captured layers of one prompt, each on the device, in host memory, or on disk.

    `places` says where each layer lies. Use as a context manager, or `close()` it, to free a temporary folder at once.
    `logits` are the last position's, float32 [vocabulary].
    """

    def __init__(self, input_ids: torch.Tensor, logits: torch.Tensor | None, name: str, fingerprint: str) -> None:
        self.input_ids = input_ids
        self.logits = logits
        self.model_name = name
        self.fingerprint = fingerprint
        self.places: dict[int, str] = {}
        self._scales: dict[int, float] = {}
        self._in_memory: dict[int, LayerInputs] = {}
        self._folder: Path | None = None
        self._finalizer: Callable[[], object] | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted(self.places))

    @property
    def tokens(self) -> int:
        return int(self.input_ids.shape[1])

    def layer(self, layer: int) -> LayerInputs:
        """q [1, Hq, S, D], k and v [1, Hkv, S, D] and the scale of one layer; read from disk if they lie there."""
        if layer not in self.places:
            raise CaptureError(f"layer {layer} was not captured: this capture holds layers {list(self.places)}")
        if layer in self._in_memory:
            return self._in_memory[layer]
        assert self._folder is not None
        path = self._folder / _layer_file(layer)
        q, k, v = (_read_tensors(path).get(name) for name in "qkv")
        if q is None or k is None or v is None or not _fit_together(q, k, v, self.tokens):
            raise CaptureError(f"{path} is damaged: it holds no queries, keys and values of {self.tokens} tokens")
        return LayerInputs(q, k, v, self._scales[layer])

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Writes the capture to a folder, whole or not at all. An earlier capture there is replaced.

        The earlier one steps aside under another name of the same folder and goes last, so one of the two is whole
        on disk at every moment; whoever loads a folder after a save that was killed in between finds the earlier one.
        """
        target = Path(folder)
        _put_back(target)
        if target.exists() and not (target / "capture.json").is_file() and (target.is_file() or any(target.iterdir())):
            raise CaptureError(f"{target} holds other things: choose a new folder for the capture")
        scratch = _scratch(target)
        try:
            for layer in self.layers:
                _write_layer(scratch / _layer_file(layer), self.layer(layer))
            rest = {"input_ids": self.input_ids} | ({} if self.logits is None else {"logits": self.logits})
            _write_tensors(scratch / "rest.safetensors", rest)
            facts = {
                "format": FORMAT,
                "model": self.model_name,
                "fingerprint": self.fingerprint,
                "tokens": self.tokens,
                "scales": {str(layer): self._scales[layer] for layer in self.layers},
            }
            files.write_atomic(scratch / "capture.json", files.indented(facts, 0) + "\n", CaptureError)
            with _disk_errors(f"save the capture in {target}"):
                _exchange(scratch, target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return target

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Capture:
        """A capture that `save` wrote; layers are read when asked for. CaptureError where it is missing or damaged."""
        source = Path(folder)
        _put_back(source)
        facts = files.read_json(source / "capture.json", CaptureError)
        if not isinstance(facts, dict) or facts.get("format") != FORMAT:
            raise CaptureError(f'{source} is no capture: its capture.json must say "format": "{FORMAT}"')
        records.check(_Facts, facts, f"{source} is damaged:", CaptureError)
        rest = _read_tensors(source / "rest.safetensors")
        ids, logits = rest.get("input_ids"), rest.get("logits")
        if ids is None or ids.dtype != torch.int64 or ids.shape != (1, facts["tokens"]):
            raise CaptureError(f"{source} is damaged: it has no token ids [1, {facts['tokens']}]")
        if logits is not None and (logits.ndim != 1 or not logits.is_floating_point()):
            raise CaptureError(f"{source} is damaged: its logits are not one number for each entry of the vocabulary")
        loaded = cls(ids, logits, facts["model"], facts["fingerprint"])
        loaded._folder = source
        for key, scale in facts["scales"].items():
            layer = int(key)
            if not (source / _layer_file(layer)).is_file():
                raise CaptureError(f"{source} is damaged: layer {layer} is missing, so capture the prompt again")
            loaded.places[layer] = "disk"
            loaded._scales[layer] = scale
        return loaded

    def close(self) -> None:
        """Drops the tensors and the temporary folder, if there is one."""
        self._in_memory.clear()
        self.places.clear()
        if self._finalizer is not None:
            self._finalizer()

    def __enter__(self) -> Capture:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _put(self, layer: int, inputs: LayerInputs, room: dict[str, int]) -> None:
        """Keeps one layer in the fastest place that still has room, and takes it off `room`."""
        size = sum(part.numel() * part.element_size() for part in (inputs.q, inputs.k, inputs.v))
        place = next((place for place, free in room.items() if free >= size), None)
        if place is None:
            raise CaptureError(
                f"layer {layer} needs {size >> 20} MiB and no budget has room for it: choose fewer layers, a shorter "
                "prompt, or a larger budget"
            )
        room[place] -= size
        if place == "disk":
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="headscope-capture-"))
                self._finalizer = weakref.finalize(self, shutil.rmtree, self._folder, True)
            _write_layer(self._folder / _layer_file(layer), inputs)
        else:
            # A copy: the model's own tensors may be views of larger ones, or be written again.
            q, k, v = (
                part.detach().clone(memory_format=torch.contiguous_format)
                if place == "device" or part.device.type == "cpu"
                else part.detach().to("cpu").contiguous()
                for part in (inputs.q, inputs.k, inputs.v)
            )
            self._in_memory[layer] = LayerInputs(q, k, v, inputs.scale)
        self.places[layer] = place
        self._scales[layer] = inputs.scale


def capture(
    loaded: LoadedModel,
    input_ids: torch.Tensor,
    layers: Iterable[int] | None = None,
    room: Room | None = None,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    config: HeadConfig | None = None,
) -> Capture:
    """Captures the chosen layers (all full-attention ones by default) of one dense prefill, or one under `config`.

    Raises as `stream` does, and CaptureError before the prefill when the layers cannot fit the budgets.
    """
    ids = check_ids(loaded, input_ids)
    wanted = chosen_layers(loaded.facts, layers)
    free = (room or Room()).resolve(loaded.device)
    facts = loaded.facts
    element = torch.empty((), dtype=loaded.dtype).element_size()
    needed = ids.shape[1] * (facts.query_heads + 2 * facts.kv_heads) * facts.head_dim * element * len(wanted)
    if needed > sum(free.values()):
        allowed = ", ".join(f"{place} {size >> 20} MiB" for place, size in free.items())
        raise CaptureError(
            f"the capture needs {needed >> 20} MiB and the budgets are {allowed}: choose fewer layers, a shorter "
            "prompt, or larger budgets"
        )
    captured = Capture(ids.cpu(), None, loaded.name, loaded.fingerprint)
    try:
        captured.logits = stream(
            loaded,
            ids,
            lambda layer, inputs: captured._put(layer, inputs, free),
            layers=wanted,
            config=config,
            progress=progress,
            cancel=cancel,
        )
    except BaseException:  # an interrupt too must not leave the temporary folder behind
        captured.close()
        raise
    return captured


def _fit_together(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tokens: int) -> bool:
    """Whether these are q [1, Hq, S, D], k and v [1, Hkv, S, D] of one layer."""
    shaped = q.ndim == k.ndim == 4 and k.shape == v.shape and q.dtype == k.dtype == v.dtype and q.is_floating_point()
    if not shaped or not k.shape[1] or q.shape[1] % k.shape[1]:
        return False
    return q.shape[::2] == k.shape[::2] == (1, tokens) and q.shape[3] == k.shape[3]


def _layer_file(layer: int) -> str:
    return f"layer-{layer:04d}.safetensors"


def _scratch(target: Path) -> Path:
    with _disk_errors(f"save the capture in {target}"):
        target.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(dir=target.parent, prefix=".headscope-"))


def _write_layer(path: Path, inputs: LayerInputs) -> None:
    _write_tensors(path, {"q": inputs.q, "k": inputs.k, "v": inputs.v})


def _aside(target: Path) -> Path:
    """Where the capture of a folder is while another takes its place."""
    return target.parent / f".headscope-{target.name}.replaced"


def _exchange(scratch: Path, target: Path) -> None:
    """Puts a finished folder where `target` is; an OSError leaves `target` as it was."""
    aside = _aside(target)
    if not target.exists():
        os.replace(scratch, target)
        return
    shutil.rmtree(aside, ignore_errors=True)  # of a save that was killed once the new one was in place
    os.replace(target, aside)
    try:
        os.replace(scratch, target)
    except BaseException:  # an interrupt too must leave the old one in its place
        os.replace(aside, target)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _put_back(target: Path) -> None:
    """Brings back the capture that stepped aside for a save that was killed before its own was in place."""
    if not target.exists() and _aside(target).is_dir():
        with suppress(OSError):
            os.replace(_aside(target), target)


def _write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    except (OSError, SafetensorError) as error:
        raise CaptureError(f"could not write {path} ({error}): free some space, or choose another folder") from error


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise CaptureError(f"could not read {path} ({error}): capture the prompt again") from error


@contextmanager
def _disk_errors(what: str) -> Iterator[None]:
    """Turns an OSError of the block into a CaptureError that says what could not be done."""
    try:
        yield
    except OSError as error:
        raise CaptureError(f"could not {what} ({error.strerror or error}): choose another folder") from error
