"""What Inductor takes a Triton kernel to write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch._higher_order_ops import triton_kernel_wrap

# The argument by which kernels that start early are known: kernels/early_triton.py.
_EARLY = "EARLY"


@contextmanager
def analysed_as_written() -> Iterator[None]:
    """Have inline instructions of kernels that start early taken for what they are: none of them writes memory.

    Inductor reads a kernel's intermediate code to see which of its arguments it writes. At an inline instruction that is not
    marked pure it gives up and takes all arguments as written, and would copy each one that is read again: weights and
    states. Those that wait and start kernels cannot be marked so, for pure ones may be moved.
    """
    generate, operation = triton_kernel_wrap.generate_ttir, triton_kernel_wrap.Op
    ours = False

    def generate_first(kernel: Any, arguments: dict[str, Any], *rest: Any) -> Any:
        nonlocal ours
        ours = _EARLY in arguments
        return generate(kernel, arguments, *rest)

    def operation_of(*arguments: Any, is_pure: bool = False, **named: Any) -> Any:
        return operation(*arguments, **{**named, "is_pure": is_pure or ours})

    with (
        mock.patch.object(triton_kernel_wrap, "generate_ttir", generate_first),
        mock.patch.object(triton_kernel_wrap, "Op", operation_of),
    ):
        yield
