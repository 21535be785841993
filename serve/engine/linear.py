"""One matrix product, with its weight laid out once in the order the CPU reads it.

oneDNN repacks a plain weight on every call, which costs as much as the product itself when one token is decoded.
A prepacked weight halves the time of a decode step. Unpacking is exact, so no second copy is kept for merging.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

PACKED_FOR_TOKENS = 1  # decode reads every weight for one token: the layout that is best there is good for prefill too


def can_prepack(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes this dtype natively on this CPU."""
    return dtype == torch.bfloat16 and torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Linear:
    """`x @ weight.T + bias`; `weight` is [out, in], `bias` [out] or None, `x` [tokens, in] of the weight's dtype."""

    __slots__ = ("_packed", "_weight", "bias")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._packed = can_prepack(weight.dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_TOKENS) if self._packed else weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
            return product
        return F.linear(x, self._weight, self.bias)

    def dense(self) -> torch.Tensor:
        """Returns a fresh plain copy of the weight, bit for bit what the layer was made from."""
        return self._weight.to_dense() if self._packed else self._weight.clone()
