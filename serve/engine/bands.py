"""The slices of a sequence's buffers that KV memory stores apart, each under an identity of its own.

Without shared layers there is one, "all". With L shared layers there are two of KV, below L and from L on, and what
enters layer L. The first and the last of these depend on the weights below L only: under an adapter that leaves those
alone they have the base's identity, so every such version finds them under the same keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from memory.kv.identity import LAYOUT, KVIdentity
from serve.engine.pages import Buffer
from serve.engine.versions import Version


@dataclass(frozen=True)
class Band:
    """Layers [first, last) of the KV, or what enters layer `first` where the two are equal."""

    identity: KVIdentity
    first: int
    last: int

    def of(self, buffer: Buffer) -> np.ndarray[Any, Any]:
        """This band of a buffer, as memory takes it."""
        if self.first < self.last:
            return as_array(buffer.kv[self.first : self.last])
        if buffer.entering is None:
            raise ValueError("the buffer does not keep what enters a layer")
        return as_array(buffer.entering)


def kv_bands(version: Version, cache_salt: str) -> tuple[Band, ...]:
    """The bands that hold the KV of `version`, together all of its layers, from the bottom up."""
    layers, shared = version.decoder.config.layers, version.decoder.shared_layers
    if not shared:
        return (Band(identity_of(version, cache_salt), 0, layers),)
    below = _identity(version.below(shared), cache_salt, f"0-{shared}", layers=shared)
    above = _identity(version, cache_salt, f"{shared}-{layers}", layers=layers - shared)
    return (Band(below, 0, shared), Band(above, shared, layers))


def entering_band(version: Version, cache_salt: str) -> Band | None:
    """The band of what enters the first layer that is not shared; None where no layers are."""
    decoder = version.decoder
    shared = decoder.shared_layers
    if not shared:
        return None
    half = decoder.config.hidden // 2
    identity = _identity(version.below(shared), cache_salt, f"hidden-{shared}", layers=1, kv_heads=1, head_dim=half)
    return Band(identity, shared, shared)


def identity_of(version: Version, cache_salt: str) -> KVIdentity:
    """Everything that the KV of all layers of `version` depends on besides the token ids."""
    return _identity(version, cache_salt, "all", layers=version.decoder.config.layers)


def _identity(
    version: Version, cache_salt: str, band: str, layers: int, kv_heads: int | None = None, head_dim: int | None = None
) -> KVIdentity:
    decoder = version.decoder
    return KVIdentity(
        weights_id=version.weights_id,
        compute_format=version.compute_format,
        kv_dtype=str(decoder.dtype).removeprefix("torch."),
        layers=layers,
        kv_heads=kv_heads or decoder.config.kv_heads,
        head_dim=head_dim or decoder.config.head_dim,
        layout=LAYOUT,
        rope=decoder.config.rope_json,
        attention=decoder.config.attention_json,
        tenant_secret=cache_salt,
        band=band,
    )


def as_array(kv: torch.Tensor) -> np.ndarray[Any, Any]:
    """Returns the same memory as a numpy array; bf16 as its bits in uint16."""
    if kv.dtype == torch.bfloat16:
        bits: np.ndarray[Any, Any] = kv.view(torch.int16).numpy().view(np.uint16)
        return bits
    array: np.ndarray[Any, Any] = kv.numpy()
    return array
