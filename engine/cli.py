"""The `headscope` command. Groups of commands have their own modules; this one registers and ends them."""

from __future__ import annotations

import os
import sys
from importlib import import_module

import click
import typer

from headscope.engine.errors import HeadscopeError

COMMANDS = {
    "fetch": "cli_run",
    "inspect": "cli_run",
    "check": "cli_run",
    "generate": "cli_run",
    "prompt": "cli_prompt",
    "convert": "cli_convert",
}
"""Command name to the module of this package that has a function of that name."""


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
        app.command(name)(getattr(import_module(f"headscope.engine.{module}"), name))
    return app


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits: 0 done, 1 refused or failed, 2 unusable input, 130 interrupted."""
    try:
        code = build()(args=arguments, standalone_mode=False)
    except HeadscopeError as error:
        code = _tell(str(error), error.exit_code)
    except click.exceptions.Abort:
        code = _tell("interrupted; nothing was left half-written", 130)
    except KeyboardInterrupt:
        code = _tell("interrupted; nothing was left half-written", 130)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except BrokenPipeError:
        # The reader of our output went away; stop without Python's own complaint at shutdown.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except MemoryError:
        code = _tell("not enough memory: take a shorter prompt or fewer layers", 1)
    raise SystemExit(code if isinstance(code, int) else 0)


def _tell(message: str, code: int) -> int:
    text = message[:1].upper() + message[1:].rstrip(".") + "."
    print(text, file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
