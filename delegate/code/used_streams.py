"""The CUDA streams that a program has queued work on. All of that work ends before memory, graphs or code are freed."""

from __future__ import annotations

import functools

import torch

from ostinato.delegate.errors import OstinatoError
from ostinato.delegate.torch_internals import current_stream_handle

from .side_stream import side_lock


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """`torch.cuda.current_stream`, which makes an object each time, and takes 5 to 10 us of a launch for it."""
    return _current(current_stream_handle(device), device)


@functools.lru_cache(maxsize=64)
def _current(handle: int, device: torch.device) -> torch.cuda.Stream:
    # Not `ExternalStream(handle)`: for the default stream, whose handle is 0, torch then takes another one from its pool.
    return torch.cuda.current_stream(device)


def is_capturing() -> bool:
    """Whether this thread is making a CUDA graph. Nothing can be waited for then, and no code can be unloaded."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class UsedStreams:
    """Notes the streams of a program's steps, and waits for them.

    A wait for the whole device would break a capture that another program is making in another thread.

    Args:
        device: the program's device. On the CPU no work is queued, so there is nothing to note.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        # By their handles.
        self._streams: dict[int, torch.cuda.Stream] = {}

    def note(self) -> None:
        """Note the current stream. To be called before work is queued there."""
        if self._on_gpu and (handle := current_stream_handle(self._device)) not in self._streams:
            self._streams[handle] = current_stream(self._device)

    def wait(self) -> None:
        """Wait for all work on the noted streams, which must still exist.

        Raises:
            OstinatoError: this thread is making a CUDA graph. Nothing has been waited for.
        """
        if is_capturing():
            raise OstinatoError(
                "nothing can be closed while this thread captures a CUDA graph: close it before or after the capture"
            )
        # The side stream is noted if it was current. Another thread may be making a capture there.
        with side_lock:
            for stream in self._streams.values():
                stream.synchronize()
