"""The buffers that a plan's graphs read their inputs from."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ostinato.delegate.code.transfers import LINE, fill, size_of, views

# Bytes of an input up to which it is copied together with others.
_SMALL = 1 << 14


class StaticInputs:
    """The buffers that a plan's graphs read, filled with the inputs that it is made for.

    Those of small inputs from the host lie side by side in one buffer, which one copy fills: to queue a copy takes the host
    10 to 20 us after a wait for the GPU, and a prompt has four inputs.

    Args:
        inputs: on the host or on the program's device.
        devices: where the code reads each: on the program's device, or on the host.
        device: the program's.

    Attributes:
        buffers: contiguous, in the order of the inputs.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], devices: Sequence[torch.device], device: torch.device) -> None:
        given = list(zip(inputs, devices, strict=True))
        small = {
            number: tensor
            for number, (tensor, reader) in enumerate(given)
            if tensor.is_cpu and reader == device and tensor.nbytes <= _SMALL
        }
        # They are written again in other modes.
        with torch.inference_mode(False):
            self._whole = torch.empty(size_of(small, LINE), dtype=torch.uint8, device=device)
            # On the CPU it is that memory itself.
            self._on_host = torch.empty_like(self._whole, device="cpu") if device.type != "cpu" else self._whole
            self._views = views(self._on_host, small, LINE)
            together = views(self._whole, small, LINE)
            self.buffers = [
                together[number] if number in small else torch.empty(tensor.shape, dtype=tensor.dtype, device=reader)
                for number, (tensor, reader) in enumerate(given)
            ]
        self.fill(inputs)

    def fill(self, inputs: Sequence[torch.Tensor]) -> None:
        """Copy inputs of the same shapes and dtypes, on the host or on the device; one that is the buffer itself is there."""
        new = {number: one for number, one in enumerate(inputs) if one is not self.buffers[number]}
        if self._views and all(number in new and new[number].is_cpu for number in self._views):
            for number, view in self._views.items():
                fill(view, new.pop(number))
            if self._whole is not self._on_host:
                # The driver has read memory that is not pinned when this returns.
                self._whole.copy_(self._on_host, non_blocking=True)
        for number, tensor in new.items():
            buffer = self.buffers[number]
            # Code on the host reads its inputs at once.
            buffer.copy_(tensor, non_blocking=not buffer.is_cpu)
