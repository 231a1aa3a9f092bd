"""How kernels are tested: compiled on a GPU, else in Triton's interpreter, with memory that holds NaN."""

from __future__ import annotations

import ast
import importlib.util
import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path
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


@pytest.fixture
def sample_of(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Callable[..., torch.Tensor]]:
    """Return the function of a form of sampling by its name, with the form's settings in force."""
    from ostinato.export.kernels.sampling import rows_triton

    from .sampling_cases import one_by_one
    from .sampling_forms import FORMS

    def get(name: str) -> Callable[..., torch.Tensor]:
        form = FORMS[name]
        for attribute, value in (form.settings or {}).items():
            monkeypatch.setattr(rows_triton, attribute, value)
        sample = form.sample or request.getfixturevalue("cpu_kernels").sample_next
        return one_by_one(sample) if form.single else sample

    return get


@pytest.fixture(autouse=True)
def repaired_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mends faults of Triton's interpreter, and makes it faster."""
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return
    from .interpreter import repair

    repair(monkeypatch)


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
