"""The one CUDA stream for captures and for `use_shared_cuda_stream`, and the functions that run work on it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence

import torch

Code = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
# Calls a `Code` on the current stream or on another one: `run_here`, or `run_on_stream` with its stream.
Call = Callable[[Code, Sequence[torch.Tensor]], list[torch.Tensor]]

# Each program has its own lock, but all share the side stream: one thread's work must not get into another's capture. The
# lock is reentrant because code on the host that runs meanwhile may itself use a program.
side_lock = threading.RLock()


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream for all captures and all methods that share it.

    One stream per method would cost 32 MiB each on an H200: cuBLAS keeps a workspace for every stream that it has seen.
    """
    return torch.cuda.Stream(device)


def run_here(run: Code, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run on the current stream."""
    return run(inputs)


def run_on_stream(stream: torch.cuda.Stream, run: Code, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run on `stream`: after all work queued on the current stream so far, and before all work queued there later."""
    current = torch.cuda.current_stream(stream.device)
    with side_lock:
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                outputs = run(inputs)
        finally:
            # After an error too: the next work may reset the state that the failed step wrote.
            current.wait_stream(stream)
    for tensor in inputs:
        # Inputs that code on the host takes are not on the GPU.
        if tensor.is_cuda:
            tensor.record_stream(stream)
    for tensor in outputs:
        tensor.record_stream(current)
    return outputs
