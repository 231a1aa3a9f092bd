"""A plan: what is captured for one shape of a method's inputs. A plan consists of pieces of the code.

A *captured* piece is neighbouring segments that one graph holds. A *called* piece is code that is called each time: one
segment that must not be captured or could not be recorded, or neighbouring segments on the host. Values that a captured piece
takes lie in static buffers: the plan's inputs, the outputs of graphs, and the values that called pieces gave when the plan
was made. A called piece works on the values of the current call. A graph writes its outputs to where the next piece reads
them. code/transfers.py says how values pass between the device and the host.

A plan belongs to the addresses that the code was bound to when the plan was recorded. When these addresses have changed, the
plan is recorded again and its graphs are updated in place. Recording executes nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from ostinato.delegate.code.side_stream import Call, side_lock
from ostinato.delegate.code.transfers import Needs, Transfers, departures, needed_on_device, results_of
from ostinato.delegate.errors import first_line
from ostinato.delegate.memory import MemoryWatch

from .recorders import Graph, GraphRecorder

# A plan whose addresses change on more consecutive calls than this costs more than it saves.
MAX_CHANGES = 4


class Code(Protocol):
    """The compiled code of a method, segment by segment; values are numbered as in `MethodRecord`."""

    @property
    def segments(self) -> Sequence[Needs]:
        """Inputs and outputs of each segment."""

    @property
    def results(self) -> Sequence[int]:
        """Numbers of the values that the method returns."""

    @property
    def called(self) -> frozenset[int]:
        """Segments that must not be captured."""

    @property
    def on_host(self) -> frozenset[int]:
        """Segments of `called` that run on the host, on values there."""

    @property
    def addresses(self) -> tuple[int, ...]:
        """Addresses of all constants and buffers that the code is bound to. The same object until the code is bound anew."""

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run all segments; outputs are on the device."""

    def start(self, inputs: Sequence[torch.Tensor]) -> None:
        """Begin a step whose segments are run one by one. To be called before the first `run_segment`."""

    def run_segment(self, index: int, values: dict[int, torch.Tensor]) -> None:
        """Run one segment: take its inputs from `values`, add its outputs, and drop values that no later segment needs."""


@dataclass
class PlanStats:
    """Numbers of one plan.

    Attributes:
        shapes: shapes of the inputs, in the order of the code's arguments.
        pieces, captured, called: number of all pieces, and of each kind.
        on_host: number of called pieces that run on the host.
        called_because: segment -> why it could not be recorded.
        launches: calls of the method that this plan answered.
        updates: number of times that a graph was updated in place because addresses had changed.
        instantiations: number of times that a graph was made executable: the first time, and after a refused update.
        given_up: why this shape has no graph any more, None if it has one.
        pool_bytes: device memory that the program's pool of graphs grew by when this plan was captured and updated; 0 on the
            CPU.
        record_us, update_us, instantiate_us: microseconds spent so far.
        graph_nodes: number of nodes of the graphs by type, such as "kernel" and "memcpy"; None if they cannot be counted.
        graph_kernels: number of kernels that one call runs in graphs; None like `graph_nodes`.
        early_kernels: number of these kernels that start before the kernel ahead has ended; None like `graph_nodes`.
        graph_note: why a graph could not be inspected, or why some of its edges stayed as they were captured.
    """

    shapes: list[list[int]]
    pieces: int = 0
    captured: int = 0
    called: int = 0
    on_host: int = 0
    called_because: dict[int, str] = field(default_factory=dict)
    launches: int = 0
    updates: int = 0
    instantiations: int = 0
    given_up: str | None = None
    pool_bytes: int = 0
    record_us: float = 0.0
    update_us: float = 0.0
    instantiate_us: float = 0.0
    graph_nodes: dict[str, int] | None = None
    graph_kernels: int | None = None
    early_kernels: int | None = None
    graph_note: str | None = None


@dataclass(frozen=True)
class Refusal:
    """Reason why segments were not recorded.

    Attributes:
        segments: the segment that failed, or all segments of the piece if the capture as a whole failed.
        reason: one line.
        no_memory: whether the device's memory ran out. Then no other capture is tried.
    """

    segments: range
    reason: str
    no_memory: bool


@dataclass
class _Piece:
    """Segments `first` to `end` - 1 of a plan. `takes`, `gives` and `leaving` are numbers of values.

    `graph` is None for a called piece: one segment, neighbouring segments on the host, or all remaining segments if memory
    runs out. The values of `leaving` go to the host at the piece's end.
    """

    first: int
    end: int
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    leaving: tuple[int, ...]
    graph: Graph | None = None
    on_host: bool = False


class Plan:
    """The pieces for one shape of inputs. A new plan is empty; `capture` makes the pieces while it runs one step.

    Args:
        code: the method's code.
        recorder: makes the graphs.
        inputs: static buffers of the inputs, filled: on the device if they are needed there, else on the host.
        stats: the numbers that this plan keeps up to date.
        call: function that runs called pieces.
        watch: recognises a capture that failed for lack of memory.
        device: the program's device.
    """

    def __init__(
        self,
        code: Code,
        recorder: GraphRecorder,
        inputs: Sequence[torch.Tensor],
        stats: PlanStats,
        call: Call,
        watch: MemoryWatch,
        device: torch.device,
    ) -> None:
        self._code = code
        self._recorder = recorder
        self._call = call
        self._watch = watch
        self.inputs = list(inputs)
        self.stats = stats
        self._addresses: tuple[int, ...] | None = code.addresses
        self._changes = 0
        self._pieces: list[_Piece] = []
        # Static buffers by the numbers of their values.
        self._static: dict[int, torch.Tensor] = dict(enumerate(inputs))
        # Known when all pieces are made. Until then the value that a called piece gives becomes the static buffer.
        self._read_by_graphs: frozenset[int] = frozenset()
        self._at = 0
        # The results, if one graph makes all of them.
        self._made_by_one: list[torch.Tensor] | None = None
        self._needed_on_device = needed_on_device(code.segments, code.on_host, code.results)
        self._departures = departures(code.segments, code.on_host)
        self._given_by_host = frozenset(n for index in code.on_host for n in code.segments[index].outputs)
        self._hosted_inputs = {n: tensor for n, tensor in self._static.items() if n not in self._needed_on_device}
        self._transfers = Transfers(device)

    @property
    def has_graphs(self) -> bool:
        return any(piece.graph for piece in self._pieces)

    def capture(self) -> list[torch.Tensor]:
        """Record and run the pieces, one after the other. Return the method's results.

        A segment that cannot be recorded is called from now on, and everything around it is captured. Each segment runs
        exactly once, however many attempts are needed: recording executes nothing. If memory runs out, all remaining segments
        are called this once, `stats.given_up` has the reason, and the plan must be released.
        """
        called, on_host = set(self._code.called), self._code.on_host
        because: dict[int, str] = {}
        at, count = 0, len(self._code.segments)
        off_host = set(range(count)) - on_host
        # A piece ends where values leave for the host, so that they need not wait for the rest.
        leaving = {index + 1 for index in self._departures}
        hosted = dict(self._hosted_inputs)

        def end(stops: Set[int]) -> int:
            return next((index for index in range(at + 1, count) if index in stops), count)

        self._code.start(self.inputs)
        while at < count:
            if at in on_host:
                piece = self._piece(at, end(off_host))
            elif at in called or self.stats.given_up:
                piece = self._piece(at, end(on_host | leaving) if self.stats.given_up else at + 1)
            else:
                recorded = self._record(at, end(called | leaving))
                if isinstance(recorded, Refusal):
                    because |= dict.fromkeys(recorded.segments, recorded.reason)
                    called |= set(recorded.segments)
                    if recorded.no_memory:
                        self.stats.given_up = recorded.reason
                    continue
                piece = recorded
            # Before the launch: if the launch fails, `release` must know the graph.
            self._pieces.append(piece)
            self._run_piece(piece, self._static, hosted)
            if piece.graph is not None:
                self._static.update(zip(piece.gives, piece.graph.outputs, strict=True))
            at = piece.end
        outputs = results_of(self._static, self._code.results, self._given_by_host)
        self._transfers.end()
        # Not earlier: if a step fails half way, the last numbers still hold.
        self.stats.called_because = because
        self._count()
        self.stats.launches += 1
        self._read_by_graphs = frozenset(number for piece in self._pieces if piece.graph for number in piece.takes)
        of_graphs = {number for piece in self._pieces if piece.graph for number in piece.gives}
        kept = of_graphs | self._read_by_graphs | set(range(len(self.inputs)))
        self._static = {number: tensor for number, tensor in self._static.items() if number in kept}
        self._find_results()
        return outputs

    def run(self) -> list[torch.Tensor]:
        """Run one step on the static inputs. The next step overwrites the outputs of graphs."""
        if self._made_by_one is not None:
            # The quick way, for the step that makes a token.
            graph = self._pieces[0].graph
            assert graph is not None
            graph.launch()
            self.stats.launches += 1
            return self._made_by_one
        values = dict(self._static)
        hosted = dict(self._hosted_inputs)
        self._code.start(self.inputs)
        for piece in self._pieces:
            self._run_piece(piece, values, hosted)
        outputs = results_of(values, self._code.results, self._given_by_host)
        self._transfers.end()
        self.stats.launches += 1
        return outputs

    def is_current(self) -> bool:
        """Whether the code is still bound to the addresses that the graphs use."""
        now = self._code.addresses
        if now is self._addresses or now == self._addresses:
            self._addresses = now
            self._changes = 0
            return True
        return False

    def may_change(self) -> bool:
        """Count one more consecutive call that found other addresses. Return False if there have been too many."""
        self._changes += 1
        return self._changes <= MAX_CHANGES

    def update(self) -> Refusal | None:
        """Record all graphs again for the addresses that the code is bound to now, and update them in place.

        Returns:
            None, or why a piece could not be recorded. In that case nothing was executed, and the plan must be released.
        """
        # If anything stops the loop, only some graphs have the new addresses, so the plan has none until all are done.
        self._addresses = None
        for piece in self._pieces:
            if piece.graph is None:
                continue
            held = self._recorder.pool_bytes()
            self._watch.begin()
            begin, self._at = time.perf_counter(), piece.first
            try:
                updated = piece.graph.update(partial(self._run_captured, piece))
            except Exception as error:
                return self._refusal(piece, error)
            if updated:
                self.stats.updates += 1
                self.stats.update_us += 1e6 * (time.perf_counter() - begin)
            else:
                self._count_instantiation(piece.graph, begin)
            self.stats.pool_bytes += self._recorder.pool_bytes() - held
            self._static.update(zip(piece.gives, piece.graph.outputs, strict=True))
        self._find_results()
        self._count()
        self._addresses = self._code.addresses
        return None

    def release(self) -> None:
        """Free the graphs, then the buffers."""
        for piece in self._pieces:
            if piece.graph is not None:
                piece.graph.release()
        self._pieces = []
        with side_lock:
            self._transfers.release()
        self._static, self._hosted_inputs, self._made_by_one = {}, {}, None
        self.inputs = []

    def _find_results(self) -> None:
        """Note where the results are if one graph makes all of them, and nothing leaves for the host."""
        alone = len(self._pieces) == 1 and self._pieces[0].graph is not None and not self._pieces[0].leaving
        self._made_by_one = [self._static[number] for number in self._code.results] if alone else None

    def _piece(self, first: int, end: int) -> _Piece:
        segments = self._code.segments
        made = {number for segment in segments[first:end] for number in segment.outputs}
        leaving = self._departures.get(end - 1, ())
        taken = {number for segment in segments[first:end] for number in segment.inputs}.union(leaving) - made
        needed = {number for segment in segments[end:] for number in segment.inputs} | set(self._code.results)
        takes, gives = tuple(sorted(taken)), tuple(sorted(made & needed))
        return _Piece(first, end, takes, gives, leaving, on_host=first in self._code.on_host)

    def _record(self, first: int, end: int) -> _Piece | Refusal:
        """Record the segments as a captured piece, which is not launched yet. Return a refusal if that fails."""
        piece = self._piece(first, end)
        held = self._recorder.pool_bytes()
        self._watch.begin()
        begin, self._at = time.perf_counter(), first
        try:
            piece.graph = self._recorder.record(partial(self._run_captured, piece))
            values = self._static | dict(zip(piece.gives, piece.graph.outputs, strict=False))
            if not self._transfers.ensure_room(
                {number: values[number] for number in piece.leaving if number in values}
            ):
                piece.graph.release()
                piece.graph = self._recorder.record(partial(self._run_captured, piece))
        except Exception as error:
            return self._refusal(piece, error)
        self._count_instantiation(piece.graph, begin)
        self.stats.pool_bytes += self._recorder.pool_bytes() - held
        return piece

    def _refusal(self, piece: _Piece, error: Exception) -> Refusal:
        """Make a refusal of an error that was raised while the piece was recorded. `_at` is the segment where it happened."""
        explained = self._watch.explain(error, f"capturing a graph for inputs of the shapes {self.stats.shapes}")
        # After the last segment, the capture as a whole failed.
        whole = self._at == piece.end
        segments = range(piece.first, piece.end) if whole else range(self._at, self._at + 1)
        return Refusal(segments, first_line(error) if explained is None else str(explained), explained is not None)

    def _count_instantiation(self, graph: Graph, begin: float) -> None:
        """Count a graph that was recorded and made executable since `begin` (seconds of `perf_counter`)."""
        self.stats.instantiations += 1
        self.stats.instantiate_us += graph.instantiate_us
        self.stats.record_us += 1e6 * (time.perf_counter() - begin) - graph.instantiate_us

    def _run_captured(self, piece: _Piece) -> list[torch.Tensor]:
        given = self._run_segments(piece, [self._static[number] for number in piece.takes])
        values = self._static | dict(zip(piece.gives, given, strict=True))
        self._transfers.record({number: values[number] for number in piece.leaving})
        return given

    def _run_piece(self, piece: _Piece, values: dict[int, torch.Tensor], hosted: dict[int, torch.Tensor]) -> None:
        """Launch or call the piece. A called piece works on `values` (device) and `hosted` (host), and adds what it gives.

        A graph works on its static buffers.
        """
        if piece.graph is not None:
            piece.graph.launch()
            if piece.leaving:
                self._transfers.launched()
        elif piece.on_host:
            self._run_on_host(piece, values, hosted)
        else:
            self._run_called(piece, values)
            self._transfers.send({number: values[number] for number in piece.leaving})

    def _run_called(self, piece: _Piece, values: dict[int, torch.Tensor]) -> None:
        """Call the piece on `values`. Outputs that a graph takes are copied to its static buffers; others go to `values`."""
        given = self._call(partial(self._run_segments, piece), [values[number] for number in piece.takes])
        for number, tensor in zip(piece.gives, given, strict=True):
            if number in self._read_by_graphs:
                self._static[number].copy_(tensor)
            else:
                values[number] = tensor

    def _run_segments(self, piece: _Piece, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the piece's code on its inputs, and return its outputs. `_at` is the segment that it has reached."""
        values = dict(zip(piece.takes, inputs, strict=True))
        for self._at in range(piece.first, piece.end):
            self._code.run_segment(self._at, values)
        self._at = piece.end
        return [values[number] for number in piece.gives]

    def _run_on_host(self, piece: _Piece, values: dict[int, torch.Tensor], hosted: dict[int, torch.Tensor]) -> None:
        """Call a piece on the host. Its inputs are in `hosted`; missing ones are copied from `values` on the device.

        Outputs stay in `hosted` for later pieces on the host. Outputs that the device needs are also added to `values`.
        """
        away = [number for number in piece.takes if number not in hosted]
        self._transfers.send({number: values[number] for number in away if number < len(self.inputs)})
        hosted.update(self._transfers.arrived(away))
        back = {}
        for number, tensor in zip(
            piece.gives, self._run_segments(piece, [hosted[n] for n in piece.takes]), strict=True
        ):
            hosted[number] = tensor
            if number in self._needed_on_device:
                back[number] = tensor
        values.update(self._transfers.to_device(back))

    def _count(self) -> None:
        graphs = [piece.graph for piece in self._pieces if piece.graph is not None]
        self.stats.pieces = len(self._pieces)
        self.stats.captured = len(graphs)
        self.stats.called = len(self._pieces) - len(graphs)
        self.stats.on_host = sum(piece.on_host for piece in self._pieces)
        nodes = [graph.nodes for graph in graphs]
        self.stats.graph_note = next((one.note for one in nodes if one.note), None)
        if nodes and all(one.by_type is not None for one in nodes):
            total = sum((Counter(one.by_type) for one in nodes), Counter())
            self.stats.graph_nodes = dict(total.most_common())
            self.stats.graph_kernels = total.get("kernel", 0)
            self.stats.early_kernels = sum(one.early for one in nodes)
