"""The one CUDA stream for captures and for `use_shared_cuda_stream`, and the functions that run work on it."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence

import torch

from ostinato.delegate.cuda_driver import DriverError, call_driver, cuda_driver, fetch_lines

logger = logging.getLogger(__name__)

# CU_STREAM_NON_BLOCKING of cuda.h: work on the default stream does not wait for this stream, nor this one for it.
_NON_BLOCKING = 1

Code = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
# Calls a `Code` on the current stream or on another one: `run_here`, or `run_on_stream` with its stream.
Call = Callable[[Code, Sequence[torch.Tensor]], list[torch.Tensor]]

# Each program has its own lock, but all share the side stream: one thread's work must not get into another's capture. That
# includes freeing: for pinned memory torch queues an event on each stream that has used the memory. The lock is reentrant
# because code on the host that runs meanwhile may itself use a program.
side_lock = threading.RLock()


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream for all captures and all methods that share it. With it the device's cache begins to `fetch_lines`.

    One stream per method would cost 32 MiB each on an H200: cuBLAS keeps a workspace for every stream that it has seen.

    It is not one of torch's. torch has 32 streams and gives them out in turn, so the caller's thirty-third would be this one,
    and what another thread queues there during a capture would become part of the graph.
    """
    # torch's are made with the first of them, which starts CUDA on the device.
    shared = torch.cuda.Stream(device)
    with torch.cuda.device(device):
        try:
            fetch_lines()
        except DriverError as error:
            logger.debug("the cache fetches as it did: %s", error)
        try:
            (own,) = call_driver(cuda_driver(), "cuStreamCreate", _NON_BLOCKING)
        except DriverError as error:
            logger.warning("captures have no stream of their own (%s): use at most 30 streams beside them", error)
            return shared
    # Never destroyed: it lives as long as the process.
    return torch.cuda.ExternalStream(int(own), device)


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
