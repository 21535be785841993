"""A worker over real HTTP without weights: log-probs and replies depend on the token ids and the adapter alone.

Runs in a thread (`serving`) or as a program (`python fake_worker.py --settings FILE`), as the real one does. Setting
FAKE_WORKER to "exit" makes the program end at once, "crash" in its first request, "deaf" never be ready.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

EOS = 2


class State:
    """What the server was asked. `better` adapters find every token likelier; `refusals` is how often it is full.

    `stale_kl` is what divergence is said to be; None is a worker that cannot measure it.
    """

    def __init__(self) -> None:
        self.adapters: dict[str, str] = {}
        self.loaded: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.refusals = 0
        self.divergence: list[dict[str, Any]] = []
        self.stale_kl: float | None = 0.004
        self.broken = False
        self.crash = False


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, state: State) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.state = state


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads an access log here."""

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(200, {"status": "ok"})
            return
        state = self.server.state
        models = [{"id": "base", "parent": None, "root": "m", "weights_id": "b0"}]
        models += [
            {"id": name, "parent": "base", "root": path, "weights_id": f"b0+{Path(path).name}"}
            for name, path in state.adapters.items()
        ]
        self._send(200, {"data": models})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        state = self.server.state
        if state.crash:
            sys.stderr.write("fake worker: out of luck\n")
            sys.stderr.flush()
            os._exit(3)
        if self.path.endswith("unload_lora_adapter"):
            del state.adapters[body["lora_name"]]
            self._send(200, {})
        elif self.path.endswith("load_lora_adapter"):
            if not Path(body["lora_path"]).is_dir():
                self._send(400, {"error": {"message": "no adapter there"}})
                return
            state.adapters[body["lora_name"]] = body["lora_path"]
            state.loaded.append(body["lora_name"])
            self._send(200, {})
        elif self.path.endswith("/kv/divergence"):
            self._diverge(body)
        else:
            self._complete(body)

    def _diverge(self, body: dict[str, Any]) -> None:
        state = self.server.state
        if state.stale_kl is None:
            self._send(404, {"detail": "Not Found"})
            return
        for name in (body["model"], *body["versions"]):
            assert name == "base" or name in state.adapters, f"{name} is not resident"
        state.divergence.append(body)
        tokens = sum(len(ids) - prefix for ids, prefix in zip(body["prompts"], body["prefixes"], strict=True))
        agreement = 0.9 if body["answer_tokens"] else None
        measured = {"kl_p95": 0.02, "top1": 0.97, "answer_agreement": agreement, "tokens": tokens}
        versions = {name: measured | {"kl_mean": state.stale_kl / len(state.divergence)} for name in body["versions"]}
        noise = measured | {"kl_mean": 0.0016}
        self._send(200, {"object": "kv.divergence", "noise": noise, "codecs": {}, "versions": versions})

    def _complete(self, body: dict[str, Any]) -> None:
        state = self.server.state
        if state.broken:
            self._send(400, {"error": {"message": "broken on purpose"}})
            return
        if state.refusals:
            state.refusals -= 1
            self._send(429, {"error": {"message": "full"}}, {"retry-after": "0"})
            return
        state.requests.append(body)
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        shift = 0.01 if Path(state.adapters.get(body["model"], "")).name == "better" else 0.0
        choices = []
        for index, prompt in enumerate(prompts):
            choice: dict[str, Any] = {"index": index, "text": "", "logprobs": None, "finish_reason": "stop"}
            choice["token_ids"] = [prompt[len(prompt) // 2], EOS][: body["max_tokens"]]
            if body.get("prompt_logprobs") is not None:
                entries: list[Any] = [None]
                entries += [{str(token): {"logprob": -1.0 - token % 7 / 10 + shift, "rank": 1}} for token in prompt[1:]]
                choice["prompt_logprobs"] = entries
            choices.append(choice)
        usage = {"prompt_tokens": sum(map(len, prompts)), "completion_tokens": len(choices)}
        self._send(200, {"choices": choices, "usage": usage})

    def _send(self, status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


@contextlib.contextmanager
def serving(state: State) -> Iterator[str]:
    """Runs the server in a thread and gives its URL."""
    server = Server(0, state)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def main() -> None:
    settings = json.loads(Path(sys.argv[sys.argv.index("--settings") + 1]).read_text())
    mood = os.environ.get("FAKE_WORKER", "")
    if mood == "exit":
        raise SystemExit("fake worker: these weights cannot be read")
    if mood == "deaf":
        time.sleep(60)
    state = State()
    state.crash = mood == "crash"
    Server(settings["port"], state).serve_forever()


if __name__ == "__main__":
    main()
