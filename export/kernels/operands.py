"""Operands that travel together from the layers to the kernels: small records of tensors.

The functions of kernels take these records. So a new operand is a new field here, and is read where it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from ostinato.delegate.logits_processing import ProcessingTensors
from ostinato.export.formats.format import Format
from ostinato.export.formats.quantization import FORMATS

from .linear.panels import unpack_panels

# Values, scale, minimum and bias of a weight, and the name of its format, "" for a floating dtype: arguments of an operator.
WeightArguments = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, str]
# The same without the bias; values are None for no weight.
UnbiasedArguments = tuple[Tensor | None, Tensor | None, Tensor | None, str]


@dataclass(frozen=True)
class Weight:
    """The weight of a linear layer, [N, K], or of one linear layer per expert, [E, N, K].

    Attributes:
        values: [..., N, K] in a floating dtype, or integers as `format` packs them.
        scale: [..., N, K / G] in the format's dtype; None for a floating dtype.
        minimum: as `scale`, in formats that have minima.
        bias: [N] in a floating dtype, added to the product; None for zeros.
        format: the number format; None for a floating dtype.
        in_panels: whether all of these but the bias are stored in panels (linear/panels.py).
    """

    values: Tensor
    scale: Tensor | None = None
    minimum: Tensor | None = None
    bias: Tensor | None = None
    format: Format | None = None
    in_panels: bool = False

    @classmethod
    def of(cls, values: Tensor, scale: Tensor | None, minimum: Tensor | None, bias: Tensor | None, name: str) -> Weight:
        """The weight that these arguments of an operator are. It is not in panels."""
        form = None
        if scale is not None:
            kind = FORMATS[name]
            form = kind(values.shape[-1] * kind.per_value // scale.shape[-1], scale.dtype)
        return cls(values, scale, minimum, bias, form)

    @property
    def arguments(self) -> WeightArguments:
        """The arguments of an operator of torch that stand for this weight."""
        return self.values, self.scale, self.minimum, self.bias, "" if self.format is None else self.format.name

    @property
    def rows(self) -> int:
        """N, the number of outputs."""
        return self.values.shape[-2]

    @property
    def columns(self) -> int:
        """K, the number of inputs."""
        return self.values.shape[-1] * (1 if self.format is None else self.format.per_value)

    @property
    def group_size(self) -> int | None:
        """G, the elements that share a scale; None for a floating dtype."""
        return None if self.format is None else self.format.group_size

    def of_experts(self, chosen: Tensor) -> Weight:
        """The weights of the experts `chosen` [..., k], in their order: [..., k, N, K]."""
        scale, minimum = (None if one is None else one[chosen] for one in (self.scale, self.minimum))
        return replace(self, values=self.values[chosen], scale=scale, minimum=minimum)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight as a plain tensor, [..., N, K] in `dtype`."""
        stored = (self.values, self.scale, self.minimum)
        values, scale, minimum = unpack_panels(self.format, *stored) if self.in_panels else stored
        if self.format is None or scale is None:
            return values.to(dtype)
        return self.format.dequantize(values, scale, minimum, dtype)


def unbiased(weight: Weight | None) -> UnbiasedArguments:
    """The arguments of an operator that stand for a weight without a bias, or for no weight."""
    if weight is None:
        return None, None, None, ""
    values, scale, minimum, _, form = weight.arguments
    return values, scale, minimum, form


@dataclass(frozen=True)
class Norm:
    """An RMS norm over K elements: `x / rms(x) * weight`.

    Attributes:
        weight: [K] float32.
        eps: added to the mean square.
    """

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., K] -> normed x, in float64 where x is float64, else in float32."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight


@dataclass(frozen=True)
class Heads:
    """How a row of attention's projection divides into heads of D elements: all queries, then all keys, then all values.

    Attributes:
        count: number of queries, a multiple of that of keys.
        q_norm, k_norm: norms over D elements of queries and of keys, with the same eps; None: these are not normed.
        gated: whether each query has a gate behind it, by whose sigmoid the head's output is multiplied.
    """

    count: int
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    gated: bool = False

    @property
    def arguments(self) -> tuple[Tensor | None, Tensor | None, float, int, bool]:
        """Weights and eps of the norms, count, and whether there are gates, as arguments of an operator of torch."""
        if self.q_norm is None or self.k_norm is None:
            return None, None, 0.0, self.count, self.gated
        return self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, self.count, self.gated

    def split(self, kv_heads: int, head_dim: int) -> tuple[int, int, int]:
        """Elements of a row that belong to queries and gates, to keys, and to values."""
        return (1 + self.gated) * self.count * head_dim, kv_heads * head_dim, kv_heads * head_dim


# MAX_ROWS: the most rows of several sessions in one call; a GPU kernel holds something about each of these rows. FEW_ROWS:
# the most rows of a call that takes the kernels for few rows, and the experts of a single token. More than SOME_ROWS rows
# take the products of prompts. Up to STEP_ROWS rows take the attention of a single token, and integer weights as
# `linear/rows_direct_triton` says, where up to FOUR_ROWS have half as many columns. TWO_ROWS rows take the kernels of a
# single token in linear layers where these are faster.
MAX_ROWS, SOME_ROWS, FEW_ROWS, STEP_ROWS, FOUR_ROWS, TWO_ROWS = 512, 256, 16, 8, 4, 2
# P of `RecurrentState` on a GPU: a state is written in every eighth step. At most 8, and V - V / 8 for the smallest V, of 16.
PENDING_UPDATES = 7
# How often a step that keeps updates pending moves a stored state, and the room for updates. It writes the state in one of
# P + 1 steps. In the others it writes an update, and as many are pending as on an average of these steps.
STATE_MOVES, PENDING_MOVES = 1 + 1 / (PENDING_UPDATES + 1), 1 / 2 + 1 / (PENDING_UPDATES + 1)


class RowIndex(NamedTuple):
    """Positions and slots of the T rows of a call, and the angles of their rotation.

    Neighbouring rows of one slot are a *run*: tokens of one session, at consecutive positions. A slot has at most one run in
    a call. A run that begins at position 0 starts a new sequence. A prompt is one run, perhaps with padding behind it.

    Attributes:
        positions: [T] int64, each row's position in its session, from 0. Padding may have any position of a session.
        slots: [T] int64, each row's slot; -1 for padding. A row of padding leaves no trace in any state, and its results mean
            nothing.
        cos, sin: [T, R] float32, cosine and sine of the angles by which the first R elements of queries and keys are rotated.
    """

    positions: Tensor
    slots: Tensor
    cos: Tensor
    sin: Tensor


def runs_of(slots: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield each run's slot and rows; padding is in no run. For references only: the slots are read, which cannot be traced.

    Args:
        slots: [T] int64, as in `RowIndex`.
    """
    rows = slots.tolist()
    for slot, group in groupby(range(len(rows)), key=rows.__getitem__):
        if slot >= 0:
            members = list(group)
            yield slot, slice(members[0], members[-1] + 1)


def token_count(slots: Tensor) -> Tensor:
    """Number of a prompt's rows that are tokens, [1] int64; the other rows are padding.

    Args:
        slots: [T] int64, the slots of a prompt, as in `RowIndex`.
    """
    return (slots >= 0).sum(0, keepdim=True)


@dataclass(frozen=True)
class KVCache:
    """Keys and values of all sessions, in pages of P positions, P being a power of two.

    Attributes:
        keys, values: [pages, kv_heads, P, D] each.
        table: [slots, M] int32: position p of a slot is in page `table[slot, p // P]`, at index `p % P`. Entries of positions
            that no row of a call sees mean nothing.
        window: number of positions that a row sees, its own and those just before it; None: it sees all before it. Positions
            that no row of a call sees are not read.
    """

    keys: Tensor
    values: Tensor
    table: Tensor
    window: int | None = None

    @property
    def page_size(self) -> int:
        """P, the positions of a page."""
        return self.keys.shape[2]

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, int]:
        """Keys, values, table and window, 0 for none, as arguments of an operator of torch."""
        return self.keys, self.values, self.table, self.window or 0


@dataclass(frozen=True)
class Convolution:
    """A causal depthwise convolution over C channels.

    Attributes:
        weight: [C, 1, W], W >= 2.
        state: [slots, W - 1, C], the last inputs of each session, oldest first.
    """

    weight: Tensor
    state: Tensor


@dataclass(frozen=True)
class RecurrentState:
    """The states of a gated delta rule, one matrix `S` [K, V] for each slot and head.

    A GPU's kernels may keep the last updates of a state beside it, as *pending updates*, since an update is much smaller
    than the state. The state of a head is then what its stored matrix becomes by its pending updates, in their order:
    `S = exp(g) S + k u^T`, with a log decay g, a key k, and values u. Heads that share a key head share its keys.

    Attributes:
        stored: [slots, H, K, V], float32 or bfloat16. In bfloat16 a matrix is rounded whenever it is written; all else is
            computed in float32.
        keys: [slots, key_heads, P, K] in the model's dtype, as they are before their normalisation. None: no update is
            ever pending.
        updates: [slots, H, P + 1, V] float32; None with `keys`. The first P rows are values, to which the write strength
            and the inverse length of the key are applied. The last row begins with P log decays. It ends with V / 8 counts
            of pending updates, all of them equal between calls: a program uses the counts that are of its own eights of
            values, since other programs of the head run at other times. Updates past the count mean nothing.
    """

    stored: Tensor
    keys: Tensor | None = None
    updates: Tensor | None = None

    @classmethod
    def zeros(
        cls,
        slots: int,
        heads: tuple[int, int],
        dims: tuple[int, int],
        pending: int,
        dtype: torch.dtype,
        stored_dtype: torch.dtype = torch.float32,
    ) -> RecurrentState:
        """Make states of zeros on the CPU.

        Args:
            heads: numbers of key heads and of heads.
            dims: K and V.
            pending: P; 0: no update is ever pending.
            dtype: the model's.
            stored_dtype: dtype of the stored matrices.
        """
        (key_heads, count), (key_dim, value_dim) = heads, dims
        stored = torch.zeros(slots, count, key_dim, value_dim, dtype=stored_dtype, device="cpu")
        if not pending:
            return cls(stored)
        keys = torch.zeros(slots, key_heads, pending, key_dim, dtype=dtype, device="cpu")
        return cls(stored, keys, torch.zeros(slots, count, pending + 1, value_dim, device="cpu"))

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Stored states, keys and updates, as arguments of an operator that keeps updates pending."""
        assert self.keys is not None and self.updates is not None, "the state has no room for pending updates"
        return self.stored, self.keys, self.updates


@dataclass(frozen=True)
class Decay:
    """Parameters of a gated delta rule's log decay, `-exp(a_log) softplus(a + dt_bias)` for a projection a; [H] each."""

    a_log: Tensor
    dt_bias: Tensor


@dataclass(frozen=True)
class HeadSquares:
    """Sums of squares of a vector's heads. The heads are not yet divided by their root mean squares.

    Attributes:
        sums: [T heads, P] float32, one row per head, the heads of one token together. The P numbers of a row add up to the
            sum of squares of its head.
        eps: added to the mean square.
    """

    sums: Tensor
    eps: float


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of one expert or of all E experts. An expert is a SwiGLU with inner size I.

    Attributes:
        gate_up: gate and up projection stacked: [E, 2 I, H], or [2 I, H] for one expert.
        down: down projection: [E, H, I], or [H, I] for one expert.
    """

    gate_up: Weight
    down: Weight


@dataclass(frozen=True)
class LastTokens:
    """The last token of each session, which the model has not seen yet, and its position; [slots] int64 each."""

    token: Tensor
    position: Tensor


@dataclass(frozen=True)
class LogitsProcessing:
    """How the logits of each session are changed before a token is sampled from them.

    Attributes:
        processed: [slots] int64, when: values of `Processing`.
        given: [slots, ...] each. `output_counts` is written where a sampled token is counted.
    """

    processed: Tensor
    given: ProcessingTensors
