"""The remote tier against a real S3 server on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from memory.kv.counters import Counters
from memory.kv.tiers.index import Index
from memory.kv.tiers.remote import Deleted, RemoteTier
from tests.memory.kv.rows import chunk_file, key, row
from tests.ports import free_port

s3fs = pytest.importorskip("s3fs", reason="needs the extra: pip install 'kvloop[s3]'")
pytest.importorskip("moto.server", reason="needs an S3 server to run: pip install 'moto[server]'")


def wait_for(server: subprocess.Popen[bytes], port: int) -> None:
    for _ in range(600):
        assert server.poll() is None, "the S3 server did not start"
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError("the S3 server does not listen")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a bucket; fsspec is told by the environment where S3 is, as an operator would."""
    port = free_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    code = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
    server = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ)
    )
    try:
        wait_for(server, port)
        s3fs.S3FileSystem(skip_instance_cache=True).mkdir("chunks")
        yield "s3://chunks/of/kv"
    finally:
        server.kill()
        server.wait()


@pytest.mark.filterwarnings("ignore::DeprecationWarning:botocore", "ignore::ResourceWarning")
def test_chunks_in_an_object_store(bucket: str, tmp_path: Path) -> None:
    index = Index.build(tmp_path / "index.db", ())
    remote = RemoteTier(bucket, 1 << 30, tmp_path, lambda: index, Counters(), operation_seconds=60.0)
    keys = [key(number) for number in range(6)]
    for number in range(6):
        data = chunk_file(number)
        index.add([row(number, size=len(data))])
        assert remote.take(key(number), data, 1e9), remote.trouble
        index.moved(key(number), "remote", len(data))
    remote.keep(keys[:5])
    assert [remote.fetch(name) for name in keys] == [chunk_file(number) for number in range(6)]
    assert remote.forget(keys[:2]) == Deleted(gone=2), remote.trouble
    assert remote.retry() == Deleted()  # the sixth was entered: it is spared
    assert remote.fetch(keys[0]) is None
    assert remote.trouble == "", "an object that is not there is no trouble"
    index.close()
    index = Index.build(tmp_path / "index.db", ())
    assert remote.reconcile(lambda owner: True, lambda: False), remote.trouble
    assert set(index.keys("remote")) == set(keys[2:])
    assert remote.fetch(keys[4]) == chunk_file(4)
    assert remote.clear() == Deleted(gone=4), remote.trouble
    assert remote.reconcile(lambda owner: True, lambda: False), remote.trouble
    assert index.keys("remote") == {}
    remote.close()
    index.close()
