"""A call's rows with padding after the last token: of NaN, at its position."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.export.kernels.operands import Place


def padded(x: Tensor, rows: int) -> Tensor:
    """x [T, ...] -> [rows, ...], NaN from row T on."""
    more = x.new_full((rows - x.shape[0], *x.shape[1:]), torch.nan)
    return torch.cat((x, more))


def padded_positions(positions: Tensor, rows: int) -> Tensor:
    """[T] -> [rows], the last position repeated."""
    return F.pad(positions, (0, rows - len(positions)), value=int(positions[-1]))


def padded_place(place: Place, rows: int) -> Place:
    behind = rows - len(place.positions)
    cos, sin = (torch.cat((x, x[-1:].expand(behind, -1))) for x in (place.cos, place.sin))
    return Place(padded_positions(place.positions, rows), cos, sin)
