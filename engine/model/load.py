"""Loading of models: the packaged ones, local folders and files, and hub ids. Imports transformers on first use."""

from __future__ import annotations

import copy
import io
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from filelock import FileLock

from headscope.engine.base.errors import ModelError, OptionError, UnusableModel
from headscope.engine.base.progress import Progress
from headscope.engine.config.facts import ModelFacts, facts_of
from headscope.engine.model.packaged import PACKAGED, cache_dir, disk_errors, fetch, packaged

__all__ = ["LoadedModel", "ModelFacts", "cache_dir", "fetch", "load_model"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run: transformers' own objects, and the facts that a head config is checked against.

    `tokenizer` is None when the folder has none; then only token ids can be used.
    """

    model: Any
    tokenizer: Any
    name: str
    fingerprint: str
    facts: ModelFacts

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype


def load_model(
    name_or_path: str | Path,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Loads a packaged model (`smollm2`), a folder, a `.gguf` file, or a hub id; never remote code, never pickle.

    `dtype` defaults to float32 on a CPU and bfloat16 on a GPU, `device` to the GPU if there is one. Raises
    ModelError, or OptionError for a device or dtype that is not there, with one sentence that says what to do.
    """
    name = str(name_or_path)
    if not name.strip():
        raise UnusableModel(f"no model is named: give a packaged model ({', '.join(PACKAGED)}), a folder or a hub id")
    place = _device(device)
    kind = _dtype(dtype, place)
    path = Path(name).expanduser()
    if name in PACKAGED and not path.exists():
        return _load(_packaged_folder(name, progress), None, name, "gguf", kind, place)
    if path.exists():
        folder, gguf = _local(path)
        return _load(folder, gguf, name, "gguf" if gguf else "safetensors", kind, place)
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(".gguf"):
        raise UnusableModel(
            f"there is no file or folder {name!r}: give a folder with config.json and safetensors or GGUF weights, "
            f"or a packaged model ({', '.join(PACKAGED)})"
        )
    return _load(name, None, name, "safetensors", kind, place)


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError:
        place = None
    if place is None or place.type not in ("cpu", "cuda"):
        raise OptionError(f"there is no device called {str(device)!r}: use cpu or cuda")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise OptionError("no CUDA device is usable here: use --device cpu, or a torch build with CUDA")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise OptionError(f"there is no {place}: this machine has {torch.cuda.device_count()} CUDA devices")
    return place


def _dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    if dtype is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    found = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found is None or found not in _DTYPES.values():
        raise OptionError(f"dtype {dtype!r} is not served: choose one of {', '.join(_DTYPES)}")
    return found


def _local(path: Path) -> tuple[Path, str | None]:
    """Folder and GGUF file name (None for safetensors) of a local model."""
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise UnusableModel(f"{str(path)!r} is no GGUF file: give a .gguf file or the folder of a model")
        return path.parent, path.name
    if not path.is_dir():
        raise UnusableModel(f"{str(path)!r} is neither a file nor a folder: give a .gguf file or the folder of a model")
    names = sorted(item.name for item in path.iterdir())
    ggufs = [item for item in names if item.lower().endswith(".gguf")]
    if "config.json" in names and any(item.endswith(".safetensors") for item in names):
        return path, None
    if len(ggufs) == 1:
        return path, ggufs[0]
    if ggufs:
        raise UnusableModel(f"{str(path)!r} holds {len(ggufs)} GGUF files: name one of them, such as {ggufs[0]}")
    if any(item.endswith((".bin", ".pt", ".pth", ".ckpt")) for item in names):
        raise UnusableModel(
            f"{str(path)!r} holds pickled weights only, which can run code: convert them to safetensors"
        )
    raise UnusableModel(f"{str(path)!r} is no model: it needs config.json and *.safetensors, or one .gguf file")


def _load(
    source: Path | str, gguf: str | None, name: str, load_format: str, dtype: torch.dtype, device: torch.device
) -> LoadedModel:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"trust_remote_code": False}
    if isinstance(source, Path) or not _hub_answers(source):
        options["local_files_only"] = True
    if gguf:
        options["gguf_file"] = gguf
    with _quiet(silence=gguf is not None), _explained(name):
        tokenizer = _tokenizer(AutoTokenizer, source, options)
        safe = {} if gguf else {"use_safetensors": True}
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **options, **safe)
        model = model.to(device).eval()
        facts = facts_of(model, name=name, load_format=load_format)
    return LoadedModel(model=model, tokenizer=tokenizer, name=name, fingerprint=facts.fingerprint, facts=facts)


def _hub_answers(name: str) -> bool:
    """Whether the hub can be asked for `name`. The hub's own client takes most of a minute to give up."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        with urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=5):
            return True
    except HTTPError:  # it answered
        return True
    except OSError:
        return False


def _tokenizer(auto: Any, source: Path | str, options: dict[str, Any]) -> Any:
    if isinstance(source, Path) and "gguf_file" not in options:
        names = {item.name for item in source.iterdir()}
        if not names & {"tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json"}:
            return None
    return auto.from_pretrained(source, **options)


def _packaged_folder(name: str, progress: Progress | None) -> Path:
    """Folder with a packaged model's weights as safetensors, converted once from its GGUF file.

    Reading GGUF takes 10 to 25 seconds each time; the copy holds the same float32 values and loads in about one.
    """
    model = packaged(name)
    root = cache_dir() / name
    target = root / f"float32-{model.sha256[:8]}"
    if (target / "config.json").is_file():
        return target
    path = fetch(name, progress)
    with disk_errors(f"keep a float32 copy of {name} in {root}", model.download_bytes * 8), FileLock(root / ".lock"):
        if not (target / "config.json").is_file():
            _convert(path, target)
    return target


def _convert(gguf: Path, target: Path) -> None:
    from safetensors.torch import save_file

    loaded = _load(gguf.parent, gguf.name, target.parent.name, "gguf", torch.float32, torch.device("cpu"))
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=".convert-"))
    try:
        weights = {key: value.contiguous() for key, value in loaded.model.state_dict().items()}
        config = copy.deepcopy(loaded.model.config)
        if config.tie_word_embeddings:
            weights.pop("lm_head.weight", None)
        for gguf_only in ("quantization_config", "_name_or_path"):
            if hasattr(config, gguf_only):
                delattr(config, gguf_only)
        save_file(weights, scratch / "model.safetensors", metadata={"format": "pt"})
        loaded.tokenizer.save_pretrained(scratch)
        loaded.model.generation_config.save_pretrained(scratch)
        config.save_pretrained(scratch)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _quiet(silence: bool) -> Iterator[None]:
    """Keeps transformers' own progress bars and notices off the terminal while the block runs.

    The bar of its GGUF reader cannot be switched off, so `silence` drops what is written to stderr.
    """
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()) if silence else nullcontext():
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turns what transformers and the hub client raise while loading into a ModelError that says what to do."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    from safetensors import SafetensorError

    try:
        yield
    except ModelError:
        raise
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        RuntimeError,
        ImportError,
        EOFError,
        struct.error,
        SafetensorError,
    ) as error:
        causes = _causes(error)
        text = " ".join(str(cause) for cause in causes).lower()
        if any(isinstance(cause, GatedRepoError) for cause in causes) or "gated repo" in text:
            raise ModelError(
                f"the model {name!r} is gated: accept its terms on the hub and log in with `hf auth login`, "
                "or give a local folder"
            ) from error
        if "trust_remote_code" in text or "custom code" in text:
            raise UnusableModel(
                f"the model {name!r} needs code of its own, which is never run: use a model of a family in transformers"
            ) from error
        if _unreachable(causes, text):
            raise ModelError(
                f"the model hub cannot be reached to load {name!r}: connect and try again, or give a packaged model "
                f"({', '.join(PACKAGED)}) or a local folder"
            ) from error
        missing = any(isinstance(cause, RepositoryNotFoundError) for cause in causes)
        if missing or "not a valid model identifier" in text or "repo id must" in text:
            raise UnusableModel(
                f"no model called {name!r} is known here or on the hub: give a packaged model "
                f"({', '.join(PACKAGED)}), a local folder, or a hub id that you may read"
            ) from error
        raise UnusableModel(
            f"{name!r} cannot be loaded as a causal language model ({_sentence(error)}): "
            "give a folder with config.json and intact safetensors or GGUF weights"
        ) from error


def _causes(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _unreachable(causes: list[BaseException], text: str) -> bool:
    kinds = {type(cause).__name__ for cause in causes}
    if kinds & {
        "ConnectError",
        "ConnectTimeout",
        "ConnectionError",
        "ProxyError",
        "OfflineModeIsEnabled",
        "ReadTimeout",
    }:
        return True
    return (
        "couldn't connect" in text
        or "couldn't find them in the cached files" in text
        or "offline mode" in text
        or "name resolution" in text
    )


def _sentence(error: BaseException) -> str:
    text = json.dumps(str(error).strip().split("\n")[0][:160], ensure_ascii=False)[1:-1]
    return text.rstrip(" .:") or type(error).__name__
