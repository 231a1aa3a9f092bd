"""What Inductor takes a Triton kernel to write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch._higher_order_ops import triton_kernel_wrap

# The kernels' own name for whether they are compiled to start early: kernels/early_triton.py.
_EARLY = "EARLY"


@contextmanager
def analysed_as_written() -> Iterator[None]:
    """Have kernels that start early analysed without the two instructions for it.

    Inductor reads a kernel's intermediate code to see which of its arguments it writes. At an inline instruction with an
    effect it gives up and takes all arguments as written, and would copy each one that is read again: weights and states.
    """
    plain = triton_kernel_wrap.generate_ttir

    def without_early(kernel: Any, arguments: dict[str, Any], *rest: Any) -> Any:
        if _EARLY in arguments:
            arguments = {**arguments, _EARLY: False}
        return plain(kernel, arguments, *rest)

    with mock.patch.object(triton_kernel_wrap, "generate_ttir", without_early):
        yield
