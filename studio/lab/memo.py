"""Values that were made once and are kept while they are used."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from cachetools import LRUCache

from headscope.studio.base.errors import Busy

T = TypeVar("T")


class _Flight(Generic[T]):
    """A value that a thread is making: what the others, who want it too, wait for."""

    def __init__(self) -> None:
        self.maker = threading.get_ident()
        self.landed = threading.Event()
        self.values: list[T] = []


class Memo(Generic[T]):
    """At most `most` values by key; the one not used for longest goes first. Any thread may call.

    A value is made once however many threads ask for it at the same time. Whoever waits for a maker that fails makes
    the value itself. The device's thread must not wait for a page: a page's `make` may be waiting for the device.
    """

    def __init__(self, most: int) -> None:
        self._values: LRUCache[Hashable, T] = LRUCache(most)
        self._flights: dict[Hashable, _Flight[T]] = {}
        self._lock = threading.Lock()

    def __call__(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of a key, made now if it is not there. `Busy` if making it is what this very thread is at."""
        while True:
            with self._lock:
                if key in self._values:
                    return self._values[key]
                flight = self._flights.get(key)
                if flight is None:
                    mine = self._flights[key] = _Flight()
                    break
            if flight.maker == threading.get_ident():
                raise Busy("Another session is having the same thing made: try again in a moment.")
            flight.landed.wait()
            if flight.values:
                return flight.values[0]
        try:
            value = make()
            mine.values.append(value)
            return self.put(key, value)
        finally:
            with self._lock:
                del self._flights[key]
            mine.landed.set()

    def __contains__(self, key: Hashable) -> bool:
        with self._lock:
            return key in self._values

    def get(self, key: Hashable) -> T | None:
        """The value if it is there, now the most recent; never makes it."""
        with self._lock:
            return self._values.get(key)

    def put(self, key: Hashable, value: T) -> T:
        """Keeps a value that was made elsewhere."""
        with self._lock:
            self._values[key] = value
        return value

    def items(self) -> list[tuple[Hashable, T]]:
        """What is kept now."""
        with self._lock:
            return list(self._values.items())

    def clear(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._values.clear()
