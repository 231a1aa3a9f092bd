"""The order in which a CPU reads weights: panels of 16 rows, one for each lane of a vector.

All rows of a panel are multiplied by the same elements of the input at the same time. So nothing is summed across lanes, and
a panel is one stretch of memory. A panel of a weight [N, K] holds, one after the other:

    float32    for each k: the element k of the 16 rows
    bfloat16   for each pair of neighbours: the pairs of the 16 rows
    int4       for each eight neighbours: four bytes of each row, the first four neighbours in the low nibbles, the others in
               the high nibbles; int4_min likewise
    int8       for each four neighbours: the four bytes of each row
    scales     for each group: the scales of the 16 rows; minima likewise

Rows that do not fill a panel stay unchanged behind the panels. So do all rows with an odd number of bfloat16 elements.
Shapes, dtypes and sizes do not change.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ostinato.export.formats.format import Format
from ostinato.export.formats.int4 import pack_nibbles, unpack_nibbles

LANES = 16
# Neighbouring elements of a row that stay together in a panel.
_TOGETHER = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 4}
_FOUR = 4

# Values, scale and minimum of a weight.
Stored = tuple[Tensor, Tensor | None, Tensor | None]


def pack_panels(form: Format | None, values: Tensor, scale: Tensor | None, minimum: Tensor | None = None) -> Stored:
    """A weight as `form` stores it, in rows: values [..., N, ..], scale and minimum [..., N, K / G] -> the same in panels."""
    return _panels(form, values, scale, minimum, _pack, _pack_nibbles)


def unpack_panels(form: Format | None, values: Tensor, scale: Tensor | None, minimum: Tensor | None = None) -> Stored:
    """The inverse of `pack_panels`."""
    return _panels(form, values, scale, minimum, _unpack, _unpack_nibbles)


def unpack_scale(scale: Tensor) -> Tensor:
    """A scale [..., N, K / G] in panels -> the same in rows, as `unpack_panels` returns it."""
    return _with_panels(scale, scale.shape[-1], 1, _unpack)


def rows_of_panels(values: Tensor, rows: Tensor) -> Tensor:
    """The rows `rows` [T] int64 of values [N, K] in panels, which are not nibbles: [T, K]."""
    return _rows(values, rows, _TOGETHER[values.dtype])


def rows_of_scale(scale: Tensor, rows: Tensor) -> Tensor:
    """The rows `rows` [T] int64 of a scale or minimum [N, K / G] in panels: [T, K / G]."""
    return _rows(scale, rows, 1)


def _rows(values: Tensor, rows: Tensor, together: int) -> Tensor:
    count, columns = values.shape
    whole = count // LANES * LANES if columns % together == 0 else 0
    k = torch.arange(columns, device=values.device)
    row = rows.unsqueeze(-1)
    panel = row // LANES * (LANES * columns) + (k // together * LANES + row % LANES) * together + k % together
    return values.flatten()[torch.where(row < whole, panel, row * columns + k)]


def _panels(
    form: Format | None,
    values: Tensor,
    scale: Tensor | None,
    minimum: Tensor | None,
    change: Callable[[Tensor, int], Tensor],
    change_nibbles: Callable[[Tensor, int], Tensor],
) -> Stored:
    if form is not None and form.per_value == 2:
        changed = _with_panels(values, 1, 1, change_nibbles)
    else:
        changed = _with_panels(values, values.shape[-1], _TOGETHER[values.dtype], change)
    scale, minimum = (None if one is None else _with_panels(one, one.shape[-1], 1, change) for one in (scale, minimum))
    return changed, scale, minimum


def _with_panels(x: Tensor, columns: int, together: int, change: Callable[[Tensor, int], Tensor]) -> Tensor:
    """x [..., N, K] with the rows that fill panels changed. `change` gets these rows, [..., N', K]."""
    whole = x.shape[-2] // LANES * LANES if columns % together == 0 else 0
    if whole == 0:
        return x
    changed = change(x[..., :whole, :], together).reshape(*x.shape[:-2], whole, x.shape[-1])
    return torch.cat((changed, x[..., whole:, :]), dim=-2)


def _pack(x: Tensor, together: int) -> Tensor:
    return x.unflatten(-2, (-1, LANES)).unflatten(-1, (-1, together)).transpose(-3, -2)


def _unpack(x: Tensor, together: int) -> Tensor:
    return x.unflatten(-2, (-1, LANES)).flatten(-2).unflatten(-1, (-1, LANES, together)).transpose(-3, -2)


def _pack_nibbles(values: Tensor, _: int) -> Tensor:
    q = unpack_nibbles(values).to(torch.uint8).unflatten(-2, (-1, LANES)).unflatten(-1, (-1, 2, _FOUR))
    return (q[..., 0, :] | (q[..., 1, :] << 4)).transpose(-3, -2)


def _unpack_nibbles(values: Tensor, _: int) -> Tensor:
    both = values.unflatten(-2, (-1, LANES)).flatten(-2).unflatten(-1, (-1, LANES, _FOUR)).transpose(-3, -2)
    q = torch.stack((both & 15, both >> 4), dim=-2).flatten(-3)
    return pack_nibbles(q).flatten(-3, -2)
