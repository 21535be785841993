"""Attention of a few new tokens over a long KV cache: what the next turn of a restored session computes.

Definition, in exact arithmetic, for query t of `tokens` and the KV head h that its head belongs to:

    out[t] = softmax(scale * query[t] . key[h, : keys - tokens + t + 1]) . value[h, : keys - tokens + t + 1]

Native where the processor multiplies pairs of bfloat16 (AVX512-BF16): about 0.6 of the time of matrix products with
the scores in between, and nearer to the definition, since scores and sums stay in float32.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from memory.native import native_library

SOURCE = Path(__file__).with_name("few_queries.cpp")
MOST_ROWS = 96
"""Query heads of one KV head times tokens: more are better off as a matrix."""
HEAD_DIMS = (64, 128)


def few_queries(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor) -> bool:
    """Writes the attention of the newest tokens into `out`; False, with nothing written, where it is not for these.

    `query`, `out`: [tokens, heads, head_dim], bfloat16, of any stride between tokens. `key`, `value`: [kv_heads, keys,
    head_dim], bfloat16, of one stride between heads; the last `tokens` keys are those of the queries. The scale is
    head_dim ** -0.5.
    """
    tokens, heads, dim = query.shape
    group = heads // len(key)
    if query.dtype != torch.bfloat16 or dim not in HEAD_DIMS or tokens * group > MOST_ROWS:
        return False
    rows_lie_close = all(tensor.stride()[1:] == (dim, 1) for tensor in (query, key, value, out))
    library = _library()
    if library is None or not rows_lie_close or key.stride(0) != value.stride(0):
        return False
    done: int = library.few_queries(
        query.data_ptr(), query.stride(0), tokens, group, len(key), dim,
        key.data_ptr(), value.data_ptr(), key.stride(0), key.shape[1], dim**-0.5,
        out.data_ptr(), out.stride(0),
    )  # fmt: skip
    return done == 0


@cache
def _library() -> ctypes.CDLL | None:
    """The library, where this processor has what it needs."""
    library = native_library(SOURCE, ["few_queries"])
    if library is None:
        return None
    pointer, size, count = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.few_queries.argtypes = [
        pointer, size, count, count, count, count, pointer, pointer, size, size, ctypes.c_float, pointer, size
    ]  # fmt: skip
    nothing = torch.zeros(1, 1, 64, dtype=torch.bfloat16)
    at = nothing.data_ptr()
    able = library.few_queries(at, 64, 1, 1, 1, 64, at, at, 64, 1, 1.0, at, 64) == 0
    return library if able else None
