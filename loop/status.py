"""What `kvloop status` says: collected from the home folder, the journal and the running processes."""

from __future__ import annotations

from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from loop.config import Config
from loop.supervisor import running_state
from memory.journal import Journal

TIMEOUT_SECONDS = 5.0


def collect(config: Config) -> dict[str, Any]:
    """Everything as JSON values; parts that are not running are null, never guessed."""
    state = running_state(config.home)
    found: dict[str, Any] = {
        "home": str(config.home),
        "running": bool(state),
        "processes": {
            name: {"pid": process["pid"], "restarts": process["restarts"]}
            for name, process in state.get("processes", {}).items()
        },
        "gateway": _ask(f"{state['gateway']}/health") if state else None,
        "memory": _memory(f"{state['worker']}/metrics") if state else None,
        "serving": None,
        "last_run": None,
        "last_move": None,
    }
    if (config.home / "journal.db").exists() or not config.journal.url.startswith("sqlite"):
        _from_journal(config, found)
    return found


def _from_journal(config: Config, found: dict[str, Any]) -> None:
    journal = Journal.open(config.journal.url, config.journal)
    try:
        serving = journal.get_serving()
        found["serving"] = {"name": serving.name, "weights_id": serving.weights_id} if serving else {"name": "base"}
        runs = journal.list_runs(limit=1)
        if runs:
            steps = [step.name for step in journal.list_steps(runs[0].id)]
            found["last_run"] = {"id": runs[0].id, "status": runs[0].status, "finished_steps": steps}
            found["last_run"]["reason"] = runs[0].reason
        moves = journal.list_promotions(limit=1)
        if moves:
            found["last_move"] = {"who": moves[0].who, "to": moves[0].to_version, "reason": moves[0].reason}
    finally:
        journal.close()


def _ask(url: str) -> Any:
    try:
        answer = httpx.get(url, timeout=TIMEOUT_SECONDS)
        return answer.json() if answer.status_code == 200 else None
    except httpx.TransportError:
        return None


def _memory(url: str) -> dict[str, float] | None:
    """The worker's KV memory gauges, such as `kvloop_kv_bytes{tier=disk}`."""
    try:
        text = httpx.get(url, timeout=TIMEOUT_SECONDS).text
    except httpx.TransportError:
        return None
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("kvloop_kv_"):
                labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
                values[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return values


def render(found: dict[str, Any], console: Console) -> None:
    """Prints `collect`'s result for a person."""
    console.print(f"home      {found['home']}")
    if not found["running"]:
        console.print("nothing runs here; start it with: kvloop up")
    else:
        table = Table("process", "pid", "restarts", box=None)
        for name, process in found["processes"].items():
            table.add_row(name, str(process["pid"] or "down"), str(process["restarts"]))
        console.print(table)
    if found["serving"]:
        console.print(f"serving   {found['serving']['name']}")
    if found["memory"]:
        console.print("memory    " + _memory_line(found["memory"]))
    if found["last_run"]:
        run = found["last_run"]
        console.print(f"last run  {run['id']}: {run['status']}; finished: {', '.join(run['finished_steps']) or 'none'}")
    if found["last_move"]:
        move = found["last_move"]
        console.print(f"last move to {move['to']} by {move['who']}: {move['reason']}")


def _memory_line(memory: dict[str, float]) -> str:
    parts = []
    for tier in ("ram", "disk"):
        held, budget = (
            memory.get(f"kvloop_kv_bytes{{tier={tier}}}"),
            memory.get(f"kvloop_kv_budget_bytes{{tier={tier}}}"),
        )
        if held is not None and budget is not None:
            parts.append(f"{tier} {held / 2**20:.0f} of {budget / 2**20:.0f} MiB")
    return ", ".join(parts)
