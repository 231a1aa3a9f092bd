"""Quantises floating-point weights to integers with one scale per group, by torchao's primitives."""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.export.formats.int4 import SCALE_DTYPE, pack_int4

# Elements quantised at once, by the kind of device. torchao makes about six float32 copies of its input (HQQ more): on a GPU
# this bounds them to 1 to 2 GiB. On a CPU they stay in its caches, and in memory that malloc does not give back: 2 cores take
# 0.08 s for 67 million elements, and 0.55 s if they are quantised at once (2026-11-25).
BLOCK = {"cuda": 1 << 26, "cpu": 1 << 21}


def quantize_int4(weight: Tensor, group_size: int, hqq: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Symmetric four-bit quantisation along the last dimension.

    Args:
        weight: [..., N, K] in a floating dtype, on any device; K a multiple of `group_size` and of 64.
        group_size: elements that share a scale.
        hqq: whether scales are fitted by alternating least squares (HQQ, in the scale-only form that torchao has) instead of
            taken from the group's extreme values.
        device: where to compute.

    Returns:
        (weight [..., N, K / 2] uint8 in the layout of `formats/int4.py`, scale [..., N, K / G] bfloat16), on `device`.
    """
    return _in_blocks(weight, group_size, -8, 7, hqq, device)


def quantize_int8(weight: Tensor, group_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Symmetric eight-bit quantisation: (weight [N, K] int8, scale [N, K / G] bfloat16), on `device`."""
    return _in_blocks(weight, group_size, -128, 127, False, device)


def _in_blocks(
    weight: Tensor, group_size: int, low: int, high: int, hqq: bool, device: torch.device
) -> tuple[Tensor, Tensor]:
    size = weight.shape[-1]
    four_bits = high < 8
    rows = weight.reshape(-1, size)
    dtype = torch.uint8 if four_bits else torch.int8
    stored = torch.empty((rows.shape[0], size // 2 if four_bits else size), dtype=dtype, device=device)
    scales = torch.empty((rows.shape[0], size // group_size), dtype=SCALE_DTYPE, device=device)
    step = max(1, BLOCK[device.type] // size)
    for begin in range(0, rows.shape[0], step):
        block = rows[begin : begin + step].to(device).float()
        q, scale = _quantize(block, group_size, low, high, hqq)
        stored[begin : begin + step] = pack_int4(q) if four_bits else q
        scales[begin : begin + step] = scale
    return stored.view(*weight.shape[:-1], -1), scales.view(*weight.shape[:-1], -1)


def _quantize(rows: Tensor, group_size: int, low: int, high: int, hqq: bool) -> tuple[Tensor, Tensor]:
    """rows [N, K] float32 -> (q [N, K] int8, scale [N, K / G] bfloat16)."""
    # Imported here: the import takes seconds and loads Inductor, which code that only reads a config does not need.
    from torchao.quantization.quant_primitives import MappingType, choose_qparams_affine, quantize_affine

    block = [1, group_size]
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
    scale = scale.to(SCALE_DTYPE)
    zero = torch.zeros_like(scale, dtype=torch.int32)
    return quantize_affine(rows, block, scale.float(), zero, torch.int8, low, high), scale
