"""The compiled code of a method: AOTInductor containers, with their constants bound by reference."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from .artifact import HOST, KERNELS_KEY_PREFIX, PROGRAM_FILE, MethodRecord, Segment
from .errors import ArtifactError, first_line
from .loading import free_tensors
from .streaming import ConstantStream, StreamBuffers
from .torch_internals import Container, bind_constants, load_container, run_container
from .transfers import Sent, departures, needed_on_device, results_of, send_once, starts, to_device_once

# Bytes; compiled code loads up to 16 at a time.
ALIGNMENT = 16


class MethodCode:
    """The compiled code of one method, loaded into this process: one torch container per segment.

    Segments that run the same code share one loaded library. Inputs and outputs of `run` are tensors in the order of
    `record.inputs` and `record.outputs`: inputs on the host or on the program's device, outputs on the device and freshly
    allocated. Work is queued on the current CUDA stream; a segment that runs on the host waits for it.

    Args:
        record: the method's record.
        named_data: the program's named data; it holds what the record's segments refer to.
        device: the program's, where the code runs except for segments on the host.
        buffers: the program's, for segments whose constants stream through the device.

    Raises:
        ArtifactError: code is missing, damaged, or cannot be loaded.
    """

    def __init__(
        self,
        record: MethodRecord,
        named_data: Mapping[str, memoryview],
        device: torch.device,
        buffers: StreamBuffers | None = None,
    ) -> None:
        self.record = record
        self._buffers = buffers or StreamBuffers(device)
        self._device = device
        self._containers: list[Container] = []
        libraries: dict[str, str] = {}
        # dlopen needs paths. The files can go as soon as they are mapped, so nothing is left behind even after a crash.
        with tempfile.TemporaryDirectory(prefix="ostinato-") as folder:
            for segment in record.segments:
                _unpack_kernels(record.method, segment, named_data, folder)
                if segment.code_key not in libraries:
                    path = os.path.join(folder, f"{record.method}-{len(libraries)}.so")
                    _unpack(record.method, segment, named_data, path)
                    libraries[segment.code_key] = path
                where = torch.device(HOST) if segment.on_host else device
                self._containers.append(_load_library(libraries[segment.code_key], where, record.method))
        self._last_uses = _last_uses(record)
        self._on_host = frozenset(index for index, segment in enumerate(record.segments) if segment.on_host)
        streamed = [index for index, segment in enumerate(record.segments) if segment.is_streamed]
        # Place among the streamed segments, by the segment's index.
        self._streamed = {index: place for place, index in enumerate(streamed)}
        self._stream: ConstantStream | None = None
        not_captured = (i for i, segment in enumerate(record.segments) if segment.is_streamed or not segment.capture)
        self._called = self._on_host.union(not_captured)
        self._needed_on_device = needed_on_device(record.segments, self._on_host, record.results)
        self._departures = departures(record.segments, self._on_host)
        self._starts = starts(record.segments, self._on_host)
        # Its thread begins when something is run on the host.
        self._host = ThreadPoolExecutor(1, "ostinato-host")
        self._addresses: tuple[int, ...] = ()
        self._lent: list[torch.Tensor] = []
        # Values of the host that the last call's work may still be reading.
        self._read_last: list[torch.Tensor] = []

    def bind(self, tensors: Mapping[str, torch.Tensor], registers: bool = False) -> None:
        """Use `tensors` in place, without a copy: all of `record.constants` and `record.buffers`, by their names there. Those
        of `record.host_names` are on the host.

        The containers keep addresses, so the caller must keep the tensors alive until the next `bind`, or `close`. With
        `registers` the GPU reads those that stream through it by itself: they must then live as long as the program.
        """
        # A container never lets go of a tensor that it was given, so it gets others over the same memory, to be emptied.
        lent = {name: torch.empty(0, dtype=t.dtype, device=t.device).set_(t) for name, t in tensors.items()}  # type: ignore[call-overload]
        try:
            for index, (segment, container) in enumerate(zip(self.record.segments, self._containers, strict=True)):
                if index not in self._streamed:
                    bind_constants(container, _of_segment(segment, lent))
            if self._streamed and self._stream is None:
                self._stream = self._open_stream(tensors, registers)
        except BaseException:
            free_tensors(lent.values())
            raise
        free_tensors(self._lent)
        self._lent = list(lent.values())
        self._addresses = tuple(tensor.data_ptr() for tensor in tensors.values())

    def _open_stream(self, tensors: Mapping[str, torch.Tensor], registers: bool) -> ConstantStream:
        """For the streamed segments, which find their constants at the same places in each call."""
        segments = [self.record.segments[index] for index in self._streamed]
        sources = [_of_segment(segment, tensors) for segment in segments]
        stream = ConstantStream(self._buffers, sources, [segment.code_key for segment in segments], registers)
        for index, place in self._streamed.items():
            bind_constants(self._containers[index], dict(stream.targets[place]))
        return stream

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self.record.segments

    @property
    def results(self) -> tuple[int, ...]:
        return self.record.results

    @property
    def called(self) -> frozenset[int]:
        """Segments that must not be captured."""
        return self._called

    @property
    def on_host(self) -> frozenset[int]:
        """Segments that run on the host."""
        return self._on_host

    @property
    def addresses(self) -> tuple[int, ...]:
        """Of all constants and buffers; the same object until the next `bind`."""
        return self._addresses

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One step: the segments in their order, each intermediate value freed after its last use.

        A segment on the host runs on a thread of its own. It begins when the device has what it needs, and what the device
        has to do besides is queued meanwhile.
        """
        values: dict[int, torch.Tensor] = dict(enumerate(inputs))
        # Of the host: what is there, and what is on its way.
        hosted: dict[int, torch.Tensor] = {}
        sent: dict[int, Sent] = {}
        # Of the host, for the device to read: what will be read, and what all that reads it is queued for.
        given: dict[int, torch.Tensor] = {}
        read, self._read_last = self._read_last, []
        begun: Future[dict[int, torch.Tensor]] | None = None
        try:
            for index in range(len(self._containers)):
                if index in self._on_host:
                    there = (begun or self._begin(index, values, hosted, sent)).result()
                    begun = None
                    hosted.update(there)
                    wanted = self._needed_on_device.intersection(self.segments[index].outputs)
                    fresh = {number: to_device_once(there[number], self._device) for number in wanted}
                    given |= fresh
                    values |= fresh
                else:
                    self.run_segment(index, values)
                leaving = self._departures.get(index)
                if leaving is not None:
                    sent |= dict.fromkeys(leaving, send_once({n: values[n] for n in leaving}, self._device, read))
                    read = []
                if index in self._starts:
                    begun = self._begin(self._starts[index], values, hosted, sent)
                for number in self._last_uses[index]:
                    values.pop(number, None)
                    hosted.pop(number, None)
                    if number in given:
                        read.append(given.pop(number))
        finally:
            if begun is not None:
                # Something else has failed. Nobody may bind or close the code while it runs.
                begun.exception()
            self._read_last = [*read, *given.values()]
        return results_of(values, self.results, given)

    def _begin(
        self, index: int, values: dict[int, torch.Tensor], hosted: dict[int, torch.Tensor], sent: dict[int, Sent]
    ) -> Future[dict[int, torch.Tensor]]:
        """Run a segment on what is on the host, or on its way there: what it gives, and what it took that others need too."""
        taken: dict[int, torch.Tensor | Sent] = {}
        for number in self.segments[index].inputs:
            if number in sent:
                taken[number] = sent.pop(number)
            else:
                # One of the method's inputs may be on the device.
                taken[number] = hosted[number] if number in hosted else values[number].to(HOST)

        def run() -> dict[int, torch.Tensor]:
            there = {n: value.arrived(n) if isinstance(value, Sent) else value for n, value in taken.items()}
            self.run_segment(index, there)
            return there

        return self._host.submit(run)

    def run_segment(self, index: int, values: dict[int, torch.Tensor]) -> None:
        """Run one segment on `values` by their numbers: adds what it gives, and drops what no later segment needs.

        What a segment on the host takes is there. What one on the device takes may be on the host, and stays there: it is
        copied, on the current stream.
        """
        segment, place = self.record.segments[index], self._streamed.get(index)
        taken = [values[number] for number in segment.inputs]
        if self._on_host and not segment.on_host:
            taken = [tensor.to(self._device) for tensor in taken]
        if self._stream is not None and place is not None and segment.streamed_by is not None:
            if place == 0:
                # It may wait for the device.
                self._stream.entries = int(values[segment.streamed_by])
            self._stream.begin(place)
            try:
                given = run_container(self._containers[index], taken)
            finally:
                self._stream.end(place)
        else:
            given = run_container(self._containers[index], taken)
        values.update(zip(segment.outputs, given, strict=True))
        del taken
        for number in self._last_uses[index]:
            values.pop(number, None)

    def close(self) -> None:
        if self._read_last and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._read_last = []
        self._host.shutdown()
        self._containers = []
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        free_tensors(self._lent)
        self._lent = []


def _of_segment(segment: Segment, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those of a method's tensors that the segment uses, by the names in its code."""
    prefix = segment.prefix
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _last_uses(record: MethodRecord) -> list[tuple[int, ...]]:
    """For each segment, the values that it takes or gives which no later one takes and the method does not return."""
    done: list[tuple[int, ...]] = []
    needed = set(record.results)
    for segment in reversed(record.segments):
        done.append(tuple(sorted({*segment.inputs, *segment.outputs} - needed)))
        needed |= set(segment.inputs)
    return done[::-1]


def _unpack(method: str, segment: Segment, named_data: Mapping[str, memoryview], path: str) -> None:
    """Write a segment's library to `path`, and beside it the list of operators where torch looks for it."""
    _write(f"the compiled code of method {method!r}", named_data.get(segment.code_key), segment.code_sha256, path)
    if segment.extern_key:
        # Without the list the code would call through a null pointer.
        if segment.extern_key not in named_data:
            raise ArtifactError(f"{PROGRAM_FILE} lacks the list of operators that method {method!r} calls")
        with open(path.removesuffix(".so") + ".json", "wb") as file:
            file.write(named_data[segment.extern_key])


def _unpack_kernels(method: str, segment: Segment, named_data: Mapping[str, memoryview], folder: str) -> None:
    """Write the kernels that a segment's library is linked with to where the system's loader looks for them: beside it."""
    if segment.kernels_key:
        path = os.path.join(folder, os.path.basename(segment.kernels_key.removeprefix(KERNELS_KEY_PREFIX)))
        if not os.path.exists(path):
            data = named_data.get(segment.kernels_key)
            _write(f"the kernels of method {method!r}", data, segment.kernels_sha256, path)


def _write(what: str, data: memoryview | None, sha256: str, path: str) -> None:
    if data is None:
        raise ArtifactError(f"{PROGRAM_FILE} lacks {what}")
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise ArtifactError(f"{what} in {PROGRAM_FILE} is damaged: SHA-256 {found[:12]}..., expected {sha256[:12]}...")
    with open(path, "wb") as file:
        file.write(data)


def _load_library(path: str, device: torch.device, method: str) -> Container:
    try:
        return load_container(path, device)
    except RuntimeError as error:
        raise ArtifactError(f"the compiled code of method {method!r} cannot be loaded: {first_line(error)}") from error
