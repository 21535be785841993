"""The registry on a real MLflow store: registered once, found again, aliases moved and removed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.registry import CHAMPION, Registry, RegistryError, Version, VersionNotFound
from pipelines.settings import RegistrySettings

# MLflow and what it imports warn about themselves.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    return Registry(RegistrySettings(folder=tmp_path_factory.mktemp("home") / "ml flow"))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    (folder / "report.md").write_text("better")
    return folder


def test_before_the_first_version_there_is_nothing(registry: Registry) -> None:
    assert registry.aliases() == {}
    assert registry.get_alias(CHAMPION) is None
    assert registry.list_versions() == []
    registry.delete_alias(CHAMPION)
    with pytest.raises(VersionNotFound, match="none yet"):
        registry.version_path("1")


@pytest.mark.parametrize(
    ("tags", "before", "told"),
    [
        ({"compared_with": "1", "stale_kl": "0.004"}, "1", 0.004),
        ({"compared_with": "base", "stale_kl": "1e-05"}, "base", 1e-5),
        ({"compared_with": "1", "stale_kl": "0.004"}, "2", None),
        ({"compared_with": "1", "stale_kl": "0.004"}, "base", None),
        ({"compared_with": "1", "stale_kl": "low"}, "1", None),
        ({"compared_with": "1"}, "1", None),
        ({"stale_kl": "0.004"}, "1", None),
    ],
)
def test_what_stale_kv_costs_holds_for_one_version_before(
    tags: dict[str, str], before: str, told: float | None, tmp_path: Path
) -> None:
    version = Version(number="3", path=tmp_path, tags=tags, aliases=(), created_at=0.0)
    assert version.stale_kl(before) == told


def test_a_run_registers_one_version_with_all_it_brings(registry: Registry, adapter: Path, report: Path) -> None:
    manifest = {"recipe": "sft-kl", "seed": 3, "parents": ["1"], "recipe_settings": {"rank": 16}, "long": "x" * 10_000}
    number = registry.register(adapter, manifest, {"heldout": 0.9}, report, "run_a", {"verdict": "pass"})
    assert registry.register(adapter, manifest, {"heldout": 0.9}, report, "run_a", {"verdict": "pass"}) == number
    (version,) = registry.list_versions()
    assert (version.number, version.tags, version.aliases) == (
        number,
        {"verdict": "pass", "kvloop.run": "run_a"},
        (),
    )
    assert (registry.version_path(number) / "adapter_model.safetensors").read_bytes() == b"weights"
    assert (registry.report_path(number) / "report.md").read_text() == "better"
    with registry._client() as client:
        (run,) = client.search_runs([registry._experiment(client)])
    assert run.data.params == {"recipe": "sft-kl", "seed": "3", "recipe_settings.rank": "16"}
    assert (run.data.metrics, run.info.status) == ({"heldout": 0.9}, "FINISHED")


def test_a_registration_that_died_half_way_is_completed(
    registry: Registry, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(registry.list_versions())
    for broken in ("log_artifacts", "set_terminated", "create_model_version"):
        with registry._client() as client, monkeypatch.context() as patch:

            def die(*arguments: object, **named: object) -> None:
                raise KeyboardInterrupt

            patch.setattr(client, broken, die)
            with pytest.raises(KeyboardInterrupt):
                registry.register(adapter, {"seed": 1}, {"loss": 1.0}, None, "run_b")
    number = registry.register(adapter, {"seed": 1}, {"loss": 1.0}, None, "run_b")
    versions = registry.list_versions()
    assert (versions[0].number, len(versions)) == (number, before + 1)


def test_aliases_move_and_go(registry: Registry, adapter: Path) -> None:
    one = registry.register(adapter, {}, {}, None, "run_one")
    two = registry.register(adapter, {}, {}, None, "run_two")
    registry.set_alias(CHAMPION, one)
    assert registry.get_version(one).aliases == (CHAMPION,)
    registry.set_alias(CHAMPION, two)
    assert registry.get_alias(CHAMPION) == two
    assert registry.get_version(one).aliases == ()
    for unknown in ("999", "not a number"):
        with pytest.raises(VersionNotFound, match=two):
            registry.set_alias(CHAMPION, unknown)
    registry.delete_alias(CHAMPION)
    assert registry.get_alias(CHAMPION) is None


def test_mlflows_own_client_sees_and_moves_the_same(registry: Registry, adapter: Path) -> None:
    from mlflow import MlflowClient

    number = registry.register(adapter, {}, {}, None, "run_c")
    client = MlflowClient(tracking_uri=registry.tracking_uri, registry_uri=registry.tracking_uri)
    client.set_registered_model_alias("kvloop", CHAMPION, number)
    assert registry.get_alias(CHAMPION) == number


def test_a_run_name_with_a_quote_is_refused(registry: Registry, adapter: Path) -> None:
    with pytest.raises(RegistryError, match="quotes"):
        registry.register(adapter, {}, {}, None, "x' or 1=1")


def test_importing_the_pipelines_does_not_import_mlflow() -> None:
    code = "import sys, pipelines.registry, pipelines.settings; sys.exit('mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0


def test_a_moved_home_finds_its_adapters_and_registers_new_ones(tmp_path: Path) -> None:
    before = Registry(RegistrySettings(folder=tmp_path / "old" / "mlflow"))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "manifest.json").write_text("{}")
    before.register(adapter, {}, {}, None, "run_1")
    (tmp_path / "old").rename(tmp_path / "new")
    after = Registry(RegistrySettings(folder=tmp_path / "new" / "mlflow"))
    assert (after.version_path("1") / "manifest.json").exists()
    after.register(adapter, {}, {}, None, "run_2")
    assert after.version_path("2").is_relative_to(tmp_path / "new")
    assert not (tmp_path / "old").exists()
