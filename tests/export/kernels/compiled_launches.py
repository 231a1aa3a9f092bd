"""Launches of the kernels that are compiled for GPUs that this machine does not have: one function per operation.

Each function takes the compute capability, the model's dtype and what else differs between the cases of `compiled_cases`.
Tensors have no storage.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, empty

from ostinato.delegate.logits_processing import ProcessingTensors, processing_tensors
from ostinato.delegate.sampling_params import SamplingParams, SamplingTensors
from ostinato.export.formats.format import Format
from ostinato.export.formats.int4 import Int4
from ostinato.export.formats.int4_min import Int4Min
from ostinato.export.formats.int8 import Int8
from ostinato.export.kernels.cuda import CudaKernels
from ostinato.export.kernels.delta_rule.rows_conv_triton import conv_rows
from ostinato.export.kernels.linear import step_triton
from ostinato.export.kernels.linear.prefill_triton import linear, unpack_int4_panels
from ostinato.export.kernels.linear.rows_triton import norm_linear_gates
from ostinato.export.kernels.operands import (
    MAX_ROWS,
    PENDING_UPDATES,
    Convolution,
    Decay,
    ExpertWeights,
    Heads,
    HeadSquares,
    KVCache,
    LastTokens,
    LogitsProcessing,
    Norm,
    RecurrentState,
    RowIndex,
    Weight,
)
from ostinato.export.models import build_network, read_config

from ..networks import of_group
from .compiling import BF16, F32, Launch, recorded

EPS = 1e-6
# The flagship's vocabulary.
VOCAB = 248_320


def weight(*size: int, dtype: torch.dtype, group: int | Format | None, bias: torch.dtype | None = None) -> Weight:
    """A weight [..., N, K] in a number format, or in `dtype` where `group` is None.

    Args:
        group: weights that share a scale, in int4; or a number format.
        bias: its bias's dtype, None without one.
    """
    offsets = None if bias is None else empty(size[-2], dtype=bias)
    form = Int4(group) if isinstance(group, int) else group
    if form is None:
        return Weight(empty(*size, dtype=dtype), bias=offsets)
    values = empty(*size[:-1], size[-1] // form.per_value, dtype=form.values_dtype)
    groups = partial(empty, *size[:-1], size[-1] // form.group_size, dtype=form.scale_dtype)
    return Weight(values, groups(), groups() if form.has_minimum else None, offsets, form)


def row_index(rows: int, rotary: int = 64) -> RowIndex:
    number = empty(rows, dtype=torch.int64)
    return RowIndex(number, number, empty(rows, rotary), empty(rows, rotary))


def attention(
    capability: int,
    dtype: torch.dtype,
    projected: torch.dtype,
    *,
    rows: tuple[int, ...],
    plain: bool = False,
    window: int | None = None,
) -> list[Launch]:
    """Launch at the flagship's shapes, or without norms and gates at those of Llama 3.1 8B; the projection's dtype is
    `projected`. Steps of each number of rows; more than a step has are a prompt."""
    with recorded(capability) as launches:
        count, kv_heads, size, rotary = (32, 8, 128, 128) if plain else (16, 2, 256, 64)
        norm = Norm(empty(size), EPS)
        heads = Heads(count) if plain else Heads(count, norm, norm, gated=True)
        keys, values = (empty(4, kv_heads, 64, size, dtype=dtype) for _ in range(2))
        cache = KVCache(keys, values, empty(2, 64, dtype=torch.int32), window)
        for tokens in rows:
            attend = CudaKernels.attend if tokens > MAX_ROWS else CudaKernels.attend_step
            qkv = empty(tokens, sum(heads.split(kv_heads, size)), dtype=projected)
            attend(qkv, heads, row_index(tokens, rotary), cache)
    return launches


def delta_rule(
    capability: int, dtype: torch.dtype, *, rows: tuple[int, ...], states: torch.dtype = torch.float32
) -> list[Launch]:
    """Launch at the flagship's shapes, for each number of rows; several rows with their convolution.

    states: dtype of the stored states.
    """
    with recorded(capability) as launches:
        conv = Convolution(empty(8192, 1, 4, dtype=dtype), empty(2, 3, 8192, dtype=dtype))
        decay = Decay(empty(32), empty(32))
        keys = empty(2, 16, PENDING_UPDATES, 128, dtype=dtype)
        state = RecurrentState(empty(2, 32, 128, 128, dtype=states), keys, empty(2, 32, PENDING_UPDATES + 1, 128))
        for count in rows:
            mixed, index = empty(count, 12288, dtype=dtype), row_index(count)
            if count > 1:
                mixed = conv_rows(mixed, conv, index)
            CudaKernels.delta_step(mixed, empty(count, 64), decay, state, index, empty(128), key_heads=16)
    return launches


EXPERTS, TOP_K, SIZE, INNER = 256, 8, 2048, 512
# As for `weight`; or those of the routed experts' gate and up, of their down projections, and of the shared expert.
ExpertFormats = int | Format | tuple[Format | None, Format | None, Format | None] | None


class ExpertsLayer(torch.nn.Module):
    """The flagship's mixture of experts as a model calls it, with weights that have no values.

    Args:
        dtype: the model's.
        formats: the number formats, None for weights in `dtype`.
        shared: inner size of the shared expert, 0 without one.
    """

    norm: Tensor
    gate: Tensor
    shared_gate: Tensor | None

    def __init__(self, dtype: torch.dtype, formats: ExpertFormats, shared: int) -> None:
        super().__init__()
        self.register_buffer("norm", empty(SIZE))
        self.register_buffer("gate", empty(EXPERTS, SIZE, dtype=dtype))
        self.register_buffer("shared_gate", empty(1, SIZE, dtype=dtype) if shared else None)
        first, second, third = formats if isinstance(formats, tuple) else 3 * (formats,)
        make = partial(weight, dtype=dtype)
        self.routed = ExpertWeights(
            make(EXPERTS, 2 * INNER, SIZE, group=first), make(EXPERTS, SIZE, INNER, group=second)
        )
        self.shared = None
        if shared:
            self.shared = ExpertWeights(make(2 * shared, SIZE, group=third), make(SIZE, shared, group=third))

    @staticmethod
    def inputs(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return empty(rows, SIZE, dtype=dtype), empty(rows, dtype=torch.int64)

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        norm = Norm(self.norm, EPS)
        return CudaKernels.sparse_moe(x, norm, self.gate, self.shared_gate, TOP_K, self.routed, self.shared, slots)


def experts(
    capability: int, dtype: torch.dtype, formats: ExpertFormats, shared: int, *, rows: tuple[int, ...]
) -> list[Launch]:
    """Launch a mixture of experts for each number of rows; see `ExpertsLayer`."""
    with recorded(capability) as launches:
        layer = ExpertsLayer(dtype, formats, shared)
        for count in rows:
            layer(*layer.inputs(count, dtype))
    return launches


# Shapes by the model's dtype: the flagship's, those of other models and small ones. (N, K, group size or None), then the
# channels of the convolution and the rows of gates, or the heads, None without sums of squares.
STEP_LINEAR = {
    BF16: ((9216, 2048, 128), (VOCAB, 2048, 128), (VOCAB, 1024, None)),
    F32: ((97, 192, 32), (97, 50, None)),
}
STEP_SWIGLU = {BF16: ((7168, 1024, 128), (7168, 1024, None)), F32: ((7168, 1024, None),)}
STEP_CONV = {
    BF16: ((12288, 2048, 128, 8192, 64), (8192, 1024, None, 6144, 32)),
    F32: ((100, 192, 64, 66, 6),),
}
# 17,408 and 3,584 columns: a dense model's last product, of several tiles.
STEP_ADD = {
    BF16: ((2048, 4096, 128, 32), (5120, 17408, 128, None), (1024, 2048, None, 16), (1024, 3584, None, None)),
    F32: ((192, 96 * 4, 32, 6), (1024, 3584, None, None)),
}


# The formats of GGUF files, whose scales are float16.
GGUF_FORMATS = (Int4(32, torch.float16), Int4Min(32, torch.float16), Int8(32, torch.float16))
# Llama 3.1 8B: the projections of attention, the vocabulary, gate and up, and the last product. The vocabulary's code is that
# of any large N.
LLAMA_LINEAR, LLAMA_SWIGLU, LLAMA_ADD = ((6144, 4096), (128_256, 4096)), (28_672, 4096), ((4096, 4096), (4096, 14_336))


def linear_formats(capability: int, dtype: torch.dtype, form: Format, *, rows: tuple[int, ...]) -> list[Launch]:
    """Launch the operations of Llama 3.1 8B with weights in a format, for each number of rows; then smaller ones, with all
    operands. But for kernels of other groups: two rows in int4 are multiplied directly, if K is a multiple of 128."""
    others = "conv_rows_early", "prepare_direct_rows_early", "direct_integers_rows_early"
    with recorded(capability) as launches:
        for count in rows:

            def operands(n: int, k: int, bias: torch.dtype | None = None) -> tuple[Tensor, Norm, Weight]:
                return (
                    empty(count, k, dtype=dtype),  # noqa: B023
                    Norm(empty(k), EPS),
                    weight(n, k, dtype=dtype, group=form, bias=bias),
                )

            for n, k in LLAMA_LINEAR:
                CudaKernels.norm_linear(*operands(n, k), dtype)
            CudaKernels.norm_swiglu(*operands(*LLAMA_SWIGLU))
            for n, k in LLAMA_ADD:
                x, _, matrix = operands(n, k)
                CudaKernels.linear_add(x, matrix, empty(count, n, dtype=dtype), None)
            # Rows past the last, a rest of K, heads and a bias.
            x, _, matrix = operands(1030, 2624, BF16)
            squares = HeadSquares(empty(count * 41, 2), EPS)
            CudaKernels.linear_add(x, matrix, empty(count, 1030, dtype=dtype), squares)
            gates, conv = (
                empty(20, 2624, dtype=dtype),
                Convolution(empty(512, 1, 4, dtype=dtype), empty(2, 3, 512, dtype=dtype)),
            )
            CudaKernels.norm_linear_conv(*operands(1030, 2624), gates, conv, row_index(count))
    return [one for one in launches if one.name not in others]


def linear_step(capability: int, dtype: torch.dtype) -> list[Launch]:
    """Launch each operation at its shapes, for one row and for two; weights that are not in int4 have a bias."""
    with recorded(capability) as launches:
        for rows in (1, 2):

            def operands(n: int, k: int, group: int | None) -> tuple[Tensor, Norm, Weight]:
                bias = dtype if group is None else None
                matrix = weight(n, k, dtype=dtype, group=group, bias=bias)
                return empty(rows, k, dtype=dtype), Norm(empty(k), EPS), matrix  # noqa: B023

            for n, k, group in STEP_LINEAR[dtype]:
                step_triton.norm_linear(*operands(n, k, group), F32 if n == VOCAB else dtype)
            for n, k, group in STEP_SWIGLU[dtype]:
                step_triton.norm_swiglu(*operands(n, k, group))
            for n, k, group, channels, gates in STEP_CONV[dtype]:
                conv = Convolution(empty(channels, 1, 4, dtype=dtype), empty(2, 3, channels, dtype=dtype))
                projection = operands(n, k, group)
                step_triton.norm_linear_conv(*projection, empty(gates, k, dtype=dtype), conv, row_index(rows))
            for n, k, group, heads in STEP_ADD[dtype]:
                x, _, matrix = operands(n, k, group)
                squares = None if heads is None else HeadSquares(empty(rows * heads, 2), EPS)
                step_triton.linear_add(x, matrix, empty(rows, n, dtype=dtype), squares)
    return launches


# Shapes for several rows, all in int4: (N, K, group size, rows), then the rows of gates or the heads. No number of rows is a
# multiple of 16: an export does not know that of its rows either.
ROWS_LINEAR = {BF16: ((VOCAB, 2048, 128, 65), (1024, 1024, 64, 65)), F32: ((97, 192, 32, 3),)}
ROWS_SWIGLU = {BF16: ((7168, 1024, 128, 15), (34816, 5120, 128, 33)), F32: ((256, 192, 64, 33),)}
ROWS_GATES = {BF16: ((12288, 2048, 128, 15, 64), (8192, 1024, 128, 33, 32)), F32: ()}
ROWS_ADD = {
    BF16: (
        (2048, 4096, 128, 15, 32),
        (2048, 4096, 128, 65, 32),
        (5120, 17408, 128, 65, None),
        (192, 256, 128, 3, 8),
        (192, 384, 32, 9, 6),
    ),
    F32: (),
}


def linear_rows(capability: int, dtype: torch.dtype) -> list[Launch]:
    """Launch each operation at its shapes; every weight has a bias."""
    with recorded(capability) as launches:

        def operands(n: int, k: int, group: int, rows: int) -> tuple[Tensor, Norm, Weight]:
            return empty(rows, k, dtype=dtype), Norm(empty(k), EPS), weight(n, k, dtype=dtype, group=group, bias=BF16)

        for n, k, group, rows in ROWS_LINEAR[dtype]:
            CudaKernels.norm_linear(*operands(n, k, group, rows), F32 if n == VOCAB else dtype)
        for n, k, group, rows in ROWS_SWIGLU[dtype]:
            CudaKernels.norm_swiglu(*operands(n, k, group, rows))
        for n, k, group, rows, gates in ROWS_GATES[dtype]:
            norm_linear_gates(*operands(n, k, group, rows), empty(gates, k, dtype=dtype))
        for n, k, group, rows, heads in ROWS_ADD[dtype]:
            x, _, matrix = operands(n, k, group, rows)
            squares = None if heads is None else HeadSquares(empty(rows * heads, 2), EPS)
            CudaKernels.linear_add(x, matrix, empty(rows, n, dtype=dtype), squares)
    # 8.0 and 8.9 multiply by the same instructions; of products in fixed point a SwiGLU's need most registers.
    return [one for one in launches if capability != 80 or one.name != "fixed_rows_early" or one.arguments["SWIGLU"]]


def linear_floats(capability: int, dtype: torch.dtype) -> list[Launch]:
    """Launch products of up to 8 and up to 16 rows with weights in bfloat16, also with long rows."""
    return _with_long_rows(capability, dtype, [(7, None), (15, None)])


def linear_integers(capability: int, dtype: torch.dtype) -> list[Launch]:
    """Launch products of few rows with weights in formats of GGUF files, and in groups of 64; also with long rows."""
    int4, int4_min, int8 = GGUF_FORMATS
    return _with_long_rows(capability, dtype, [(4, int4), (4, int4_min), (8, int4_min), (4, int8), (8, 64)])


def _with_long_rows(capability: int, dtype: torch.dtype, calls: list[tuple[int, int | Format | None]]) -> list[Launch]:
    """calls: numbers of rows and what weights are grouped by."""
    found = [one for rows, group in calls for one in linear_direct(capability, dtype, rows, group)]
    with recorded(capability) as launches:
        for rows, group in calls:
            matrix = weight(4096, 14336, dtype=dtype, group=group)
            CudaKernels.linear_add(empty(rows, 14336, dtype=dtype), matrix, empty(rows, 4096, dtype=dtype))
    return found + launches


def linear_int4(capability: int, dtype: torch.dtype) -> list[Launch]:
    """Launch products of up to 4 and up to 8 rows with int4 in groups of 128."""
    return [one for rows in (3, 8) for one in linear_direct(capability, dtype, rows, 128)]


def linear_direct(capability: int, dtype: torch.dtype, rows: int, group: int | Format | None) -> list[Launch]:
    """Launch the flagship's linear layers and a SwiGLU for few rows, without a group also a small model's vocabulary; every
    weight has a bias."""
    with recorded(capability) as launches:

        def operands(n: int, k: int) -> tuple[Tensor, Norm, Weight]:
            return empty(rows, k, dtype=dtype), Norm(empty(k), EPS), weight(n, k, dtype=dtype, group=group, bias=BF16)

        conv = Convolution(empty(8192, 1, 4, dtype=dtype), empty(rows, 3, 8192, dtype=dtype))
        CudaKernels.norm_linear_conv(*operands(12288, 2048), empty(64, 2048, dtype=dtype), conv, row_index(rows))
        CudaKernels.norm_linear(*operands(9216, 2048), dtype)
        CudaKernels.norm_swiglu(*operands(28672, 4096))
        if group is None:
            CudaKernels.norm_linear(*operands(VOCAB, 1024), F32)
        x, _, matrix = operands(2048, 4096)
        squares = HeadSquares(empty(rows * 32, 2), EPS)
        CudaKernels.linear_add(x, matrix, empty(rows, 2048, dtype=dtype), squares)
    return launches


# Neither this number of tokens nor eight times it is a multiple of 16, so no code is compiled for a multiple of 16.
TOKENS = 131
POSITIONS = 4096


def prefill(
    capability: int, dtype: torch.dtype, folder: Path, group_size: int | None, kernels: tuple[str, ...] = ()
) -> list[Launch]:
    """Launch a model's prefill, with one layer of each type; `kernels` selects launches by name."""
    config = replace(read_config(folder)[1], layer_types=("linear_attention", "full_attention"))
    model = build_network(config, POSITIONS, dtype, kernels=CudaKernels, quant=of_group(group_size)).to("meta")
    with recorded(capability) as launches:
        model(*(empty(size, dtype=torch.int64) for size in ((1, TOKENS), (TOKENS,), (TOKENS,))))
        # The first step of experts whose weights stay on the host.
        unpack_int4_panels(empty(2, 64, config.hidden_size // 2, dtype=torch.uint8))
        # The formats of GGUF files.
        for form in GGUF_FORMATS:
            linear(empty(TOKENS, 4096, dtype=dtype), weight(6144, 4096, dtype=dtype, group=form))
            layer, shares = ExpertsLayer(dtype, form, 0), empty(TOKENS, TOP_K)
            CudaKernels.experts(empty(TOKENS, SIZE, dtype=dtype), shares, shares.int(), layer.routed)
    # The last token's logits are computed as in a step.
    return [one for one in launches if not one.name.endswith("_early") and (not kernels or one.name in kernels)]


def sampling(capability: int, dtype: torch.dtype, vocab: int, rows: int, late: bool = False) -> list[Launch]:
    """Launch `sample_next` for logits in `dtype`, in a step or for slots that it leaves for `late`r."""
    slots, params = 2, SamplingParams(seed=0)
    given = processing_tensors(params, (), 0, vocab, ())
    with recorded(capability) as launches:
        numbers = empty(rows, dtype=torch.int64)
        CudaKernels.sample_next(
            empty(rows, vocab, dtype=dtype),
            numbers,
            numbers,
            LastTokens(*empty(2, slots, dtype=torch.int64)),
            SamplingTensors(*(value.to("meta").expand(slots) for value in params.tensors())),
            LogitsProcessing(
                empty(slots, dtype=torch.int64),
                ProcessingTensors(*(value.to("meta").expand(slots, *value.shape[1:]) for value in given)),
            ),
            late,
        )
    return launches


def logprobs(capability: int, dtype: torch.dtype, vocab: int, rows: int) -> list[Launch]:
    """Launch `logprobs` for logits in `dtype`."""
    with recorded(capability) as launches:
        CudaKernels.logprobs(empty(rows, vocab, dtype=dtype), empty(rows, dtype=torch.int64))
    return launches
