"""The GPU that code is compiled for: its properties, and the target that it is for Triton.

Code is generated in processes that are forked from this one, and a process that has started CUDA cannot fork one that uses
the GPU. So this process learns what it must know from a process of its own, and does not start CUDA before all are forked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from unittest import mock

import torch

from ostinato.delegate.artifact.target import Target, host_target

from .processes import call_in_processes

_WARP = 32


@dataclass(frozen=True)
class GpuProperties:
    """Properties of a GPU on which code for it depends.

    Attributes:
        name: the product's name.
        capability: compute capability: major and minor number.
        processors: number of streaming multiprocessors.
        shared_memory: the most bytes of shared memory that a block may have.
        l2_bytes: bytes of the L2 cache.
        free_memory: bytes of memory that nobody used when this was asked. Not compared.
    """

    name: str
    capability: tuple[int, int]
    processors: int
    shared_memory: int
    l2_bytes: int
    free_memory: int = field(repr=False, compare=False)


def gpu_properties() -> GpuProperties | None:
    """Return the properties of torch's current GPU; None without a GPU. If CUDA is not started here, it stays so."""
    if torch.version.cuda is None:
        return None
    return _asked() if torch.cuda.is_initialized() else _asked_elsewhere()


def compile_target(device: str) -> Target:
    """Return the target of code that is compiled on this machine now, for `device`. CUDA is not started.

    Raises:
        TargetError: the device is "cuda", and there is no GPU.
    """
    gpu = gpu_properties() if device == "cuda" else None
    return host_target(device, None if gpu is None else gpu.capability)


@contextmanager
def gpus_counted_by_nvml() -> Iterator[None]:
    """Inside this context, `torch.cuda.is_available` does not start CUDA.

    Needs the variable `PYTORCH_NVML_BASED_CUDA_CHECK`. Without it Inductor starts CUDA as soon as it is imported, and code
    for a GPU is generated in one process, which takes several times longer.
    """
    with mock.patch.dict(os.environ, {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}):
        yield


@contextmanager
def triton_target(device: str) -> Iterator[None]:
    """Inside this context, Triton knows the target of kernels for `device` without starting CUDA.

    torch asks for it when it finds out which arguments a kernel writes. Needs `_active` of `triton.runtime.driver`. Without
    it tracing starts CUDA, and code for a GPU is generated in one process, as above.
    """
    gpu = gpu_properties() if device == "cuda" else None
    if gpu is None:
        yield
        return
    import triton
    from triton.backends.compiler import GPUTarget

    major, minor = gpu.capability
    target = GPUTarget("cuda", 10 * major + minor, _WARP)
    with mock.patch.object(triton.runtime.driver, "_active", SimpleNamespace(get_current_target=lambda: target)):
        yield


def _asked() -> GpuProperties | None:
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties()
    return GpuProperties(
        found.name,
        (found.major, found.minor),
        found.multi_processor_count,
        found.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        found.L2_cache_size,
        torch.cuda.mem_get_info()[0],
    )


@cache
def _asked_elsewhere() -> GpuProperties | None:
    ((_, found, _),) = call_in_processes(lambda _: _asked(), [0], 1)
    # Without an answer there is no GPU; or this process has asked CUDA for one, and those that it forks can no more.
    return _asked() if found is None else found
