"""The buffers that a plan's graphs read their inputs from."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ostinato.delegate.code.transfers import LINE, fill, size_of, views

# Inputs of at most this many bytes are copied together.
_SMALL = 1 << 14


class StaticInputs:
    """Input buffers of a plan's graphs, filled with the inputs that the plan is made for.

    Buffers of small inputs from the host lie side by side in one larger buffer, which one copy fills. After a wait for the
    GPU, queuing a copy takes the host 10 to 20 us, and a prompt has four inputs.

    Args:
        inputs: input tensors, on the host or on the program's device.
        devices: for each input, where the code reads it: the program's device, or the host.
        device: the program's device.

    Attributes:
        buffers: contiguous buffers, in the order of the inputs.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], devices: Sequence[torch.device], device: torch.device) -> None:
        given = list(zip(inputs, devices, strict=True))
        small = {
            number: tensor
            for number, (tensor, reader) in enumerate(given)
            if tensor.is_cpu and reader == device and tensor.nbytes <= _SMALL
        }
        # Not inference tensors: they are also written outside inference mode.
        with torch.inference_mode(False):
            self._whole = torch.empty(size_of(small, LINE), dtype=torch.uint8, device=device)
            # On the CPU both are the same memory.
            self._on_host = torch.empty_like(self._whole, device="cpu") if device.type != "cpu" else self._whole
            self._views = views(self._on_host, small, LINE)
            together = views(self._whole, small, LINE)
            self.buffers = [
                together[number] if number in small else torch.empty(tensor.shape, dtype=tensor.dtype, device=reader)
                for number, (tensor, reader) in enumerate(given)
            ]
        self.fill(inputs)

    def fill(self, inputs: Sequence[torch.Tensor]) -> None:
        """Copy inputs of the same shapes and dtypes into the buffers. An input that is the buffer itself is not copied."""
        new = {number: one for number, one in enumerate(inputs) if one is not self.buffers[number]}
        if self._views and all(number in new and new[number].is_cpu for number in self._views):
            for number, view in self._views.items():
                fill(view, new.pop(number))
            if self._whole is not self._on_host:
                # This memory is not pinned, so the driver has read it when the call returns, and it can be filled again.
                self._whole.copy_(self._on_host, non_blocking=True)
        for number, tensor in new.items():
            buffer = self.buffers[number]
            # Code on the host reads its inputs at once, so they must be complete.
            buffer.copy_(tensor, non_blocking=not buffer.is_cpu)
