"""Amounts of free memory, and the errors and warnings for a person when memory is not enough."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from .errors import DeviceMemoryError

_ADVICE = (
    "Free memory on it, export the model with a smaller --max-seq-len or with --quant int4, or choose another GPU with "
    "CUDA_VISIBLE_DEVICES"
)


def free_device_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated: free in the driver, or held and not used by torch's allocator.

    Not more than `torch.cuda.set_per_process_memory_fraction` leaves. None on the CPU: there constants are memory-mapped, and
    the system provides pages when they are touched.
    """
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device)
    # By its index: unlike the functions above, this one does not take "cuda" for the current device.
    allowed = int(torch.cuda.get_per_process_memory_fraction(device.index) * total)
    return max(min(free, allowed - held), 0) + held - torch.cuda.memory_allocated(device)


def available_host_memory() -> int | None:
    """Bytes of host memory that can be allocated or can cache files, with those that already cache files (`MemAvailable`).

    None if the system does not report it.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def mapped_warning(mapped_bytes: int) -> str | None:
    """Return a warning if `mapped_bytes` of mapped constants do not stay in the host's memory, else None."""
    available = available_host_memory()
    if available is None or mapped_bytes <= available:
        return None
    return (
        f"{size_text(mapped_bytes)} of weights stay in the mapped file, and the host has {size_text(available)} of memory "
        "for them: parts will be read from the disk again and again. Free memory, or export the model with fewer bits"
    )


def check_room(device: torch.device, method: str, constant_bytes: int, buffer_bytes: int) -> None:
    """Raise DeviceMemoryError when `device` has no room for what loading `method` will allocate.

    On a CPU these are only the mutable buffers: constants stay in the mapped file. The system would grant more memory than
    there is, and end the process when the memory is used.
    """
    needed, free = constant_bytes + buffer_bytes, free_device_memory(device)
    if free is None:
        available = available_host_memory()
        if available is not None and buffer_bytes > available:
            raise DeviceMemoryError(
                f"method {method!r} needs {size_text(buffer_bytes)} of the host's memory for mutable buffers; "
                f"{size_text(available)} are available. Ask for fewer sessions or kv_tokens, or free memory"
            )
    elif needed > free:
        raise DeviceMemoryError(
            f"method {method!r} needs {size_text(needed)} on {_name(device)}: {size_text(constant_bytes)} of constants and "
            f"{size_text(buffer_bytes)} of mutable buffers; {size_text(free)} are free. {_ADVICE}"
        )


class MemoryWatch:
    """Recognises errors that mean that the device's memory ran out.

    torch's own error is easy to recognise. Compiled code turns every error into a RuntimeError that says only "API call
    failed" (torch 2.11 and 2.13). For such an error torch's count of failed allocations decides: it must have grown.
    One failed allocation explains one error only. So a program has one watch, and `explain` must see every error that may be
    of this kind, even one that is handled. The count covers the whole process: call `begin` before an attempt that may also
    fail for other reasons.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._failures = allocation_failures(device)

    def begin(self) -> None:
        """Ignore allocations that failed before this call."""
        self._failures = allocation_failures(self._device)

    def explain(self, error: Exception, doing: str) -> DeviceMemoryError | None:
        """Return the error to raise in place of `error`, None if it has another cause. `doing` is for the message."""
        before, self._failures = self._failures, allocation_failures(self._device)
        text = str(error)
        opaque = "API call failed" in text and self._failures > before
        if not (isinstance(error, torch.OutOfMemoryError) or "out of memory" in text.lower() or opaque):
            return None
        asked = re.search(r"Tried to allocate ([\d.]+ \w+)", text)
        needed = f"; the allocation that failed was of {asked[1]}" if asked else ""
        free = free_device_memory(self._device)
        left = f"; {size_text(free)} are free now" if free is not None else ""
        return DeviceMemoryError(f"{_name(self._device)} ran out of memory while {doing}{needed}{left}. {_ADVICE}")

    @contextmanager
    def explaining(self, doing: str) -> Iterator[None]:
        """Context manager: raise a DeviceMemoryError in place of an error that `explain` recognises; keep other errors."""
        try:
            yield
        except RuntimeError as error:
            explained = self.explain(error, doing)
            if explained is None:
                raise
            raise explained from error


def allocation_failures(device: torch.device) -> int:
    """Number of allocations on `device` that torch has failed to make in the life of this process."""
    return int(torch.cuda.memory_stats(device).get("num_ooms", 0)) if device.type == "cuda" else 0


def size_text(nbytes: float, digits: int = 1) -> str:
    """`18100000000` -> `"18.1 GB"`: decimal units, as in speeds of memory."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.{digits}f} {name}"
    return f"{nbytes:.0f} B"


def _name(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
