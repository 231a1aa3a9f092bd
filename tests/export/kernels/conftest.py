"""How kernels are tested: compiled on a GPU, else in Triton's interpreter, with memory that holds NaN."""

from __future__ import annotations

import ast
import importlib.util
import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ostinato.export.kernels import Kernels, kernels_for
from ostinato.export.kernels.operators_cpu import LIBRARY

from . import native


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` gives NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def cpu_kernels(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> type[Kernels]:
    """The C++ kernels, callable; skips where this CPU lacks what they need. Built once, and kept in pytest's cache."""
    kernels = kernels_for("cpu")
    if not kernels.has_panels:
        pytest.skip("this CPU does not have AVX2")
    cache = getattr(pytestconfig, "cache", None)
    folder = Path(cache.mkdir("native")) if cache else tmp_path_factory.mktemp("native")
    native.make_callable(LIBRARY, native.build(LIBRARY.build(), folder))
    return kernels


@pytest.fixture(autouse=True)
def repaired_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mends three faults of Triton's interpreter, in 3.6 and 3.7, and makes it faster.

    numpy 2.4 refuses the one-element arrays that it uses as a loop's bounds; `tl.dot` multiplies the bit patterns of
    bfloat16 numbers; and float32 is truncated, not rounded, to bfloat16.
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

    patched: set[int] = set()

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        # Of a module's functions the first: it stays so, and what a kernel uses itself is replaced at each launch.
        if id(self.fn.__globals__) not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(id(self.fn.__globals__))
        return self.rewrite()(*arguments, **named)

    nameless = tl.core.tuple_type([])

    def type_of_values(values: Any, fields: Any = None) -> Any:
        return nameless if fields is None else type_for(values, fields)

    type_for = tl.core._type_for_tuple_values
    # Three quarters of its time: each call of a function replaced the language's functions anew; each tensor wrote out a
    # name for the type of its shape, which only a compiler reads; and each sum of integers was computed again in 64 bits, to
    # see whether it overflows, but nothing was told.
    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)
    monkeypatch.setattr(tl.core, "_type_for_tuple_values", type_of_values)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_tensor_with_index)
    monkeypatch.setattr(builder, "create_dot", dot_of_widened)
    monkeypatch.setattr(builder, "cast_impl", cast_with_rounding)


def run_compiled(code: str) -> str:
    """What a script prints in a process without Triton's interpreter.

    A trace needs that: the interpreter would run the kernels on its fake tensors. All such processes come from one that has
    imported what they need, but where there is a GPU: a process that asked for it cannot be forked for one that uses it.
    """
    from .compiling import printed

    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    context.set_forkserver_preload([printed.__module__])
    without = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with mock.patch.dict(os.environ, without, clear=True), context.Pool(1) as pool:
        return pool.apply_async(printed, (code,)).get(timeout=900)


def traced_layer(code: str) -> tuple[list[str], list[str], list[tuple[int | str, ...]]]:
    """Our operators in the graph of `Layer()`, the buffers that it writes, and the shapes of what it returns.

    Args:
        code: defines the module `Layer` and `inputs`, what its forward takes; and `dynamic`, where sizes are symbols: in
            the shapes these are then their names.
    """
    operators, buffers, shapes = map(ast.literal_eval, run_compiled("dynamic = None\n" + code + _TRACE).splitlines())
    return operators, buffers, shapes


_TRACE = """
program = torch.export.export(Layer(), inputs, dynamic_shapes=dynamic, strict=False)
print([str(node.target) for node in program.graph.nodes if "ostinato" in str(node.target)])
program = program.run_decompositions({})
written = program.graph_signature.buffers_to_mutate
print(sorted(written.values()))
symbols = {str(symbol): "R" for symbol in program.range_constraints}
def size(value):
    text = str(value)
    for symbol, name in symbols.items():
        text = text.replace(symbol, name)
    return value if isinstance(value, int) else text
outputs = program.graph.output_node().args[0][len(written):]
print([tuple(map(size, node.meta["val"].shape)) for node in outputs])
"""
