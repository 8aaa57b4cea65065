"""Are the weights of a model whole, and only weights? Checks of files before they are read, and of what was read."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headscope.engine.base import files
from headscope.engine.base.errors import UnusableModel
from headscope.engine.base.files import listing

_LEAST_BYTES = {"metadata entry": 8 + 1 + 4 + 1, "tensor": 8 + 1 + 4 + 8 + 4 + 8}
"""Bytes that one entry of a GGUF header takes at least: a name, a type, and the least that follows."""

_CHANGE_NUMBERS = (
    "rope.scaling.",
    "attention.scale",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    "softcapping",
    "sliding_window",
    "max_alibi_bias",
    "clamp_kqv",
    "temperature_",
)
"""Parts of the names of GGUF settings that change what a model computes."""

_READ_APART = {"gpt-oss": "rope.scaling."}
"""Settings that transformers reads outside its table."""

_SAME = {"rope.scaling.type": ("none",), "rope.scaling.factor": (0.0, 1.0), "rope.scaling.attn_factor": (1.0,)}
"""Values of such settings that change nothing."""


def check_index(folder: Path) -> None:
    """UnusableModel where an index of shards names anything but safetensors files that lie in `folder`."""
    for path in sorted(folder.glob("*.index.json")):
        index = files.read_json(path, UnusableModel)
        check_weight_map(index, str(path))
        missing = {name for name in index["weight_map"].values() if not (folder / name).is_file()}
        if missing:
            raise UnusableModel(f"{path} names {listing(sorted(missing))}, which are not there: fetch the model again")


def check_weight_map(index: Any, where: str) -> None:
    """UnusableModel where the `weight_map` of an index holds anything but plain names of safetensors files."""
    places = index.get("weight_map") if isinstance(index, Mapping) else None
    if not isinstance(places, Mapping) or not places or not all(isinstance(name, str) for name in places.values()):
        raise UnusableModel(f'{where} is damaged: it must hold "weight_map", a file name for each tensor')
    wrong = sorted({name for name in places.values() if Path(name).name != name or not name.endswith(".safetensors")})
    if wrong:
        raise UnusableModel(
            f"{where} names {listing(wrong)}, and weights are read from .safetensors files beside it only: "
            "convert the model to safetensors"
        )


def check_loaded(name: str, info: Mapping[str, Any]) -> None:
    """UnusableModel naming the tensors that the files lack, or that the model has no place for.

    `info` is what transformers reports; tied heads and what a family ignores on purpose are not in it.
    """
    missing = sorted(map(str, info.get("missing_keys") or ()))
    unexpected = sorted(map(str, info.get("unexpected_keys") or ()))
    mismatched = sorted(str(item[0]) for item in info.get("mismatched_keys") or ())
    found = []
    if missing:
        found.append(f"{len(missing)} tensors are missing ({listing(missing, 3)})")
    if unexpected:
        found.append(f"{len(unexpected)} are left over ({listing(unexpected, 3)})")
    if mismatched:
        found.append(f"{len(mismatched)} have another shape ({listing(mismatched, 3)})")
    if found:
        raise UnusableModel(
            f"the weights of {name!r} do not fit its config: {' and '.join(found)}; fetch the model again, or mend "
            "config.json"
        )


def check_gguf_header(path: Path) -> None:
    """UnusableModel where the header of a GGUF file promises more than a file of its size can hold."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(24)
    if len(head) < 24 or head[:4] != b"GGUF":
        raise UnusableModel(f"{str(path)!r} is no GGUF file, or cut short: fetch it again")
    version, tensors, entries = struct.unpack("<IQQ", head[4:])
    if version not in (2, 3):
        raise UnusableModel(f"{str(path)!r} is GGUF version {version}, and 2 and 3 can be read: convert it again")
    needed = tensors * _LEAST_BYTES["tensor"] + entries * _LEAST_BYTES["metadata entry"]
    if needed > size:
        raise UnusableModel(f"{str(path)!r} is damaged: its header promises more than its {size} bytes hold")


def check_gguf(
    path: Path, reader: Any, known_settings: Mapping[str, Any], config: Any, known_tensors: Iterable[str]
) -> None:
    """UnusableModel naming what changes the model in a GGUF file and is not read by transformers.

    `reader` is gguf's own of the file. `known_settings` maps the settings that it reads, without the architecture in
    front, to their names in the config (None or -1: passed over). `known_tensors` are the tensors that it reads.
    """
    architecture = str(reader.fields["general.architecture"].contents())
    ignored = []
    for key, field in reader.fields.items():
        setting = key.removeprefix(architecture + ".")
        if setting == key or known_settings.get(setting) not in (None, -1):
            continue
        if setting.startswith(_READ_APART.get(architecture, "\0")):
            continue
        value = field.contents()
        ours = getattr(config, setting.rpartition(".")[2], None)
        if any(part in setting for part in _CHANGE_NUMBERS) and value not in (*_SAME.get(setting, ()), ours):
            ignored.append(f"{key} = {str(value)[:40]}")
    if ignored:
        raise UnusableModel(
            f"{str(path)!r} has settings that are not read from GGUF files ({listing(ignored, 3)}), and without them "
            "the numbers would be others: give the model as safetensors"
        )
    read = set(known_tensors)
    # Tensors of experts are merged while they are read, under names of their own.
    left = [tensor.name for tensor in reader.tensors if tensor.name not in read and "exp" not in tensor.name]
    if left:
        check_loaded(str(path), {"unexpected_keys": left})


def settings_that_were_read(mapping: Mapping[str, Any], architecture: str) -> Mapping[str, Any]:
    """The part of transformers' table of GGUF settings that concerns one architecture."""
    table = mapping.get("config", {})
    return table.get(architecture) or table.get(architecture.replace("-", "_")) or {}
