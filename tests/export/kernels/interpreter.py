"""Triton's interpreter, 3.6 and 3.7, without four faults, and several times as fast."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

_BUILDER, _REDUCE, _SCAN = interpreter.InterpreterBuilder, interpreter.ReduceOps, interpreter.ScanOps
_patch_tensor, _create_dot, _cast = interpreter._patch_lang_tensor, _BUILDER.create_dot, _BUILDER.cast_impl
_generic_reduce, _generic_scan, _np_dtype = _REDUCE.generic_reduce, _SCAN.generic_scan, interpreter._get_np_dtype
_block_type, _tensor = tl.block_type.__init__, tl.tensor.__init__
_type_for = tl.core._type_for_tuple_values
_NAMELESS = tl.core.tuple_type([])
# What the interpreter would make anew for every operation, by the names of types; for a block's type by its shape too.
_np_dtypes: dict[str, Any] = {}
_blocks: dict[Any, dict[str, Any]] = {}
_shapes: dict[str, Any] = {}


def repair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repair the interpreter for one test.

    The faults: numpy 2.4 refuses the one-element arrays that it uses as a loop's bounds; `tl.dot` multiplies the bit patterns
    of bfloat16 numbers, and gives a row's sum in other bits where the row is another one (numpy's product, on some CPUs); and
    float32 is truncated, not rounded, to bfloat16.

    Most of its time went into work that changes no result. Each call of a function replaced the language's functions anew.
    Each tensor made its type again, and wrote out a name for it. Each sum of integers was computed again in 64 bits, to see
    whether it overflows. Reductions by functions of our own went element by element.
    """
    patched: set[int] = set()

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        # Of a module's functions the first: it stays so, and what a kernel uses itself is replaced at each launch.
        if id(self.fn.__globals__) not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(id(self.fn.__globals__))
        return self.rewrite()(*arguments, **named)

    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", _patch_tensor_with_index)
    monkeypatch.setattr(_BUILDER, "create_dot", _dot_in_float64)
    monkeypatch.setattr(_BUILDER, "cast_impl", _cast_bfloat16)
    monkeypatch.setattr(_REDUCE, "generic_reduce", _reduce_by_pairs)
    monkeypatch.setattr(_SCAN, "generic_scan", _scan_by_doubling)
    monkeypatch.setattr(interpreter, "_get_np_dtype", _known_np_dtype)
    monkeypatch.setattr(tl.block_type, "__init__", _known_block_type)
    monkeypatch.setattr(tl.tensor, "__init__", _tensor_of_known_shape)
    monkeypatch.setattr(tl.core, "_type_for_tuple_values", _type_of_values)


def _patch_tensor_with_index(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def _dot_in_float64(self: Any, a: Any, b: Any, total: Any, *rest: Any) -> Any:
    if total.dtype.scalar != tl.float32:
        return _create_dot(self, a, b, total, *rest)

    def widened(x: Any) -> Any:
        return (_cast_bfloat16(None, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x).data

    # The order of the additions, which the row's place decides, is lost when the sum is rounded.
    product = np.matmul(widened(a), widened(b), dtype=np.float64).astype(np.float32)
    return interpreter.TensorHandle(product + total.data, tl.float32)


def _cast_bfloat16(self: Any, x: Any, to: Any) -> Any:
    dtypes = x.dtype.scalar, to.scalar
    if dtypes == (tl.bfloat16, tl.float32):
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
    if dtypes == (tl.float32, tl.bfloat16):
        rounded = torch.from_numpy(x.data.copy()).bfloat16().view(torch.uint16)
        return interpreter.TensorHandle(rounded.numpy(), tl.bfloat16)
    return _cast(self, x, to)


def _reduce_by_pairs(self: Any, inputs: Any) -> Any:
    """Combine neighbours until one is left, all elements of the other axes at once."""
    if self.axis is None or self.keep_dims:
        return _generic_reduce(self, inputs)

    def every(step: range | int) -> list[Any]:
        return [self.to_tensor(x.handle.data.take(step, self.axis), x.dtype) for x in inputs]

    while (size := inputs[0].handle.data.shape[self.axis]) > 1:
        inputs = _in_tuple(self.combine_fn.fn(*every(range(0, size, 2)), *every(range(1, size, 2))))
    return every(0)


def _scan_by_doubling(self: Any, inputs: Any) -> Any:
    """Combine each element with the one 1, 2, 4, ... ahead of it."""
    if len(inputs[0].shape) > 1:
        return _generic_scan(self, inputs)
    shift = 1
    while shift < inputs[0].handle.data.size:
        ahead = [self.to_tensor(np.roll(x.handle.data, shift), x.dtype) for x in inputs]
        combined = _in_tuple(self.combine_fn.fn(*ahead, *inputs))
        for x, y in zip(inputs, combined, strict=True):
            y.handle.data[:shift] = x.handle.data[:shift]
        inputs, shift = combined, 2 * shift
    return list(inputs)


def _in_tuple(values: Any) -> tuple[Any, ...]:
    return values if isinstance(values, tuple) else (values,)


def _known_np_dtype(of: Any) -> Any:
    name = of.scalar.name
    if name not in _np_dtypes:
        _np_dtypes[name] = _np_dtype(of)
    return _np_dtypes[name]


def _known_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    key = element_ty.name, tuple(getattr(size, "value", size) for size in shape)
    if key not in _blocks:
        _block_type(self, element_ty, shape)
        _blocks[key] = vars(self).copy()
    vars(self).update(_blocks[key])


def _tensor_of_known_shape(self: Any, handle: Any, of: Any) -> None:
    if of.name not in _shapes:
        _tensor(self, handle, of)
        _shapes[of.name] = self.numel, self.shape
    self.handle, self.type, self.dtype = handle, of, of.scalar
    self.numel, self.shape = _shapes[of.name]


def _type_of_values(values: Any, fields: Any = None) -> Any:
    return _NAMELESS if fields is None else _type_for(values, fields)
