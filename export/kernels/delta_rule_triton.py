"""The gated delta rule on NVIDIA GPUs: the functions of `delta_rule.py` as Triton kernels.

`delta_decode_triton.py` has the step of one token, `delta_prefill_triton.py` the chunked form.
"""

from __future__ import annotations

from torch import Tensor

from ...delegate.errors import ExportError
from .delta_decode_triton import decode
from .delta_prefill_triton import prefill

MIN_DIM, MAX_DIM = 16, 128


def check_shapes(key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> None:
    """Raise ExportError, with the limit in its message, unless the kernels take heads of these numbers and sizes."""
    if key_heads < 1 or value_heads % key_heads:
        raise ExportError(
            f"the delta rule's kernels share each key head among the same number of value heads: "
            f"{value_heads} value heads are no multiple of {key_heads} key heads"
        )
    for name, size in (("key", key_dim), ("value", value_dim)):
        if not MIN_DIM <= size <= MAX_DIM or size & (size - 1):
            raise ExportError(
                f"the delta rule's kernels take head sizes that are powers of two from {MIN_DIM} to {MAX_DIM}, "
                f"got a {name} head size of {size}; export for the cpu instead"
            )


def gated_delta_rule(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    positions: Tensor,
    key_heads: int,
    max_tokens: int,
) -> Tensor:
    """`delta_rule.gated_delta_rule`: the same arguments and result, the state written in place.

    `mixed`, `a` and `b` may be slices of wider tensors as long as each row is contiguous. `max_tokens` is not needed:
    the prefill kernel loops over chunks.

    Raises:
        ExportError: as `check_shapes`.
    """
    heads, key_dim, value_dim = state.shape
    check_shapes(key_heads, heads, key_dim, value_dim)
    if mixed.shape[0] == 1:
        return decode(mixed, a, b, a_log, dt_bias, state, positions, key_heads)
    return prefill(mixed, a, b, a_log, dt_bias, state, positions, key_heads)
