"""The table at the end of the demo: what was measured, and what it had to be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from loop.demo.story import Measured


def rows(measured: Measured) -> list[tuple[str, str, str]]:
    """(what, measured, aim) for everything that has an aim or explains one."""
    before, after = measured.guards_before, measured.guards_after
    guards = [
        (f"guard: {name}", f"{before[name]:.3f} -> {after[name]:.3f}", "inside its margin")
        for name in ("knowledge", "format")
        if name in before
    ]
    return [
        ("held-out recall, before", _number(measured.recall_before), "<= 0.05"),
        ("held-out recall, after", _number(measured.recall_after), ">= 0.90"),
        ("perplexity, candidate over base", _number(measured.perplexity_ratio, 3), "<= 1.06"),
        *guards,
        ("gate", str(measured.gate_verdict), "pass"),
        ("plain SFT refused by the gate", _flag(measured.gate_refused_plain_sft), "yes"),
        (f"first token, {measured.history_tokens} tokens cold", _seconds(measured.ttft_cold_seconds), ""),
        ("first token, warm", _seconds(measured.ttft_warm_seconds), ""),
        ("first token, restored by a fresh process", _seconds(measured.ttft_restored_seconds), ""),
        ("restored over cold", _number(measured.ttft_restored_over_cold, 3), "<= 0.15"),
        ("cached_tokens is honest", _flag(measured.cached_tokens_honest), "yes"),
        ("KV on disk per token", _bytes(measured.kv_bytes_per_token), ""),
        ("requests during the swap", str(measured.swap_requests), ">= 200"),
        ("of those failed / mixed", f"{measured.swap_failed} / {measured.swap_mixed}", "0 / 0"),
        ("alias move to first token of the new version", _seconds(measured.swap_seconds), "<= 3 s"),
        ("decode, embedded engine over Hugging Face", _number(measured.decode_over_hf), ">= 1.0"),
        ("prefill, embedded engine over Hugging Face", _number(measured.prefill_over_hf), ">= 1.0"),
        ("training", _seconds(measured.train_seconds), "<= 300 s"),
        ("everything", _seconds(measured.total_seconds), "<= 720 s"),
    ]


def show(measured: Measured, say: Console) -> None:
    """Prints the table, and the seconds of every step below it."""
    table = Table("what", "measured in this run", "aim", title="kvloop demo")
    for row in rows(measured):
        table.add_row(*row)
    say.print(table)
    say.print("  ".join(f"{step}: {seconds:.0f} s" for step, seconds in measured.step_seconds.items()))


def _number(value: float | None, digits: int = 2) -> str:
    return "not measured" if value is None else f"{value:.{digits}f}"


def _seconds(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f} s" if value < 10 else f"{value:.0f} s"


def _bytes(value: float | None) -> str:
    return "not measured" if value is None else f"{value:,.0f} bytes"


def _flag(value: bool | None) -> str:
    return "not measured" if value is None else "yes" if value else "no"
