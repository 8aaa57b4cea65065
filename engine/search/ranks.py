"""Data parallel over prompts: the processes of `torchrun` share out the prompts and meet at the result files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as distributed

from headscope.engine.base.errors import HeadscopeError, OptionError

_TORCHRUN = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")
"""What `torchrun` tells each of its processes."""


@dataclass(frozen=True)
class Ranks:
    """This process among those of one search: alone, unless it joined the others of `torchrun`."""

    rank: int = 0
    count: int = 1

    @classmethod
    def join(cls) -> Ranks:
        """Joins the processes that `torchrun` started, over gloo; alone where the environment tells of no others.

        Raises OptionError where it tells of others but not how to reach them, which would mean to wait for ever.
        """
        if _announced(os.environ) < 2:
            return cls()
        if not distributed.is_initialized():
            distributed.init_process_group("gloo")
        return cls(distributed.get_rank(), distributed.get_world_size())

    @property
    def first(self) -> bool:
        return self.rank == 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """All processes leave the block when the last one has; if one failed, all raise, and none waits for ever."""
        problem: BaseException | None = None
        try:
            yield
        except Exception as error:  # whatever it is, the others wait to be told
            problem = error
        if self.count > 1:
            problems: list[str | None] = [None] * self.count
            distributed.all_gather_object(problems, None if problem is None else str(problem))
            other = next((text for text in problems if text is not None), None)
            if problem is None and other is not None:
                raise HeadscopeError(f"Another process of this search stopped: {other}")
        if problem is not None:
            raise problem


def _announced(environment: Mapping[str, str]) -> int:
    """How many processes the environment of `torchrun` tells of: 1 where there is none."""
    text = environment.get("WORLD_SIZE", "1")
    count = _whole(text)
    if count == 1:
        return 1
    missing = [name for name in _TORCHRUN if not environment.get(name)]
    if missing:
        raise _refusal(f"does not give {', '.join(missing)}")
    if count is None or count < 1:
        raise _refusal(f"WORLD_SIZE must be a number from 1 on, got {text[:40]!r}")
    for name, low, high in (("RANK", 0, count - 1), ("MASTER_PORT", 1, 65535)):
        value = _whole(environment[name])
        if value is None or not low <= value <= high:
            raise _refusal(f"{name} must be a number from {low} to {high}, got {environment[name][:40]!r}")
    return count


def _whole(text: str) -> int | None:
    """The number that plain digits say, None for any other text."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


def _refusal(what: str) -> OptionError:
    return OptionError(
        f"the environment tells of other processes in WORLD_SIZE but {what}: start the search with torchrun, or "
        "unset WORLD_SIZE"
    )
