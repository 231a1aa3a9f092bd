"""Values of a network's parameters, made when they are asked for: read or random, quantised, and not kept in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ostinato.delegate.errors import CheckpointError, ExportError
from ostinato.delegate.memory import size_text
from ostinato.export.formats.format import Format
from ostinato.export.kernels.linear.panels import LANES, Stored, pack_panels

from .quantize import BLOCK, Quantized, quantize

# Ends of the names of a weight's scale and minimum, and of all its parameters.
_BESIDE = ("_scale", "_minimum")
_ENDINGS = ("", *_BESIDE)


class WeightSource(Protocol):
    """Source of floating-point parameters by name: `CheckpointWeights` or `DummyWeights`."""

    def read(self, name: str) -> Tensor: ...


@runtime_checkable
class StoredSource(WeightSource, Protocol):
    """A source that may have a parameter in a number format already."""

    def stored(self, name: str, form: Format) -> Quantized | None: ...


class QuantizedWeights(Mapping[str, Tensor]):
    """Parameter name -> its value as the artifact stores it, on the CPU. The value is made again each time it is asked for.

    A weight in a number format is several parameters: values, scale, perhaps a minimum. Asking for one makes all, and the
    others are kept until they are asked for.

    Args:
        network: network whose parameters have shapes, dtypes and formats; their values do not matter.
        source: the values before quantisation; or, if it is a `StoredSource`, some of them in the network's formats.
        device: device that computes the quantisation.
        hqq: whether int4 scales are chosen by half-quadratic quantisation.

    Asking for a value raises CheckpointError if the value cannot be read, or cannot be quantised.
    """

    def __init__(self, network: nn.Module, source: WeightSource, device: torch.device, hqq: bool = False) -> None:
        self._parameters = dict(network.named_parameters())
        self._formats = formats_of(network)
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
        base = next((name.removesuffix(end) for end in _BESIDE if name.removesuffix(end) in self._formats), name)
        form = self._formats.get(base)
        if form is None:
            stored: Stored = (self._source.read(name).to(self._parameters[name].dtype), None, None)
        else:
            stored = self._quantize(base, form)
        if base in self._in_panels:
            stored = _packed(form, *stored)
        made = {base + end: _on_host(value) for end, value in zip(_ENDINGS, stored, strict=True) if value is not None}
        wanted = made.pop(name)
        self._kept = made
        return wanted

    def _quantize(self, name: str, form: Format) -> Quantized:
        found = self._source.stored(name, form) if isinstance(self._source, StoredSource) else None
        if found is None:
            found = quantize(self._source.read(name), form, self._hqq, self._device)
        if not all(part is None or part.isfinite().all() for part in found[1:]):
            raise CheckpointError(f"parameter {name!r} cannot be quantised: it holds values that are infinite or NaN")
        return found


def _packed(form: Format | None, values: Tensor, scale: Tensor | None, minimum: Tensor | None) -> Stored:
    """`pack_panels`, some rows at a time: that bounds its temporaries, which on a CPU then stay in the caches."""
    whole: Stored = (values, scale, minimum)
    if values.shape[-2] % LANES:
        return pack_panels(form, *whole)
    rows = [None if one is None else one.flatten(0, -2) for one in whole]
    packed = [None if one is None else torch.empty_like(one) for one in rows]
    columns = values.shape[-1]
    step = max(1, BLOCK[values.device.type] // columns // LANES) * LANES
    for begin in range(0, values.numel() // columns, step):
        some = slice(begin, begin + step)
        made = pack_panels(form, *(None if one is None else one[some] for one in rows))  # type: ignore[arg-type]
        for to, piece in zip(packed, made, strict=True):
            if to is not None and piece is not None:
                to[some] = piece
    return tuple(None if one is None else one.view(like.shape) for one, like in zip(packed, whole, strict=True))  # type: ignore


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


def formats_of(network: nn.Module) -> dict[str, Format]:
    """Map the name of each parameter that holds values in a number format to this format."""
    names = {parameter: name for name, parameter in network.named_parameters()}
    return {
        names[getattr(module, local)]: form
        for module in network.modules()
        for local, form in getattr(module, "formats", {}).items()
        if form is not None
    }


def float_shapes(network: nn.Module) -> dict[str, tuple[int, ...]]:
    """Map each parameter name to its shape before quantisation. Scales and minima of formats are left out."""
    formats = formats_of(network)
    shapes = {}
    for name, parameter in network.named_parameters():
        if not any(name.endswith(end) and name.removesuffix(end) in formats for end in _BESIDE):
            per_value = formats[name].per_value if name in formats else 1
            shapes[name] = (*parameter.shape[:-1], parameter.shape[-1] * per_value)
    return shapes


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
