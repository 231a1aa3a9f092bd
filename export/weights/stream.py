"""Values of a network's parameters, made when they are asked for: read or random, quantised, and not kept in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from ostinato.delegate.errors import CheckpointError, ExportError
from ostinato.delegate.memory import size_text
from ostinato.export.kernels.linear.panels import LANES, pack_panels

from .quantize import BLOCK, quantize_int4, quantize_int8

_SCALE = "_scale"


class WeightSource(Protocol):
    """Source of floating-point parameters by name: `CheckpointWeights` or `DummyWeights`."""

    def read(self, name: str) -> Tensor: ...


class QuantizedWeights(Mapping[str, Tensor]):
    """Parameter name -> its value as the artifact stores it, on the CPU. The value is made again each time it is asked for.

    A parameter is quantised if the network also has its name with `_scale` at the end. Asking for one of the two makes both,
    and the other one is kept until it is asked for.

    Args:
        network: network whose parameters have shapes and dtypes; their values do not matter.
        source: the values before quantisation.
        device: device that computes the quantisation.
        hqq: whether int4 scales are chosen by half-quadratic quantisation.

    Asking for a value raises CheckpointError if the value cannot be read, or cannot be quantised.
    """

    def __init__(self, network: nn.Module, source: WeightSource, device: torch.device, hqq: bool = False) -> None:
        self._parameters = dict(network.named_parameters())
        self._source = source
        self._device = device
        self._hqq = hqq
        self._in_panels = names_in_panels(network)
        self._kept: dict[str, Tensor] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def __contains__(self, name: object) -> bool:
        """Look the name up. `Mapping`'s own method would make the value to find out."""
        return name in self._parameters

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._parameters:
            raise KeyError(name)
        if name in self._kept:
            return self._kept.pop(name)
        base = name.removesuffix(_SCALE)
        if base + _SCALE in self._parameters:
            value, scale = self._quantize(base)
        else:
            value, scale = self._source.read(name).to(self._parameters[name].dtype), None
        if base in self._in_panels:
            value, scale = _packed(value, scale)
        if scale is None:
            return _on_host(value)
        pair = {base: _on_host(value), base + _SCALE: _on_host(scale)}
        wanted = pair.pop(name)
        self._kept = pair
        return wanted

    def _quantize(self, name: str) -> tuple[Tensor, Tensor]:
        weight = self._source.read(name)
        group_size = weight.shape[-1] // self._parameters[name + _SCALE].shape[-1]
        if self._parameters[name].dtype == torch.int8:
            stored, scale = quantize_int8(weight, group_size, self._device)
        else:
            stored, scale = quantize_int4(weight, group_size, self._hqq, self._device)
        if not scale.isfinite().all():
            raise CheckpointError(f"parameter {name!r} cannot be quantised: it holds values that are infinite or NaN")
        return stored, scale


def _packed(values: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """`pack_panels`, some rows at a time: that bounds its temporaries, which on a CPU then stay in the caches."""
    if values.shape[-2] % LANES:
        return pack_panels(values, scale)
    rows, scales = values.flatten(0, -2), None if scale is None else scale.flatten(0, -2)
    packed = torch.empty_like(rows)
    packed_scales = None if scales is None else torch.empty_like(scales)
    step = max(1, BLOCK[values.device.type] // rows.shape[1] // LANES) * LANES
    for begin in range(0, rows.shape[0], step):
        some = slice(begin, begin + step)
        made = pack_panels(rows[some], None if scales is None else scales[some])
        for whole, piece in zip((packed, packed_scales), made, strict=True):
            if whole is not None and piece is not None:
                whole[some] = piece
    return packed.view(values.shape), None if packed_scales is None else packed_scales.view(*values.shape[:-1], -1)


def _on_host(value: Tensor) -> Tensor:
    """The value in the host's memory, pinned if it comes from a GPU.

    A GPU copies 268 MB to pinned memory in 5 ms, and in 210 ms to memory that was just reserved (an H100's machine,
    2026-11-25). torch keeps pinned memory for the next tensor.
    """
    if value.is_cpu:
        return value.contiguous()
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value)


def names_in_panels(network: nn.Module) -> set[str]:
    """Return the names of the parameters whose values are stored in panels. Their scales, which are in panels too, are not
    listed."""
    wanted = {
        parameter
        for module in network.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if name in getattr(module, "panels", ())
    }
    return {name for name, parameter in network.named_parameters() if parameter in wanted}


def float_shapes(network: nn.Module) -> dict[str, tuple[int, ...]]:
    """Map each parameter name to its shape before quantisation. The scales of quantised parameters are left out."""
    parameters = dict(network.named_parameters())
    return {
        name: _float_shape(parameter)
        for name, parameter in parameters.items()
        if not (name.endswith(_SCALE) and name.removesuffix(_SCALE) in parameters)
    }


def _float_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape before quantisation: one uint8 holds two elements."""
    return (*parameter.shape[:-1], parameter.shape[-1] * (2 if parameter.dtype == torch.uint8 else 1))


def allocate_untouched(network: nn.Module) -> None:
    """Replace parameters on the meta device by tensors whose memory is reserved and never written, so that it costs no RAM.

    Tracing and compiling need only shapes, and tensors that can be told apart. The values come when the artifact is written.

    Raises:
        ExportError: a parameter is larger than the memory that this machine can reserve.
    """
    materialise(network, {name: _untouched(name, parameter) for name, parameter in network.named_parameters()})


def _untouched(name: str, like: Tensor) -> Tensor:
    try:
        return torch.empty(like.shape, dtype=like.dtype)
    except RuntimeError as error:
        raise ExportError(
            f"parameter {name!r} is {list(like.shape)}, {size_text(like.nbytes)}: more memory than this machine can reserve"
        ) from error


def materialise(network: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Replace the network's parameters by `values`. A tied parameter is replaced in every module that holds it."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in network.modules():
        for local, parameter in module.named_parameters(recurse=False):
            places.setdefault(parameter, []).append((module, local))
    for name, parameter in list(network.named_parameters()):
        value = nn.Parameter(values[name], requires_grad=False)
        for module, local in places[parameter]:
            setattr(module, local, value)
