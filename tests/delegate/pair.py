"""Helpers: one program loaded twice, with and without graphs; and segments that are made to fail, or to refuse recording."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ostinato.delegate import load_program
from ostinato.delegate.code.method_code import MethodCode
from ostinato.delegate.graphs.pool import Work
from ostinato.delegate.graphs.recorders import HostGraphRecorder, _HostGraph

from .chain import WIDTH

SEGMENTS = 3
NOT_RECORDED = "segment . cannot be recorded|captur"
GRAPH: dict[str, bool | int | str] = {"enable_cuda_graph_for_method": "step", "cuda_graph_warmup_steps": 1}


def inputs_of(length: int, seed: int) -> tuple[Tensor, Tensor]:
    return torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(seed)), torch.tensor([seed % 100])


def with_graphs(name: str) -> dict[str, bool | int | str]:
    return {**GRAPH, "enable_cuda_graph_for_method": name}


class Pair:
    """The same program with and without graphs. `step` runs both, and asserts that all results and state are equal."""

    def __init__(self, artifact: Path, name: str = "step", /, **options: bool | int | str) -> None:
        self.program, self.plain_program = load_program(artifact), load_program(artifact)
        self.method = self.program.load_method(name, {**GRAPH, "enable_cuda_graph_for_method": name, **options})
        self.plain = self.plain_program.load_method(name)
        self.steps = 0

    def step(self, length: int = 3) -> None:
        self.steps += 1
        inputs = inputs_of(length, self.steps)
        found, expected = self.method.execute(inputs), self.plain.execute(inputs)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        state, plain = self.program.mutable_buffers, self.plain_program.mutable_buffers
        assert all(torch.equal(state[key], plain[key]) for key in plain)

    def reset(self) -> None:
        self.program.reset()
        self.plain_program.reset()

    def change_state(self) -> None:
        """Bind a new state to both programs."""
        for program in (self.program, self.plain_program):
            program.bind_state(program.new_state())

    def close(self) -> None:
        self.program.close()
        self.plain_program.close()


@contextmanager
def failing(segment: int) -> Iterator[None]:
    """Make the segment raise an error when it runs."""
    run = MethodCode.run_segment

    def run_segment(self: MethodCode, index: int, values: dict[int, Tensor]) -> None:
        if index == segment:
            raise RuntimeError("no more threads")
        run(self, index, values)

    with mock.patch.object(MethodCode, "run_segment", run_segment):
        yield


@contextmanager
def refusing(segments: set[int]) -> Iterator[None]:
    """Make segments impossible to record: on a GPU they synchronise during the capture; on the host recording first goes
    through the code without executing it."""
    if torch.cuda.is_available() and torch.cuda.get_allocator_backend() != "native":
        pytest.skip("with this allocator torch captures nothing more in a process after a capture that failed")
    recording = False
    run, record, update = MethodCode.run_segment, HostGraphRecorder.record, _HostGraph.update

    def run_segment(self: MethodCode, index: int, values: dict[int, Tensor]) -> None:
        if not recording:
            if index in segments and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                torch.cuda.synchronize()
            return run(self, index, values)
        if index in segments:
            raise RuntimeError(f"segment {index} cannot be recorded")
        values.update((number, torch.empty(0)) for number in self.segments[index].outputs)
        return None

    def dry(work: Work) -> None:
        nonlocal recording
        recording = True
        try:
            work()
        finally:
            recording = False

    def dry_record(self: HostGraphRecorder, work: Work) -> Any:
        dry(work)
        return record(self, work)

    def dry_update(self: _HostGraph, work: Work) -> bool:
        dry(work)
        return update(self, work)

    with (
        mock.patch.object(MethodCode, "run_segment", run_segment),
        mock.patch.object(HostGraphRecorder, "record", dry_record),
        mock.patch.object(_HostGraph, "update", dry_update),
    ):
        yield
