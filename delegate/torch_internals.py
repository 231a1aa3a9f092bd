"""Every call that the runtime makes into private parts of torch: one function each, and one test each
(tests/delegate/test_torch_internals.py).

Public, and so not here: `torch.cuda.CUDAGraph` with `keep_graph`, `raw_cuda_graph` and `instantiate`, and `Tensor.set_`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# `AOTIModelContainerRunnerCpu` or `...Cuda`; torch gives no type for either.
Container = Any
# Bytes; compiled code loads up to 16 at a time.
ALIGNMENT = 16
# What `torch.cuda.graph_pool_handle` gives: two integers, whose type is private.
PoolHandle = Any


def load_container(path: str, device: torch.device) -> Container:
    """Load the shared library that AOTInductor made, as torch's container of it.

    Needs `torch._C._aoti.AOTIModelContainerRunnerCpu` and `...Cuda`, and their arguments by position. torch looks for the
    list of ATen operators that the code calls by name beside the library: the same path with `.json` for `.so`. The public
    `torch._inductor.aoti_load_package` takes another file format and imports the compiler.
    Without it no compiled method can be loaded. Seen in torch 2.11 and 2.13.

    Raises:
        RuntimeError: not a library, or not one that torch's container can open.
    """
    if device.type == "cuda":
        # (path, number of models, device, cubin folder, run_single_threaded). Single-threaded: the pool of
        # models of the default mode records events and waits, which a capture must not see.
        return torch._C._aoti.AOTIModelContainerRunnerCuda(path, 1, str(device), "", True)  # type: ignore[call-overload]
    return torch._C._aoti.AOTIModelContainerRunnerCpu(path, 1)


def bind_constants(container: Container, tensors: dict[str, torch.Tensor]) -> None:
    """Have a container use `tensors` in place, without a copy: all of its constants, by the names in its code.

    Needs `update_constant_buffer(tensors, use_inactive, validate_full_updates, user_managed)` of the container. It keeps
    addresses, not references, and never frees a user-managed constant.
    Without it every method would hold a copy of the weights, and methods could not share state. Seen in torch 2.11 and 2.13.

    Raises:
        RuntimeError: a constant is missing, or under a wrong name. With `validate_full_updates` off, that one would keep
            its place empty, without an error.
    """
    container.update_constant_buffer(tensors, False, True, True)


def run_container(container: Container, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a container's code: work is queued on the current CUDA stream, and the outputs are freshly allocated.

    Needs `run(inputs)` of the container, which takes the current stream by itself. Without it nothing runs. Seen in torch
    2.11 and 2.13.
    """
    outputs: list[torch.Tensor] = container.run(inputs)
    return outputs


def free_pinned_memory() -> None:
    """Give the pinned host memory that torch caches back to the system. For CUDA builds of torch only.

    Needs `torch._C._host_emptyCache`. Without it the 96 MiB that a load pins stay with the process. Seen in torch 2.11 and
    2.13, neither of which has a public function for it.
    """
    torch._C._host_emptyCache()


def current_stream_handle(device: torch.device) -> int:
    """The `cudaStream_t` of the current stream on `device`, as a number.

    Needs `torch._C._cuda_getCurrentRawStream`. `torch.cuda.current_stream` makes an object each time, which takes 10 us of a
    launch in a process that has just waited for the GPU. Seen in torch 2.11 and 2.13.
    """
    return int(torch._C._cuda_getCurrentRawStream(device.index))


def end_allocation_to_pool(device: torch.device, handle: PoolHandle) -> None:
    """Have the device's allocator take no more memory for a capture out of the pool `handle`: what a capture's end does.

    Needs `torch._C._cuda_endAllocateToPool`. When CUDA has given a capture up, torch's `capture_end` raises before it does
    this. Without it the allocator takes a capture to be under way for ever: it puts off the reuse of memory that several
    streams used, and `torch.cuda.empty_cache` fails. Seen in torch 2.11 and 2.13.

    Raises:
        RuntimeError: no capture into that pool is under way.
    """
    torch._C._cuda_endAllocateToPool(device.index, handle)


def release_pool(device: torch.device, handle: PoolHandle) -> None:
    """Take back one use of the device's pool `handle`, as `reset` does for a graph that was captured to its end.

    Needs `torch._C._cuda_releasePool`. A capture that CUDA gave up is counted as a use, but its graph never releases it:
    without this the pool's memory would stay with the process. Seen in torch 2.11 and 2.13.
    """
    torch._C._cuda_releasePool(device.index, handle)
