"""How fast one core encodes and decodes each codec: bytes of raw bfloat16 KV a second of CPU time, in GB/s.

decode_gb_s           codec to figure, native where there is a compiler
encode_gb_s           the same for encoding
decode_python_gb_s    without native code
encode_python_gb_s    the same for encoding
payload_ratio         raw bytes over payload bytes of one chunk, no tokens kept, on the synthetic KV of this benchmark

Each figure is the median of repetitions that take turns, so that what else the machine does meets all of them alike.
The KV is synthetic (keys with large and shifted channels, values with large tokens); its exponents spread as widely as
those of a model.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from memory.kv.codec.base import KVArray
from memory.kv.codec.factory import codec_named
from memory.native import SWITCH

CODECS = ("exact", "int8", "int4")
SHAPE = (30, 2, 3, 256, 64)
NATIVE_REPETITIONS, PYTHON_REPETITIONS = 25, 3


def synthetic_kv(shape: tuple[int, ...] = SHAPE, seed: int = 0) -> KVArray:
    """The bits of bfloat16 KV of one chunk."""
    layers, _, heads, tokens, dim = shape
    rng = np.random.default_rng(seed)
    kv = rng.standard_normal(shape, np.float32)
    kv[:, 0] *= np.exp2(rng.normal(0, 1, (layers, heads, 1, dim))).astype(np.float32)
    kv[:, 0] += rng.normal(0, 1, (layers, heads, 1, dim)).astype(np.float32)
    kv[:, 1] *= np.exp2(rng.normal(-2, 0.5, (layers, heads, tokens, 1))).astype(np.float32)
    return (kv.view(np.uint32) >> 16).astype(np.uint16)


@contextmanager
def native_code(wanted: bool) -> Iterator[None]:
    """With native code where there is any, or without."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "1" if wanted else "0"
    try:
        yield
    finally:
        del os.environ[SWITCH]
        if before is not None:
            os.environ[SWITCH] = before


def speeds(kv: KVArray, native: bool, repetitions: int) -> tuple[dict[str, float], dict[str, float]]:
    """GB/s of encoding and of decoding, by codec."""
    work: dict[tuple[str, str], Callable[[], object]] = {}
    with native_code(native):
        for name in CODECS:
            codec, out = codec_named(name), np.empty_like(kv)
            payload = memoryview(codec.encode(kv))
            work["encode", name] = lambda codec=codec: codec.encode(kv)  # type: ignore[misc]
            work["decode", name] = lambda codec=codec, payload=payload, out=out: codec.decode(payload, out)  # type: ignore[misc]
        seconds: dict[tuple[str, str], list[float]] = {key: [] for key in work}
        for _ in range(repetitions):
            for key, call in work.items():
                started = time.process_time()
                call()
                seconds[key].append(time.process_time() - started)
    figures = {key: kv.nbytes / statistics.median(taken) / 1e9 for key, taken in seconds.items()}
    return ({name: figures["encode", name] for name in CODECS}, {name: figures["decode", name] for name in CODECS})


def measure() -> dict[str, dict[str, float]]:
    """All of it, in some twenty seconds."""
    kv = synthetic_kv()
    encode, decode = speeds(kv, True, NATIVE_REPETITIONS)
    encode_python, decode_python = speeds(kv, False, PYTHON_REPETITIONS)
    return {
        "decode_gb_s": decode,
        "encode_gb_s": encode,
        "decode_python_gb_s": decode_python,
        "encode_python_gb_s": encode_python,
        "payload_ratio": {name: kv.nbytes / len(codec_named(name).encode(kv)) for name in CODECS},
    }


def main() -> None:
    """Prints one JSON object."""
    rounded = {figure: {name: round(value, 3) for name, value in by.items()} for figure, by in measure().items()}
    print(json.dumps(rounded))


if __name__ == "__main__":
    main()
