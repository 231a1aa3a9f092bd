"""The program around the compiled code: its shells state inputs and outputs, for sizes of every form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from ostinato.delegate.artifact.pte import ProgramFile, parse_program
from ostinato.delegate.artifact.records import Dim, MethodRecord, Segment, TensorSpec
from ostinato.delegate.artifact.target import host_target
from ostinato.export.artifact.assemble import assemble
from ostinato.export.artifact.records import UNBOUNDED, CompiledMethod

T, U = Dim(2, 31, "T"), Dim(1, UNBOUNDED, "U")


def spec(dtype: str, *dims: int | Dim) -> TensorSpec:
    return TensorSpec("x", dtype, tuple(dim if isinstance(dim, Dim) else Dim(dim, dim) for dim in dims))


def compiled(name: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], extern: bool) -> CompiledMethod:
    """Return a method of two segments: one with its own code, and one with the code that all methods here share."""
    count, results = len(inputs), range(len(inputs), len(inputs) + len(outputs))
    segments = (
        Segment(f"code.{name}", "", f"extern.{name}" if extern else "", "0/", tuple(range(count)), tuple(results)),
        Segment("code.shared", "", "", "1/", tuple(results), ()),
    )
    data = {f"code.{name}": b"code of " + name.encode(), "code.shared": b"code of all"}
    return CompiledMethod(
        MethodRecord(name, tuple(inputs), tuple(outputs), segments, tuple(results)),
        data | ({f"extern.{name}": b"{}"} if extern else {}),
    )


def assembled(
    ends: dict[str, tuple[Sequence[TensorSpec], Sequence[TensorSpec]]],
) -> tuple[ProgramFile, dict[str, bytes]]:
    """Return the program of methods with these inputs and outputs, as it is read back, and the data that went in, by key."""
    methods = {
        name: compiled(name, inputs, outputs, extern=index % 2 == 1)
        for index, (name, (inputs, outputs)) in enumerate(ends.items())
    }
    data = assemble(methods, host_target("cpu"), {"get_answer": 42, "get_names": ["a", "b"]})
    program = parse_program(memoryview(data), Path("model.pte"))
    assert {name: method.record for name, method in program.methods.items()} == {
        name: method.record for name, method in methods.items()
    }
    return program, {key: value for method in methods.values() for key, value in method.named_data.items()}


def test_methods_of_all_kinds() -> None:
    program, data = assembled(
        {
            "static": (
                [spec("float32", 2, 3), spec("bfloat16")],
                [spec("int64"), spec("bool", 3), spec("uint8", 0, 2)],
            ),
            "no_input": ([], [spec("float32", 3)]),
            "prefill": ([spec("int64", 1, T), spec("int64", T)], [spec("float32", 1, 1536)]),
            "unbounded": ([spec("float32", U), spec("bool", U)], [spec("float32", U), spec("float32", U)]),
        }
    )
    assert {key: bytes(value) for key, value in program.named_data.items()} == data
    assert program.metadata == {"get_answer": 42, "get_names": ["a", "b"]}
    orders = {name: (method.input_order, method.output_order) for name, method in program.methods.items()}
    assert orders == {
        "static": ((0, 1), (0, 1, 2)),
        "no_input": ((), (0,)),
        "prefill": ((0, 1), (0,)),
        "unbounded": ((0, 1), (0, 1)),
    }
    for method in program.methods.values():
        assert method.target == host_target("cpu")


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    (
        ([T], [Dim(5, 63, "2*T + 1")]),
        ([T], [Dim(1, 15, "(T//2)")]),
        ([T], [Dim(0, 3, "Mod(T, 4)")]),
        ([T], [Dim(5, 31, "Max(5, T)")]),
        ([T], [Dim(4, 961, "T**2"), T]),
        ([T, Dim(4, 62, "2*T")], [T, Dim(4, 62, "2*T")]),
        ([Dim(4, 62, "2*T")], [T]),
        ([T, U], [Dim(2, UNBOUNDED, "T*U")]),
        # Names that have a meaning in sympy or in Python.
        ([Dim(2, 20, "N"), Dim(2, 20, "lambda")], [Dim(4, 40, "2*N"), Dim(4, 40, "2*lambda")]),
        ([Dim(130, 400, f"s{i}") for i in range(6)], [Dim(130, 400, "s5"), Dim(260, 800, "s0 + s1")]),
    ),
    ids=lambda dims: " ".join(dim.symbol for dim in dims),
)
def test_sizes_computed_from_others(inputs: list[Dim], outputs: list[Dim]) -> None:
    ends = [spec("float32", dim) for dim in inputs], [spec("float32", 3, dim) for dim in outputs]
    program, _ = assembled({"forward": ends})
    assert program.methods["forward"].input_order == tuple(range(len(inputs)))
    assert program.methods["forward"].output_order == tuple(range(len(outputs)))
