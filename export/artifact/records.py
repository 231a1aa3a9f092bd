"""Makes the records that the runtime needs, from traced methods and their code."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ostinato.delegate.artifact.names import CODE_KEY_PREFIX, EXTERN_KEY_PREFIX, KERNELS_KEY_PREFIX
from ostinato.delegate.artifact.records import (
    BufferSpec,
    Dim,
    Growth,
    MethodRecord,
    Segment,
    StateForm,
    TensorSpec,
    dtype_name,
)
from ostinato.delegate.errors import ExportError
from ostinato.export.compile.aot import Code
from ostinato.export.compile.torch_internals import size_bounds, size_expression, storage_key
from ostinato.export.compile.trace import TracedGraph, TracedLink, TracedMethod

# Largest value of a dimension without a bound; 2**31 - 1 is the largest size that a FlatBuffers int32 can hold.
UNBOUNDED = 2**31 - 1
# (lowest, highest) value of an input. For an index into buffers that grow, the second entry is what the index counts.
ValueRange = tuple[int, int | Growth]


@dataclass
class Constants:
    """All tensors of an export, each under one key in `model.ptd`.

    Attributes:
        forms: key -> kind and growth of a mutable buffer, given by the caller of the export. A buffer with a form is mutable,
            even if no method writes it.
        tensors: key -> the tensor, on the CPU. In some exports only its shape and dtype count.
        mutable: keys of the buffers that have a form, or that a method writes.
        devices: key -> devices of the links that hold the tensor.
        read: keys of the tensors that a graph reads.
    """

    forms: Mapping[str, StateForm] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    mutable: set[str] = field(default_factory=set)
    devices: dict[str, set[str | None]] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    _names: dict[tuple[Any, ...], str] = field(default_factory=dict)
    _keys: dict[tuple[Any, ...], str] = field(default_factory=dict)

    def name_after(self, root: nn.Module) -> None:
        """Name the tensors of `root` as `root` names them, no matter which link holds them first."""
        for name, tensor in (*root.named_parameters(), *root.named_buffers()):
            self._names.setdefault(_identity(tensor), name)

    def add(self, method: TracedMethod) -> None:
        """Give each of the method's tensors a key. A tensor that already has a key, from any method, keeps it.

        Raises:
            ExportError: links on both devices hold the same mutable buffer.
        """
        read = {id(graph): graph.read for graph in method.graphs.values()}
        for traced in method.links:
            for name, tensor in traced.tensors.items():
                identity = _identity(tensor)
                key = self._keys.get(identity)
                if key is None:
                    key = self._names.get(identity, traced.link.prefix + name)
                    key = key if key not in self.tensors else f"{method.name}.{key}"
                    self._keys[identity] = key
                    self.tensors[key] = tensor.detach()
                self.devices.setdefault(key, set()).add(traced.link.device)
                if name in read[id(traced.graph)]:
                    self.read.add(key)
                if name in traced.graph.written or key in self.forms:
                    self.mutable.add(key)
        for key in sorted(self.mutable):
            if len(self.devices[key]) > 1:
                raise ExportError(
                    f"method {method.name!r}: the mutable buffer {key!r} is in links on the host and in others that are not: "
                    "a buffer has one place. Put all of these links on one device, or hand its value on from one to the next"
                )

    def stored(self) -> dict[str, Tensor]:
        """The tensors whose values the artifact must hold, by key, sorted. They are known before there is any code."""
        mutable = {key for key in self.mutable if self.buffer_spec(key).initialised}
        return {key: self.tensors[key] for key in sorted((self.read - self.mutable) | mutable)}

    def key(self, tensor: Tensor) -> str:
        return self._keys[_identity(tensor)]

    def has_growing(self, traced: TracedLink) -> bool:
        """Whether a buffer of the link may have another first dimension when the program is loaded."""
        forms = (self.forms.get(self.key(tensor), StateForm()) for tensor in traced.tensors.values())
        return any(form.growth is not Growth.FIXED for form in forms)

    def buffer_spec(self, key: str) -> BufferSpec:
        """The spec of a mutable buffer."""
        tensor, form = self.tensors[key], self.forms.get(key, StateForm())
        return BufferSpec(tuple(tensor.shape), dtype_name(tensor.dtype), bool(tensor.count_nonzero()), *form)


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    return (storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride())


@dataclass(frozen=True)
class CompiledMethod:
    """A method's record, and the named data that the record refers to."""

    record: MethodRecord
    named_data: dict[str, bytes]


def make_method(
    method: TracedMethod,
    codes: Mapping[str, Code],
    constants: Constants,
    value_ranges: Mapping[str, ValueRange],
) -> CompiledMethod:
    """Make the record of a method, with its named data.

    Args:
        method: the traced method.
        codes: kind of link -> code.
        constants: the tensors of the export.
        value_ranges: see `export_program`.
    """
    digests = {kind: hashlib.sha256(code.library).hexdigest() for kind, code in codes.items()}
    kernels = {code.kernels: code.kernels.read_bytes() for code in codes.values() if code.kernels is not None}
    kernel_digests = {path: hashlib.sha256(data).hexdigest() for path, data in kernels.items()}
    named_data: dict[str, bytes] = {}
    segments = []
    bound: dict[str, str] = {}
    buffers: dict[str, str] = {}
    numbers = {name: index for index, name in enumerate(method.inputs)}
    count = len(numbers)
    for index, traced in enumerate(method.links):
        code = codes[traced.link.kind]
        # All links of a kind run the same code. Names in the code are those of the kind's first link.
        prefix = f"{index}/" if len(method.links) > 1 else ""
        for in_code, key in _keys_of(traced, code, constants).items():
            (buffers if key in constants.mutable else bound)[prefix + in_code] = key
        digest = digests[traced.link.kind]
        code_key = CODE_KEY_PREFIX + digest
        named_data[code_key] = code.library
        extern_key = f"{EXTERN_KEY_PREFIX}{digest}" if code.extern else ""
        if extern_key:
            named_data[extern_key] = code.extern
        taken = tuple(numbers[name] for name in traced.inputs)
        given = tuple(range(count, count + len(traced.link.outputs)))
        count += len(given)
        numbers |= dict(zip(traced.link.outputs, given, strict=True))
        kernels_key = kernels_digest = ""
        if code.kernels is not None:
            kernels_key, kernels_digest = KERNELS_KEY_PREFIX + code.kernels.name, kernel_digests[code.kernels]
            named_data[kernels_key] = kernels[code.kernels]
        _check_streamed(method, traced, code)
        segments.append(
            Segment(
                code_key=code_key,
                code_sha256=digest,
                extern_key=extern_key,
                prefix=prefix,
                inputs=taken,
                outputs=given,
                kernels_key=kernels_key,
                kernels_sha256=kernels_digest,
                capture=traced.link.capture,
                device=traced.link.device or "",
                streamed_by=None if traced.link.streamed_by is None else method.inputs.index(traced.link.streamed_by),
            )
        )
    unread = sorted(set(bound.values()) - constants.read)
    assert not unread, f"the code of method {method.name!r} has {unread}, which its graphs do not read"
    specs = {key: constants.buffer_spec(key) for key in sorted(set(buffers.values()))}
    record = MethodRecord(
        method=method.name,
        inputs=tuple(_input_spec(method, name, value_ranges) for name in method.inputs),
        outputs=tuple(_output_spec(method, name) for name in method.outputs),
        segments=tuple(segments),
        results=tuple(numbers[name] for name in method.outputs),
        constants=bound,
        buffers=buffers,
        buffer_specs=specs,
    )
    return CompiledMethod(record, named_data)


def _keys_of(traced: TracedLink, code: Code, constants: Constants) -> dict[str, str]:
    tensors = traced.tensors
    return {in_code: constants.key(tensors[name]) for in_code, name in code.names.items()}


def _check_streamed(method: TracedMethod, traced: TracedLink, code: Code) -> None:
    """Check that a streamed link's constants have equal first dimensions: a call sends the same number of entries of each."""
    counts = {traced.tensors[name].shape[:1] for name in code.names.values()}
    if traced.link.streamed_by is not None and (len(counts) != 1 or () in counts):
        raise ExportError(
            f"method {method.name!r}: {traced.link.kind} is streamed, so its constants must have one first dimension; they "
            f"have {', '.join(sorted(str(list(count)) for count in counts)) or 'none'}"
        )


def _input_spec(method: TracedMethod, name: str, ranges: Mapping[str, ValueRange]) -> TensorSpec:
    user = next(traced for traced in method.links if name in traced.inputs)
    value = list(user.graph.inputs.values())[user.inputs.index(name)]
    spec = _tensor_spec(user.graph, name, value)
    bounds = ranges.get(f"{method.name}.{name}", ranges.get(name))
    if bounds is None:
        return spec
    low, high = bounds
    if isinstance(high, Growth):
        return replace(spec, value_range=(low, low), counts=high)
    return replace(spec, value_range=(low, high))


def _output_spec(method: TracedMethod, name: str) -> TensorSpec:
    maker = next(traced for traced in reversed(method.links) if name in traced.link.outputs)
    value = maker.graph.outputs[maker.link.outputs.index(name)]
    return _tensor_spec(maker.graph, name.removeprefix("result "), value)


def _tensor_spec(graph: TracedGraph, name: str, value: Any) -> TensorSpec:
    if not isinstance(value, Tensor):
        raise ExportError(f"input or output {name!r} is a {type(value).__name__}; only tensors are supported")
    return TensorSpec(name, dtype_name(value.dtype), tuple(_dim(graph, size) for size in value.shape))


def _dim(graph: TracedGraph, size: int | torch.SymInt) -> Dim:
    if isinstance(size, int):
        return Dim(size, size)
    expression = size_expression(size)
    low, high = size_bounds(expression, graph.ranges)
    text = re.sub(r"\w+", lambda match: graph.symbols.get(match[0], match[0]), str(expression))
    return Dim(_finite(low, 0), _finite(high, UNBOUNDED), text)


def _finite(bound: Any, fallback: int) -> int:
    try:
        return min(int(bound), UNBOUNDED)
    except (TypeError, OverflowError, ValueError):
        return fallback
