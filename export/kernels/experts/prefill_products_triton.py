# mypy: allow-untyped-defs
"""Tiles of a weight as operands of tensor cores, for the experts of a prompt: loaded, unpacked and scaled in registers.

An iteration takes two tiles of integers [N, B]: the low and the high nibbles of packed bytes, or 2 B bytes of eight bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.export.kernels.linear.rows_tiles_triton import INTERPRETED, unpack_nibbles


@triton.jit
def unpack_bytes(bytes, dtype: tl.constexpr):
    """Signed bytes [N, B] -> the same numbers, exact in `dtype`."""
    if INTERPRETED or dtype != tl.bfloat16:
        return bytes.to(tl.float32).to(dtype)
    else:
        # See `linear.rows_grouped_triton.unpack_bytes`.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 first, second, low, high, bits, sign, magic, minus;
            mov.b32 bits, 0x007f007f;
            mov.b32 sign, 0x00800080;
            mov.b32 magic, 0x43004300;
            mov.b32 minus, 0xbf80bf80;
            prmt.b32 first, $2, 0, 0x4140;
            prmt.b32 second, $2, 0, 0x4342;
            lop3.b32 $0, first, bits, magic, 0xEA;
            lop3.b32 $1, second, bits, magic, 0xEA;
            lop3.b32 low, first, sign, magic, 0xEA;
            lop3.b32 high, second, sign, magic, 0xEA;
            fma.rn.bf16x2 $0, low, minus, $0;
            fma.rn.bf16x2 $1, high, minus, $1;
            }""",
            "=&r,=&r,r",
            [bytes],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )


@triton.jit
def in_lanes(weights):
    """weights [N, B] with each row's elements in the order that `stands_at` gives inputs. This moves no data."""
    B: tl.constexpr = weights.shape[1]
    parts = tl.reshape(weights, [weights.shape[0], 4, B // 16, 2, 2])
    return tl.reshape(tl.permute(parts, (0, 2, 3, 1, 4)), [weights.shape[0], B])


@triton.jit
def stands_at(element, STEP: tl.constexpr):
    """The place of a row's element in the order in which products read inputs, with STEP bytes of weights per iteration.

    Four lanes share a row of a tensor core's operand; lane c has elements 2c, 2c + 1, 2c + 8 and 2c + 9 of every 16. Each
    lane should read its STEP / 4 neighbouring bytes of a weight row with one load. So the inputs for these bytes get the
    places that lane c has.
    """
    byte = element // 64 % (STEP // 32) * 32 + element % 32
    lane = byte // (STEP // 4)
    inside = byte % (STEP // 4)
    return (
        element // (2 * STEP) * (2 * STEP) + element // 32 % 2 * STEP + inside // 4 * 16 + inside // 2 % 2 * 8 + lane * 2
        + inside % 2
    )  # fmt: skip


@triton.jit
def add_product(weights, inputs, sums):
    """sums [N, M] + weights [N, K] @ inputs [K, M]."""
    return tl.dot(weights, inputs, sums, input_precision="tf32x3")


@triton.jit
def scaled(weights, scale, minimum, MINIMUM: tl.constexpr):
    """weights [N, B] times scale [N] plus minimum [N], in the weights' dtype.

    The product by a scale in bfloat16 is rounded once. By one in float16 it would be rounded twice, so it is computed in
    float32, as are sums. Triton's interpreter has no products of bfloat16.
    """
    if INTERPRETED or MINIMUM or scale.dtype != tl.bfloat16:
        product = weights.to(tl.float32) * scale.to(tl.float32)[:, None]
        if MINIMUM:
            product += minimum.to(tl.float32)[:, None]
        return product.to(weights.dtype)
    else:
        return weights * scale.to(weights.dtype)[:, None]


@triton.jit
def add_step(
    packed,
    scale,
    minimum,
    low_inputs,
    high_inputs,
    sums,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    MINIMUM: tl.constexpr,
):
    """sums [N, M] + both tiles of an iteration's weights, with scales and minima, @ low_inputs and high_inputs [B, M].

    Args:
        packed: result of `load_packed`.
        scale, minimum: results of `load_pair`.
    """
    if BITS == 8:
        low, high = unpack_bytes(packed[0], low_inputs.dtype), unpack_bytes(packed[1], low_inputs.dtype)
    else:
        low, high = unpack_nibbles(packed[0], low_inputs.dtype, MINIMUM)
    if GROUP == 32:
        # Low and high nibbles have different scales. With one product for each, an iteration takes 278 instructions, not 237.
        low, high = scaled(low, scale[0], minimum[0], MINIMUM), scaled(high, scale[1], minimum[1], MINIMUM)
        return add_product(in_lanes(high), high_inputs, add_product(in_lanes(low), low_inputs, sums))
    else:
        product = add_product(in_lanes(low), low_inputs, tl.zeros(sums.shape, tl.float32))
        product = add_product(in_lanes(high), high_inputs, product)
        return sums + product * scale[0].to(tl.float32)[:, None]


@triton.jit
def load_packed(tiles, inside, BITS: tl.constexpr, WHOLE: tl.constexpr):
    """The weights of an iteration: a tile of packed bytes, or of eight-bit integers two tiles, the second one `inside`.

    Without a second tile, the first one stands in its place.
    """
    first = tl.load(tiles)
    second = first
    if BITS == 8:
        second = tl.load(tiles + 32) if WHOLE else tl.load(tiles + 32, mask=inside, other=0)
    return first, second


@triton.jit
def load_second(inputs, filled, inside, WHOLE: tl.constexpr):
    """The inputs [B, M] of an iteration's second half, of which the last one may not be `inside`."""
    mask = filled[None, :] if WHOLE else filled[None, :] & inside
    return tl.load(inputs, mask=mask, other=0)


@triton.jit
def load_pair(numbers, first, inside, GROUP: tl.constexpr, WHOLE: tl.constexpr):
    """Scales or minima [N] of the iteration that begins at element `first`: of its low and of its high nibbles, or of both
    tiles of bytes."""
    low = tl.load(numbers + first // GROUP)
    high = low
    if GROUP == 32:
        following = numbers + (first // GROUP + 1)
        high = tl.load(following) if WHOLE else tl.load(following, mask=inside, other=0.0)
    return low, high
