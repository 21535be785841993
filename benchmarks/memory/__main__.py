"""All figures of KV memory: a table, and as the last line one JSON object.

python -m benchmarks.memory [--quick] [--only resume,faults] [--vllm]

Each module of this folder may be run by itself. One that fails leaves its figures out as null and says why; the exit
code is then 1. Peers are installed on first use, in `.bench-peers/`; one that cannot be is null, with the reason in
`peers_missing`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from rich.console import Console
from rich.table import Table

MODULES = ("codecs", "fidelity", "lookups", "store", "cost", "resume", "faults", "long_context")
QUICK: dict[str, dict[str, Any]] = {
    "resume": {"quick": True},
    "store": {"quick": True},
    "faults": {"quick": True},
    "cost": {"rounds": 1, "lengths": (64,)},
    "long_context": {"tokens": 2000},
}
"""What makes a smoke run of a module; the others are left out of one."""

WANTED: dict[str, tuple[str, float]] = {
    "exact_ratio": (">=", 1.4),
    "int8_ratio": (">=", 1.95),
    "int8_kl": ("<=", 0.003),
    "int4_ratio": (">=", 3.6),
    "int4_kl": ("<=", 0.006),
    "low_ratio": (">=", 8.0),
    "low_kl": ("<=", 0.05),
    "noise": ("", 0.0),
    "resume_over_best_peer_exact": ("<=", 0.5),
    "resume_over_best_peer_int4": ("<=", 0.5),
    "peers": ("", 0.0),
    "decode_gb_s": ("", 0.0),
    "decode_gb_s exact": (">=", 0.5),
    "decode_gb_s int8": (">=", 1.0),
    "decode_gb_s int4": (">=", 1.0),
    "disk_share": (">=", 0.7),
    "lookup_p99_us": ("<=", 1000.0),
    "rebuild_files_s": (">=", 20_000.0),
    "store_overhead": ("<=", 0.02),
    "cost_worst_ratio": ("<=", 1.05),
    "flips_tried": (">=", 1512),
    "flips_accepted": ("<=", 0),
    "syscalls_failed": (">=", 1),
    "wrong_answers": ("<=", 0),
    "unhandled": ("<=", 0),
}
"""Figures that are always there, and what each should be."""


def run(names: list[str], *, quick: bool, with_vllm: bool, console: Console) -> dict[str, Any]:
    """The figures of these modules together; "failed" holds what went wrong, by module."""
    figures: dict[str, Any] = {name: None for name in WANTED if " " not in name}
    failed: dict[str, str] = {}
    seconds: dict[str, float] = {}
    for name in names:
        if quick and name not in QUICK:
            continue
        options: dict[str, Any] = dict(QUICK[name]) if quick else {}
        if name == "resume" and with_vllm:
            options["with_vllm"] = True
        console.print(f"{name} …")
        began = time.monotonic()
        try:
            figures |= importlib.import_module(f"benchmarks.memory.{name}").measure(**options)
        except Exception as error:  # noqa: BLE001  # one that cannot run must not hide the others' figures
            traceback.print_exc()
            failed[name] = f"{type(error).__name__}: {error}"
        seconds[name] = round(time.monotonic() - began, 1)
    return {**figures, "seconds": seconds, "machine": machine(), "failed": failed}


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "processor": platform.processor() or platform.machine(),
        "load": round(os.getloadavg()[0], 1),
        "revision": revision.stdout.strip(),
    }


def verdict(name: str, value: Any) -> str:
    """Whether a figure is what it should be, in a word."""
    sign, wanted = WANTED.get(name, ("", 0.0))
    if not sign:
        return ""
    if not isinstance(value, int | float):
        return "not measured"
    return "yes" if (value >= wanted if sign == ">=" else value <= wanted) else "NO"


def table(figures: Mapping[str, Any]) -> Table:
    """The figures, what they should be, and whether they are."""
    shown = Table(title="KV memory", show_lines=False)
    for column in ("figure", "value", "wanted", "met"):
        shown.add_column(column, justify="right" if column == "value" else "left")
    rows: dict[str, Any] = {}
    for name, value in figures.items():
        if isinstance(value, Mapping):
            rows |= {f"{name} {part}": entry for part, entry in value.items() if not isinstance(entry, Mapping | list)}
        elif not isinstance(value, list):
            rows[name] = value
    order = [name for name in WANTED if name in rows]
    for name in [*order, *(name for name in rows if name not in WANTED)]:
        sign, wanted = WANTED.get(name, ("", 0.0))
        shown.add_row(name, _text(rows[name]), f"{sign} {wanted:g}" if sign else "", verdict(name, rows[name]))
    return shown


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "-" if value is None else str(value)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {str(name): _rounded(entry) for name, entry in value.items()}
    return [_rounded(entry) for entry in value] if isinstance(value, list | tuple) else value


def main() -> None:
    """Runs the benchmarks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description="all figures of KV memory")
    parser.add_argument("--quick", action="store_true", help="a smoke run of a few minutes; its figures say little")
    parser.add_argument("--only", default="", help=f"modules, with commas between: {', '.join(MODULES)}")
    parser.add_argument("--vllm", action="store_true", help="measure vLLM as a peer (3.5 GB to install)")
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else list(MODULES)
    if unknown := sorted(set(names) - set(MODULES)):
        parser.error(f"there is no module {', '.join(unknown)}; there are {', '.join(MODULES)}")
    console = Console(stderr=False)
    figures = run(names, quick=arguments.quick, with_vllm=arguments.vllm, console=console)
    console.print(table(figures))
    print(json.dumps(_rounded(figures)))
    sys.exit(1 if figures["failed"] else 0)


if __name__ == "__main__":
    main()
