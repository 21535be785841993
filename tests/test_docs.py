"""The docs keep up with the code: every command, endpoint, field, error code, metric and setting is described; links
lead somewhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import BaseModel
from typer.main import get_command

from loop.cli import app as command_line
from loop.config import describe
from loop.config_docs import markdown
from memory.kv.settings import KVSettings
from memory.kv.store import KVStore
from serve.engine.engine import Engine, EngineLoad
from serve.engine.kv_memory import MemoryStats
from serve.gateway import bodies
from serve.gateway.app import routes
from serve.gateway.metrics import Metrics
from serve.worker.app import create_app
from serve.worker.metrics import WorkerMetrics
from serve.worker.protocol import Body, CompletionBody

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
API = (ROOT / "docs" / "api.md").read_text()
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()


def _idle_engine(folder: Path) -> Engine:
    """What the worker's application asks of an engine before the first request: no model is loaded."""
    with KVStore(KVSettings(disk_bytes=0), folder) as store:
        stats, rates = store.stats(), dict.fromkeys(store.cost.rates(), 1.0)
    measured = MemoryStats(stats, rates, 0)
    engine = SimpleNamespace(
        load_now=EngineLoad(*(0 for _ in fields(EngineLoad))),
        versions=SimpleNamespace(list=list),
        memory=SimpleNamespace(stats=lambda: measured),
    )
    return cast(Engine, engine)


def _missing(wanted: Iterable[str], page: str) -> list[str]:
    return sorted({name for name in wanted if f"`{name}`" not in page})


def _commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every command with its whole name, those within groups included."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


def _section(title: str) -> str:
    """The part of the API page under a heading."""
    return API.split(f"\n## {title}\n")[1].split("\n## ")[0]


def _endpoints(found: Iterable[Any]) -> Iterator[str]:
    for route in found:
        path = re.sub(r":\w+}", "}", route.path)
        yield from (f"{method} {path}" for method in route.methods - {"HEAD"})


def _metric_names(metrics: Metrics | WorkerMetrics) -> Iterator[str]:
    for family in metrics.registry.collect():
        yield f"{family.name}_total" if family.type == "counter" else family.name


def _error_codes() -> Iterator[str]:
    """The codes that the gateway's sources give to errors: the `code` of a call, or the text in its place."""
    place = {"conflict": 1, "invalid": 2, "not_found": 2}
    for file in sorted((ROOT / "serve" / "gateway").glob("*.py")):
        for call in ast.walk(ast.parse(file.read_text())):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                continue
            given = [keyword.value for keyword in call.keywords if keyword.arg == "code"]
            if call.func.id in place:
                given += call.args[place[call.func.id] :][:1]
            for value in given:
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield value.value


def test_configuration_page_is_what_the_settings_say() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page.rstrip() == markdown().rstrip(), "run: kvloop config --docs > docs/configuration.md"


def test_every_setting_has_a_meaning() -> None:
    assert [name for name, meaning in describe() if not meaning.strip()] == []


def test_settings_that_pages_name_exist() -> None:
    sections = {name.split(".")[0] for name, _ in describe() if "." in name}
    known = {name for name, _ in describe()}
    named = re.findall(r"`([a-z]+(?:\.[a-z_]+)+)`", "".join(page.read_text() for page in PAGES))
    files = (".md", ".py", ".toml", ".json", ".jsonl", ".db", ".log", ".old")
    settings = [name for name in named if name.split(".")[0] in sections and not name.endswith(files)]
    assert sorted({name for name in settings if name not in known}) == []


def test_every_command_is_described_with_its_options() -> None:
    commands = dict(_commands(get_command(command_line)))
    assert len(commands) >= 13
    missing = []
    for name, command in commands.items():
        row = re.search(rf"^\| `kvloop {name}\b.*$", OPERATIONS, re.MULTILINE)
        if row is None:
            missing.append(name)
            continue
        options = [option for parameter in command.params for option in parameter.opts if option.startswith("--")]
        missing += [f"{name} {option}" for option in options if option != "--help" and option not in row.group()]
    assert missing == []


def test_every_endpoint_of_the_gateway_is_described() -> None:
    assert _missing(_endpoints(routes()), API) == []


def test_no_endpoint_is_described_that_does_not_exist(tmp_path: Path) -> None:
    app = create_app(_idle_engine(tmp_path), 1)
    known = {*_endpoints(routes()), *(f"{method.upper()} {path}" for path, each in app.openapi()["paths"].items()
                                      for method in each)}  # fmt: skip
    named = re.findall(r"`((?:GET|POST|DELETE|PUT|PATCH) /[^`\s]*)`", "".join(page.read_text() for page in PAGES))
    assert sorted(set(named) - known) == []


def test_every_endpoint_of_the_worker_is_described(tmp_path: Path) -> None:
    paths = create_app(_idle_engine(tmp_path), 1).openapi()["paths"]
    wanted = [f"{method.upper()} {path}" for path, methods in paths.items() for method in methods]
    assert len(wanted) >= 6
    assert _missing(wanted, _section("The worker")) == []


@pytest.mark.parametrize(
    ("title", "body"),
    [
        ("Chat completions", bodies.ChatBody),
        ("Responses", bodies.ResponsesBody),
        ("Sessions", bodies.SessionBody),
        ("Sessions", bodies.ForkBody),
        ("Memories", bodies.MemoryBody),
        ("Feedback", bodies.FeedbackBody),
        ("The internal API", bodies.ActivateBody),
    ],
)
def test_every_field_is_described(title: str, body: type[BaseModel]) -> None:
    also = _section("Chat completions") if title == "Responses" else ""
    assert _missing(body.model_fields, _section(title) + also) == []


def test_every_field_of_the_worker_is_described() -> None:
    section = _section("The worker")
    named = [name for body in Body.__subclasses__() for name in body.model_fields]
    assert len(named) > len(CompletionBody.model_fields) + 10
    assert [name for name in named if name not in section] == []


def test_fields_that_do_nothing_are_described() -> None:
    assert _missing([*bodies._NOTHING_ASKED, *bodies._IGNORED], _section("What is not supported")) == []


def test_every_error_code_is_described() -> None:
    codes = set(_error_codes())
    assert len(codes) > 20
    assert _missing(codes, API) == []


def test_every_metric_is_described(tmp_path: Path) -> None:
    wanted = [*_metric_names(Metrics()), *_metric_names(WorkerMetrics(_idle_engine(tmp_path)))]
    named = re.findall(r"^\| `(kvloop_\w+)` \|", _section("Metrics"), re.MULTILINE)
    assert sorted(wanted) == sorted(named)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target, _, anchor in re.findall(r"\]\(([^)#]*)(#([^)]*))?\)", page.read_text()):
        file = page if not target else page.parent / target
        if target.startswith("http"):
            continue
        if not file.exists() or (anchor and anchor not in _anchors(file)):
            broken.append(f"{target}#{anchor}")
    assert broken == []


def _anchors(page: Path) -> list[str]:
    """Headings as links name them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
