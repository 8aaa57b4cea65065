"""The `headscope` command. Groups of commands have their own modules; this one registers and ends them."""

from __future__ import annotations

import errno
import functools
import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import typer

from headscope.engine.base.errors import ConfigMismatch, HeadscopeError, Interrupted

COMMANDS = {
    "fetch": "run",
    "inspect": "run",
    "check": "run",
    "generate": "run",
    "search": "search",
    "evaluate": "evaluate",
    "prompt": "prompt",
    "convert": "convert",
    "bench": "bench",
}
"""Command name to the module of this package that has a function of that name."""

ENTRY_POINTS = "headscope.commands"
"""Commands of packages above the engine (`studio`), which it must not import by name."""


def build() -> typer.Typer:
    """The application with every command."""
    app = typer.Typer(
        help="See, tune and ship sparse attention, head by head. Start with: headscope inspect --model smollm2 "
        "--prompt code",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for name, module in COMMANDS.items():
        _register(app, name, getattr(import_module(f"headscope.engine.cli.{module}"), name))
    for entry in entry_points(group=ENTRY_POINTS):
        _register(app, entry.name, entry.load())
    return app


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits: 0 done, 1 refused or failed, 2 unusable input, 130 interrupted."""
    # Threads that spin while they wait slow a small machine down threefold as soon as anything else runs on it.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        with _nothing_begun():
            app = build()
        app(args=arguments)
    except HeadscopeError as error:
        raise SystemExit(_tell(str(error) + _hint(error), error.exit_code)) from None
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        raise SystemExit(_tell(f"could not write the output ({error.strerror}): send it elsewhere", 1)) from None
    except MemoryError:
        raise SystemExit(_tell("not enough memory: take a shorter prompt or fewer layers", 1)) from None


def _register(app: typer.Typer, name: str, command: Callable[..., Any]) -> None:
    """Adds a command; its help keeps the paragraphs of the docstring, and the terminal breaks the lines."""
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    app.command(name, help="\n\n".join(" ".join(each.split()) for each in paragraphs))(_interruptible(command))


@contextmanager
def _nothing_begun() -> Iterator[None]:
    """Ctrl-C while modules load leaves at once: an import that is broken off there ends in somebody's traceback."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: os._exit(_tell("interrupted; nothing was begun", 130)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


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


def _tell(message: str, code: int) -> int:
    first = message.split(maxsplit=1)[0] if message.strip() else ""
    plain = first.rstrip(",;:").isalpha() and not os.path.exists(first)  # a name stays as it is written
    text = (message[:1].upper() + message[1:] if plain else message).rstrip(".") + "."
    print(text, file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    main()
