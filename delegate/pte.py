"""Read an ExecuTorch program (`.pte`) without executorch.exir, whose import takes seconds.

The FlatBuffers readers are executorch's own generated ones. The layout of the file (flatbuffer, extended header `eh00`,
segments) is that of executorch's `schema/extended_header.h` and `exir/_serialize/program.fbs`.
"""

from __future__ import annotations

import importlib
import importlib.util
import mmap
import struct
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from .artifact import BACKEND_ID, SPEC_EXPORT_ID, SPEC_TARGET, MethodRecord
from .errors import ArtifactError
from .target import Target

_READERS = "executorch.exir._serialize.generated.executorch_flatbuffer"
_STUBS = ("executorch.exir", "executorch.exir._serialize", "executorch.exir._serialize.generated")


@dataclass(frozen=True)
class DelegateMethod:
    """A method that one delegate call runs.

    `input_order[i]` is the index among the method's inputs of the i-th argument of the compiled code;
    `output_order[j]` is the index among the compiled code's outputs of the method's j-th output.
    """

    name: str
    record: MethodRecord
    target: Target
    export_id: str
    input_order: tuple[int, ...]
    output_order: tuple[int, ...]


@dataclass
class ProgramFile:
    """A parsed `.pte`: delegated methods, metadata (constant methods) and named data, the last as views of the map."""

    methods: dict[str, DelegateMethod] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    named_data: dict[str, memoryview] = field(default_factory=dict)


def parse_program(data: memoryview, origin: Path) -> ProgramFile:
    """Parse the bytes of a `.pte`.

    Raises:
        ArtifactError: not a program, cut short, or not one of this project's programs; names `origin`.
    """
    if len(data) < 64 or bytes(data[4:6]) != b"ET":
        raise ArtifactError(f"{origin} is not an ExecuTorch program (no 'ET..' identifier at byte 4)")
    segment_base, segment_size = 0, 0
    if bytes(data[8:12]) == b"eh00":
        (length,) = struct.unpack_from("<I", data, 12)
        program_size, segment_base = struct.unpack_from("<QQ", data, 16)
        segment_size = struct.unpack_from("<Q", data, 32)[0] if length > 24 else 0
        if program_size > len(data) or segment_base + segment_size > len(data):
            raise ArtifactError(
                f"{origin} is cut short: its header speaks of {segment_base + segment_size} bytes, "
                f"the file has {len(data)}"
            )
    try:
        return _read(data, segment_base)
    except ArtifactError:
        raise
    except Exception as error:  # The generated readers fail in many ways on damaged tables.
        raise ArtifactError(f"{origin} cannot be parsed, the file is damaged: {error}") from error


def _read(data: memoryview, segment_base: int) -> ProgramFile:
    program = _reader("Program").Program.GetRootAs(data, 0)
    segments = []
    for i in range(program.SegmentsLength()):
        segment = program.Segments(i)
        begin = segment_base + segment.Offset()
        segments.append(data[begin : begin + segment.Size()])
    out = ProgramFile()
    for i in range(program.NamedDataLength()):
        entry = program.NamedData(i)
        out.named_data[entry.Key().decode()] = segments[entry.SegmentIndex()]
    for i in range(program.ExecutionPlanLength()):
        plan = program.ExecutionPlan(i)
        name = plan.Name().decode()
        if plan.DelegatesLength() == 0 and plan.InputsLength() == 0 and _instruction_count(plan) == 0:
            values = [_constant_value(plan, plan.Outputs(j)) for j in range(plan.OutputsLength())]
            out.metadata[name] = values[0] if len(values) == 1 else values
        else:
            out.methods[name] = _delegated_method(program, plan, name, segments)
    return out


def _instruction_count(plan: Any) -> int:
    return sum(plan.Chains(i).InstructionsLength() for i in range(plan.ChainsLength()))


def _delegated_method(program: Any, plan: Any, name: str, segments: list[memoryview]) -> DelegateMethod:
    kinds = _reader("InstructionArguments").InstructionArguments
    instructions = [
        plan.Chains(i).Instructions(j)
        for i in range(plan.ChainsLength())
        for j in range(plan.Chains(i).InstructionsLength())
    ]
    calls = [item for item in instructions if item.InstrArgsType() == kinds.DelegateCall]
    if len(calls) != 1 or len(instructions) != 1:
        operators = sorted({plan.Operators(i).Name().decode() for i in range(plan.OperatorsLength())})
        raise ArtifactError(
            f"method {name!r} is not one delegate call: {len(calls)} delegate calls and "
            f"{len(instructions) - len(calls)} other instructions"
            + (f" ({', '.join(operators)})" if operators else "")
            + ". This runtime runs programs made by `ostinato export`"
        )
    call = _reader("DelegateCall").DelegateCall()
    call.Init(calls[0].InstrArgs().Bytes, calls[0].InstrArgs().Pos)
    delegate = plan.Delegates(call.DelegateIndex())
    backend = delegate.Id().decode()
    if backend != BACKEND_ID:
        raise ArtifactError(f"method {name!r} was lowered to backend {backend!r}; this runtime has {BACKEND_ID!r} only")
    specs = {}
    for i in range(delegate.CompileSpecsLength()):
        spec = delegate.CompileSpecs(i)
        specs[spec.Key().decode()] = bytes(spec.Value(j) for j in range(spec.ValueLength()))
    record = MethodRecord.from_bytes(_delegate_bytes(program, delegate, segments))
    args = [call.Args(i) for i in range(call.ArgsLength())]
    inputs = [plan.Inputs(i) for i in range(plan.InputsLength())]
    outputs = [plan.Outputs(i) for i in range(plan.OutputsLength())]
    count = len(record.inputs)
    return DelegateMethod(
        name=name,
        record=record,
        target=Target.from_bytes(specs[SPEC_TARGET]),
        export_id=specs[SPEC_EXPORT_ID].decode(),
        input_order=tuple(inputs.index(arg) for arg in args[:count]),
        output_order=tuple(args[count:].index(value) for value in outputs),
    )


def _delegate_bytes(program: Any, delegate: Any, segments: list[memoryview]) -> bytes:
    reference = delegate.Processed()
    if reference.Location() == _reader("DataLocation").DataLocation.SEGMENT:
        return bytes(segments[reference.Index()])
    inline = program.BackendDelegateData(reference.Index())
    return bytes(inline.Data(i) for i in range(inline.DataLength()))


def _constant_value(plan: Any, index: int) -> Any:
    value = plan.Values(index)
    kinds = _reader("KernelTypes").KernelTypes
    fields = {
        kinds.Int: ("Int", "IntVal"),
        kinds.Bool: ("Bool", "BoolVal"),
        kinds.Double: ("Double", "DoubleVal"),
        kinds.String: ("String", "StringVal"),
    }
    if value.ValType() not in fields:
        raise ArtifactError(f"a constant method returns a value of kind {value.ValType()}, which is not supported")
    table, accessor = fields[value.ValType()]
    reader = getattr(_reader(table), table)()
    reader.Init(value.Val().Bytes, value.Val().Pos)
    raw = getattr(reader, accessor)()
    return raw.decode() if isinstance(raw, bytes) else raw


_reader_cache: dict[str, ModuleType] = {}


def _reader(table: str) -> ModuleType:
    """Import one generated reader module without running `executorch/exir/__init__.py`.

    The readers live inside the package `executorch.exir` and import one another by that name. While they load, empty
    packages with the right search path stand in for their parents; they are taken out afterwards, so that a
    later `import executorch.exir` in this process gets the real one.
    """
    if table in _reader_cache:
        return _reader_cache[table]
    if "executorch.exir" in sys.modules:
        module = importlib.import_module(f"{_READERS}.{table}")
    else:
        spec = importlib.util.find_spec("executorch")
        if spec is None or not spec.submodule_search_locations:
            raise ArtifactError("the package executorch is not installed: pip install executorch==1.5.1")
        root = Path(next(iter(spec.submodule_search_locations)))
        try:
            for stub in _STUBS:
                package = ModuleType(stub)
                package.__path__ = [str(root.joinpath(*stub.split(".")[1:]))]
                sys.modules[stub] = package
            module = importlib.import_module(f"{_READERS}.{table}")
        finally:
            for name in [name for name in sys.modules if name.startswith("executorch.exir")]:
                del sys.modules[name]
            sys.modules.pop("executorch.exir", None)
    _reader_cache[table] = module
    return module


def map_file(path: Path) -> memoryview:
    """The whole file as a private, copy-on-write memory map: pages are read when touched, never written back.

    Raises:
        ArtifactError: the file is missing, unreadable or empty.
    """
    try:
        with open(path, "rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    except FileNotFoundError:
        raise ArtifactError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}") from error
