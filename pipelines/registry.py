"""Versions in MLflow: SQLite for tracking and registry, artifacts as plain files.

Invariants: a pipeline run registers one version, however often it tries (its MLflow run is found again by a tag); a
version exists only once all its files are on disk; aliases are the only thing about a version that changes later.
MLflow is imported when the registry is first used: it takes seconds.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from memory.files import sync_folder
from pipelines.settings import RegistrySettings

CHAMPION = "champion"
PREVIOUS = "previous"
COMPARED_WITH = "compared_with"
"""Tag of a version: the number of the version it was evaluated against, or `base`."""
STALE_KL = "stale_kl"
"""Tag of a version: KL of serving it on KV of the version it was evaluated against, in nats per token."""
_RUN_TAG = "kvloop.run"
_ADAPTER, _REPORT = "adapter", "report"
_MOST_PARAM_CHARACTERS = 500


class RegistryError(RuntimeError):
    """MLflow refused or could not do something; the message is MLflow's."""


class VersionNotFound(RegistryError):
    """The registry has no such version."""


@dataclass(frozen=True, kw_only=True)
class Version:
    """One registered version. `path` is its adapter folder: read it, never write to it."""

    number: str
    path: Path
    tags: dict[str, str]
    aliases: tuple[str, ...]
    created_at: float
    """UTC seconds since 1970."""

    def stale_kl(self, before: str) -> float | None:
        """What serving this version on the KV of version `before` (a number, or `base`) costs, if that was measured."""
        try:
            return float(self.tags[STALE_KL]) if self.tags.get(COMPARED_WITH) == before else None
        except (KeyError, ValueError):
            return None


class Registry:
    """The versions of one registered model. Thread-safe."""

    def __init__(self, settings: RegistrySettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._made: Any = None

    @property
    def tracking_uri(self) -> str:
        """What `mlflow ui --backend-store-uri` takes to show everything registered here."""
        return self._settings.tracking_uri

    def register(
        self,
        adapter_dir: Path,
        manifest: Mapping[str, Any],
        metrics: Mapping[str, float],
        report_dir: Path | None,
        run_name: str,
        tags: Mapping[str, str] | None = None,
    ) -> str:
        """Copies an adapter and its reports into MLflow and makes it a version; returns the version's number.

        `run_name` is the pipeline run: the same one again returns the version it made before. Numbers and short texts
        of `manifest` become the run's parameters; `tags` are set on run and version. Raises `RegistryError`.
        """
        name = self._settings.model_name
        all_tags = {**(tags or {}), _RUN_TAG: run_name}
        with self._client() as client:
            run = self._run(client, run_name, all_tags)
            if run.info.status != "FINISHED":
                self._fill(client, run, adapter_dir, manifest, metrics, report_dir)
            known = client.search_model_versions(f"name = '{name}' and run_id = '{run.info.run_id}'")
            if known:
                return str(known[0].version)
            self._ensure_model(client)
            source = f"{run.info.artifact_uri}/{_ADAPTER}"
            return str(client.create_model_version(name, source, run.info.run_id, tags=all_tags).version)

    def aliases(self) -> dict[str, str]:
        """Every alias with the number of the version it points at; empty before the first version."""
        with self._client() as client:
            try:
                model = client.get_registered_model(self._settings.model_name)
            except self._mlflow_error() as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                return {}
            return {alias: str(version) for alias, version in model.aliases.items()}

    def get_alias(self, alias: str) -> str | None:
        """The number of the version an alias points at."""
        return self.aliases().get(alias)

    def set_alias(self, alias: str, version: str) -> None:
        """Points an alias at a version. Raises `VersionNotFound`."""
        self.get_version(version)
        with self._client() as client:
            client.set_registered_model_alias(self._settings.model_name, alias, version)

    def delete_alias(self, alias: str) -> None:
        """Removes an alias; one that is not there is fine."""
        if alias in self.aliases():
            with self._client() as client:
                client.delete_registered_model_alias(self._settings.model_name, alias)

    def get_version(self, version: str) -> Version:
        """Raises `VersionNotFound`."""
        aliases = self.aliases()
        with self._client() as client:
            try:
                found = client.get_model_version(self._settings.model_name, version)
            except self._mlflow_error() as error:
                if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                    raise
                raise VersionNotFound(f"no version {version!r}: the registry has {self._numbers(client)}") from error
            return self._version(found, aliases)

    def list_versions(self) -> list[Version]:
        """Newest first."""
        aliases = self.aliases()
        with self._client() as client:
            found = client.search_model_versions(f"name = '{self._settings.model_name}'")
            return sorted((self._version(one, aliases) for one in found), key=lambda one: int(one.number), reverse=True)

    def version_path(self, version: str) -> Path:
        """The adapter folder of a version, in the artifact store itself. Raises `VersionNotFound`."""
        return self.get_version(version).path

    def report_path(self, version: str) -> Path:
        """The folder of a version's reports; it may be missing. Raises `VersionNotFound`."""
        return self.get_version(version).path.with_name(_REPORT)

    def _version(self, found: Any, aliases: Mapping[str, str]) -> Version:
        number = str(found.version)
        return Version(
            number=number,
            path=self._at_home(_local(found.source)),
            tags=dict(found.tags),
            aliases=tuple(sorted(alias for alias, version in aliases.items() if version == number)),
            created_at=found.creation_timestamp / 1000,
        )

    def _at_home(self, path: Path) -> Path:
        """MLflow stores absolute paths, `.../<run>/artifacts/adapter`; a moved home has the files with it."""
        here = self._artifacts / Path(*path.parts[-3:])
        return here if here.exists() and not path.exists() else path

    @property
    def _artifacts(self) -> Path:
        return self._settings.folder.absolute() / "artifacts"

    @contextmanager
    def _client(self) -> Iterator[Any]:
        """MLflow's client, made on first use; its errors come out as `RegistryError`."""
        with self._lock:
            if self._made is None:
                self._made = self._connect()
        try:
            yield self._made
        except self._mlflow_error() as error:
            raise RegistryError(f"MLflow at {self.tracking_uri}: {error}") from error

    def _connect(self) -> Any:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient

        for noisy in ("mlflow.store.db.utils", "alembic.runtime.migration"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        self._settings.folder.mkdir(parents=True, exist_ok=True)
        return MlflowClient(tracking_uri=self.tracking_uri, registry_uri=self.tracking_uri)

    @staticmethod
    def _mlflow_error() -> type[Any]:
        from mlflow.exceptions import MlflowException

        error: type[Any] = MlflowException
        return error

    def _run(self, client: Any, run_name: str, tags: Mapping[str, str]) -> Any:
        if "'" in run_name:
            raise RegistryError(f"a run name has no quotes: {run_name!r}")
        experiment = self._experiment(client)
        found = client.search_runs([experiment], f"tags.`{_RUN_TAG}` = '{run_name}'", max_results=1)
        return found[0] if found else client.create_run(experiment, run_name=run_name, tags=dict(tags))

    def _experiment(self, client: Any) -> str:
        """The experiment whose artifacts lie in this home: after a move that is another one, since MLflow fixes it."""
        ours = self._artifacts.as_uri()
        for name in (self._settings.experiment, f"{self._settings.experiment} in {self._settings.folder.absolute()}"):
            known = client.get_experiment_by_name(name)
            if known is None:
                return str(client.create_experiment(name, artifact_location=ours))
            if known.artifact_location == ours:
                return str(known.experiment_id)
        raise RegistryError(
            f"experiment {known.name!r} keeps its artifacts in {known.artifact_location}, not in {ours}"
        )

    def _ensure_model(self, client: Any) -> None:
        try:
            client.create_registered_model(self._settings.model_name)
        except self._mlflow_error() as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    def _fill(
        self,
        client: Any,
        run: Any,
        adapter_dir: Path,
        manifest: Mapping[str, Any],
        metrics: Mapping[str, float],
        report_dir: Path | None,
    ) -> None:
        from mlflow.entities import Metric, Param

        moment = run.info.start_time  # fixed, so that a second try writes the same rows
        params = [Param(key, text) for key, text in _flat(manifest)]
        values = [Metric(key, float(value), moment, 0) for key, value in metrics.items()]
        client.log_batch(run.info.run_id, metrics=values, params=params[:100])
        client.log_artifacts(run.info.run_id, str(adapter_dir), _ADAPTER)
        if report_dir is not None:
            client.log_artifacts(run.info.run_id, str(report_dir), _REPORT)
        _sync_tree(_local(run.info.artifact_uri))
        client.set_terminated(run.info.run_id, "FINISHED")

    def _numbers(self, client: Any) -> str:
        found = client.search_model_versions(f"name = '{self._settings.model_name}'")
        return ", ".join(sorted((str(one.version) for one in found), key=int)) or "none yet"


def _local(uri: str) -> Path:
    return Path(unquote(urlparse(uri).path))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Numbers and short texts of a manifest as (dotted key, text)."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, str | int | float | bool) and len(str(value)) <= _MOST_PARAM_CHARACTERS:
            yield prefix + key, str(value)


def _sync_tree(root: Path) -> None:
    """Makes every file below `root` durable."""
    for folder, _, names in os.walk(root):
        for name in names:
            descriptor = os.open(Path(folder) / name, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_folder(Path(folder))
    sync_folder(root.parent)
