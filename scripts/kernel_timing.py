"""Checks one case of `kernel_cases` on a GPU, and times it among other launches of its kind; captures and times graphs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from kernel_arguments import Arguments, RandomTensors, Shapes, tensors_of, with_tensors
from kernel_case import Case
from torch import Tensor

from ostinato.delegate.code.side_stream import side_stream
from ostinato.delegate.graphs.nodes import inspect_graph, start_early
from ostinato.export.kernels.delta_rule.reference import whole_states
from ostinato.export.kernels.operands import RecurrentState

# Largest allowed difference from the float64 reference, over the reference's largest number. bfloat16 results are rounded a
# few times on their way; float32 results differ by the order of sums. Integers must be the same.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-4}
# All buffers of a graph's launches together are this many times as large as L2, so that none is left in L2 from the replay
# before.
L2_TIMES = 4
# Most copies of a case's buffers. Attention at depth 0 reads so little that no number of copies is enough: the table marks
# cases that stay in L2.
MAX_COPIES = 512
# Launches in one graph, and replays of the graph between two events. With these, starting a graph takes less than a hundredth
# of the time.
LAUNCHES = 200
REPLAYS = 3


@dataclass(frozen=True)
class Timing:
    """Time of one case in one kind of graph.

    Attributes:
        microseconds: microseconds of one call: the median over the repetitions.
        kernels: number of kernels that one call launches; None if they cannot be counted.
    """

    microseconds: float
    kernels: int | None


@dataclass(frozen=True)
class Check:
    """Result of a check: the largest error, and a message about the first result that is past its tolerance."""

    error: float
    failure: str | None = None


def check(case: Case, shapes: Shapes, device: str) -> Check:
    """Compare results and written tensors with the float64 reference. Memory that the kernel allocates holds NaN before.

    Recurrent states are compared with their pending updates.
    """
    arguments = case.arguments(RandomTensors(shapes, device))
    wide = {name: with_tensors(value, _widened) for name, value in arguments.items()}
    with poisoned_memory():
        found = case.comparable(_as_tuple(case.kernel(*arguments.values())))
    expected = case.comparable(_as_tuple(case.reference(*wide.values())))
    pairs = {f"output {i}": pair for i, pair in enumerate(zip(found, expected, strict=True))}
    allowed = {name: TOLERANCE.get(one.dtype, 0.0) for name, (one, _) in pairs.items()}
    allowed |= {f"output {i}": TOLERANCE[shapes.dtype] for i in case.rounded}
    after, after_wide = (
        tensors_of({name: _with_pending(value) for name, value in values.items()}) for values in (arguments, wide)
    )
    pairs |= {name: (after[name], after_wide[name]) for name in case.writes}
    allowed |= {name: TOLERANCE.get(after[name].dtype, 0.0) for name in case.writes}
    errors = {name: difference(*pair) for name, pair in pairs.items()}
    failures = [f"{name} is off by {error:.1e}" for name, error in errors.items() if not error <= allowed[name]]
    return Check(max(errors.values()), failures[0] if failures else None)


def difference(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected magnitude; infinite if shapes differ or a number is not finite."""
    if found.shape != expected.shape or not found.double().isfinite().all():
        return float("inf")
    largest = (found.double() - expected.double()).abs().max()
    return (largest / expected.double().abs().max().clamp(min=1e-30)).item()


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside this context, `torch.empty` gives memory that is filled with NaN, or with the largest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def copies_of(case: Case, shapes: Shapes, l2_bytes: int, free_bytes: int) -> tuple[int, bool]:
    """Number of argument sets to cycle through, and whether they still fit in L2.

    The number is at least 2. It is as large as needed to exceed L2 `L2_TIMES` times, within MAX_COPIES and half of the free
    memory.
    """
    whole = sum(tensor.nbytes for tensor in tensors_of(case.arguments(RandomTensors(shapes, "meta"))).values())
    read = case.bytes_read(shapes)
    wanted = -(-L2_TIMES * l2_bytes // read)
    copies = max(2, min(wanted, MAX_COPIES, free_bytes // 2 // whole))
    return copies, copies * read <= l2_bytes


def time_case(case: Case, sets: list[Arguments], repetitions: int, *, early: bool) -> Timing:
    """Time the case in a graph whose launches go through `sets`, one after another.

    With `early`, kernels that can wait by themselves start before the kernel ahead of them has ended.
    """
    launches = -(-LAUNCHES // len(sets)) * len(sets)
    kernel = case.kernel
    kernel(*sets[0].values())
    torch.cuda.synchronize()

    def launch() -> None:
        for number in range(launches):
            kernel(*sets[number % len(sets)].values())

    # Kernels of a case read each other's results only after their wait.
    graph, kernels = captured(launch, {} if early else None)
    samples = [replay_microseconds(graph, REPLAYS) for _ in range(1 + repetitions)]
    graph.reset()
    microseconds = statistics.median(samples[1:]) / launches
    return Timing(microseconds, None if kernels is None else round(kernels / launches))


def captured(
    launch: Callable[[], None], required_ahead: Mapping[str, str] | None
) -> tuple[torch.cuda.CUDAGraph, int | None]:
    """Capture what `launch` launches, as the runtime does: on its stream, with early edges.

    Args:
        required_ahead: see `start_early`. None: no kernel starts early.

    Returns:
        (the graph; its number of kernels, None if they cannot be counted).
    """
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, stream=side_stream(torch.device("cuda", torch.cuda.current_device()))):
        launch()
    kernels = inspect_graph(graph.raw_cuda_graph()).kernels
    if required_ahead is not None:
        start_early(graph.raw_cuda_graph(), required_ahead)
    graph.instantiate()
    return graph, kernels


def replay_microseconds(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Return the time of a replay, the mean of `replays`."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # The first replay keeps the GPU busy while the host submits the others.
    graph.replay()
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / replays * 1e3


def _widened(tensor: Tensor) -> Tensor:
    """A copy, with floating-point numbers in float64."""
    return tensor.to(torch.float64, copy=True) if tensor.is_floating_point() else tensor.clone()


def _with_pending(value: Any) -> Any:
    """An argument; recurrent states with their pending updates as stored ones."""
    if not isinstance(value, RecurrentState):
        return value
    return RecurrentState(whole_states(value, torch.arange(len(value.stored), device=value.stored.device)))


def _as_tuple(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)
