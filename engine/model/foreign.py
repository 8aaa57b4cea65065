"""What other libraries raise while a model is read, as one sentence that says what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from headscope.engine.base.errors import HeadscopeError, ModelError, UnusableModel
from headscope.engine.model.packaged import PACKAGED

_UNREACHABLE = {
    "ConnectError",
    "ConnectTimeout",
    "ConnectionError",
    "ProxyError",
    "OfflineModeIsEnabled",
    "ReadTimeout",
}
_UNREACHABLE_WORDS = (
    "couldn't connect",
    "couldn't find them in the cached files",
    "offline mode",
    "name resolution",
)


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Turns whatever the readers of configs, tokenizers and weights raise in the block into a ModelError.

    A damaged tokenizer can end in a panic of its Rust code, which is no Exception; it is told like the others. An
    interrupt and a lack of memory stay what they are.
    """
    try:
        yield
    except (HeadscopeError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise _told(name, error) from error


def _told(name: str, error: BaseException) -> ModelError:
    causes = _causes(error)
    kinds = {type(cause).__name__ for cause in causes}
    text = " ".join(str(cause) for cause in causes).lower()
    shown = name if len(name) <= 120 else name[:117] + "..."
    if "GatedRepoError" in kinds or "gated repo" in text:
        return ModelError(
            f"the model {shown!r} is gated: accept its terms on the hub and log in with `hf auth login`, "
            "or give a local folder"
        )
    if "trust_remote_code" in text or "custom code" in text:
        return UnusableModel(
            f"the model {shown!r} needs code of its own, which is never run: use a model of a family in transformers"
        )
    if kinds & _UNREACHABLE or any(words in text for words in _UNREACHABLE_WORDS):
        return ModelError(
            f"the model hub cannot be reached to load {shown!r}: connect and try again, or give a packaged model "
            f"({', '.join(PACKAGED)}) or a local folder"
        )
    if "RepositoryNotFoundError" in kinds or "not a valid model identifier" in text or "repo id must" in text:
        return UnusableModel(
            f"no model called {shown!r} is known here or on the hub: give a packaged model "
            f"({', '.join(PACKAGED)}), a local folder, or a hub id that you may read"
        )
    if any(isinstance(cause, PermissionError) for cause in causes):
        return UnusableModel(
            f"{shown!r} may not be read ({_sentence(error)}): change its permissions, or give another folder"
        )
    return UnusableModel(
        f"{shown!r} cannot be loaded as a causal language model ({_sentence(error)}): "
        "give a folder with config.json and intact safetensors or GGUF weights"
    )


def _causes(error: BaseException | None) -> list[BaseException]:
    causes: list[BaseException] = []
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__ or error.__context__
    return causes


def _sentence(error: BaseException) -> str:
    text = json.dumps(str(error).strip().split("\n")[0][:160], ensure_ascii=False)[1:-1]
    return text.rstrip(" .:") or type(error).__name__
