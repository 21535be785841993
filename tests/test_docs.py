"""The docs keep up with the code: every command, endpoint, metric and setting is described; links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from loop.cli import app as command_line
from loop.config import describe
from loop.config_docs import markdown

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_configuration_page_is_what_the_settings_say() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == markdown(), (
        "run: kvloop config --docs > docs/configuration.md"
    )


def test_every_setting_has_a_meaning() -> None:
    assert [name for name, meaning in describe() if not meaning.strip()] == []


def test_every_command_is_described() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    names = [
        command.name or command.callback.__name__ for command in command_line.registered_commands if command.callback
    ]
    assert [name for name in names if f"`kvloop {name}" not in page] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text())
    local = [target for target in targets if not target.startswith("http")]
    assert [target for target in local if not (page.parent / target).exists()] == []
