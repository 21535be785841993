"""All settings in one place: `kvloop.toml`, the environment and the command line over each layer's defaults.

A default is written once, in the layer that uses it. This module only finds values, in the order
command line > environment > kvloop.toml > default, and refuses a key that no layer knows: nothing is ignored.
"""

from __future__ import annotations

import difflib
import os
import secrets
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from evals.settings import EvalSettings, GateSettings
from loop.shared_layers import local_folder, shared_layers
from memory.files import write_atomic
from memory.journal.settings import JournalSettings
from memory.kv.keyring import MASTER_VARIABLE
from pipelines.settings import RegistrySettings, RetrainSettings, ScheduleSettings
from serve.gateway.settings import GatewaySettings
from serve.pull import DEFAULT_MODEL
from serve.worker.settings import WorkerSettings
from train.settings import TrainSettings

ENVIRONMENT_PREFIX = "KVLOOP_"
NOT_SETTINGS = (MASTER_VARIABLE, "KVLOOP_NATIVE")
"""Variables of KV memory itself: its master key, which no file of settings may hold, and the switch of its native
code."""
DEFAULT_HOME = Path(".kvloop")
COPIED_SECTIONS = {"gateway.journal": "journal"}
"""Sections that a layer gets as a copy of another one, which is the only place where they are set."""


class ConfigError(ValueError):
    """A setting is unknown or has a bad value; the message names it, where it came from and what would be right."""


class Config(BaseModel):
    """Everything one install of kvloop is told. Sections are the settings of the layer of that name."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    home: Path = DEFAULT_HOME
    """Folder that holds all state of this install."""
    model: str = DEFAULT_MODEL
    """Base model: the default model's name, a local Hugging Face folder, or a hub id."""
    restart_backoff_seconds: float = Field(default=0.5, gt=0)
    """Pause before a died process is started again; doubles up to 30 s while it keeps dying."""
    follow_seconds: float = Field(default=0.5, gt=0, le=3)
    """How often the follower looks where MLflow's `champion` alias points."""
    journal: JournalSettings
    worker: WorkerSettings
    gateway: GatewaySettings
    registry: RegistrySettings
    train: TrainSettings
    evals: EvalSettings
    gate: GateSettings
    retrain: RetrainSettings
    schedule: ScheduleSettings


def load(
    overrides: Sequence[str] = (), home: Path | None = None, environment: Mapping[str, str] | None = None
) -> Config:
    """Reads the configuration of the install in `home`.

    `overrides` are `section.key=value` strings from the command line. Raises `ConfigError`.
    """
    environment = os.environ if environment is None else environment
    home = (home or Path(environment.get("KVLOOP_HOME", DEFAULT_HOME))).expanduser().resolve()
    if home.exists() and not home.is_dir():
        raise ConfigError(f"home {home} is a file: name a folder, which is made where there is none")
    values: dict[str, Any] = {}
    for source, found in (
        (str(home / "kvloop.toml"), _from_file(home / "kvloop.toml")),
        ("the environment", _from_environment(environment)),
        ("the command line", _from_overrides(overrides)),
    ):
        _check_known(found, Config, source)
        if "home" in found and source != "the environment":
            raise ConfigError(f"setting 'home' in {source} comes too late: use kvloop --home or KVLOOP_HOME")
        _merge(values, found)
    values["home"] = home
    _fill_derived(values, home)
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        given = "" if isinstance(first["input"], dict) else f" (got {first['input']!r})"
        raise ConfigError(f"setting {where}: {first['msg'].removeprefix('Value error, ')}{given}") from None
    return with_shared_layers(config, local_folder(config.model, home / "models"))


def with_shared_layers(config: Config, model_dir: Path) -> Config:
    """`config` in which KV memory shares the KV of the layers that training leaves alone, unless it says otherwise.

    Unchanged while the model is not in `model_dir` yet. Raises `ConfigError` when no layer is left to train.
    """
    if "kv_shared_layers" in config.worker.model_fields_set or not (model_dir / "config.json").is_file():
        return config
    try:
        layers = shared_layers(config.train, model_dir)
    except ValueError as error:
        raise ConfigError(f"setting train.layers_from: {error}") from None
    return config.model_copy(update={"worker": config.worker.model_copy(update={"kv_shared_layers": layers})})


def _from_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # TOML's own, and bytes that are no UTF-8
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """`KVLOOP_WORKER__THREADS=2` sets `worker.threads`. `KVLOOP_TEST_*` belongs to the test suite."""
    found: dict[str, Any] = {}
    for name, value in environment.items():
        if name.startswith(ENVIRONMENT_PREFIX) and not name.startswith("KVLOOP_TEST_") and name not in NOT_SETTINGS:
            _put(found, name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__"), value)
    return found


def _from_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator:
            raise ConfigError(f"--set {override}: write it as section.key=value")
        _put(found, key.strip().split("."), value)
    return found


def _put(tree: dict[str, Any], path: Sequence[str], text: str) -> None:
    for depth, part in enumerate(path[:-1], start=1):
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            whole, section = ".".join(path), ".".join(path[:depth])
            raise ConfigError(
                f"setting {whole!r} needs {section!r} to be a section, but that was given a value: {tree!r}"
            )
    try:
        tree[path[-1]] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        tree[path[-1]] = text  # a bare word or path: pydantic parses it for the field's type


def _merge(into: dict[str, Any], found: Mapping[str, Any]) -> None:
    for key, value in found.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _check_known(found: Mapping[str, Any], model: type[BaseModel], source: str, prefix: str = "") -> None:
    for key, value in found.items():
        field = model.model_fields.get(key)
        if field is None:
            known = [name for name, _ in describe()]
            near = difflib.get_close_matches(prefix + key, known, n=1, cutoff=0.0)
            raise ConfigError(f"unknown setting {prefix + key!r} in {source}; the nearest known one is {near[0]!r}")
        section = section_of(field)
        if section is not None:
            if prefix + key in COPIED_SECTIONS:
                right = COPIED_SECTIONS[prefix + key]
                raise ConfigError(f"setting {prefix + key!r} in {source} is a copy of [{right}]: set it there")
            if not isinstance(value, Mapping):
                raise ConfigError(f"setting {prefix + key!r} in {source} is a section, not a value: {value!r}")
            _check_known(value, section, source, f"{prefix}{key}.")


def _fill_derived(values: dict[str, Any], home: Path) -> None:
    """Paths that follow from `home`, so that one folder holds all state unless a setting says otherwise."""
    for name, field in Config.model_fields.items():
        if section_of(field) is not None:
            values.setdefault(name, {})
    values["journal"].setdefault("url", f"sqlite:///{home / 'journal.db'}")
    worker = {name: WorkerSettings.model_fields[name].default for name in ("host", "port")} | values["worker"]
    values["worker"].setdefault("kv_folder", home / "kv")
    values["worker"].setdefault("kv", {}).setdefault("keyring", home / "keyring")
    values["gateway"]["journal"] = values["journal"]
    values["gateway"].setdefault("workers", [f"http://{worker['host']}:{worker['port']}"])
    values["gateway"].setdefault("model_dir", home / "models" / str(values.get("model", DEFAULT_MODEL)))
    values["gateway"].setdefault("secret_file", home / "secret")
    values["gateway"].setdefault("admin_token_file", home / "admin-token")
    values["registry"].setdefault("folder", home / "mlflow")
    values["schedule"].setdefault("folder", home / "schedule")
    values["retrain"].setdefault("folder", home / "runs")


def describe(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields (`section.key`, docstring) for every setting that can be set."""
    for name, field in model.model_fields.items():
        section = section_of(field)
        if prefix + name in COPIED_SECTIONS:
            continue
        if section is not None:
            yield from describe(section, f"{prefix}{name}.")
        else:
            yield prefix + name, field.description or ""


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The settings model a field holds, or None for a plain value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def secret_file(path: Path) -> Path:
    """Returns `path`, created with 32 random bytes (hex) and mode 0600 on first use."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, secrets.token_hex(32).encode(), mode=0o600)
    return path
