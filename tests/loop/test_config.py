"""Where settings come from, which source wins, and what is said about a setting that is wrong."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from pydantic import BaseModel

from loop.config import Config, ConfigError, describe, load, secret_file, section_of, with_shared_layers
from train.settings import first_trained_layer


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def toml(home: Path, text: str) -> None:
    home.mkdir(exist_ok=True)
    (home / "kvloop.toml").write_text(text)


def test_the_nearer_source_wins(home: Path) -> None:
    default = load((), home, {}).worker.threads
    assert default == 1
    toml(home, "[worker]\nthreads = 3\n")
    assert load((), home, {}).worker.threads == 3
    environment = {"KVLOOP_WORKER__THREADS": "4"}
    assert load((), home, environment).worker.threads == 4
    assert load(("worker.threads=5",), home, environment).worker.threads == 5
    assert load(("worker.threads=5", "worker.threads=6"), home, environment).worker.threads == 6


def test_sources_are_merged_key_by_key(home: Path) -> None:
    toml(home, "follow_seconds = 0.25\n[worker]\nthreads = 3\n[worker.kv]\nram_bytes = 1_000_000\n")
    environment = {"KVLOOP_WORKER__KV__DISK_BYTES": "2000000", "UNRELATED": "x", "KVLOOP_TEST_MODEL": "/nowhere"}
    environment |= {"KVLOOP_KV_KEY": "c2VjcmV0", "KVLOOP_NATIVE": "0"}  # not settings
    config = load(("worker.kv.chunk_tokens=32", "schedule.cron=0 3 * * *"), home, environment)
    kv = config.worker.kv
    assert (config.follow_seconds, config.worker.threads) == (0.25, 3)
    assert (kv.ram_bytes, kv.disk_bytes, kv.chunk_tokens) == (1_000_000, 2_000_000, 32)
    assert config.schedule.cron == "0 3 * * *"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("plain-name", "plain-name"),
        ('"quoted name"', "quoted name"),
        ("/srv/models/mine", "/srv/models/mine"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
    ],
)
def test_texts_need_no_quotes(home: Path, text: str, value: str) -> None:
    assert load((f"model={text}",), home, {}).model == value
    assert load((), home, {"KVLOOP_MODEL": text}).model == value


def test_lists_and_null_sections(home: Path) -> None:
    config = load(('gateway.workers=["http://127.0.0.1:9001", "http://127.0.0.1:9002"]',), home, {})
    assert config.gateway.workers == ("http://127.0.0.1:9001", "http://127.0.0.1:9002")


def test_home_comes_from_the_flag_the_environment_or_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load((), None, {}).home == tmp_path / ".kvloop"
    environment = {"KVLOOP_HOME": str(tmp_path / "other")}
    assert load((), None, environment).home == tmp_path / "other"
    assert load((), tmp_path / "flag", environment).home == tmp_path / "flag"
    toml(tmp_path / "other", "follow_seconds = 0.125\n")
    assert load((), None, environment).follow_seconds == 0.125


def test_all_state_lies_under_home(home: Path) -> None:
    config = load(("worker.port=9101",), home, {})
    assert config.journal.url == config.gateway.journal.url == f"sqlite:///{home}/journal.db"
    assert config.gateway.workers == ("http://127.0.0.1:9101",)
    paths = [
        config.worker.kv_folder,
        config.worker.kv.keyring,
        config.gateway.secret_file,
        config.gateway.admin_token_file,
        config.gateway.model_dir,
        config.registry.folder,
        config.schedule.folder,
        config.retrain.folder,
    ]
    assert all(path is not None and path.is_relative_to(home) for path in paths)


def test_a_path_that_is_set_stays(home: Path, tmp_path: Path) -> None:
    config = load((f"worker.kv_folder={tmp_path / 'kv'}", "journal.url=sqlite:////elsewhere/j.db"), home, {})
    assert config.worker.kv_folder == tmp_path / "kv"
    assert config.gateway.journal.url == "sqlite:////elsewhere/j.db"


def a_model(folder: Path, layers: object) -> Path:
    """A folder that tells how many layers it has, and nothing else."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": layers}))
    return folder


@pytest.mark.parametrize(("layers", "given", "shared"), [(30, (), 12), (9, (), 3), (2, (), 0),
                                                         (30, ("train.layers_from=7",), 7),
                                                         (30, ("worker.kv_shared_layers=5",), 5),
                                                         (30, ("worker.kv_shared_layers=0",), 0),
                                                         ("many", (), 0)])  # fmt: skip
def test_memory_shares_the_layers_that_training_leaves_alone(
    home: Path, tmp_path: Path, layers: object, given: tuple[str, ...], shared: int
) -> None:
    config = load((f"model={a_model(tmp_path / 'model', layers)}", *given), home, {})
    assert config.worker.kv_shared_layers == shared
    if isinstance(layers, int) and "worker" not in "".join(given):
        assert shared == first_trained_layer(config.train, layers)


def test_a_model_that_is_not_there_yet_is_asked_for_its_layers_once_it_is(home: Path) -> None:
    config = load((), home, {})
    assert config.worker.kv_shared_layers == 0
    (home / "models").mkdir(parents=True)
    folder = a_model(home / "models" / config.model, 30)
    assert with_shared_layers(config, folder).worker.kv_shared_layers == 12
    assert load((), home, {}).worker.kv_shared_layers == 12


def test_settings_that_leave_no_layer_to_train_are_refused(home: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"setting train\.layers_from: .*the model has 30 layers"):
        load((f"model={a_model(tmp_path / 'model', 30)}", "train.layers_from=30"), home, {})


def test_the_gateway_takes_the_journal_section_whole(home: Path) -> None:
    config = load(("journal.eval_share=0.35", "journal.split_salt=mine"), home, {"KVLOOP_JOURNAL__POOL_SIZE": "3"})
    assert config.gateway.journal == config.journal
    assert (config.journal.eval_share, config.journal.split_salt, config.journal.pool_size) == (0.35, "mine", 3)
    with pytest.raises(ConfigError, match=r"'gateway.journal' in the command line is a copy of \[journal\]"):
        load(("gateway.journal.eval_share=0.1",), home, {})


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("worker.thraeds", "worker.threads"),
        ("worker.kv.chunk_token", "worker.kv.chunk_tokens"),
        ("gatway.port", "gateway.port"),
        ("modle", "model"),
    ],
)
def test_an_unknown_key_names_the_nearest_one_in_every_source(home: Path, key: str, nearest: str) -> None:
    expected = rf"unknown setting '{key.split('.')[0]}.*the nearest known one is '{nearest}'"
    with pytest.raises(ConfigError, match=expected) as line:
        load((f"{key}=1",), home, {})
    assert "the command line" in str(line.value)
    with pytest.raises(ConfigError, match=expected) as environment:
        load((), home, {"KVLOOP_" + key.replace(".", "__").upper(): "1"})
    assert "the environment" in str(environment.value)
    toml(home, f"{key} = 1\n")
    with pytest.raises(ConfigError, match=expected) as file:
        load((), home, {})
    assert "kvloop.toml" in str(file.value)


@pytest.mark.parametrize("key", ["", "=1", "worker.", ".threads"])
def test_a_key_that_is_none_is_refused(home: Path, key: str) -> None:
    with pytest.raises(ConfigError):
        load((key + "=1",), home, {})


def test_an_override_without_a_value_is_refused(home: Path) -> None:
    with pytest.raises(ConfigError, match=r"worker\.threads: write it as section\.key=value"):
        load(("worker.threads",), home, {})


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("worker.threads=many", r"worker\.threads"),
        ("worker.port=70000", r"worker\.port"),
        ("follow_seconds=4", "follow_seconds"),
        ("worker.kv.chunk_tokens=0", r"worker\.kv\.chunk_tokens"),
        ("schedule.cron=hourly", r"schedule\.cron"),
        ("gateway.host=0.0.0.0", "keys_file"),
        ("model.name=x", "model"),
    ],
)
def test_a_bad_value_is_named(home: Path, override: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"setting .*{name}") as raised:
        load((override,), home, {})
    assert "\n" not in str(raised.value)
    assert "Value error" not in str(raised.value)
    assert str(home) not in str(raised.value)  # one setting's value, not a whole section


def test_a_section_is_no_value(home: Path) -> None:
    expected = "setting 'worker' in .* is a section, not a value: 3"
    with pytest.raises(ConfigError, match=expected):
        load(("worker=3",), home, {})
    with pytest.raises(ConfigError, match=expected):
        load((), home, {"KVLOOP_WORKER": "3"})
    toml(home, "worker = 3\n")
    with pytest.raises(ConfigError, match=expected):
        load((), home, {})


def test_a_section_and_a_value_of_one_name_are_refused(home: Path) -> None:
    with pytest.raises(ConfigError, match=r"'worker\.threads' needs 'worker' to be a section"):
        load(("worker=3", "worker.threads=2"), home, {})
    with pytest.raises(ConfigError, match="'model' to be a section"):
        load((), home, {"KVLOOP_MODEL": "mine", "KVLOOP_MODEL__NAME": "x"})


def test_home_cannot_be_moved_by_what_lies_in_it(home: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kvloop --home"):
        load((f"home={tmp_path}",), home, {})
    toml(home, 'home = "elsewhere"\n')
    with pytest.raises(ConfigError, match="KVLOOP_HOME"):
        load((), home, {})


def test_a_home_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        load((), tmp_path / "file", {})


@pytest.mark.parametrize("content", [b"worker = [", b'model = "\xff"', b"a = 1\na = 2"])
def test_a_broken_file_is_named(home: Path, content: bytes) -> None:
    home.mkdir()
    (home / "kvloop.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"kvloop\.toml is not valid TOML"):
        load((), home, {})


def test_every_setting_is_documented_and_has_a_default(home: Path) -> None:
    assert [name for name, meaning in describe() if not meaning.strip()] == []
    config = load((), home, {})
    names = {name for name, _ in describe()}
    assert names == {name for name in _leaves(config) if not name.startswith("gateway.journal.")}


def _leaves(model: BaseModel, prefix: str = "") -> list[str]:
    found: list[str] = []
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        found += _leaves(value, f"{prefix}{name}.") if section_of(field) is not None else [prefix + name]
    return found


def test_what_is_written_for_the_children_reads_back_the_same(home: Path) -> None:
    config = load(("worker.kv.ram_bytes=12345678",), home, {})
    assert Config.model_validate_json(config.model_dump_json()) == config


def test_secrets_are_made_once_and_are_private(home: Path) -> None:
    path = secret_file(home / "secret")
    first = path.read_text()
    assert (len(first), stat.S_IMODE(path.stat().st_mode)) == (64, 0o600)
    assert secret_file(path).read_text() == first
    assert secret_file(home / "admin-token").read_text() != first
