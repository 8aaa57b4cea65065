"""Which config each sequence of a batch runs under, by its own length and not by that of the longest row."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headscope.engine.base.errors import OptionError
from headscope.engine.config.file import HeadConfig
from headscope.engine.config.sets import ConfigSet
from headscope.engine.model.rows import Rows

if TYPE_CHECKING:
    from headscope.engine.config.host import HostProfile


class ChunkWarning(UserWarning):
    """A chunk of a prompt runs under another config than the chunks before it."""


@dataclass(frozen=True)
class Group:
    """Sequences of a batch, by number, that run under one config (None: dense), and how long their prompts are."""

    config: HeadConfig | None
    sequences: tuple[int, ...]
    lengths: tuple[int, ...]


class ConfigChoice:
    """Picks by the length of each sequence without its padding.

    `prompt_tokens` is the length of the whole prompt (with padding, of the longest) where it comes in chunks. Without
    it the length is that so far, and the first chunk that changes the config gives a ChunkWarning.
    """

    def __init__(
        self, config: HeadConfig | ConfigSet, host: HostProfile | None, name: str | None, prompt_tokens: int | None
    ) -> None:
        if prompt_tokens is not None and prompt_tokens < 1:
            raise OptionError(f"prompt_tokens must be at least 1, got {prompt_tokens}")
        self._config = config
        self._host = host
        self._name = name
        self._prompt_tokens = prompt_tokens
        self._warned = False

    def groups(self, rows: Rows, prompt_len: int, before: int = 0) -> list[Group]:
        """The sequences of a call by config, in the order of their first one.

        `prompt_len` are the keys so far, padding included, of which `before` were there before the call.
        """
        whole = max(prompt_len, self._prompt_tokens or 0)
        lengths = [whole - start for start in rows.starts]
        configs = [self._pick(length, len(lengths)) for length in lengths]
        if before and self._prompt_tokens is None:
            self._warn_of_change(rows, before, configs)
        members: dict[int, list[int]] = {}
        for sequence, config in enumerate(configs):
            members.setdefault(id(config), []).append(sequence)
        return [
            Group(configs[own[0]], tuple(own), tuple(lengths[sequence] for sequence in own)) for own in members.values()
        ]

    def _pick(self, length: int, batch: int) -> HeadConfig | None:
        if self._host is not None and length < self._host.dense_below_tokens(batch):
            return None
        return self._config.pick(length, self._name) if isinstance(self._config, ConfigSet) else self._config

    def _warn_of_change(self, rows: Rows, before: int, configs: list[HeadConfig | None]) -> None:
        for start, config in zip(rows.starts, configs, strict=True):
            if not self._warned and before > start and self._pick(before - start, len(configs)) is not config:
                self._warned = True
                warnings.warn(
                    f"The first {before - start} tokens of a sequence ran under another config, or dense, than those "
                    "that follow, since each call goes by the length so far: where a prompt comes in chunks, give "
                    "apply its whole length as prompt_tokens",
                    ChunkWarning,
                    stacklevel=2,
                )
