"""llama.cpp: the state file of a sequence, as `llama-server` writes and reads it for a slot."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import llama_cpp
from llama_cpp import Llama
from peer_process import WARM_UP, Config, run


def load_model(config: Config) -> Llama:
    context = len(config["history"]) + 512
    llama = Llama(
        config["gguf"], n_ctx=context, n_threads=1, n_threads_batch=1, n_batch=512, flash_attn=True, verbose=False
    )
    llama.eval(WARM_UP)
    llama.reset()
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llama.ctx), True)
    return llama


def save(config: Config) -> None:
    llama = load_model(config)
    llama.eval(config["history"])
    ids = (llama_cpp.llama_token * len(config["history"]))(*config["history"])
    path = str(Path(config["store"]) / "slot.bin").encode()
    if not llama_cpp.llama_state_seq_save_file(llama.ctx, path, 0, ids, len(ids)):
        raise RuntimeError("llama.cpp did not save the state")


def prepare(config: Config) -> Callable[[], tuple[int, int]]:
    llama = load_model(config)
    path = str(Path(config["store"]) / "slot.bin").encode()
    room = len(config["history"]) + 1

    def resume() -> tuple[int, int]:
        ids = (llama_cpp.llama_token * room)()
        count = ctypes.c_size_t(0)
        if not llama_cpp.llama_state_seq_load_file(llama.ctx, path, 0, ids, room, ctypes.byref(count)):
            raise RuntimeError("llama.cpp did not load the state")
        llama.n_tokens = count.value
        llama.eval(config["turn"])
        logits = llama_cpp.llama_get_logits_ith(llama.ctx, -1)
        vocabulary = llama.n_vocab()
        values = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * vocabulary)).contents
        import numpy as np

        return count.value, int(np.frombuffer(values, np.float32).argmax())

    return resume


if __name__ == "__main__":
    run(save, prepare)
