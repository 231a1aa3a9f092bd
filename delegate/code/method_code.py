"""The compiled code of a method: AOTInductor containers, with their constants bound by reference."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from ostinato.delegate.artifact.names import HOST, KERNELS_KEY_PREFIX, PROGRAM_FILE
from ostinato.delegate.artifact.pte import kernels_of, library_of
from ostinato.delegate.artifact.records import MethodRecord, Segment
from ostinato.delegate.constants.loading import free_tensors
from ostinato.delegate.constants.streaming import ConstantStream, StreamBuffers
from ostinato.delegate.errors import ArtifactError, first_line
from ostinato.delegate.torch_internals import Container, bind_constants, load_container, run_container

from .transfers import Mark, PinnedPool, Sent, departures, needed_on_device, results_of, starts, to_device_once


@dataclass
class _Step:
    """Values of one step by their numbers. Each value is kept until its last use.

    Attributes:
        values: values on the device, and the method's inputs.
        read: memory of the host that queued work on the device may still read.
        hosted: values on the host.
        sent: copies on the host of values from the device, queued or complete.
        given: for each of `values` that lies in the host's memory: that memory. It moves to `read` after the last use.
    """

    values: dict[int, torch.Tensor]
    read: list[torch.Tensor]
    hosted: dict[int, torch.Tensor] = field(default_factory=dict)
    sent: dict[int, Sent] = field(default_factory=dict)
    given: dict[int, torch.Tensor] = field(default_factory=dict)


class MethodCode:
    """The compiled code of one method, loaded into this process: one torch container per segment.

    Segments that run the same code share one loaded library. Inputs and outputs of `run` are tensors in the order of
    `record.inputs` and `record.outputs`. Inputs are on the host or on the program's device; outputs are on the device and
    freshly allocated. Work is queued on the current CUDA stream. A segment on the host waits for the values that it takes.

    Args:
        record: the method's record.
        named_data: the program's named data, with the libraries that the record's segments refer to.
        device: the program's device. The code runs there, except for segments on the host.
        buffers: the program's buffers for constants that stream through the device.

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
        # dlopen needs paths. The files are deleted as soon as they are mapped, so even a crash leaves nothing behind.
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
        # Segment -> its number among the streamed segments.
        self._streamed = {index: number for number, index in enumerate(streamed)}
        # Number of the method's input that says how many entries of the streamed constants a call needs.
        self._streamed_by = record.segments[streamed[0]].streamed_by if streamed else None
        self._stream: ConstantStream | None = None
        not_captured = (i for i, segment in enumerate(record.segments) if segment.is_streamed or not segment.capture)
        self._called = self._on_host.union(not_captured)
        self._needed_on_device = needed_on_device(record.segments, self._on_host, record.results)
        self._departures = departures(record.segments, self._on_host)
        self._starts = starts(record.segments, self._on_host)
        self._read_mark = Mark(device)
        self._pool = PinnedPool(device)
        # The thread starts when it first gets segments to queue, while another segment runs on the host.
        self._thread = ThreadPoolExecutor(1, "ostinato-queue")
        self._addresses: tuple[int, ...] = ()
        self._lent: list[torch.Tensor] = []
        # Memory of the host that the last call's work may still be reading.
        self._read_last: list[torch.Tensor] = []

    def bind(self, tensors: Mapping[str, torch.Tensor], registers: bool = False) -> None:
        """Make the code use `tensors` in place, without a copy.

        The containers keep only addresses, so the caller must keep the tensors alive until the next `bind`, or `close`.

        Args:
            tensors: all of `record.constants` and `record.buffers`, by their names there. Those of `record.host_names` are on
                the host.
            registers: whether the GPU reads streamed constants directly from the host's memory. They must then live as long
                as the program.
        """
        # A container never releases a tensor. So it gets other tensors over the same memory, which can be emptied later.
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
        """Open the stream of constants for the streamed segments, and bind their code to the stream's buffers once."""
        segments = [self.record.segments[index] for index in self._streamed]
        sources = [_of_segment(segment, tensors) for segment in segments]
        stream = ConstantStream(self._buffers, sources, [segment.code_key for segment in segments], registers)
        for index, number in self._streamed.items():
            bind_constants(self._containers[index], dict(stream.targets[number]))
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
        """Addresses of all constants and buffers. The same object until the next `bind`."""
        return self._addresses

    def start(self, inputs: Sequence[torch.Tensor]) -> None:
        """Queue the first copies of constants that stream through the device. To be called at the beginning of a step."""
        if self._stream is not None and self._streamed_by is not None:
            # `int` waits for the device if the input is there.
            self._stream.start(int(inputs[self._streamed_by]))

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run one step: the segments in their order. Each intermediate value is freed after its last use.

        A segment on the host starts when the values that it takes have arrived. Meanwhile another thread queues more work for
        the device: operators on the host release Python's global lock (GIL).
        """
        if not self._departures and self._read_last:
            # This call waits for no copy to the host, so nothing else shows that the last call's work is done.
            self._read_mark.wait()
            self._read_last = []
        self.start(inputs)
        step = _Step(dict(enumerate(inputs)), self._read_last)
        try:
            index = 0
            while index < len(self._containers):
                host = index
                if index not in self._on_host:
                    self._queue(index, step)
                    host = self._starts.get(index, index)
                if host in self._on_host:
                    self._run_on_host(host, range(index + 1, host), step)
                index = host + 1
        finally:
            behind = [memory for sent in set(step.sent.values()) for memory in sent.behind]
            self._read_last = [*step.read, *step.given.values(), *behind]
            if not self._departures and self._read_last:
                self._read_mark.record()
        return results_of(step.values, self.results, step.given)

    def _queue(self, index: int, step: _Step) -> None:
        """Queue a segment on the device, then the copies of values that leave for the host after it."""
        lent = {_storage(step.values[number]): memory for number, memory in step.given.items()}
        self.run_segment(index, step.values)
        if lent:
            # An output may be a view of an input.
            made = [number for number in self.segments[index].outputs if number in step.values]
            step.given |= {n: lent[_storage(step.values[n])] for n in made if _storage(step.values[n]) in lent}
        leaving = self._departures.get(index)
        if leaving is not None:
            sent = Sent({n: step.values[n] for n in leaving}, self._device, step.read, self._pool)
            step.sent |= dict.fromkeys(leaving, sent)
            step.read = []
        self._drop(index, step)

    def _run_on_host(self, index: int, besides: Sequence[int], step: _Step) -> None:
        """Run a segment on the host, and meanwhile queue the segments `besides` on the device."""
        taken = self.segments[index].inputs
        away = [number for number in taken if number in step.sent and number not in step.hosted]
        step.hosted |= {number: step.sent[number].arrived(number) for number in away}
        # An input of the method may be on the device.
        there = {n: step.hosted[n] if n in step.hosted else step.values[n].to(HOST) for n in taken}
        # The memory of the inputs will be used again for other values.
        lent = {_storage(tensor) for tensor in there.values()}
        queued: Future[None] | None = None
        try:
            queued = self._on_thread(besides, step) if besides else None
            self.run_segment(index, there)
        finally:
            if queued is not None:
                # The code must not be bound or closed while the other thread uses it.
                _wait_for(queued)
        if queued is not None:
            queued.result()
        for number in self.segments[index].outputs:
            # A value that no later segment needs is not in `there`.
            if number in there and _storage(there[number]) in lent:
                there[number] = there[number].clone()
        step.hosted.update(there)
        wanted = self._needed_on_device.intersection(self.segments[index].outputs)
        for number in wanted:
            step.values[number], step.given[number] = to_device_once(there[number], self._device)
        self._drop(index, step)

    def _on_thread(self, indexes: Sequence[int], step: _Step) -> Future[None]:
        """Queue these segments on the current stream from another thread, which runs when this one releases the GIL."""
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        inference = torch.is_inference_mode_enabled()

        def run() -> None:
            with torch.inference_mode(inference), nullcontext() if stream is None else torch.cuda.stream(stream):
                for index in indexes:
                    self._queue(index, step)

        return self._thread.submit(run)

    def _drop(self, index: int, step: _Step) -> None:
        """Drop the values that no segment after `index` needs."""
        for number in self._last_uses[index]:
            step.values.pop(number, None)
            step.hosted.pop(number, None)
            if number in step.sent:
                step.sent.pop(number).done(number)
            if number in step.given:
                step.read.append(step.given.pop(number))

    def run_segment(self, index: int, values: dict[int, torch.Tensor]) -> None:
        """Run one segment on `values`, by their numbers. Add its outputs, and drop values that no later segment needs.

        A segment on the host needs its inputs on the host. A segment on the device takes inputs from anywhere: those on the
        host are copied for it, on the current stream.
        """
        segment, number = self.record.segments[index], self._streamed.get(index)
        taken = [values[number] for number in segment.inputs]
        if self._on_host and not segment.on_host:
            taken = [tensor.to(self._device) for tensor in taken]
        if self._stream is not None and number is not None:
            self._stream.begin(number)
            try:
                given = run_container(self._containers[index], taken)
            finally:
                self._stream.end(number)
        else:
            given = run_container(self._containers[index], taken)
        values.update(zip(segment.outputs, given, strict=True))
        del taken
        for number in self._last_uses[index]:
            values.pop(number, None)

    def close(self) -> None:
        """Unload the code. None of its work may be under way."""
        self._read_last = []
        self._pool.clear()
        self._thread.shutdown()
        self._containers = []
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        free_tensors(self._lent)
        self._lent = []


def _storage(tensor: torch.Tensor) -> int:
    """Address of the tensor's storage. Equal for tensors that share memory."""
    return tensor.untyped_storage().data_ptr()


def _wait_for(future: Future[None]) -> None:
    """Wait until `future` has ended, with or without an error. An interrupt is raised after that."""
    interrupt: KeyboardInterrupt | None = None
    while not future.done():
        try:
            wait([future])
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


def _of_segment(segment: Segment, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Select the tensors of a method that the segment uses, by the names in the segment's code."""
    prefix = segment.prefix
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _last_uses(record: MethodRecord) -> list[tuple[int, ...]]:
    """Per segment: numbers of its inputs and outputs that no later segment takes and the method does not return."""
    done: list[tuple[int, ...]] = []
    needed = set(record.results)
    for segment in reversed(record.segments):
        done.append(tuple(sorted({*segment.inputs, *segment.outputs} - needed)))
        needed |= set(segment.inputs)
    return done[::-1]


def _unpack(method: str, segment: Segment, named_data: Mapping[str, memoryview], path: str) -> None:
    """Write a segment's library to `path`, and the list of operators beside it, where torch looks for the list."""
    with open(path, "wb") as file:
        file.write(library_of(method, segment, named_data))
    if segment.extern_key:
        # Without the list the code would call through a null pointer.
        if segment.extern_key not in named_data:
            raise ArtifactError(f"{PROGRAM_FILE} lacks the list of operators that method {method!r} calls")
        with open(path.removesuffix(".so") + ".json", "wb") as file:
            file.write(named_data[segment.extern_key])


def _unpack_kernels(method: str, segment: Segment, named_data: Mapping[str, memoryview], folder: str) -> None:
    """Write the kernels that a segment's library is linked with into `folder`, where the system's loader looks for them."""
    if segment.kernels_key:
        path = os.path.join(folder, os.path.basename(segment.kernels_key.removeprefix(KERNELS_KEY_PREFIX)))
        if not os.path.exists(path):
            with open(path, "wb") as file:
                file.write(kernels_of(method, segment, named_data))


def _load_library(path: str, device: torch.device, method: str) -> Container:
    try:
        return load_container(path, device)
    except RuntimeError as error:
        raise ArtifactError(f"the compiled code of method {method!r} cannot be loaded: {first_line(error)}") from error
