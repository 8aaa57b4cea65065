"""Data parallel over prompts: the processes of `torchrun` share out the prompts and meet at the result files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as distributed

from headscope.engine.base.errors import HeadscopeError


@dataclass(frozen=True)
class Ranks:
    """This process among those of one search; rank 0 of 1 without `torchrun`."""

    rank: int
    count: int

    @classmethod
    def here(cls) -> Ranks:
        """Joins the group that `torchrun` announced in the environment, over gloo."""
        count = int(os.environ.get("WORLD_SIZE", "1"))
        if count < 2:
            return cls(0, 1)
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
        except Exception as error:
            problem = error
        if self.count > 1:
            told: list[str | None] = [None] * self.count
            distributed.all_gather_object(told, None if problem is None else str(problem))
            other = next((text for text in told if text is not None), None)
            if problem is None and other is not None:
                raise HeadscopeError(f"Another process of this search stopped: {other}")
        if problem is not None:
            raise problem
