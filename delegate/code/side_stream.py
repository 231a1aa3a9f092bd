"""The one stream for captures and shared runs, and how work gets there."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence

import torch

Run = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
# Has the work of a `Run` queued, on this stream or another: `run_here`, or `run_on_stream` for one stream.
Call = Callable[[Run, Sequence[torch.Tensor]], list[torch.Tensor]]

# Programs have locks of their own but share the side stream: one thread's work must not get into another's capture. Code on
# the host that runs in between may itself use a program.
side_lock = threading.RLock()


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream for captures and shared runs. One stream per method would cost 32 MiB each on an H200: cuBLAS keeps a
    workspace for every stream that it has seen."""
    return torch.cuda.Stream(device)


def run_here(run: Run, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run on the current stream."""
    return run(inputs)


def run_on_stream(stream: torch.cuda.Stream, run: Run, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run on `stream`, after all work that the current stream holds and before all that it will get."""
    current = torch.cuda.current_stream(stream.device)
    with side_lock:
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                outputs = run(inputs)
        finally:
            # What comes next may be a reset of the state that a step wrote before it failed.
            current.wait_stream(stream)
    for tensor in inputs:
        # Those that code on the host takes are there.
        if tensor.is_cuda:
            tensor.record_stream(stream)
    for tensor in outputs:
        tensor.record_stream(current)
    return outputs
