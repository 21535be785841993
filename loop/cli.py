"""The `kvloop` command. Every subcommand is a thin face on a function of another module.

Errors a user can cause end with one line on stderr and exit code 2; machine output is `--json` on stdout.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loop.config import Config, load
from loop.memory_commands import memory
from pipelines.promotion import Move

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help=("A serving tier that remembers, a post-training job that learns from it, and the loop between them."),
)
app.add_typer(memory, name="memory")
say = Console(stderr=True, highlight=False)
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


@dataclass(frozen=True)
class Context:
    home: Path | None
    overrides: tuple[str, ...]
    config_file: Path | None

    def config(self, *more: str) -> Config:
        if self.config_file is not None:
            return Config.model_validate_json(self.config_file.read_text())
        return load((*self.overrides, *more), self.home)


@app.callback()
def common(
    context: typer.Context,
    home: Annotated[Path | None, typer.Option(help="Folder with all state; default ./.kvloop, or KVLOOP_HOME.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting; repeatable.")
    ] = None,
    config_file: Annotated[
        Path | None, typer.Option(hidden=True, help="Settings as `kvloop up` wrote them for its children.")
    ] = None,
) -> None:
    context.obj = Context(home, tuple(setting or ()), config_file)


@app.command()
def pull(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help="Default model, a local Hugging Face folder, or a hub id.")] = None,
) -> None:
    """Bring the model to disk and say where it is and what its digest is."""
    from serve import pull as source

    config = context.obj.config(*_model_override(model))
    with say.status(f"bringing {config.model}"):
        folder = source.pull(config.model, config.home / "models")
        digest = source.digest_folder(folder)
    typer.echo(json.dumps({"model": config.model, "folder": str(folder), "digest": digest}))


@app.command()
def up(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help="Base model to serve.")] = None,
) -> None:
    """Start gateway, worker, follower and scheduler, and keep them running until Ctrl-C."""
    from loop.supervisor import Supervisor, only_one

    config = context.obj.config(*_model_override(model))
    with only_one(config.home):
        supervisor = Supervisor(config, say.print)
        with say.status("starting"):
            supervisor.start()
        say.print(f"API         {supervisor.addresses.gateway}/v1   (description: {supervisor.addresses.gateway}/docs)")
        say.print(f"worker      {supervisor.addresses.worker}")
        say.print(f"home        {config.home}")
        # Whole, so that it can be copied, however narrow the terminal is.
        say.print(f"MLflow      mlflow ui --backend-store-uri {config.registry.tracking_uri}", soft_wrap=True)
        say.print("Ctrl-C stops everything.")
        try:
            supervisor.watch()
        finally:
            supervisor.stop()
    say.print("stopped")


@app.command()
def status(context: typer.Context, json_: JsonFlag = False) -> None:
    """What runs, which version serves, what memory holds, which job is under way."""
    from loop.status import collect, render

    found = collect(context.obj.config())
    if json_:
        typer.echo(json.dumps(found, indent=2))
    else:
        render(found, Console())


@app.command()
def retrain(
    context: typer.Context,
    force: Annotated[bool, typer.Option("--force", help="Train even if too few corrections are new.")] = False,
    json_: JsonFlag = False,
) -> None:
    """Curate, train, evaluate, register and, if the gate says so, promote. Resumes an interrupted run."""
    from loop.retrain_progress import retrain_with_progress

    outcome = retrain_with_progress(context.obj.config(), say, force=force)
    typer.echo(json.dumps(outcome.as_json(), indent=2) if json_ else outcome.summary())
    raise typer.Exit(outcome.exit_code)


@app.command()
def schedule(
    context: typer.Context,
    cron: Annotated[str | None, typer.Option(help="Retrain at these times, as a cron expression.")] = None,
    every_feedback: Annotated[int | None, typer.Option(help="Retrain after this many new pieces of feedback.")] = None,
    off: Annotated[bool, typer.Option("--off", help="Remove all triggers.")] = False,
    json_: JsonFlag = False,
) -> None:
    """Show or set when retraining starts by itself. `kvloop up` runs what is set here."""
    from loop.jobs import edit_schedule

    triggers = edit_schedule(context.obj.config(), cron=cron, every_feedback=every_feedback, off=off)
    if json_:
        typer.echo(json.dumps(triggers, indent=2))
    for trigger in triggers if not json_ else ():
        typer.echo(trigger["description"])
    if not triggers and not json_:
        typer.echo("nothing is scheduled; try: kvloop schedule --cron '0 3 * * *' --every-feedback 200")


@app.command()
def promote(
    context: typer.Context,
    version: Annotated[int, typer.Argument(help="Registered version to serve.")],
    reason: Annotated[str, typer.Option(help="Goes into the ledger.")] = "by hand",
) -> None:
    """Point @champion at a version; serving follows within seconds."""
    from loop.jobs import promote as move

    typer.echo(_move_text(move(context.obj.config(), version, reason)))


@app.command()
def rollback(
    context: typer.Context, reason: Annotated[str, typer.Option(help="Goes into the ledger.")] = "by hand"
) -> None:
    """Point @champion back at the version before (or at the base model when there is none)."""
    from loop.jobs import rollback as move

    typer.echo(_move_text(move(context.obj.config(), reason)))


@app.command()
def versions(context: typer.Context, json_: JsonFlag = False) -> None:
    """List registered versions with their verdicts and aliases."""
    from loop.jobs import list_versions

    _print_rows("versions", list_versions(context.obj.config()), json_)


@app.command()
def ledger(context: typer.Context, json_: JsonFlag = False) -> None:
    """List every move of the served version: who, when, from, to, why, which report."""
    from loop.jobs import list_moves

    _print_rows("ledger", list_moves(context.obj.config()), json_)


@app.command("config")
def show_config(
    context: typer.Context,
    docs: Annotated[bool, typer.Option("--docs", help="Print what every setting means, as Markdown.")] = False,
) -> None:
    """Print the settings in force, as JSON."""
    if docs:
        from loop.config_docs import markdown

        typer.echo(markdown(), nl=False)
        return
    typer.echo(context.obj.config().model_dump_json(indent=2))


@app.command()
def demo(
    context: typer.Context,
    exit_: Annotated[bool, typer.Option("--exit", help="Stop everything at the end instead of leaving it up.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write what was measured to this file.")] = None,
    plain_sft: Annotated[
        bool, typer.Option("--plain-sft", help="Also train a candidate that forgets, and see the gate refuse it.")
    ] = False,
    facts: Annotated[int | None, typer.Option(min=1, help="Tell it with only this many products.")] = None,
) -> None:
    """Tell the whole story in one run on the bundled model, with everything measured."""
    from loop.demo.story import run

    home = context.obj.home or Path(".kvloop-demo")
    run(home, context.obj.overrides, stay=not exit_, json_file=json_file, plain_sft=plain_sft, facts=facts, say=say)


def _model_override(model: str | None) -> tuple[str, ...]:
    return (f"model={json.dumps(model)}",) if model else ()


def _move_text(move: Move) -> str:
    if not move.moved:
        return f"@champion is version {move.to_version} already"
    return f"@champion moved from {move.from_version} to {move.to_version}; serving follows within seconds"


def _print_rows(title: str, rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        typer.echo(f"no {title} yet")
        return
    table = Table(*rows[0].keys(), title=title)
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    Console().print(table)


def main() -> None:
    """Entry point: known errors become one line and exit code 2, never a traceback."""
    try:
        app()
    except Exception as error:
        from loop.errors import USER_ERRORS  # imported late: it costs start time and is rarely needed

        if not isinstance(error, USER_ERRORS):
            raise
        say.print(f"[red]kvloop:[/red] {escape(str(error))}", soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
