"""ggml's blocks of quantised weights as our number formats: which type becomes which, and whether its integers are kept.

Layouts are those of ggml-common.h. A row of a tensor is a row of blocks. Q4_0, Q4_1, Q5_0 and Q8_0 keep their integers and
scales: what is stored means the same numbers, bit for bit. Q4_K keeps its integers; its two-level scales are multiplied out
and rounded to float16, 2^-11 of a scale at most. Q5_1, Q5_K and Q6_K are rounded once more, to eight bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ostinato.export.formats.format import Format
from ostinato.export.formats.int4 import Int4
from ostinato.export.formats.int4_min import Int4Min
from ostinato.export.formats.int8 import Int8

Blocks = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
# Integers [N, K] int8, scale [N, K / 32] float16, and minimum or None.
Integers = tuple[Tensor, Tensor, Tensor | None]

_BYTES = Int8(32, torch.float16)


@dataclass(frozen=True)
class Kept:
    """Number format that a type of blocks becomes.

    Attributes:
        form: the number format.
        integers: function from blocks [N, blocks, bytes] to integers that mean the same; None: they are rounded once more.
    """

    form: Format
    integers: Callable[[Blocks], Integers] | None = None


def kept_as(kind: str, columns: int) -> Kept | None:
    """Look up what rows of this type and length become; None for a floating dtype."""
    kept = _KEPT.get(kind)
    if kept is not None and columns % kept.form.multiple:
        return Kept(_BYTES)
    return kept


def _q4_0(blocks: Blocks) -> Integers:
    return _integers(_nibbles(blocks[..., 2:]) - 8), _halves(blocks, 0), None


def _q4_1(blocks: Blocks) -> Integers:
    return _integers(_nibbles(blocks[..., 4:])), _halves(blocks, 0), _halves(blocks, 2)


def _q5_0(blocks: Blocks) -> Integers:
    fifth = np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little").astype(np.int8)
    return _integers(_nibbles(blocks[..., 6:]) + 16 * fifth - 16), _halves(blocks, 0), None


def _q8_0(blocks: Blocks) -> Integers:
    return _integers(np.ascontiguousarray(blocks[..., 2:]).view(np.int8)), _halves(blocks, 0), None


def _q4_k(blocks: Blocks) -> Integers:
    """A block has 256 integers in eight groups, and for each group six bits of a scale and six of a minimum."""
    packed = blocks[..., 4:16]
    low, high, last = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate((low & 63, (last & 15) | (low >> 6 << 4)), axis=-1)
    minima = np.concatenate((high & 63, (last >> 4) | (high >> 6 << 4)), axis=-1)
    # 32 bytes have 64 integers: first the low nibbles, then the high ones.
    quarters = blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32)
    q = np.stack((quarters & 15, quarters >> 4), axis=-2).astype(np.int8)
    scale = _halves(blocks, 0).float().unsqueeze(-1) * torch.from_numpy(scales.astype(np.float32))
    minimum = _halves(blocks, 2).float().unsqueeze(-1) * torch.from_numpy(minima.astype(np.float32))
    return _integers(q), scale.flatten(1).half(), minimum.neg().flatten(1).half()


def _nibbles(packed: Blocks) -> np.ndarray[tuple[int, ...], np.dtype[np.int8]]:
    """16 bytes -> 32 integers from 0 to 15: first the low nibbles, then the high ones."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1).astype(np.int8)


def _integers(q: np.ndarray[tuple[int, ...], np.dtype[np.int8]]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(q)).flatten(1)


def _halves(blocks: Blocks, at: int) -> Tensor:
    """The float16 at byte `at` of each block, [N, blocks]."""
    return torch.from_numpy(np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0].copy())


_KEPT: Mapping[str, Kept] = {
    "Q4_0": Kept(Int4(32, torch.float16), _q4_0),
    "Q4_1": Kept(Int4Min(32, torch.float16), _q4_1),
    "Q5_0": Kept(_BYTES, _q5_0),
    "Q5_1": Kept(_BYTES),
    "Q8_0": Kept(_BYTES, _q8_0),
    "Q4_K": Kept(Int4Min(32, torch.float16), _q4_k),
    "Q5_K": Kept(_BYTES),
    "Q6_K": Kept(_BYTES),
}
