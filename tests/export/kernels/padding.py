"""A call's rows with padding after the last token: of NaN, at its position."""

from __future__ import annotations

import torch
from torch import Tensor


def padded(x: Tensor, rows: int) -> Tensor:
    """x [T, ...] -> [rows, ...], NaN from row T on."""
    more = x.new_full((rows - x.shape[0], *x.shape[1:]), torch.nan)
    return torch.cat((x, more))
