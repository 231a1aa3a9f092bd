"""Records stored in an artifact: what the runtime needs to know about methods, and the manifest.

Each delegated method carries a `MethodRecord` (JSON) as its delegate's processed bytes. The manifest, a named blob in
`model.ptd`, holds the SHA-256 of every constant, and the seal of `model.pte` (`seal.py`) that of the program and of the
manifest. So damage and mixed-up files are found before anything runs. `model.ptd` knows nothing of a program: another one may
be compiled for the same constants.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ostinato.delegate.errors import ArtifactError

from .json_files import as_flag, as_names, as_numbers, as_text, one_of, parse_json
from .names import CONSTANTS_FILE, FORMAT_VERSION, HOST, PROGRAM_FILE


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `"bfloat16"`."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """`"bfloat16"` -> `torch.bfloat16`; ArtifactError for a name that torch does not have."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ArtifactError(f"unknown dtype {name!r} in the artifact")
    return dtype


@dataclass(frozen=True)
class Dim:
    """One dimension of an input: fixed when `min == max`. In one call, dimensions with equal symbols have equal sizes."""

    min: int
    max: int
    symbol: str = ""

    @property
    def is_static(self) -> bool:
        return self.min == self.max

    def __str__(self) -> str:
        return str(self.min) if self.is_static else f"{self.symbol or 'T'}={self.min}..{self.max}"


class Growth(str, Enum):
    """Meaning of a mutable buffer's first dimension. The numbers of slots and pages are chosen when a program is loaded."""

    # The size is the one in the artifact.
    FIXED = "fixed"
    # One entry for each session.
    SLOTS = "slots"
    # One entry for each page of the KV caches of a page group.
    PAGES = "pages"


@dataclass(frozen=True)
class TensorSpec:
    """Spec of a method's input or output.

    Attributes:
        name, dtype: the tensor's name, and the name of its dtype.
        shape: the tensor's dimensions.
        value_range: lowest and highest value of an integer input; None if unbounded.
        counts: for an index into buffers that grow: what it counts. Loading a program then sets the highest value.
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...]
    value_range: tuple[int, int] | None = None
    counts: Growth = Growth.FIXED

    @property
    def shape_text(self) -> str:
        return "[" + ", ".join(str(dim) for dim in self.shape) + "]"

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TensorSpec:
        bounds = data.get("value_range")
        return cls(
            name=data["name"],
            dtype=data["dtype"],
            shape=tuple(Dim(**dim) for dim in data["shape"]),
            value_range=(int(bounds[0]), int(bounds[1])) if bounds else None,
            counts=one_of(Growth, data["counts"], "growth of state"),
        )


class StateKind(str, Enum):
    """Kind of content of a mutable buffer.

    The last component of a `SAMPLING` buffer's name says what the buffer holds: `token`, `position`, a field of
    `SamplingTensors`, or `processed` (see `Processing`). That of a `LOGITS_PROCESSING` buffer is a field of
    `ProcessingTensors`.
    """

    KV_CACHE = "kv_cache"
    # Table of each session's pages of one page group. Methods read the table, and the runtime writes it.
    BLOCK_TABLE = "block_table"
    CONVOLUTION = "convolution"
    RECURRENT = "recurrent"
    SAMPLING = "sampling"
    # What changes logits before they are sampled. The runtime can write it again from a session's parameters and history.
    LOGITS_PROCESSING = "logits_processing"
    # No kind was declared.
    OTHER = "other"


@dataclass(frozen=True)
class PageGroup:
    """KV caches whose pages are dealt out together, through one block table (vLLM: KV cache group).

    Attributes:
        name: the group's name in the artifact. Groups of one name are equal.
        window: number of positions that a row sees, its own and those just before it; 0: it sees all before it. Pages that a
            session has left behind its window are dealt out again.
    """

    name: str = "global"
    window: int = 0

    @classmethod
    def of_window(cls, window: int | None) -> PageGroup:
        """The group of layers with a sliding window, or, for None, of layers without one."""
        return cls() if window is None else cls(f"window {window}", window)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> PageGroup:
        (window,) = as_numbers([data["window"]])
        return cls(as_text(data["name"]), window)


class StateForm(NamedTuple):
    """Kind of a mutable buffer's content, meaning of its first dimension, and page group of a KV cache or a block table."""

    kind: StateKind = StateKind.OTHER
    growth: Growth = Growth.FIXED
    group: PageGroup = PageGroup()


@dataclass(frozen=True)
class BufferSpec:
    """A mutable buffer that methods share.

    Attributes:
        shape: the buffer's shape. If the buffer grows, its first size is an example.
        dtype: name of the dtype.
        initialised: whether the first value is in `model.ptd`; otherwise the buffer starts as zeros. If the buffer grows, all
            entries of its first dimension start as the first entry.
        kind, growth, group: see `StateForm`.
    """

    shape: tuple[int, ...]
    dtype: str
    initialised: bool
    kind: StateKind = StateKind.OTHER
    growth: Growth = Growth.FIXED
    group: PageGroup = PageGroup()

    @property
    def grows(self) -> bool:
        """Whether the first dimension is chosen when a program is loaded."""
        return self.growth is not Growth.FIXED

    @property
    def nbytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * dtype_from_name(self.dtype).itemsize

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> BufferSpec:
        return cls(
            shape=as_numbers(data["shape"]),
            dtype=as_text(data["dtype"]),
            initialised=bool(data["initialised"]),
            kind=one_of(StateKind, data["kind"], "kind of state"),
            growth=one_of(Growth, data["growth"], "growth of state"),
            group=PageGroup.from_json(data["group"]),
        )


@dataclass(frozen=True)
class Segment:
    """One call of compiled code. A method is a chain of one or more segments. Several segments may run the same code.

    Attributes:
        code_key, code_sha256: key of the shared library in the program's named data, and its hash.
        extern_key: key of the list of ATen operators that the code calls by name; "" without such operators.
        kernels_key, kernels_sha256: key of the library of kernels that the code is linked with, and its hash; "" without one.
        prefix: text that stands before the code's own names in the record's `constants` and `buffers`.
        inputs, outputs: numbers of the values that the segment takes and gives, in the order of the code's arguments.
        capture: whether the segment may be part of a CUDA graph. If not, it is called each time.
        device: "cpu" if the segment runs on the host: it is called there, and has its constants and buffers there. "" if it
            runs on the program's device. In a program for the CPU both are the same machine, and the rest still holds.
        streamed_by: number of the method's input that says how many entries of its constants' first dimension the segment
            needs in a call. The code runs on the device, but the constants stay on the host, and each call copies that many
            entries to the device. None if no constants are streamed.
    """

    code_key: str
    code_sha256: str
    extern_key: str
    prefix: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    kernels_key: str = ""
    kernels_sha256: str = ""
    capture: bool = True
    device: str = ""
    streamed_by: int | None = None

    @property
    def on_host(self) -> bool:
        return self.device == HOST

    @property
    def is_streamed(self) -> bool:
        return self.streamed_by is not None

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Segment:
        return cls(
            code_key=as_text(data["code_key"]),
            code_sha256=as_text(data["code_sha256"]),
            extern_key=as_text(data["extern_key"]),
            prefix=as_text(data["prefix"]),
            inputs=as_numbers(data["inputs"]),
            outputs=as_numbers(data["outputs"]),
            kernels_key=as_text(data["kernels_key"]),
            kernels_sha256=as_text(data["kernels_sha256"]),
            capture=as_flag(data["capture"]),
            device=_device(data["device"]),
            streamed_by=None if data["streamed_by"] is None else as_numbers([data["streamed_by"]])[0],
        )


@dataclass(frozen=True)
class MethodRecord:
    """Description of one delegated method, as the runtime needs it.

    Attributes:
        inputs, outputs: specs, in the order of the delegate call's arguments.
        segments: the method's segments, run one after the other. Values are numbered: first the inputs, from 0 on, then the
            outputs of the segments.
        results: numbers of the values that the method returns.
        constants: names in the compiled code, each after its segment's prefix -> keys of `model.ptd`.
        buffers: names of mutable buffers, in the same form -> keys of `buffer_specs`.
    """

    method: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    segments: tuple[Segment, ...]
    results: tuple[int, ...]
    constants: dict[str, str] = field(default_factory=dict)
    buffers: dict[str, str] = field(default_factory=dict)
    buffer_specs: dict[str, BufferSpec] = field(default_factory=dict)
    version: int = FORMAT_VERSION

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> MethodRecord:
        """Parse a record. Raises ArtifactError when the bytes are not a record of this format version."""
        raw = parse_json(data, f"a method's record in {PROGRAM_FILE}", ArtifactError)
        try:
            _check_version(raw["version"])
            record = cls(
                method=as_text(raw["method"]),
                inputs=tuple(TensorSpec.from_json(item) for item in raw["inputs"]),
                outputs=tuple(TensorSpec.from_json(item) for item in raw["outputs"]),
                segments=tuple(Segment.from_json(item) for item in raw["segments"]),
                results=as_numbers(raw["results"]),
                constants=as_names(raw["constants"]),
                buffers=as_names(raw["buffers"]),
                buffer_specs={key: BufferSpec.from_json(item) for key, item in raw["buffer_specs"].items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(f"a method's record in {PROGRAM_FILE} cannot be read: {error}") from error
        why = record._fault()
        if why:
            raise ArtifactError(f"the record of method {record.method!r} in {PROGRAM_FILE} is damaged: {why}")
        return record

    @cached_property
    def host_names(self) -> frozenset[str]:
        """Names in `constants` and `buffers` whose tensors are on the host."""
        prefixes = tuple(segment.prefix for segment in self.segments if segment.on_host or segment.is_streamed)
        return frozenset(name for name in (*self.constants, *self.buffers) if name.startswith(prefixes))

    def _fault(self) -> str:
        """Return what is wrong with the record, "" if nothing. For example, each value must be given once, before use."""
        if not self.segments:
            return "it has no code"
        known = set(range(len(self.inputs)))
        for segment in self.segments:
            if not known.issuperset(segment.inputs):
                return "a value is taken before it is given"
            if len(known | set(segment.outputs)) != len(known) + len(segment.outputs):
                return "a value is given twice"
            by = segment.streamed_by
            if by is not None and (by not in segment.inputs or by >= len(self.inputs)):
                return "a segment is streamed by what it does not take of the method's inputs"
            known |= set(segment.outputs)
        if not known.issuperset(self.results) or len(self.results) != len(self.outputs):
            return "it lacks a result"
        prefixes = Counter(segment.prefix for segment in self.segments)
        lengths = {len(prefix) for prefix in prefixes}
        names = (*self.constants, *self.buffers)
        if any(sum(prefixes[name[:n]] for n in lengths if n <= len(name)) != 1 for name in names):
            return "a constant does not belong to one segment"
        if not self.buffer_specs.keys() >= set(self.buffers.values()):
            return "it lacks a buffer's shape"
        groups = {spec.group for spec in self.buffer_specs.values()}
        if len({group.name for group in groups}) < len(groups):
            return "two page groups have one name"
        host_names = self.host_names
        if len({(key, name in host_names) for name, key in self.buffers.items()}) > len(set(self.buffers.values())):
            return "a mutable buffer is on two devices"
        return ""


def _device(value: object) -> str:
    if value not in ("", HOST):
        raise ValueError(f"unknown device {value!r} of a segment")
    return as_text(value)


def constant_digest(data: memoryview | bytes, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> str:
    """SHA-256 (hex) of a constant: of its bytes, dtype, shape and strides."""
    digest = hashlib.sha256(data)
    digest.update(f"{dtype} {list(shape)} {list(strides)}".encode())
    return digest.hexdigest()


def _check_version(version: object) -> None:
    if version != FORMAT_VERSION:
        raise ArtifactError(
            f"the artifact has format version {version}, this runtime reads version {FORMAT_VERSION}: "
            "export the model again with this version of ostinato"
        )


@dataclass(frozen=True)
class Manifest:
    """The SHA-256 (hex) of each constant, by its name (`constant_digest`). Stored as a blob in `model.ptd`."""

    constants: dict[str, str]
    version: int = FORMAT_VERSION

    @property
    def id(self) -> str:
        """SHA-256 (hex) of the manifest. Files with equal constants have equal ids."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Parse a manifest. Raises ArtifactError when the bytes are not a manifest of this format version."""
        raw = parse_json(data, f"the manifest in {CONSTANTS_FILE}", ArtifactError)
        try:
            _check_version(raw["version"])
            return cls(dict(raw["constants"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ArtifactError(f"the manifest in {CONSTANTS_FILE} cannot be read: {error}") from error
