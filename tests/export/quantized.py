"""Quantisation as tests ask for it: values and scale of int4 and int8, and what they stand for."""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.export.formats.int4 import Int4
from ostinato.export.formats.int8 import Int8
from ostinato.export.weights.quantize import quantize

GROUP_SIZES = Int4.group_sizes


def quantize_int4(weight: Tensor, group_size: int, hqq: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    values, scale, _ = quantize(weight, Int4(group_size), hqq, device)
    return values, scale


def quantize_int8(weight: Tensor, group_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    values, scale, _ = quantize(weight, Int8(group_size), False, device)
    return values, scale


def dequantize_int4(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return Int4(2 * values.shape[-1] // scale.shape[-1]).dequantize(values, scale, None, dtype)
