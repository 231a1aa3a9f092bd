"""Quantises floating-point weights to integers with one scale per group: symmetric ones by torchao's primitives."""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.export.formats.format import Format

# Elements quantised at once, by the kind of device. torchao makes about six float32 copies of its input (HQQ more): on a GPU
# this bounds them to 1 to 2 GiB. On a CPU they stay in its caches, and in memory that malloc does not give back: 2 cores take
# 0.08 s for 67 million elements, and 0.55 s if they are quantised at once (2026-11-25).
BLOCK = {"cuda": 1 << 26, "cpu": 1 << 21}


# Values, scale and minimum of a weight. The minimum is None in formats without one.
Quantized = tuple[Tensor, Tensor, Tensor | None]


def quantize(weight: Tensor, form: Format, hqq: bool, device: torch.device) -> Quantized:
    """Quantise along the last dimension.

    Args:
        weight: [..., N, K] in a floating dtype, on any device; K a multiple of the format's groups.
        form: the number format.
        hqq: whether scales are fitted by alternating least squares (HQQ, in the scale-only form that torchao has) instead of
            taken from the group's extreme values. For int4.
        device: where to compute.

    Returns:
        What the format stores, on `device`: values [..., N, K / per_value], scale and minimum [..., N, K / G].
    """
    size = weight.shape[-1]
    rows = weight.reshape(-1, size)
    groups = (rows.shape[0], size // form.group_size)
    values = torch.empty((rows.shape[0], size // form.per_value), dtype=form.values_dtype, device=device)
    scale = torch.empty(groups, dtype=form.scale_dtype, device=device)
    minimum = torch.empty(groups, dtype=form.scale_dtype, device=device) if form.has_minimum else None
    step = max(1, BLOCK[device.type] // size)
    for begin in range(0, rows.shape[0], step):
        some = slice(begin, begin + step)
        block = rows[some].to(device).float()
        if minimum is None:
            q, scale[some] = _symmetric(block, form, hqq)
        else:
            q, scale[some], minimum[some] = _from_minimum(block, form)
        values[some] = form.pack(q)
    of_groups = (*weight.shape[:-1], -1)
    return values.view(of_groups), scale.view(of_groups), None if minimum is None else minimum.view(of_groups)


def _symmetric(rows: Tensor, form: Format, hqq: bool) -> tuple[Tensor, Tensor]:
    """rows [N, K] float32 -> (q [N, K] int8, scale [N, K / G])."""
    # Imported here: the import takes seconds and loads Inductor, which code that only reads a config does not need.
    from torchao.quantization.quant_primitives import MappingType, choose_qparams_affine, quantize_affine

    block, low, high = [1, form.group_size], form.lowest, form.highest
    if hqq:
        # Private to torchao: imported here, so that nothing but --hqq depends on it.
        from torchao.quantization.quant_primitives import _choose_qparams_and_quantize_scale_only_hqq

        _, scale = _choose_qparams_and_quantize_scale_only_hqq(rows, block, low, high)
    else:
        scale, _ = choose_qparams_affine(
            rows, MappingType.SYMMETRIC, block, torch.int8, low, high, scale_dtype=torch.float32
        )
        scale = scale.reshape(rows.shape[0], -1)
    # The scale is rounded first, so that the integers are the nearest ones for the stored scale.
    scale = scale.to(form.scale_dtype)
    zero = torch.zeros_like(scale, dtype=torch.int32)
    return quantize_affine(rows, block, scale.float(), zero, torch.int8, low, high), scale


def _from_minimum(rows: Tensor, form: Format) -> tuple[Tensor, Tensor, Tensor]:
    """rows [N, K] float32 -> (q [N, K] int8, scale and minimum [N, K / G]): the range from a group's smallest value to its
    largest is divided evenly."""
    groups = rows.unflatten(-1, (-1, form.group_size))
    low, high = groups.aminmax(dim=-1)
    minimum = low.to(form.scale_dtype)
    span = (high - minimum.float()).clamp(min=torch.finfo(torch.float32).tiny)
    scale = (span / (form.highest - form.lowest)).to(form.scale_dtype)
    # With a scale that is rounded to zero, every integer means the minimum.
    steps = (groups - minimum.float().unsqueeze(-1)) / scale.float().unsqueeze(-1)
    q = steps.nan_to_num(0.0).round().clamp(form.lowest, form.highest).to(torch.int8)
    return q.flatten(-2), scale, minimum
