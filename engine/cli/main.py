"""The `headscope` command: finds the command that is asked for, runs it, and ends with one sentence if it fails.

Only the module of that command is imported, and no command module imports torch, transformers or numpy before its
arguments are read: help and a wrong option answer at once.
"""

from __future__ import annotations

import errno
import functools
import inspect
import os
from collections.abc import Callable, Iterator, MutableMapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperGroup

from headscope.engine.base.errors import ConfigMismatch, HeadscopeError, Interrupted
from headscope.engine.cli.ending import nothing_begun, tell, writable_streams

COMMANDS = ("fetch", "inspect", "check", "generate", "search", "evaluate", "prompt", "convert", "bench")
"""In the order of the help. Each is a module of this package with a function of its own name."""

ENTRY_POINTS = "headscope.commands"
"""Commands of packages above the engine (`studio`), which it must not import by name."""


class _Lazy(MutableMapping[str, Any]):
    """Commands by name, each imported when it is asked for."""

    def __init__(self) -> None:
        self._built: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._built:
            if name not in COMMANDS and name not in _entries():
                raise KeyError(name)
            with nothing_begun():
                own = name in COMMANDS
                command = (
                    getattr(import_module(f"headscope.engine.cli.{name}"), name) if own else _entries()[name].load()
                )
            self._built[name] = _command(name, command)
        return self._built[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._built[name] = command

    def __delitem__(self, name: str) -> None:
        del self._built[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*COMMANDS, *_entries(), *self._built)))

    def __len__(self) -> int:
        return len(list(iter(self)))


class _Commands(TyperGroup):
    """The group whose commands are `_Lazy`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Lazy()

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)


def build() -> typer.Typer:
    """The application with every command."""
    app = typer.Typer(
        cls=_Commands,
        help="See, tune and ship sparse attention, head by head. Start with: headscope inspect --model smollm2 "
        "--prompt code",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(lambda: None)  # makes it a group, though no command is registered
    return app


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits: 0 done, 1 refused or failed, 2 unusable input, 130 interrupted."""
    # Threads that spin while they wait slow a small machine down threefold as soon as anything else runs on it.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    writable_streams()
    try:
        build()(args=arguments)
    except HeadscopeError as error:
        raise SystemExit(tell(str(error) + _hint(error), error.exit_code)) from None
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        raise SystemExit(tell(f"could not write the output ({error.strerror}): send it elsewhere", 1)) from None
    except MemoryError:
        raise SystemExit(tell("not enough memory: take a shorter prompt or fewer layers", 1)) from None


@functools.cache
def _entries() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}


def _command(name: str, function: Callable[..., Any]) -> Any:
    """A function as a command; its help keeps the paragraphs of the docstring, and the terminal breaks the lines."""
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(name, help="\n\n".join(" ".join(each.split()) for each in paragraphs))(_interruptible(function))
    return typer.main.get_command(app)


def _interruptible(command: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> Any:
        try:
            return command(*args, **options)
        except KeyboardInterrupt:
            raise Interrupted("interrupted; nothing was left half-written") from None

    return run


def _hint(error: HeadscopeError) -> str:
    """What the command line adds to an error's own words."""
    if not isinstance(error, ConfigMismatch):
        return ""
    from headscope.engine.cli.output import force_hint

    return force_hint(error.reasons)


if __name__ == "__main__":
    main()
