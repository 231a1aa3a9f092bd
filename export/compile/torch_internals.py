"""All calls of the export into private parts of torch, except Inductor's, one function each.

Each docstring says what the function needs, and what breaks without it. `tests/export/compile/test_torch_internals.py` has a
test for each function, whose failure names the function. Seen to work with torch 2.11 to 2.15. Private parts of Inductor are
in `inductor_internals.py`, those of executorch in `artifact/executorch_internals.py`, those of triton in `gpu.py` and
`kernels/launch.py`, those of torchao in `weights/quantize.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.fx import Node

from ostinato.delegate.errors import ExportError, first_line

# Name of the argument that marks kernels which start early: see kernels/early_start_triton.py.
_EARLY = "EARLY"


class _GivenUp(Exception):
    """Raised at the point where torch would go on with a kernel that it could not analyse."""


@contextmanager
def early_kernels_analysed_as_pure() -> Iterator[None]:
    """Inside this context, Inductor takes inline assembly of kernels that start early for pure: this assembly writes no
    memory.

    Inductor reads a kernel's intermediate code to see which arguments the kernel writes. At an inline instruction that is not
    marked pure, Inductor gives up and takes all arguments as written. It would then copy each argument that is read again:
    weights and states. Instructions that wait for kernels, or start them, cannot be marked pure, because pure ones may be
    moved.

    Needs `generate_ttir` and `Op` of `torch._higher_order_ops.triton_kernel_wrap`. Without them exports for GPUs work, but
    every step copies weights and states.
    """
    from torch._higher_order_ops import triton_kernel_wrap

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


@contextmanager
def failed_analyses_raised() -> Iterator[None]:
    """Inside this context, it is an error if torch cannot find out which arguments a Triton kernel writes.

    torch reads a kernel's intermediate code to see which arguments it writes. If this fails, torch logs a warning and takes
    all arguments as written. Then weights become outputs of the compiled code. The code has more outputs than its record
    says, and fails when it runs.

    Raises, inside it:
        ExportError: the message names the kernel; torch's own error is the cause.

    Needs `generate_ttir` of `torch._higher_order_ops.triton_kernel_wrap`, which comes first in that analysis, and its `log`,
    which warns where the analysis gives up, and nowhere else. Without them such kernels are exported without an error.
    """
    from torch._higher_order_ops import triton_kernel_wrap

    generate, log = triton_kernel_wrap.generate_ttir, triton_kernel_wrap.log
    name = ""
    failures: list[ExportError] = []

    def generate_named(kernel: Any, *rest: Any) -> Any:
        nonlocal name
        name = kernel.fn.__name__
        return generate(kernel, *rest)

    def fail(*_: Any, **__: Any) -> None:
        error = sys.exc_info()[1]
        why = "" if error is None else f" ({first_line(error)})"
        failures.append(
            ExportError(
                f"torch cannot find out which arguments the Triton kernel {name!r} writes{why}: write it without what torch "
                "does not know; inline assembly must be marked `is_pure=True`"
            )
        )
        failures[-1].__cause__ = error
        raise _GivenUp

    try:
        with (
            mock.patch.object(triton_kernel_wrap, "generate_ttir", generate_named),
            mock.patch.object(triton_kernel_wrap, "log", mock.Mock(wraps=log, warning=fail)),
        ):
            yield
    except Exception:
        # This is `_GivenUp`, or an exception that torch made of it.
        if not failures:
            raise
    if failures:
        raise failures[0]


def is_metadata_check(node: Node) -> bool:
    """Whether a node is the tracer's check of its own dtypes and devices. Such a check names the device of the trace.

    Needs the operator `aten._assert_tensor_metadata`. Without it the checks stay in the graph, and code for a GPU that was
    traced on the CPU fails at its first run.
    """
    return node.target is torch.ops.aten._assert_tensor_metadata.default


def storage_key(tensor: Tensor) -> int:
    """A number that is equal for tensors that share memory. It also works for the tracer's tensors, which have no memory.

    Needs `UntypedStorage._cdata`: data_ptr() is 0 for tensors without memory. Without it shared tensors and written buffers
    cannot be found, and nothing can be exported.
    """
    return tensor.untyped_storage()._cdata


def written_arguments(node: Node) -> list[Any]:
    """What a node passes to those arguments that its operator's schema marks as written; [] for other nodes.

    Needs `torch._ops.OpOverload` and its `_schema`. Without them the buffers that a graph writes cannot be found, and nothing
    can be exported.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    values: list[Any] = []
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value: Any = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            values += value if isinstance(value, (list, tuple)) else [value]
    return values


def size_expression(size: torch.SymInt) -> Any:
    """The sympy expression of a symbolic size, in torch's symbols (`s27`).

    Needs `SymInt.node.expr`. Without it no method with a dynamic dimension can be exported.
    """
    return size.node.expr


def size_example(size: torch.SymInt) -> int:
    """The size that a symbolic size had in the example.

    Needs `SymInt.node.hint`. Without it no chain with a dynamic dimension can be exported.
    """
    return int(size.node.hint)


def size_bounds(expression: Any, program_ranges: Mapping[str, Any]) -> tuple[Any, Any]:
    """The least and the largest value of a size's expression, as sympy numbers; infinite if there is no bound.

    Args:
        expression: result of `size_expression`.
        program_ranges: torch's symbol -> its entry in `ExportedProgram.range_constraints`.

    Needs `torch.utils._sympy.value_ranges`. Without it no method with a dynamic dimension can be exported.
    """
    from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

    ranges = {
        symbol: ValueRanges(program_ranges[str(symbol)].lower, program_ranges[str(symbol)].upper)
        for symbol in expression.free_symbols
        if str(symbol) in program_ranges
    }
    bounds = bound_sympy(expression, ranges)
    return bounds.lower, bounds.upper


def upper_bound(size: int | torch.SymInt) -> Any:
    """The largest value that a size may have. For a symbolic size it is a sympy number, infinite if there is no bound.

    Needs `expr` and `shape_env` of `SymInt.node`, and `bound_sympy` of the `shape_env`. Without them no method with a dynamic
    dimension can be exported for a GPU.
    """
    return size if isinstance(size, int) else size.node.shape_env.bound_sympy(size.node.expr).upper


def lower_bound(size: int | torch.SymInt) -> Any:
    """The smallest value that a size may have. Needs the same as `upper_bound`."""
    return size if isinstance(size, int) else size.node.shape_env.bound_sympy(size.node.expr).lower
