"""What the scripts that resume a session have in common. Free of everything but the standard library: peers run in
environments of their own.

A script is started as `python peer_X.py save|resume CONFIG`. `save` computes the session's KV once and stores it.
`resume` loads the model, computes something unrelated so that nothing is first-time, prints a line, waits for one,
and then does what is timed: loads the KV, computes the next message, finds the first token of the reply.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Config = dict[str, Any]
WARM_UP_TOKENS = 64
WARM_UP = [1000 + 7 * place for place in range(WARM_UP_TOKENS)]


def answer(what: dict[str, Any]) -> None:
    """Tells the benchmark; a marker sets the line apart from what libraries print."""
    print("PEER " + json.dumps(what), flush=True)


def run(save: Callable[[Config], None], prepare: Callable[[Config], Callable[[], tuple[int, int]]]) -> None:
    """Runs a peer. `prepare` returns what is timed, which returns the tokens restored and the first token."""
    mode, path = sys.argv[1:3]
    config: Config = json.loads(Path(path).read_text())
    if mode == "save":
        save(config)
        answer({"saved": True})
        return
    resume = prepare(config)
    answer({"ready": True})
    sys.stdin.readline()
    began = time.perf_counter()
    restored, token = resume()
    milliseconds = 1000 * (time.perf_counter() - began)
    answer({"ms": milliseconds, "restored": restored, "token": token})
