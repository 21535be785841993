"""What each rung of the fidelity ladder weighs and costs, on the bundled model and real text of several kinds.

Divergence: windows of 1,792 tokens; the KV of the first 1,536 goes through a codec in chunks of 256 (first 4 tokens
exact, last 128 kept), and the next-token distributions at the 256 tokens that follow are compared with those over
exact KV: mean KL(exact || rung) in nats. 80 windows are 20,480 tokens compared. `noise` is the same for exact KV that
was computed in other pieces. The noise and the curve (compact at other rates) are taken on every fourth window.

Ratio: bytes of bf16 over bytes of the chunk files of sessions of 4,096 tokens, one session of each kind of text.

The compact codec is calibrated as the product does it, on text that ships with it and is none of this.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from blake3 import blake3

from benchmarks.memory.texts import windows
from memory.kv.codec.base import Codec, Kept
from memory.kv.codec.compact import CompactCodec
from memory.kv.codec.compact_calibrate import DEFAULT_BITS
from memory.kv.codec.factory import codec_named
from serve.engine.bands import as_array
from serve.engine.divergence import CHUNK_TOKENS, CodedLayers, divergences, prefill, through_codecs
from serve.engine.measure import FILE_BYTES, calibrated_at, tokenizer_of
from serve.engine.model import Decoder
from serve.engine.weights import load_decoder

PREFIX, FOLLOWING = 1536, 256
WINDOWS = 80
CURVE_RATES = (0.5, 0.8, 1.6, 2.4)
CURVE_EVERY = 4
SESSION = 4096
SESSION_KINDS = 5
Result = dict[str, Any]


def measure(
    model: Path | None = None,
    count: int = WINDOWS,
    cache: Path | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Result:
    """The figures. `cache` keeps what was measured of each window, so that an interrupted run goes on."""
    torch.set_num_threads(1)
    folder = model or _bundled()
    decoder, encode = load_decoder(folder, torch.bfloat16), tokenizer_of(folder)
    codecs: dict[str, Codec] = {name: codec_named(name) for name in ("int8", "int4")}
    rates = (DEFAULT_BITS, *CURVE_RATES)
    before = time.process_time()
    bases = calibrated_at(decoder, range(decoder.config.layers), encode, rates)
    tell(f"calibrated {len(rates)} bases in {time.process_time() - before:.0f} s of CPU")
    compact: dict[str, Codec] = {
        f"compact {rate}": CompactCodec(None, basis) for rate, basis in zip(rates, bases, strict=True)
    }
    low = f"compact {DEFAULT_BITS}"
    key = blake3(b"".join(basis.digest for basis in bases)).hexdigest(8)
    kept = _Kept(None if cache is None else cache / key)
    ratios = _ratios(decoder, encode, {"exact": codec_named("exact")} | codecs | compact, kept, tell)
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    by_kind: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for number, (kind, ids) in enumerate(windows(encode, PREFIX + FOLLOWING, count)):
        main = codecs | {low: compact[low]}
        found = kept.get(f"window-{number}", lambda ids=ids, main=main: _window(decoder, ids, main, 0))  # type: ignore[misc]
        if number % CURVE_EVERY == 0:
            others = {name: codec for name, codec in compact.items() if name != low}
            found = found | kept.get(
                f"curve-{number}",
                lambda ids=ids, others=others: _window(decoder, ids, others, 1),  # type: ignore[misc]
            )
        for name, each in found.items():
            _add(sums[name], each)
            if name == low:
                by_kind[kind][0] += each["kl_mean"] * each["tokens"]
                by_kind[kind][1] += each["tokens"]
        tell(
            f"window {number + 1} of {count} ({kind}): "
            + ", ".join(f"{n} {v['kl_mean']:.4f}" for n, v in found.items())
        )
    return _summary(ratios, sums, by_kind, low)


def _summary(
    ratios: Mapping[str, float], sums: Mapping[str, list[float]], by_kind: Mapping[str, list[float]], low: str
) -> Result:
    kl = {name: total[0] / total[2] for name, total in sums.items()}
    curve = [
        {"codec": name, "ratio": round(ratios[name], 3), "kl": round(kl.get(name, 0.0), 5)}
        | ({"top1": round(sums[name][1] / sums[name][2], 4), "tokens": int(sums[name][2])} if name in sums else {})
        for name in sorted(ratios, key=lambda each: ratios[each])
    ]
    return {
        "exact_ratio": ratios["exact"],
        "int8_ratio": ratios["int8"],
        "int8_kl": kl["int8"],
        "int4_ratio": ratios["int4"],
        "int4_kl": kl["int4"],
        "low_ratio": ratios[low],
        "low_kl": kl[low],
        "noise": kl["noise"],
        "fidelity_tokens": int(sums[low][2]),
        "fidelity_curve": curve,
        "low_kl_by_kind": {kind: total[0] / total[1] for kind, total in by_kind.items()},
    }


def _window(decoder: Decoder, ids: list[int], codecs: Mapping[str, Codec], noise: int) -> Result:
    layers = decoder.config.layers
    variants = {name: through_codecs([CodedLayers(codec, 0, layers)]) for name, codec in codecs.items()}
    found = divergences(decoder, variants, [ids], [PREFIX], noise_prompts=noise)
    results = {name: asdict(each) for name, each in found.variants.items()}
    if found.noise is not None:
        results["noise"] = {"kl_mean": found.noise, "top1": 1.0, "tokens": FOLLOWING}
    return results


def _add(total: list[float], found: Mapping[str, float]) -> None:
    for place, weight in enumerate((found["kl_mean"], found["top1"], 1.0)):
        total[place] += weight * found["tokens"]


def _ratios(
    decoder: Decoder,
    encode: Callable[[str], Any],
    codecs: Mapping[str, Codec],
    kept: _Kept,
    tell: Callable[[str], None],
) -> dict[str, float]:
    sizes: dict[str, int] = defaultdict(int)
    sessions = windows(encode, SESSION, SESSION_KINDS)
    for number, (kind, ids) in enumerate(sessions):
        found = kept.get(f"session-{number}", lambda ids=ids: _session(decoder, ids, codecs))  # type: ignore[misc]
        raw = decoder.kv_bytes_per_token * SESSION
        tell(f"session of {kind}: " + ", ".join(f"{name} {raw / size:.2f}" for name, size in found.items()))
        for name, size in found.items():
            sizes[name] += size
    return {name: decoder.kv_bytes_per_token * SESSION * len(sessions) / size for name, size in sizes.items()}


@torch.inference_mode()
def _session(decoder: Decoder, ids: list[int], codecs: Mapping[str, Codec]) -> dict[str, int]:
    """Bytes of the files that hold this session, by codec."""
    kv = decoder.new_kv(len(ids))
    prefill(decoder, ids, 0, kv)
    array = as_array(kv)
    sizes: dict[str, int] = defaultdict(int)
    for start in range(0, len(ids), CHUNK_TOKENS):
        end = start + CHUNK_TOKENS
        keep = Kept(4 if start == 0 else 0, 128 if end >= len(ids) else 0)
        for name, codec in codecs.items():
            sizes[name] += len(codec.encode(array[:, :, :, start:end], keep, start)) + FILE_BYTES
    return dict(sizes)


class _Kept:
    """Results in a folder, or nowhere."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def get(self, name: str, compute: Callable[[], Result]) -> Result:
        if self._folder is None:
            return compute()
        path = self._folder / f"{name}.json"
        if path.is_file():
            found: Result = json.loads(path.read_text())
            return found
        result = compute()
        self._folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result))
        return result


def _bundled() -> Path:
    given = os.environ.get("KVLOOP_TEST_MODEL")
    if given:
        return Path(given)
    from serve.pull import DEFAULT_MODEL, pull

    return pull(DEFAULT_MODEL, Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "kvloop" / "models")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=WINDOWS, help="windows of 256 measured tokens")
    parser.add_argument("--cache", type=Path, help="folder that keeps what was measured")
    options = parser.parse_args()
    result = measure(
        count=options.windows, cache=options.cache, tell=lambda line: print(line, file=sys.stderr, flush=True)
    )
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
