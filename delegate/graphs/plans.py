"""What is captured for one shape of a method's inputs: a plan, which is pieces of the method's code over static buffers.

A piece is a run of segments that one graph holds (*captured*), or one segment whose code is called each time (*called*),
because the program says so or because it could not be recorded; or it is a run of segments on the host, called as well.
Values that a captured piece takes lie in static buffers: the plan's inputs, the outputs of graphs, and what called pieces
gave when the plan was made. So a called piece works on this call's values, and a graph writes to where the next piece reads.
How values pass between the device and the host is in code/transfers.py.

A plan belongs to the addresses that the code was bound to when it was recorded. When these have changed, it is recorded again
and its graphs are updated in place; recording executes nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from ostinato.delegate.code.side_stream import Call
from ostinato.delegate.code.transfers import Needs, Transfers, departures, needed_on_device, results_of
from ostinato.delegate.errors import first_line
from ostinato.delegate.memory import MemoryWatch

from .recorders import Graph, GraphRecorder

# A plan whose addresses changed on more calls than this, one after the other, costs more than it saves.
MAX_CHANGES = 4


class Code(Protocol):
    """The compiled code of a method, segment by segment; values are numbered as in `MethodRecord`."""

    @property
    def segments(self) -> Sequence[Needs]:
        """What each segment takes and gives."""

    @property
    def results(self) -> Sequence[int]:
        """Numbers of what the method returns."""

    @property
    def called(self) -> frozenset[int]:
        """Segments that must not be captured."""

    @property
    def on_host(self) -> frozenset[int]:
        """Those of `called` that run on the host, over values there."""

    @property
    def addresses(self) -> tuple[int, ...]:
        """Of all constants and buffers that the code is bound to; the same object as long as nothing is bound anew."""

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run all segments; outputs are on the device."""

    def start(self, inputs: Sequence[torch.Tensor]) -> None:
        """Called before the segments of a step, where they are run one by one."""

    def run_segment(self, index: int, values: dict[int, torch.Tensor]) -> None:
        """Run one: takes its inputs out of `values`, adds its outputs, and drops what no later one needs."""


@dataclass
class PlanStats:
    """One plan, in numbers.

    Attributes:
        shapes: of the inputs, in the order of the code's arguments.
        pieces, captured, called: how many there are, of each kind.
        on_host: how many of the called ones run on the host.
        called_because: segment -> why it could not be recorded.
        launches: calls of the method that this plan answered.
        updates: how often graphs were updated in place because addresses had changed, counted by graph.
        instantiations: graphs made executable, the first time and when an update was refused.
        given_up: why this shape has no graph any more, None if it has one.
        pool_bytes: device memory that the program's pool of graphs grew by when this plan was captured, and with its updates;
            0 on the CPU.
        record_us, update_us, instantiate_us: microseconds spent so far.
        graph_nodes: nodes of the graphs by type, such as "kernel" and "memcpy"; None where they cannot be counted.
        graph_kernels: kernels that one call runs in graphs; None like `graph_nodes`.
        early_kernels: how many of them start before the one ahead has ended; None like `graph_nodes`.
        graph_note: why a graph could not be looked into, or why edges of it stayed as they were captured.
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
    """Why segments were not recorded.

    Attributes:
        segments: the one that failed, or all of them if it was the capture as a whole.
        reason: one line.
        no_memory: whether the device's memory ran out: then no other capture is tried.
    """

    segments: range
    reason: str
    no_memory: bool


@dataclass
class _Piece:
    """Segments `first` to `last`; `graph` is None where they are called: one, on the host all that follow each other, or all
    that are left if memory runs out. `leaving` is what goes to the host at its end."""

    first: int
    last: int
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    leaving: tuple[int, ...]
    graph: Graph | None = None
    on_host: bool = False


class Plan:
    """The pieces for one shape of inputs. Made empty; `capture` makes the pieces, and a step of the model on the way.

    Args:
        code: the method's.
        recorder: makes the graphs.
        inputs: static buffers of the inputs, filled; on the device those that are needed there, the others on the host.
        stats: where it counts.
        call: where called pieces run.
        watch: recognises a capture that failed for lack of memory.
        device: the program's.
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
        # Known when all pieces are made; until then what a called piece gives becomes the buffer.
        self._read_by_graphs: frozenset[int] = frozenset()
        self._at = 0
        self._needed_on_device = needed_on_device(code.segments, code.on_host, code.results)
        self._departures = departures(code.segments, code.on_host)
        self._given_by_host = frozenset(n for index in code.on_host for n in code.segments[index].outputs)
        self._hosted_inputs = {n: tensor for n, tensor in self._static.items() if n not in self._needed_on_device}
        self._transfers = Transfers(device)

    @property
    def has_graphs(self) -> bool:
        return any(piece.graph for piece in self._pieces)

    def capture(self) -> list[torch.Tensor]:
        """Record and run the pieces, one after the other; what the method returns.

        A segment that cannot be recorded is called from now on, and all around it is captured. Each segment runs exactly
        once, however many attempts that takes: recording executes nothing. Where memory runs out, all that is left is called
        this once, `stats.given_up` says so, and the plan must be released.
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
            # First: `release` must know a graph whose launch fails.
            self._pieces.append(piece)
            self._run_piece(piece, self._static, hosted)
            if piece.graph is not None:
                self._static.update(zip(piece.gives, piece.graph.outputs, strict=True))
            at = piece.last
        outputs = results_of(self._static, self._code.results, self._given_by_host)
        self._transfers.end()
        # Not before: where a step fails half way, what was counted last still holds.
        self.stats.called_because = because
        self._count()
        self.stats.launches += 1
        self._read_by_graphs = frozenset(number for piece in self._pieces if piece.graph for number in piece.takes)
        of_graphs = {number for piece in self._pieces if piece.graph for number in piece.gives}
        kept = of_graphs | self._read_by_graphs | set(range(len(self.inputs)))
        self._static = {number: tensor for number, tensor in self._static.items() if number in kept}
        return outputs

    def run(self) -> list[torch.Tensor]:
        """One step over the static inputs. What a graph gives is overwritten by the next step."""
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
        """Whether the code is still bound to the addresses that the graphs have."""
        now = self._code.addresses
        if now is self._addresses or now == self._addresses:
            self._addresses = now
            self._changes = 0
            return True
        return False

    def may_change(self) -> bool:
        """Count one more call in a row that found other addresses; False when there have been too many."""
        self._changes += 1
        return self._changes <= MAX_CHANGES

    def update(self) -> Refusal | None:
        """Record all graphs again for the addresses that the code is bound to now, and update them in place.

        Returns:
            What kept a piece from being recorded; nothing was executed, and the plan must be released. None if all went well.
        """
        # Until all are done, whatever ends this leaves some graphs with other addresses than others.
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
        self._count()
        self._addresses = self._code.addresses
        return None

    def release(self) -> None:
        """Free the graphs, then the buffers."""
        for piece in self._pieces:
            if piece.graph is not None:
                piece.graph.release()
        self._pieces = []
        self._transfers.release()
        self._static, self._hosted_inputs = {}, {}
        self.inputs = []

    def _piece(self, first: int, last: int) -> _Piece:
        segments = self._code.segments
        made = {number for segment in segments[first:last] for number in segment.outputs}
        leaving = self._departures.get(last - 1, ())
        taken = {number for segment in segments[first:last] for number in segment.inputs}.union(leaving) - made
        needed = {number for segment in segments[last:] for number in segment.inputs} | set(self._code.results)
        takes, gives = tuple(sorted(taken)), tuple(sorted(made & needed))
        return _Piece(first, last, takes, gives, leaving, on_host=first in self._code.on_host)

    def _record(self, first: int, last: int) -> _Piece | Refusal:
        """The segments as a captured piece, not launched yet; or why not."""
        piece = self._piece(first, last)
        held = self._recorder.pool_bytes()
        self._watch.begin()
        begin, self._at = time.perf_counter(), first
        try:
            piece.graph = self._recorder.record(partial(self._run_captured, piece))
            values = self._static | dict(zip(piece.gives, piece.graph.outputs, strict=False))
            if not self._transfers.has_room({number: values[number] for number in piece.leaving if number in values}):
                piece.graph.release()
                piece.graph = self._recorder.record(partial(self._run_captured, piece))
        except Exception as error:
            return self._refusal(piece, error)
        self._count_instantiation(piece.graph, begin)
        self.stats.pool_bytes += self._recorder.pool_bytes() - held
        return piece

    def _refusal(self, piece: _Piece, error: Exception) -> Refusal:
        """What `error` means, which came while the piece was recorded, `_at` being where."""
        explained = self._watch.explain(error, f"capturing a graph for inputs of the shapes {self.stats.shapes}")
        # After the last segment it was the capture as a whole that failed.
        whole = self._at == piece.last
        segments = range(piece.first, piece.last) if whole else range(self._at, self._at + 1)
        return Refusal(segments, first_line(error) if explained is None else str(explained), explained is not None)

    def _count_instantiation(self, graph: Graph, begin: float) -> None:
        """Of a graph that has been recorded since `begin`, and made executable."""
        self.stats.instantiations += 1
        self.stats.instantiate_us += graph.instantiate_us
        self.stats.record_us += 1e6 * (time.perf_counter() - begin) - graph.instantiate_us

    def _run_captured(self, piece: _Piece) -> list[torch.Tensor]:
        given = self._run_segments(piece, [self._static[number] for number in piece.takes])
        values = self._static | dict(zip(piece.gives, given, strict=True))
        self._transfers.record({number: values[number] for number in piece.leaving})
        return given

    def _run_piece(self, piece: _Piece, values: dict[int, torch.Tensor], hosted: dict[int, torch.Tensor]) -> None:
        """Launch or call it on the device's `values` and on what is `hosted`. What a called one gives is there then; a graph
        writes to its static buffers."""
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
        """Call the piece on `values`. What it gives and a graph takes goes to the buffer that the graph knows."""
        given = self._call(partial(self._run_segments, piece), [values[number] for number in piece.takes])
        for number, tensor in zip(piece.gives, given, strict=True):
            if number in self._read_by_graphs:
                self._static[number].copy_(tensor)
            else:
                values[number] = tensor

    def _run_segments(self, piece: _Piece, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the piece's code on what it takes; what it gives. `_at` says how far it came."""
        values = dict(zip(piece.takes, inputs, strict=True))
        for self._at in range(piece.first, piece.last):
            self._code.run_segment(self._at, values)
        self._at = piece.last
        return [values[number] for number in piece.gives]

    def _run_on_host(self, piece: _Piece, values: dict[int, torch.Tensor], hosted: dict[int, torch.Tensor]) -> None:
        """Call the segments on what is in `hosted`, or else on copies of what the device has given.

        What they give stays in `hosted` for later pieces on the host, and goes to `values` if the device needs it.
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
