"""Makes the bytes of an ExecuTorch program from compiled methods.

The graphs went from torch.export straight to AOTInductor. exir only makes the program around the code: one shell per method,
with the method's inputs and outputs, whose body is one call of the delegate. Sending the graphs themselves through exir's
passes would give the same program. But it would copy every weight in memory, and take minutes for a model of 40 layers. The
shells are not lowered by `to_edge` either: it would find nothing to decompose, and take five of six seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from ostinato.delegate.artifact import names
from ostinato.delegate.artifact.records import Dim as ArtifactDim
from ostinato.delegate.artifact.records import MethodRecord, dtype_from_name
from ostinato.delegate.artifact.target import Target

from .executorch_internals import delegated_module, emit_program
from .records import UNBOUNDED, CompiledMethod


class _Shell(nn.Module):
    """Stand-in for a method: makes outputs of the right shapes and dtypes from the inputs. It is traced, and never run."""

    def __init__(self, record: MethodRecord) -> None:
        super().__init__()
        self._record = record

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        sizes = {
            dim.symbol: size
            for spec, x in zip(self._record.inputs, inputs, strict=True)
            for dim, size in zip(spec.shape, x.shape, strict=True)
            if dim.symbol
        }
        used = sum((x.sum().float() for x in inputs), torch.zeros(())) * 0
        return tuple(
            torch.zeros([_size(dim, sizes) for dim in spec.shape], dtype=dtype_from_name(spec.dtype))
            + used.to(dtype_from_name(spec.dtype))
            for spec in self._record.outputs
        )


def _size(dim: ArtifactDim, sizes: Mapping[str, Any]) -> Any:
    """An output's size in terms of the inputs' sizes, such as `2*T + 1`, or the largest value that it may have.

    The largest value stands for sizes like `T//2`, about which torch.export would ask for more facts. The runtime takes sizes
    from the method's record.
    """
    if dim.min == dim.max or dim.symbol in sizes:
        return sizes.get(dim.symbol, dim.max)
    symbols = {name: sympy.Symbol(name) for name in sizes if name.isidentifier()}
    try:
        expression = sympy.sympify(dim.symbol, locals=symbols)
    except sympy.SympifyError:
        return dim.max
    known = expression.free_symbols <= set(symbols.values()) and expression.is_polynomial()
    if not known or dim.min < 2 or dim.max >= UNBOUNDED:
        return dim.max
    return sympy.lambdify(list(symbols.values()), expression)(*(sizes[name] for name in symbols))


class _Call(nn.Module):
    """Module whose only content is the delegate call."""

    def __init__(self, lowered: nn.Module) -> None:
        super().__init__()
        self._lowered = lowered

    def forward(self, *inputs: Tensor) -> Any:
        return self._lowered(*inputs)


def assemble(methods: Mapping[str, CompiledMethod], target: Target, metadata: dict[str, Any]) -> bytes:
    """Make the bytes of the program. The methods' code is in it as named data, `metadata` as constant methods."""
    programs = {name: _delegate_call(compiled, target) for name, compiled in methods.items()}
    return emit_program(programs, metadata)


def _delegate_call(compiled: CompiledMethod, target: Target) -> ExportedProgram:
    record = compiled.record
    specs = {names.SPEC_TARGET: target.to_bytes()}
    inputs, dynamic = _example(record)
    shell = torch.export.export(_Shell(record), inputs, dynamic_shapes=dynamic, strict=False)
    lowered = delegated_module(shell, names.BACKEND_ID, record.to_bytes(), specs, compiled.named_data)
    return torch.export.export(_Call(lowered), inputs, dynamic_shapes=dynamic, strict=False)


def _example(record: MethodRecord) -> tuple[tuple[Tensor, ...], Any]:
    """Small example inputs, and their dynamic dimensions. Dimensions with one symbol stay equal.

    A dimension that is computed from another one (`2*T`) is independent here. The method's record has the rule.
    """
    dims = {dim.symbol: dim for spec in record.inputs for dim in spec.shape if dim.min != dim.max}
    # One size per symbol, mostly 3 to 6. torch.export would make a rule of a size of 0 or 1, or of sizes that are equal by
    # chance.
    sizes = {symbol: min(dim.max, max(dim.min, 3 + i % 4)) for i, (symbol, dim) in enumerate(dims.items())}
    lengths = {symbol: Dim(f"length_{i}", min=dim.min, max=dim.max) for i, (symbol, dim) in enumerate(dims.items())}
    inputs = tuple(
        torch.zeros([sizes.get(dim.symbol, dim.max) for dim in spec.shape], dtype=dtype_from_name(spec.dtype))
        for spec in record.inputs
    )
    dynamic = tuple(
        {axis: lengths[dim.symbol] for axis, dim in enumerate(spec.shape) if dim.symbol in lengths}
        for spec in record.inputs
    )
    return inputs, (dynamic,) if inputs else None
