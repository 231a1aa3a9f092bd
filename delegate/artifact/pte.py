"""Read an ExecuTorch program (`.pte`).

The layout of the file (flatbuffer, extended header `eh00`, segments) follows executorch's `schema/extended_header.h`. The
numbers below are field numbers of executorch's `exir/_serialize/program.fbs`.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ostinato.delegate.errors import ArtifactError

from .flatbuffer import Table, damaged
from .names import BACKEND_ID, PROGRAM_FILE, SPEC_TARGET
from .records import MethodRecord, Segment, TensorSpec
from .target import Target

_PROGRAM_PLANS, _PROGRAM_INLINE, _PROGRAM_SEGMENTS, _PROGRAM_NAMED_DATA = 1, 3, 4, 7
_PLAN_NAME, _PLAN_VALUES, _PLAN_INPUTS, _PLAN_OUTPUTS = 0, 2, 3, 4
_PLAN_CHAINS, _PLAN_OPERATORS, _PLAN_DELEGATES = 5, 6, 7
_CHAIN_INSTRUCTIONS = 2
_DELEGATE_ID, _DELEGATE_PROCESSED, _DELEGATE_SPECS = 0, 1, 2
_UNION_KIND, _UNION_VALUE = 0, 1
_DELEGATE_CALL = 2
_IN_SEGMENT = 1
# KernelTypes of the values that constant methods return -> letter of the struct module.
_SCALARS = {2: "q", 3: "?", 4: "d"}
_STRING = 6


@dataclass(frozen=True)
class DelegateMethod:
    """A method that consists of one delegate call.

    The i-th argument of the compiled code is the method's input number `input_order[i]`. The method's j-th output is the
    compiled code's output number `output_order[j]`.
    """

    name: str
    record: MethodRecord
    target: Target
    input_order: tuple[int, ...]
    output_order: tuple[int, ...]

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Specs of the inputs, in the method's order."""
        return tuple(self.record.inputs[self.input_order.index(i)] for i in range(len(self.input_order)))

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Specs of the outputs, in the method's order. The names in the record are in this order too."""
        names = [spec.name for spec in self.record.outputs]
        return tuple(
            replace(self.record.outputs[index], name=names[place] if place < len(names) else f"output_{place}")
            for place, index in enumerate(self.output_order)
        )


@dataclass
class ProgramFile:
    """A parsed `.pte`: delegated methods, metadata (constant methods) and named data, which are views of the mapped file.

    `id`: `Seal.id` of the artifact; "" before the file is matched with its constants.
    """

    methods: dict[str, DelegateMethod] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    named_data: dict[str, memoryview] = field(default_factory=dict)
    id: str = ""


def library_of(method: str, segment: Segment, named_data: Mapping[str, memoryview]) -> memoryview:
    """Return the library of a segment of `method`. Raises ArtifactError: it is missing, or not what the record says."""
    return _checked(f"the compiled code of method {method!r}", named_data.get(segment.code_key), segment.code_sha256)


def kernels_of(method: str, segment: Segment, named_data: Mapping[str, memoryview]) -> memoryview:
    """Return the kernels that a segment's library is linked with. Raises ArtifactError, as `library_of` does."""
    return _checked(f"the kernels of method {method!r}", named_data.get(segment.kernels_key), segment.kernels_sha256)


def _checked(what: str, data: memoryview | None, sha256: str) -> memoryview:
    if data is None:
        raise ArtifactError(f"{PROGRAM_FILE} lacks {what}")
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise ArtifactError(f"{what} in {PROGRAM_FILE} is damaged: SHA-256 {found[:12]}..., expected {sha256[:12]}...")
    return data


def parse_program(data: memoryview, path: Path) -> ProgramFile:
    """Parse the bytes of a `.pte`.

    Raises:
        ArtifactError: not a program, cut short, or not one of this project's programs. The message names `path`.
    """
    if len(data) < 64 or bytes(data[4:6]) != b"ET":
        raise ArtifactError(f"{path} is not an ExecuTorch program (no 'ET..' identifier at byte 4)")
    segment_base = 0
    if bytes(data[8:12]) == b"eh00":
        program_size, segment_base, segment_size = struct.unpack_from("<QQQ", data, 16)
        if max(program_size, segment_base + segment_size) > len(data):
            raise ArtifactError(
                f"{path} is cut short: its header says {segment_base + segment_size} bytes, the file has {len(data)}"
            )
    with damaged(path):
        return _read(data, segment_base)


def _read(data: memoryview, segment_base: int) -> ProgramFile:
    program = Table.root(data)
    segments = []
    for segment in program.tables(_PROGRAM_SEGMENTS):
        begin = segment_base + segment.integer(0, "Q")
        segments.append(data[begin : begin + segment.integer(1, "Q")])
    out = ProgramFile()
    for entry in program.tables(_PROGRAM_NAMED_DATA):
        out.named_data[entry.text(0)] = segments[entry.integer(1)]
    for plan in program.tables(_PROGRAM_PLANS):
        name = plan.text(_PLAN_NAME)
        if _instructions(plan) or plan.tables(_PLAN_DELEGATES):
            out.methods[name] = _delegated_method(program, plan, name, segments)
        else:
            values = [_constant_value(plan, index, name) for index in plan.numbers(_PLAN_OUTPUTS, "i")]
            out.metadata[name] = values[0] if len(values) == 1 else values
    return out


def _instructions(plan: Table) -> list[Table]:
    return [item for chain in plan.tables(_PLAN_CHAINS) for item in chain.tables(_CHAIN_INSTRUCTIONS)]


def _delegated_method(program: Table, plan: Table, name: str, segments: list[memoryview]) -> DelegateMethod:
    instructions = _instructions(plan)
    calls = [item.table(_UNION_VALUE) for item in instructions if item.integer(_UNION_KIND, "B") == _DELEGATE_CALL]
    if len(calls) != 1 or len(instructions) != 1 or calls[0] is None:
        operators = sorted({operator.text(0) for operator in plan.tables(_PLAN_OPERATORS)})
        raise ArtifactError(
            f"method {name!r} is not one delegate call: {len(calls)} delegate calls and {len(instructions) - len(calls)} "
            f"other instructions{' (' + ', '.join(operators) + ')' if operators else ''}. This runtime runs programs made "
            "by `ostinato export`"
        )
    call = calls[0]
    delegate = plan.tables(_PLAN_DELEGATES)[call.integer(0, "i")]
    backend = delegate.text(_DELEGATE_ID)
    if backend != BACKEND_ID:
        raise ArtifactError(f"method {name!r} was lowered to backend {backend!r}; this runtime has {BACKEND_ID!r} only")
    specs = {spec.text(0): bytes(spec.blob(1)) for spec in delegate.tables(_DELEGATE_SPECS)}
    record = MethodRecord.from_bytes(_processed_bytes(program, delegate, segments))
    arguments = call.numbers(1, "i")
    inputs = plan.numbers(_PLAN_INPUTS, "i")
    results = arguments[len(record.inputs) :]
    return DelegateMethod(
        name=name,
        record=record,
        target=Target.from_bytes(specs[SPEC_TARGET]),
        input_order=tuple(inputs.index(value) for value in arguments[: len(record.inputs)]),
        output_order=tuple(results.index(value) for value in plan.numbers(_PLAN_OUTPUTS, "i")),
    )


def _processed_bytes(program: Table, delegate: Table, segments: list[memoryview]) -> bytes:
    reference = delegate.table(_DELEGATE_PROCESSED)
    if reference is None:
        return b""
    index = reference.integer(1)
    if reference.integer(0, "b") == _IN_SEGMENT:
        return bytes(segments[index])
    return bytes(program.tables(_PROGRAM_INLINE)[index].blob(0))


def _constant_value(plan: Table, index: int, name: str) -> int | float | bool | str:
    value = plan.tables(_PLAN_VALUES)[index]
    kind, held = value.integer(_UNION_KIND, "B"), value.table(_UNION_VALUE)
    if held is not None and kind == _STRING:
        return held.text(0)
    if held is None or kind not in _SCALARS:
        raise ArtifactError(f"constant method {name!r} returns a value of kind {kind}, which is not supported")
    return held.number(0, _SCALARS[kind])
