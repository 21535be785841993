"""The `kvloop memory` commands. Each is a thin face on a function of `loop.memory`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

memory = typer.Typer(no_args_is_help=True, help="What KV memory holds, what each rung of it costs, and emptying it.")
say = Console(stderr=True, highlight=False)
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


@memory.command()
def report(
    context: typer.Context,
    json_: JsonFlag = False,
    picture: Annotated[
        Path | None, typer.Option(help="Also draw bytes per token against KL into this file (.png or .svg).")
    ] = None,
) -> None:
    """What is stored on each rung, and what each rung was measured to cost. Works whether or not kvloop runs."""
    from loop.memory import report as collect
    from loop.memory_picture import check_kind, draw

    if picture is not None:
        check_kind(picture)
    found = collect(context.obj.config())
    if picture is not None:
        draw(found["records"], picture)
    if json_:
        typer.echo(json.dumps(found, indent=2))
    else:
        show(found, Console())


@memory.command()
def measure(context: typer.Context, json_: JsonFlag = False) -> None:
    """Calibrate the compact rung and measure every rung on the model that runs; takes minutes."""
    from loop.memory import measure as ask
    from loop.memory import report as collect

    config = context.obj.config()
    with say.status("the worker measures every rung on its model"):
        told = ask(config)
    if json_:
        typer.echo(json.dumps(told, indent=2))
    else:
        show(collect(config), Console())


@memory.command()
def clear(
    context: typer.Context,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete all stored KV. No word is lost: sessions compute their KV again at their next turn."""
    from loop.memory import clear as empty

    config = context.obj.config()
    if not yes:
        typer.confirm(f"Delete all KV of {config.worker.kv_folder}?", abort=True, err=True)
    gone = empty(config)
    typer.echo(f"deleted {gone['chunks']} chunks, {_mebibytes(gone['bytes'])}")


def show(found: Mapping[str, Any], console: Console) -> None:
    """Prints `loop.memory.report`'s result for a person."""
    console.print(f"folder    {found['folder']}")
    for tier, held in found["tiers"].items():
        console.print(f"{tier:<9} {held['chunks']} chunks, {_of_budget(held)}")
    console.print(_held(found["rungs"]) if found["rungs"] else "nothing is stored")
    if found["records"]:
        console.print(_measured(found["records"]))
    else:
        console.print("no rung was measured yet, so chunks stay exact; try: kvloop memory measure")


def _held(rungs: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("stored", "chunks", "tokens", "MiB", "times smaller", box=None)
    for rung in rungs:
        counts = (str(rung[name]) for name in ("chunks", "tokens"))
        table.add_row(rung["fidelity"], *counts, f"{rung['bytes'] / 2**20:.1f}", f"{rung['ratio']:.2f}")
    return table


def _measured(records: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("measured", "model", "bytes/token", "smaller", "KL", "top-1", "noise", "ladder", box=None)
    for record in records:
        table.add_row(
            record["codec"],
            record["weights_id_base"][:8],
            f"{record['bytes_per_token']:,.0f}",
            f"{record['ratio']:.2f}",
            f"{record['kl_mean']:.5f}",
            f"{record['top1']:.3f}",
            f"{record['noise_kl']:.5f}",
            "yes" if record["trusted"] else f"no: > {record['max_kl']:g}",
        )
    return table


def _of_budget(held: Mapping[str, Any]) -> str:
    return f"{_mebibytes(held['bytes'])} of {_mebibytes(held['budget'])}"


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
