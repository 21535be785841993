"""Ports for servers under test, which must still be free after the server was stopped and is started again.

So they are none that the system hands out by itself, to other servers or to outgoing connections; each worker of a
test run has its own, and no port is given out twice.
"""

from __future__ import annotations

import os
import socket
from itertools import count

FIRST, LAST = 20_000, 32_000  # Linux hands out ports from 32768 on
WORKERS = 8
_PORTS_OF_ONE = (LAST - FIRST) // WORKERS
_given = count(os.getpid())  # other test runs on this machine begin elsewhere


def free_port() -> int:
    """A TCP port of loopback that nobody listens on, and that nobody else is given."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS
    for _ in range(_PORTS_OF_ONE):
        port = FIRST + worker * _PORTS_OF_ONE + next(_given) % _PORTS_OF_ONE
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no port of {FIRST} to {LAST} is free")
