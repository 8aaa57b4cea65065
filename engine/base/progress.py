"""How long work tells its caller where it is, and asks whether to stop."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with units done and units in all, such as layers or bytes."""

NamedProgress = Callable[[int, int, str], None]
"""Called with units done, units in all, and what the last one was, such as `layer 3 alone`."""

Cancel = Callable[[], bool]
"""Asked now and then; True ends the work with `Cancelled`."""
