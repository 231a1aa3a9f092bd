"""Sizes that the Triton kernels of the gated delta rule take."""

from __future__ import annotations

from ostinato.delegate.errors import ExportError

MIN_DIM, MAX_DIM = 16, 128


def check_delta_rule(key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> None:
    """Raises ExportError, which names the limit, unless the kernels take these numbers and sizes of heads."""
    if key_heads < 1 or value_heads % key_heads:
        raise ExportError(
            f"the delta rule's kernels share each key head among the same number of value heads: "
            f"{value_heads} value heads are not a multiple of {key_heads} key heads"
        )
    for name, size in (("key", key_dim), ("value", value_dim)):
        if not MIN_DIM <= size <= MAX_DIM or size & (size - 1):
            raise ExportError(
                f"the delta rule's kernels take head sizes that are powers of two from {MIN_DIM} to {MAX_DIM}, "
                f"got a {name} head size of {size}; export for the cpu instead"
            )
