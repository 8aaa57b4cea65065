"""Where the server listens, and whether it can. Light: whoever only wants the port loads nothing else."""

from __future__ import annotations

import errno
import os
import socket

from headscope.engine.base.errors import HeadscopeError

ADDRESS = "127.0.0.1"


def check_port(port: int) -> None:
    """HeadscopeError where the server could not open `port`: another program has it, or the system keeps it."""
    with socket.socket() as probe:
        if os.name == "posix":  # as the server does: a port is free as soon as its last program has ended
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ADDRESS, port))
        except OSError as problem:
            if problem.errno == errno.EADDRINUSE:
                raise HeadscopeError(f"Port {port} is in use: end the other studio or give --port.") from problem
            raise HeadscopeError(f"Port {port} cannot be opened ({problem.strerror}): give --port.") from problem
