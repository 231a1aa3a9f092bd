"""How many rows of a call are tokens, in kernels: `operands.length_of`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def length_of(positions: tl.tensor, tokens: tl.tensor) -> tl.tensor:
    """Of the `tokens` rows at `positions` those that are no padding: a scalar, int32."""
    tokens = tl.cast(tokens, tl.int32)
    length = (tl.load(positions + tokens - 1) - tl.load(positions) + 1).to(tl.int32)
    return tl.minimum(tl.maximum(length, 1), tokens)
