"""Every call that the runtime makes into private parts of torch: one function each, and one test each
(tests/delegate/test_torch_internals.py).

Public, and so not here: `torch.cuda.CUDAGraph` with `keep_graph`, `raw_cuda_graph` and `instantiate`, and `Tensor.set_`.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

# `AOTIModelContainerRunnerCpu` or `...Cuda`; torch gives no type for either.
Container = Any
# Alignment of tensors in bytes: compiled code loads up to 16 bytes at a time.
ALIGNMENT = 16
_calls = itertools.count()
# Result of `torch.cuda.graph_pool_handle`: two integers, whose type is private.
PoolHandle = Any


def load_container(path: str, device: torch.device) -> Container:
    """Load a shared library that AOTInductor made, as a torch container.

    Needs `torch._C._aoti.AOTIModelContainerRunnerCpu` and `...Cuda`, and their arguments by position. torch reads the list of
    ATen operators that the code calls by name from a file beside the library: the same path, with `.json` in place of `.so`.
    The public `torch._inductor.aoti_load_package` takes another file format and imports the compiler.
    Without this call no compiled method can be loaded. Seen in torch 2.11 and 2.13.

    Raises:
        RuntimeError: not a library, or not one that torch's container can open.
    """
    if device.type == "cuda":
        # (path, number of models, device, cubin folder, run_single_threaded). Single-threaded: the pool of
        # models of the default mode records events and waits, which a capture must not see.
        return torch._C._aoti.AOTIModelContainerRunnerCuda(path, 1, str(device), "", True)  # type: ignore[call-overload]
    return torch._C._aoti.AOTIModelContainerRunnerCpu(path, 1)


def bind_constants(container: Container, tensors: dict[str, torch.Tensor]) -> None:
    """Make a container use `tensors` as its constants, in place, without a copy. Keys are the names in its code.

    Needs `update_constant_buffer(tensors, use_inactive, validate_full_updates, user_managed)` of the container. The container
    keeps addresses, not references, and never frees a user-managed constant.
    Without this call every method would hold a copy of the weights, and methods could not share state. Seen in torch 2.11
    and 2.13.

    Raises:
        RuntimeError: a constant is missing, or has a wrong name. With `validate_full_updates` off, this constant would stay
            empty without an error.
    """
    container.update_constant_buffer(tensors, False, True, True)


def run_container(container: Container, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a container's code: work is queued on the current CUDA stream, and the outputs are freshly allocated.

    Needs `run(inputs)` of the container, which takes the current stream by itself. Without this call nothing runs. Seen in
    torch 2.11 and 2.13.
    """
    outputs: list[torch.Tensor] = container.run(inputs)
    return outputs


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source to its target of the same shape. All are contiguous, of one dtype and on one device: then a GPU runs
    one kernel for up to 64 small tensors.

    Needs `torch._foreach_copy_`. Without this call a row of small buffers would take a kernel for each size. Seen in torch
    2.11 and 2.13.
    """
    torch._foreach_copy_(targets, sources)  # type: ignore[arg-type]


def writes_to(tensor: torch.Tensor) -> int:
    """A number that grows when an operator of torch writes the tensor in place, or a view of it. Compiled code and graphs do
    not count, nor does what writes the same memory through another tensor. An inference tensor is not counted: for one, the
    number grows with each call.

    Needs `Tensor._version`. Without this call every prompt would write the parameters of its session anew. Seen in torch 2.11
    and 2.13.
    """
    return tensor._version if not tensor.is_inference() else next(_calls)


def free_pinned_memory() -> None:
    """Give the pinned host memory that torch caches back to the system. For CUDA builds of torch only.

    Needs `torch._C._host_emptyCache`. Without this call the 96 MiB that a load pins stay with the process. Seen in torch 2.11
    and 2.13, neither of which has a public function for it.
    """
    torch._C._host_emptyCache()


@contextmanager
def outside_modes() -> Iterator[None]:
    """Hide what is called inside from every dispatch mode of this thread: one that traces would record it, and one of fake
    tensors would refuse it. The garbage collector calls `__del__` also in the middle of a trace.

    Needs `torch._C._len_torch_dispatch_stack`, `torch._ops._len_torch_dispatch_stack_pre_dispatch` and
    `torch.utils._python_dispatch._disable_current_modes`. The last one imports the tracer, so it is called only where there
    are modes. Without this call a program that is freed during an export spoils that export. Seen in torch 2.11 and 2.13.
    """
    if torch._C._len_torch_dispatch_stack() or torch._ops._len_torch_dispatch_stack_pre_dispatch():
        with _disable_current_modes():
            yield
    else:
        yield


def current_stream_handle(device: torch.device) -> int:
    """The `cudaStream_t` of the current stream on `device`, as a number.

    Needs `torch._C._cuda_getCurrentRawStream`. Without this call every launch would make an object for its stream, as
    `torch.cuda.current_stream` does. Seen in torch 2.11 and 2.13.
    """
    return int(torch._C._cuda_getCurrentRawStream(device.index))


def pool_bytes(handle: PoolHandle) -> int:
    """Bytes of device memory that the pool `handle` holds, used or not.

    Needs `torch.cuda.memory_snapshot` with a handle. In torch 2.11 that call gives up a reference to each of the handle's two
    integers that it never took. An integer above 256 would be freed in use: with the 257th pool of a process, anything may
    then crash. So each call takes the two references first. If a later torch is mended, these integers are never freed.
    Without this call a plan could not say how much memory it takes. Seen in torch 2.11.
    """
    for number in handle:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(number))
    segments = torch.cuda.memory_snapshot(handle, include_traces=False)
    return sum(segment["total_size"] for segment in segments)


def end_allocation_to_pool(device: torch.device, handle: PoolHandle) -> None:
    """Stop the device's allocator from allocating into the pool `handle`, as the end of a capture does.

    Needs `torch._C._cuda_endAllocateToPool`. If CUDA has invalidated a capture, torch's `capture_end` raises before it does
    this. Without this call the allocator believes that the capture goes on: it delays the reuse of memory that several
    streams used, and `torch.cuda.empty_cache` fails. Seen in torch 2.11 and 2.13.

    Raises:
        RuntimeError: no capture into that pool is under way.
    """
    torch._C._cuda_endAllocateToPool(device.index, handle)


def release_pool(device: torch.device, handle: PoolHandle) -> None:
    """Release one use of the device's pool `handle`, as a graph's `reset` does after a complete capture.

    Needs `torch._C._cuda_releasePool`. A capture that CUDA invalidated is counted as a use, but its graph never releases it.
    Without this call the pool's memory would stay with the process. Seen in torch 2.11 and 2.13.
    """
    torch._C._cuda_releasePool(device.index, handle)
