"""How kernels are tested: compiled on a GPU, else by Triton's interpreter, with memory that holds NaN."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    # Read when triton is imported, and when it meets a kernel.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` gives NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def repaired_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three faults of Triton's interpreter, in 3.6 and 3.7.

    numpy 2.4 refuses the one-element arrays that it takes for a loop's bounds; `tl.dot` multiplies the bit patterns of
    bfloat16 numbers; and float32 is cut off, not rounded, to bfloat16.
    """
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    patch_tensor, create_dot, cast = interpreter._patch_lang_tensor, builder.create_dot, builder.cast_impl

    def patch_tensor_with_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def widen(x: Any) -> Any:
        return cast(None, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x

    def dot_of_widened(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, widen(a), widen(b), *rest)

    def cast_with_rounding(self: Any, x: Any, to: Any) -> Any:
        if (x.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, x, to)
        rounded = torch.from_numpy(x.data.copy()).bfloat16().view(torch.uint16)
        return interpreter.TensorHandle(rounded.numpy(), tl.bfloat16)

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_tensor_with_index)
    monkeypatch.setattr(builder, "create_dot", dot_of_widened)
    monkeypatch.setattr(builder, "cast_impl", cast_with_rounding)
