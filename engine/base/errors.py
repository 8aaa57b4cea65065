"""Errors of the engine. The message of each is one sentence that says what happened and what to do."""

from __future__ import annotations

from collections.abc import Sequence


class HeadscopeError(Exception):
    """A problem that a person can solve; the command line prints its message and leaves with `exit_code`.

    1 means that something was refused or failed, 2 that what was given cannot be used.
    """

    exit_code = 1


class ModelError(HeadscopeError):
    """A model that cannot be fetched, found, loaded or used."""


class UnusableModel(ModelError):
    """A name or a file that is no model which can be used here, whatever the machine and the network do."""

    exit_code = 2


class PromptError(HeadscopeError):
    """A prompt that is empty, unreadable or too long."""

    exit_code = 2


class ConfigError(HeadscopeError):
    """A head config that is malformed."""

    exit_code = 2


class ConfigMismatch(ConfigError):
    """A head config that belongs to another model, with every reason."""

    exit_code = 1

    def __init__(self, model: str, reasons: Sequence[str]) -> None:
        super().__init__(f"this config does not fit {model}: " + "; ".join(reasons))
        self.reasons = tuple(reasons)


class OptionError(HeadscopeError, ValueError):
    """An option or argument that cannot be used, or not on this machine."""

    exit_code = 2


class CaptureError(HeadscopeError):
    """A prefill that could not be captured, stored or read back."""


class Cancelled(HeadscopeError):
    """The caller's `cancel` said stop; the message says what was kept."""


class Interrupted(HeadscopeError):
    """A person pressed Ctrl-C."""

    exit_code = 130
