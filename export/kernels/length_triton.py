"""The number of a prompt's rows that are tokens: `operands.length_of` for Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def length_of(positions: tl.tensor, tokens: tl.tensor) -> tl.tensor:
    """Number of tokens among the first `tokens` rows of `positions`; the other rows are padding. A scalar, int32."""
    tokens = tl.cast(tokens, tl.int32)
    length = (tl.load(positions + tokens - 1) - tl.load(positions) + 1).to(tl.int32)
    return tl.minimum(tl.maximum(length, 1), tokens)
