"""The `headscope` command. Groups of commands have their own modules; this one registers and ends them."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import typer

from headscope.engine.errors import HeadscopeError, Interrupted

COMMANDS = {
    "fetch": "cli_run",
    "inspect": "cli_run",
    "check": "cli_run",
    "generate": "cli_run",
    "search": "cli_search",
    "evaluate": "cli_evaluate",
    "prompt": "cli_prompt",
    "convert": "cli_convert",
    "bench": "cli_bench",
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
        app.command(name)(_interruptible(getattr(import_module(f"headscope.engine.{module}"), name)))
    for entry in entry_points(group=ENTRY_POINTS):
        app.command(entry.name)(_interruptible(entry.load()))
    return app


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits: 0 done, 1 refused or failed, 2 unusable input, 130 interrupted."""
    # Threads that spin while they wait slow a small machine down threefold as soon as anything else runs on it.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        build()(args=arguments)
    except HeadscopeError as error:
        raise SystemExit(_tell(str(error), error.exit_code)) from None
    except MemoryError:
        raise SystemExit(_tell("not enough memory: take a shorter prompt or fewer layers", 1)) from None


def _interruptible(command: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> Any:
        try:
            return command(*args, **options)
        except KeyboardInterrupt:
            raise Interrupted("interrupted; nothing was left half-written") from None

    return run


def _tell(message: str, code: int) -> int:
    text = message[:1].upper() + message[1:].rstrip(".") + "."
    print(text, file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
