"""Helpers to launch Triton kernels, and to choose configurations for the GPU that they are compiled for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from ostinato.delegate.errors import ExportError
from ostinato.export.compile.gpu import gpu_properties
from ostinato.export.compile.torch_internals import lower_bound, upper_bound

from .operands import FEW_ROWS, MAX_ROWS, SOME_ROWS

C = TypeVar("C")

# The most bytes of shared memory that a block may have, by compute capability: CUDA C++ Programming Guide, technical
# specifications per compute capability.
LARGE = 227 * 1024  # 9.0, 10.0 and 10.3
MEDIUM = 163 * 1024  # 8.0 and 8.7
SMALL = 99 * 1024  # 8.6, 8.9, 12.0 and 12.1


def launcher(kernel: Any) -> Any:
    """Return a kernel as torch launches it: `launcher(kernel)[grid](...)`. torch does not wrap an interpreted kernel."""
    return kernel if isinstance(kernel, InterpretedFunction) else torch.library.wrap_triton(kernel)


def is_one(rows: int | torch.SymInt) -> bool:
    """Whether a call is known to have one row. False for a symbol: comparing it with 1 would make it a constant."""
    return isinstance(rows, int) and rows == 1


def at_most(rows: int | torch.SymInt, count: int) -> bool:
    """Whether a number of rows, which may be a symbol in a trace, is never more than `count`."""
    return bool(upper_bound(rows) <= count)


def row_class(rows: int | torch.SymInt) -> int:
    """The key of a configuration: FEW_ROWS if a number of rows is never more than that, else MAX_ROWS."""
    return FEW_ROWS if at_most(rows, FEW_ROWS) else MAX_ROWS


def are_many(rows: int | torch.SymInt) -> bool:
    """Whether a number of rows, which may be a symbol in a trace, is always more than SOME_ROWS."""
    return bool(lower_bound(rows) > SOME_ROWS)


def row_vector(rows: int | torch.SymInt) -> int:
    """Length of a vector in which a kernel has room for something about each row.

    It is no shorter for few rows: with 16, at 9.0 attention takes 212 registers, not 207.
    """
    return SOME_ROWS if at_most(rows, SOME_ROWS) else MAX_ROWS


def pointers(first: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
    """Return all tensors, with `first` in the place of missing ones. The kernel does not read what stands in such a place."""
    return first, *(first if tensor is None else tensor for tensor in others)


def shared_memory() -> int:
    """The most bytes of shared memory that a block may have on this process's GPU; LARGE without a GPU."""
    gpu = gpu_properties()
    return LARGE if gpu is None else gpu.shared_memory


def processors() -> int:
    """The number of streaming multiprocessors of this process's GPU; 1 without a GPU."""
    gpu = gpu_properties()
    return 1 if gpu is None else gpu.processors


def fitting(configs: Mapping[int, C]) -> C:
    """Return the configuration that needs the most shared memory, among those for which the GPU has enough.

    Args:
        configs: configurations by the bytes of shared memory that they need.

    Raises:
        ExportError: every configuration needs more than the GPU has.
    """
    available = shared_memory()
    fits = [size for size in configs if size <= available]
    if not fits:
        raise ExportError(
            f"the kernels need a GPU whose blocks may have {min(configs) // 1024} KB of shared memory (compute capability "
            f"8.0 or newer), this one's may have {available // 1024} KB; export for the cpu instead"
        )
    return configs[max(fits)]


def starts_early() -> bool:
    """Whether kernels are compiled for a GPU that can start a kernel before the kernel ahead has ended.

    GPUs of compute capability 9.0 and newer can.
    """
    gpu = gpu_properties()
    return gpu is not None and gpu.capability >= (9, 0)
