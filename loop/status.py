"""What `kvloop status` says: collected from the home folder, the journal and the running processes."""

from __future__ import annotations

from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from loop.config import Config
from loop.memory import by_rung
from loop.supervisor import running_state
from memory.journal import Journal

TIMEOUT_SECONDS = 5.0


def collect(config: Config) -> dict[str, Any]:
    """Everything as JSON values; parts that are not running are null, never guessed."""
    state = running_state(config.home)
    told = _ask(f"{state['worker']}/v1/kv/report") if state else None
    found: dict[str, Any] = {
        "home": str(config.home),
        "running": bool(state),
        "processes": {
            name: {"pid": process["pid"], "restarts": process["restarts"]}
            for name, process in state.get("processes", {}).items()
        },
        "gateway": _ask(f"{state['gateway']}/health") if state else None,
        "memory": _memory(f"{state['worker']}/metrics") if state else None,
        "rungs": by_rung(told["holdings"]) if told else None,
        "upkeep": told.get("upkeep") if told else None,
        "refresh": _refresh(config, state["gateway"]) if state else None,
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


def _ask(url: str, headers: dict[str, str] | None = None) -> Any:
    try:
        answer = httpx.get(url, headers=headers, timeout=TIMEOUT_SECONDS)
        return answer.json() if answer.status_code == 200 else None
    except httpx.TransportError:
        return None


def _refresh(config: Config, gateway: str) -> Any:
    """How far the gateway is with computing sessions' KV under the version that serves."""
    try:
        token = (config.gateway.admin_token_file or config.home / "admin-token").read_text().strip()
    except OSError:
        return None  # whoever may not read it is not told
    return _ask(f"{gateway}/internal/refresh", {"Authorization": f"Bearer {token}"})


def _memory(url: str) -> dict[str, float] | None:
    """The worker's KV memory gauges, such as `kvloop_kv_bytes{tier=disk}`."""
    try:
        answer = httpx.get(url, timeout=TIMEOUT_SECONDS)
    except httpx.TransportError:
        return None
    if answer.status_code != 200:
        return None
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(answer.text):
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
    if found["rungs"]:
        console.print("rungs     " + ", ".join(_rung(rung) for rung in found["rungs"]))
    if found["upkeep"]:
        console.print("upkeep    " + _upkeep_line(found["upkeep"]))
    if found["refresh"]:
        console.print("refresh   " + _refresh_line(found["refresh"]))
    if found["last_run"]:
        run = found["last_run"]
        console.print(f"last run  {run['id']}: {run['status']}; finished: {', '.join(run['finished_steps']) or 'none'}")
    if found["last_move"]:
        move = found["last_move"]
        console.print(f"last move to {move['to']} by {move['who']}: {move['reason']}")


def _memory_line(memory: dict[str, float]) -> str:
    parts = []
    for tier in ("ram", "disk", "remote"):
        held, budget = (
            memory.get(f"kvloop_kv_bytes{{tier={tier}}}"),
            memory.get(f"kvloop_kv_budget_bytes{{tier={tier}}}"),
        )
        if held is not None and budget:
            parts.append(f"{tier} {held / 2**20:.0f} of {budget / 2**20:.0f} MiB")
    return ", ".join(parts)


def _rung(rung: dict[str, Any]) -> str:
    return f"{rung['fidelity']} {rung['tokens']:,} tokens in {rung['bytes'] / 2**20:,.0f} MiB ({rung['ratio']:.2f}x)"


def _upkeep_line(upkeep: dict[str, Any]) -> str:
    moved, scrubbed = upkeep["moved"], upkeep["scrubbed"]
    parts = [
        f"{moved['by_age'] + moved['by_budget']} chunks moved down, {moved['saved_bytes'] / 2**20:,.0f} MiB saved",
        f"{scrubbed['files']} files verified, {scrubbed['bad']} bad",
        f"{upkeep['expired']} chunks expired",
    ]
    if not upkeep["active"]:
        parts.append("another process does it now")
    if upkeep["trouble"]:
        parts.append(f"trouble: {upkeep['trouble']}")
    return "; ".join(parts)


def _refresh_line(refresh: dict[str, Any]) -> str:
    if not refresh["enabled"]:
        return "switched off"
    parts = [f"{refresh['done']} done, {refresh['waiting']} waiting, {refresh['failed']} failed"]
    current = refresh["current"]
    if current is not None:
        parts.append(f"now {current['session_id']}, {current['tokens']:,} tokens, since {current['seconds']:.0f} s")
    if refresh["eta_seconds"] is not None:
        parts.append(f"about {refresh['eta_seconds']:.0f} s left")
    if refresh["waits_for"]:
        parts.append(f"waits: {refresh['waits_for']}")
    return "; ".join(parts)
