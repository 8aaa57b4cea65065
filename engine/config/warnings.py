"""Warnings of prompts outside the lengths on which a head config was calibrated."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from headscope.engine.config.file import HeadConfig


class CalibrationWarning(UserWarning):
    """A prompt is shorter or longer than those on which its head config was calibrated."""


class LengthWarnings:
    """One warning for prompts that are too short for a config and one for those too long, however many there are.

    A config that names no lengths has none to be outside of.
    """

    def __init__(self) -> None:
        self._said: set[tuple[int, bool]] = set()

    def check(self, config: HeadConfig, lengths: Iterable[int]) -> None:
        """CalibrationWarning for the first of `lengths` on either side."""
        calibrated = config.provenance.get("lengths")
        if not calibrated:
            return
        for length in lengths:
            side = (id(config), length < min(calibrated))
            if side not in self._said and (texts := config.warnings(length)):
                self._said.add(side)
                warnings.warn(" ".join(texts), CalibrationWarning, stacklevel=3)
