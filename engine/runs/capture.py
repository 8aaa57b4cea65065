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
from typing import TYPE_CHECKING

import torch

from headscope.engine.base import files
from headscope.engine.base.errors import Cancelled, CaptureError, OptionError
from headscope.engine.config.facts import FULL, ModelFacts
from headscope.engine.config.file import HeadConfig
from headscope.engine.model.apply import Call, Hook, SparsePrefill
from headscope.engine.prompts.tokens import check_ids

if TYPE_CHECKING:
    from headscope.engine.model.load import LoadedModel

FORMAT = "headscope.capture/1"
Visit = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], None]
"""Called with layer, q [1, Hq, S, D], k and v [1, Hkv, S, D], and the scale of the logits."""

Progress = Callable[[int, int], None]
"""Called after each layer with layers done and layers in all."""


@dataclass(frozen=True)
class Budget:
    """Bytes that a capture may take on the device, in host memory and on disk; None is half of what is free."""

    device: int | None = None
    host: int | None = None
    disk: int | None = None

    def resolve(self, device: torch.device) -> dict[str, int]:
        """Bytes per place, fastest first. On a CPU there is no device apart from the host."""
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
        places = {
            "device": free // 2 if self.device is None else self.device,
            "host": _free_memory() // 2 if self.host is None else self.host,
            "disk": shutil.disk_usage(tempfile.gettempdir()).free // 2 if self.disk is None else self.disk,
        }
        if device.type == "cpu":
            del places["device"]
        return places


class _Enough(Exception):
    """Ends a forward after the last layer that anybody asked for."""


def stream(
    loaded: LoadedModel,
    input_ids: torch.Tensor,
    visit: Visit,
    *,
    layers: Iterable[int] | None = None,
    config: HeadConfig | None = None,
    progress: Progress | None = None,
    cancel: Callable[[], bool] | None = None,
    logits: bool = True,
) -> torch.Tensor | None:
    """One prefill of `input_ids` [1, S]; `visit` gets each chosen layer's tensors, one layer at a time.

    The forward is dense, or sparse under `config` (then a layer's tensors are those it meets in situ). Returns the
    float32 logits [vocabulary] of the last position; with `logits=False` it returns None and stops after the last
    chosen layer. `layers` defaults to every full-attention layer. `cancel` is asked at each layer.

    Raises PromptError for a prompt that does not fit, OptionError for layers that cannot be chosen, CaptureError for
    one that turns out not to be plain causal attention, Cancelled.
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
            visit(call.layer, call.q, call.k, call.v, call.scale)
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

    `places` says where each layer lies, `storage` the slowest place in use. Use as a context manager, or `close()`
    it, to free a temporary folder at once. `logits` are the last position's, float32 [vocabulary].
    """

    def __init__(self, input_ids: torch.Tensor, logits: torch.Tensor | None, name: str, fingerprint: str) -> None:
        self.input_ids = input_ids
        self.logits = logits
        self.model_name = name
        self.fingerprint = fingerprint
        self.places: dict[int, str] = {}
        self.scales: dict[int, float] = {}
        self._held: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._folder: Path | None = None
        self._finalizer: Callable[[], object] | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted(self.places))

    @property
    def tokens(self) -> int:
        return int(self.input_ids.shape[1])

    @property
    def storage(self) -> str:
        used = set(self.places.values())
        return next((place for place in ("disk", "host", "device") if place in used), "host")

    def describe_storage(self) -> str:
        """Such as `20 layers in host memory, 10 on disk`."""
        words = {"device": "on the device", "host": "in host memory", "disk": "on disk"}
        counts = {place: list(self.places.values()).count(place) for place in words}
        parts = [f"{count} layers {words[place]}" for place, count in counts.items() if count]
        return ", ".join(parts) if parts else "no layers"

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [1, Hq, S, D], k and v [1, Hkv, S, D] of one layer; read from disk if that is where they lie."""
        if layer not in self.places:
            raise CaptureError(f"layer {layer} was not captured: this capture holds layers {list(self.places)}")
        if layer in self._held:
            return self._held[layer]
        assert self._folder is not None
        parts = _read_tensors(self._folder / _layer_file(layer))
        return parts["q"], parts["k"], parts["v"]

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
                _write_tensors(scratch / _layer_file(layer), dict(zip("qkv", self.layer(layer), strict=True)))
            rest = {"input_ids": self.input_ids} | ({} if self.logits is None else {"logits": self.logits})
            _write_tensors(scratch / "rest.safetensors", rest)
            facts = {
                "format": FORMAT,
                "model": self.model_name,
                "fingerprint": self.fingerprint,
                "tokens": self.tokens,
                "scales": {str(layer): self.scales[layer] for layer in self.layers},
            }
            files.write_atomic(scratch / "capture.json", files.indented(facts, 0) + "\n", CaptureError)
            with _disk_errors(f"save the capture in {target}"):
                _exchange(scratch, target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return target

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Capture:
        """A capture that `save` wrote; layers are read when asked for. CaptureError when it is none, or damaged."""
        source = Path(folder)
        _put_back(source)
        facts = files.read_json(source / "capture.json", CaptureError)
        if not isinstance(facts, dict) or facts.get("format") != FORMAT or not isinstance(facts.get("scales"), dict):
            raise CaptureError(f'{source} is no capture: its capture.json must say "format": "{FORMAT}"')
        rest = _read_tensors(source / "rest.safetensors")
        if "input_ids" not in rest:
            raise CaptureError(f"{source} is damaged: its token ids are missing, so capture the prompt again")
        made = cls(rest["input_ids"], rest.get("logits"), str(facts.get("model")), str(facts.get("fingerprint")))
        made._folder = source
        for key, scale in facts["scales"].items():
            layer = int(key) if key.isascii() and key.isdecimal() and len(key) < 6 else -1
            if not isinstance(scale, float) or not (source / _layer_file(layer)).is_file():
                raise CaptureError(f"{source} is damaged: layer {key[:20]} is missing, so capture the prompt again")
            made.places[layer] = "disk"
            made.scales[layer] = scale
        return made

    def close(self) -> None:
        """Drops the tensors and the temporary folder, if there is one."""
        self._held.clear()
        self.places.clear()
        if self._finalizer is not None:
            self._finalizer()

    def __enter__(self) -> Capture:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _put(self, layer: int, parts: tuple[torch.Tensor, ...], scale: float, room: dict[str, int]) -> None:
        """Keeps one layer in the fastest place that still has room, and takes it off `room`."""
        size = sum(part.numel() * part.element_size() for part in parts)
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
            _write_tensors(self._folder / _layer_file(layer), dict(zip("qkv", parts, strict=True)))
        else:
            # A copy: the model's own tensors may be views of larger ones, or be written again.
            q, k, v = (
                part.detach().clone(memory_format=torch.contiguous_format)
                if place == "device" or part.device.type == "cpu"
                else part.detach().to("cpu").contiguous()
                for part in parts
            )
            self._held[layer] = (q, k, v)
        self.places[layer] = place
        self.scales[layer] = scale


def capture(
    loaded: LoadedModel,
    input_ids: torch.Tensor,
    layers: Iterable[int] | None = None,
    budget: Budget | None = None,
    progress: Progress | None = None,
    cancel: Callable[[], bool] | None = None,
    config: HeadConfig | None = None,
) -> Capture:
    """Captures the chosen layers (all full-attention ones by default) of one dense prefill, or one under `config`.

    Raises as `stream` does, and CaptureError before the prefill when the layers cannot fit the budgets.
    """
    ids = check_ids(loaded, input_ids)
    wanted = chosen_layers(loaded.facts, layers)
    room = (budget or Budget()).resolve(loaded.device)
    facts = loaded.facts
    element = torch.empty((), dtype=loaded.dtype).element_size()
    needed = ids.shape[1] * (facts.query_heads + 2 * facts.kv_heads) * facts.head_dim * element * len(wanted)
    if needed > sum(room.values()):
        allowed = ", ".join(f"{place} {size >> 20} MiB" for place, size in room.items())
        raise CaptureError(
            f"the capture needs {needed >> 20} MiB and the budgets are {allowed}: choose fewer layers, a shorter "
            "prompt, or larger budgets"
        )
    made = Capture(ids.cpu(), None, loaded.name, loaded.fingerprint)
    try:
        made.logits = stream(
            loaded,
            ids,
            lambda layer, q, k, v, scale: made._put(layer, (q, k, v), scale, room),
            layers=wanted,
            config=config,
            progress=progress,
            cancel=cancel,
        )
    except BaseException:  # an interrupt too must not leave the temporary folder behind
        made.close()
        raise
    return made


def _layer_file(layer: int) -> str:
    return f"layer-{layer:04d}.safetensors"


def _scratch(target: Path) -> Path:
    with _disk_errors(f"save the capture in {target}"):
        target.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(dir=target.parent, prefix=".headscope-"))


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
    except BaseException:
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
    except (OSError, SafetensorError) as error:
        raise CaptureError(f"could not read {path} ({error}): capture the prompt again") from error


@contextmanager
def _disk_errors(what: str) -> Iterator[None]:
    """Turns an OSError of the block into a CaptureError that says what could not be done."""
    try:
        yield
    except OSError as error:
        raise CaptureError(f"could not {what} ({error.strerror or error}): choose another folder") from error


def _free_memory() -> int:
    """Bytes of host memory that can be had without swapping."""
    with suppress(OSError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
