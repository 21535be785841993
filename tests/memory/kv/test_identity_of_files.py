"""What lies in the same place under the same name and is something else has other keys."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from memory.kv.identity import LAYOUT, KVIdentity
from serve.engine.config import read_config
from serve.weights_id import adapter_digest, base_weights_id, weights_id
from tests.memory.kv.common import CHUNK, kv_of, open_store, prompt, restore

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "vocab_size": 100,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
}


def write_model(folder: Path, **changes: object) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    (folder / "model.safetensors").write_bytes(b"weights")


def write_adapter(folder: Path, weights: bytes) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "target_modules": ["q_proj"]}))
    (folder / "adapter_model.safetensors").write_bytes(weights)


def identity_of(model: Path, adapter: Path | None = None, kv_dtype: str = "bfloat16") -> KVIdentity:
    """As a worker that starts on these folders makes it."""
    config = read_config(model)
    return KVIdentity(
        weights_id=weights_id(base_weights_id(model), adapter_digest(adapter) if adapter else None),
        compute_format="bf16",
        kv_dtype=kv_dtype,
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        layout=LAYOUT,
        rope=config.rope_json,
        attention=config.attention_json,
        tenant_secret="secret",
    )


def test_an_adapter_rewritten_in_place_under_the_same_path(tmp_path: Path) -> None:
    """Stores that name KV by an adapter's name or path hand out the old one's."""
    write_model(tmp_path / "model")
    write_adapter(tmp_path / "adapter", b"first")
    first = identity_of(tmp_path / "model", tmp_path / "adapter")
    ids = prompt(2 * CHUNK)
    with open_store(tmp_path / "kv") as store:
        store.save(first, ids, kv_of(ids, first))
        write_adapter(tmp_path / "adapter", b"other")
        second = identity_of(tmp_path / "model", tmp_path / "adapter")
        assert restore(store, ids, second) == 0
        assert restore(store, ids, first) == len(ids)
        write_adapter(tmp_path / "adapter", b"first")
        assert restore(store, ids, identity_of(tmp_path / "model", tmp_path / "adapter")) == len(ids), "content counts"
        assert first.model_digest() == second.model_digest(), "but both are of one base"


def test_rope_scaling_changed_in_the_configuration(tmp_path: Path) -> None:
    ids = prompt(2 * CHUNK)
    with open_store(tmp_path / "kv") as store:
        write_model(tmp_path / "model")
        plain = identity_of(tmp_path / "model")
        store.save(plain, ids, kv_of(ids, plain))
        digests = {plain.digest()}
        for change in (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
            {"rope_theta": 500000.0},
        ):
            write_model(tmp_path / "model", **change)
            scaled = identity_of(tmp_path / "model")
            assert scaled.rope != plain.rope
            assert scaled.weights_id != plain.weights_id, "twice over: the configuration is part of the weights' digest"
            assert restore(store, ids, scaled) == 0
            digests.add(scaled.digest())
        assert len(digests) == 4


def test_dtypes_that_differ_in_the_same_folder(tmp_path: Path) -> None:
    """float16 and bfloat16 have the same size: nothing else than the key would tell them apart."""
    write_model(tmp_path / "model")
    ids = prompt(2 * CHUNK)
    kinds = [identity_of(tmp_path / "model", kv_dtype=kind) for kind in ("bfloat16", "float16", "float32")]
    with open_store(tmp_path / "kv", ram_bytes=0) as store:
        for number, of in enumerate(kinds):
            assert [restore(store, ids, each) for each in kinds] == [len(ids)] * number + [0] * (3 - number)
            store.save(of, ids, kv_of(ids, of))
            assert store.flush(20)
        out = np.zeros(kinds[1].shape(len(ids)), kinds[1].dtype)
        assert store.load(kinds[1], store.match(kinds[0], ids), out) == 0, "not even with a match that is another's"
        assert [restore(store, ids, each) for each in kinds] == [len(ids)] * 3
