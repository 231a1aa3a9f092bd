"""The records that travel in an artifact: what the runtime needs to know of methods, and the manifest.

Each delegated method carries a `MethodRecord` (JSON) as its delegate's processed bytes. The manifest, a named blob
in `model.ptd`, holds the SHA-256 of `model.pte` and of every constant, so that damage and mixed-up files
are found before anything runs.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from enum import Enum
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
    """One dimension of an input: fixed when `min == max`; in one call, equal symbols must have equal sizes."""

    min: int
    max: int
    symbol: str = ""

    @property
    def is_static(self) -> bool:
        return self.min == self.max

    def __str__(self) -> str:
        return str(self.min) if self.is_static else f"{self.symbol or 'T'}={self.min}..{self.max}"


class Growth(str, Enum):
    """What the first dimension of a mutable buffer is. How many there are is chosen when a program is loaded."""

    # As in the artifact.
    FIXED = "fixed"
    # One row for each session.
    SLOTS = "slots"
    # One row for each page of the KV caches.
    PAGES = "pages"


@dataclass(frozen=True)
class TensorSpec:
    """A method's input or output.

    Attributes:
        name, dtype, shape: what they say.
        value_range: lowest and highest value of an integer input; None if unbounded.
        counts: where it is an index into buffers that grow, what it counts: the highest value is known when it is loaded.
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
    """What a mutable buffer holds.

    The last part of the name of a `SAMPLING` buffer says what it holds: `token`, `position`, or a field of
    `sampling.SamplingTensors`.
    """

    KV_CACHE = "kv_cache"
    # Where each session's pages of the KV caches are. Methods read it, and the runtime writes it.
    BLOCK_TABLE = "block_table"
    CONVOLUTION = "convolution"
    RECURRENT = "recurrent"
    SAMPLING = "sampling"
    # Its content between steps means nothing.
    WORKSPACE = "workspace"
    # A program that does not say more.
    OTHER = "other"


class StateForm(NamedTuple):
    """What a mutable buffer holds, and what its first dimension is."""

    kind: StateKind = StateKind.OTHER
    growth: Growth = Growth.FIXED


@dataclass(frozen=True)
class BufferSpec:
    """A mutable buffer that methods share.

    Attributes:
        shape: of a buffer that grows, its first dimension is an example.
        dtype: its name.
        initialised: its first value is in `model.ptd`, else it is zeros. Of one that grows, all rows begin as the first one.
        kind, growth: as of `StateForm`.
    """

    shape: tuple[int, ...]
    dtype: str
    initialised: bool
    kind: StateKind = StateKind.OTHER
    growth: Growth = Growth.FIXED

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
        )


@dataclass(frozen=True)
class Segment:
    """One call of compiled code. A method is a chain of one segment or more; several may run the same code.

    Attributes:
        code_key, code_sha256: the shared library among the program's named data, and its hash.
        extern_key: the list of ATen operators that the code calls by name, "" if there are none.
        kernels_key, kernels_sha256: the library of kernels that the code is linked with, and its hash; "" if there is none.
        prefix: stands before the code's own names in the record's `constants` and `buffers`.
        inputs, outputs: numbers of the values that it takes and gives, in the order of the code's arguments.
        capture: whether it may be part of a CUDA graph; where not, it is called each time.
        device: "cpu" where it runs on the host, is called there, and has its constants and buffers there; "" where it runs
            on the program's device. In a program for the CPU both are the same machine, and all else holds.
        streamed_by: number of the method's input that says how many entries of the first dimension of its constants a call
            needs: they stay on the host, although the code runs on the device, and so many are copied there each time. None
            where they do not.
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
    """What the runtime needs to know about one delegated method.

    Attributes:
        inputs, outputs: specs, in the order of the delegate call's arguments.
        segments: run one after the other. Values are numbered: the inputs from 0 on, then what the segments give.
        results: numbers of the values that the method returns.
        constants: names that the compiled code uses, each after its segment's prefix -> keys of `model.ptd`.
        buffers: the same for mutable buffers -> keys of `buffer_specs`.
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
        """Raises ArtifactError when the bytes are not a record of this format version."""
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

    @property
    def host_names(self) -> frozenset[str]:
        """Those of `constants` and `buffers` that are on the host."""
        prefixes = tuple(segment.prefix for segment in self.segments if segment.on_host or segment.is_streamed)
        return frozenset(name for name in (*self.constants, *self.buffers) if name.startswith(prefixes))

    def _fault(self) -> str:
        """What is wrong with the chain, "" if nothing: each value must be given once, and before it is taken."""
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
        names = [*self.constants, *self.buffers]
        if any(sum(name.startswith(segment.prefix) for segment in self.segments) != 1 for name in names):
            return "a constant does not belong to one segment"
        if not self.buffer_specs.keys() >= set(self.buffers.values()):
            return "it lacks a buffer's shape"
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
    """Hashes (SHA-256, hex) that bind `model.ptd` to its `model.pte`; a blob in `model.ptd`."""

    export_id: str
    program_sha256: str
    constants: dict[str, str]
    version: int = FORMAT_VERSION

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Raises ArtifactError when the bytes are not a manifest of this format version."""
        raw = parse_json(data, f"the manifest in {CONSTANTS_FILE}", ArtifactError)
        try:
            _check_version(raw["version"])
            return cls(
                export_id=raw["export_id"],
                program_sha256=raw["program_sha256"],
                constants=dict(raw["constants"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ArtifactError(f"the manifest in {CONSTANTS_FILE} cannot be read: {error}") from error
