"""Facts that a measurement records about its machine: the device's name, its memory in use, and the speed of its copies."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass
from pathlib import Path

import torch

_CUDA_COPY_BYTES = 1 << 30
_HOST_COPY_BYTES = 256 << 20
_ROUNDS = 5
# Copies per round: 1 GiB takes an H200 half a millisecond, and one synchronisation a few percent of that.
_COPIES = 8


@dataclass(frozen=True)
class CopySpeed:
    """Best speed of `rounds` rounds of copies of `buffer_bytes`. Each byte counts twice, as it is read and written."""

    bytes_per_second: float
    buffer_bytes: int
    rounds: int


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes in use on a GPU. `used` is the driver's count, of all processes; `allocated` torch's own, for tensors."""

    used: int
    total: int
    allocated: int


def device_name(device: torch.device) -> str:
    """`NVIDIA H200 (sm_90)`, or the processor's name and the number of threads that torch uses."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
    threads = torch.get_num_threads()
    return f"{_processor()}, {threads} {'thread' if threads == 1 else 'threads'}"


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Return the memory in use on a GPU; None for a CPU."""
    if device.type != "cuda":
        return None
    synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total - free, total, torch.cuda.memory_allocated(device))


def copy_speed(device: torch.device) -> CopySpeed:
    """Copy a buffer within the device's memory: 1 GiB on a GPU, but at most a quarter of what is free; 256 MiB on a CPU."""
    size = _HOST_COPY_BYTES
    if device.type == "cuda":
        torch.cuda.empty_cache()
        size = min(_CUDA_COPY_BYTES, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    best = float("inf")
    for _ in range(_ROUNDS):
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(_COPIES):
            target.copy_(source)
        synchronize(device)
        best = min(best, (time.perf_counter() - begin) / _COPIES)
    del source, target
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return CopySpeed(2 * size / best, size, _ROUNDS)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all its work; on a CPU nothing is ever pending."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()
