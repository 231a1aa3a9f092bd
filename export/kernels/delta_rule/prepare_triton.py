"""The computation of the chunked gated delta rule that does not need the state, for all chunks at once."""

from __future__ import annotations

import triton
import triton.language as tl

from .math_triton import (
    inverse_length,
    log_decay,
    multiply,
    multiply_add,
    store_parts,
    sum_of_squares,
    write_strength,
)


@triton.jit
def prepare_kernel(
    mixed: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    slots: tl.tensor,
    w: tl.tensor,
    pairs: tl.tensor,
    u: tl.tensor,
    factors: tl.tensor,
    tokens: tl.tensor,
    padded: tl.tensor,
    MIXED_STRIDE: tl.constexpr,
    A_STRIDE: tl.constexpr,
    B_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Program (chunk, head). It solves the chunk's triangular system in two halves, top and bottom.

    Rows behind the last token have q = k = v = 0: they decay nothing, write nothing, and give zeros in w, u and P.
    """
    if tl.load(slots + tl.program_id(0) * (2 * HALF)) < 0:
        return
    head = tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    padded = tl.cast(padded, tl.int64)
    half = tl.arange(0, HALF)
    column = tl.arange(0, COLUMNS)
    # 64 bits: a row times a stride exceeds 2^31 at about 200,000 tokens.
    top = tl.program_id(0).to(tl.int64) * (2 * HALF) + half
    bottom = top + HALF
    in_top = tl.load(slots + top, mask=top < tokens, other=-1) >= 0
    in_bottom = tl.load(slots + bottom, mask=bottom < tokens, other=-1) >= 0
    top_cell = (top * HEADS + head)[:, None]
    bottom_cell = (bottom * HEADS + head)[:, None]

    rate = tl.load(a_log + head)
    bias = tl.load(dt_bias + head)
    g_top = log_decay(tl.load(a + top * A_STRIDE + head, mask=in_top, other=0.0), rate, bias)
    g_bottom = log_decay(tl.load(a + bottom * A_STRIDE + head, mask=in_bottom, other=0.0), rate, bias)
    g_top = tl.where(in_top, g_top, 0.0)
    g_bottom = tl.where(in_bottom, g_bottom, 0.0)
    d_top = tl.cumsum(g_top, 0)
    d_bottom = tl.cumsum(g_bottom, 0) + tl.sum(g_top, 0)
    d_last = tl.sum(g_top, 0) + tl.sum(g_bottom, 0)
    beta_top = write_strength(tl.load(b + top * B_STRIDE + head, mask=in_top, other=0.0))
    beta_bottom = write_strength(tl.load(b + bottom * B_STRIDE + head, mask=in_bottom, other=0.0))

    from_top = mixed + top[:, None] * MIXED_STRIDE + column[None, :]
    from_bottom = mixed + bottom[:, None] * MIXED_STRIDE + column[None, :]
    q_start = key_head * K
    k_start = (KEY_HEADS + key_head) * K
    v_start = 2 * KEY_HEADS * K + head * V
    k_top_length, k_bottom_length, kk_top, kk_corner, kk_bottom = compare(
        from_top + k_start,
        from_bottom + k_start,
        from_top + k_start,
        from_bottom + k_start,
        in_top,
        in_bottom,
        K,
        COLUMNS,
    )
    q_top_length, q_bottom_length, qk_top, qk_corner, qk_bottom = compare(
        from_top + q_start,
        from_bottom + q_start,
        from_top + k_start,
        from_bottom + k_start,
        in_top,
        in_bottom,
        K,
        COLUMNS,
    )
    q_top_factor = q_top_length * K**-0.5
    q_bottom_factor = q_bottom_length * K**-0.5

    # Above the diagonal, exponents are positive and could overflow, so they are cut to 0. These results are not used.
    decay_top = tl.exp(tl.minimum(d_top[:, None] - d_top[None, :], 0.0)) * k_top_length[None, :]
    decay_corner = tl.exp(d_bottom[:, None] - d_top[None, :]) * k_top_length[None, :]
    decay_bottom = tl.exp(tl.minimum(d_bottom[:, None] - d_bottom[None, :], 0.0)) * k_bottom_length[None, :]
    lower = half[:, None] >= half[None, :]
    p_top = pairs + top_cell * (2 * HALF) + half[None, :]
    p_bottom = pairs + bottom_cell * (2 * HALF) + half[None, :]
    p_size = padded * HEADS * (2 * HALF)
    qk_top = tl.where(lower, qk_top * decay_top * q_top_factor[:, None], 0.0)
    qk_bottom = tl.where(lower, qk_bottom * decay_bottom * q_bottom_factor[:, None], 0.0)
    store_parts(p_top, qk_top, p_size, PARTS)
    store_parts(p_top + HALF, tl.zeros((HALF, HALF), tl.float32), p_size, PARTS)
    store_parts(p_bottom, qk_corner * decay_corner * q_bottom_factor[:, None], p_size, PARTS)
    store_parts(p_bottom + HALF, qk_bottom, p_size, PARTS)

    # X = [[x_top, 0], [x_corner, x_bottom]].
    a_top = kk_top * decay_top * (beta_top * k_top_length)[:, None]
    a_corner = kk_corner * decay_corner * (beta_bottom * k_bottom_length)[:, None]
    a_bottom = kk_bottom * decay_bottom * (beta_bottom * k_bottom_length)[:, None]
    x_top, x_bottom = invert(a_top, a_bottom, PARTS)
    x_corner = -multiply(multiply(x_bottom, a_corner, PARTS), x_top, PARTS)

    top_factor = beta_top[None, :]
    bottom_factor = beta_bottom[None, :]
    u_top = u + top_cell * V + column[None, :]
    u_bottom = u + bottom_cell * V + column[None, :]
    x = (x_top * top_factor, x_corner * top_factor, x_bottom * bottom_factor)
    store_product(u_top, u_bottom, x, from_top + v_start, from_bottom + v_start, in_top, in_bottom, 0, V, COLUMNS, 1)

    top_factor *= -(tl.exp(d_top) * k_top_length)[None, :]
    bottom_factor *= -(tl.exp(d_bottom) * k_bottom_length)[None, :]
    w_top = w + top_cell * K + column[None, :]
    w_bottom = w + bottom_cell * K + column[None, :]
    w_size = padded * HEADS * K
    x = (x_top * top_factor, x_corner * top_factor, x_bottom * bottom_factor)
    store_product(
        w_top, w_bottom, x, from_top + k_start, from_bottom + k_start, in_top, in_bottom, w_size, K, COLUMNS, PARTS
    )

    q_factors = factors + head * padded
    k_factors = q_factors + HEADS * padded
    decays = k_factors + HEADS * padded
    tl.store(q_factors + top, q_top_factor * tl.exp(d_top))
    tl.store(q_factors + bottom, q_bottom_factor * tl.exp(d_bottom))
    tl.store(k_factors + top, k_top_length * tl.exp(d_last - d_top))
    tl.store(k_factors + bottom, k_bottom_length * tl.exp(d_last - d_bottom))
    tl.store(decays + top, tl.exp(d_top))
    tl.store(decays + bottom, tl.exp(d_bottom))


@triton.jit
def compare(
    x_top: tl.tensor,
    x_bottom: tl.tensor,
    k_top: tl.tensor,
    k_bottom: tl.tensor,
    in_top: tl.tensor,
    in_bottom: tl.tensor,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Products of rows of x and rows of k, in blocks of columns, because whole rows would spill registers.

    Arguments x and k are pointers to the first columns of the rows of the two halves.

    Returns:
        (1 / |x| of the top half, the same of the bottom half; x k^T of top and top, of bottom and top, of bottom and bottom).
    """
    top_square = tl.zeros((x_top.shape[0],), tl.float32)
    bottom_square = tl.zeros((x_top.shape[0],), tl.float32)
    top = tl.zeros((x_top.shape[0], x_top.shape[0]), tl.float32)
    corner = tl.zeros((x_top.shape[0], x_top.shape[0]), tl.float32)
    bottom = tl.zeros((x_top.shape[0], x_top.shape[0]), tl.float32)
    for start in range(0, WIDTH, COLUMNS):
        a = tl.load(x_top + start, mask=in_top[:, None], other=0.0)
        b = tl.load(x_bottom + start, mask=in_bottom[:, None], other=0.0)
        c = tl.trans(tl.load(k_top + start, mask=in_top[:, None], other=0.0))
        d = tl.trans(tl.load(k_bottom + start, mask=in_bottom[:, None], other=0.0))
        top_square += sum_of_squares(a, 1)
        bottom_square += sum_of_squares(b, 1)
        top = tl.dot(a, c, top, input_precision="tf32x3")
        corner = tl.dot(b, c, corner, input_precision="tf32x3")
        bottom = tl.dot(b, d, bottom, input_precision="tf32x3")
    return inverse_length(top_square), inverse_length(bottom_square), top, corner, bottom


@triton.jit
def store_product(
    to_top: tl.tensor,
    to_bottom: tl.tensor,
    x: tl.tuple,
    from_top: tl.tensor,
    from_bottom: tl.tensor,
    in_top: tl.tensor,
    in_bottom: tl.tensor,
    size: tl.tensor,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Multiplies `[[x[0], 0], [x[1], x[2]]]` by rows of `mixed`, in blocks of columns, and stores the product in parts."""
    nothing = tl.zeros(from_top.shape, tl.float32)
    for start in range(0, WIDTH, COLUMNS):
        top = tl.load(from_top + start, mask=in_top[:, None], other=0.0)
        bottom = tl.load(from_bottom + start, mask=in_bottom[:, None], other=0.0)
        store_parts(to_top + start, multiply_add(x[0], top, nothing), size, PARTS)
        rest = multiply_add(x[1], top, nothing)
        store_parts(to_bottom + start, multiply_add(x[2], bottom, rest), size, PARTS)


@triton.jit
def invert(first: tl.tensor, second: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    """Inverses of `I + strictly_lower` of two matrices of 32 rows, as in `reference.invert_unit_lower`.

    Two matrices at once, so that products of one matrix are computed while those of the other wait.
    """
    i = tl.arange(0, first.shape[0])[:, None]
    j = tl.arange(0, first.shape[0])[None, :]
    eye = tl.where(i == j, 1.0, 0.0)
    below = (i == j + 1) & (i % 2 == 1)
    x = eye - tl.where(below, first, 0.0)
    y = eye - tl.where(below, second, 0.0)
    for level in range(1, 5):
        corner = ((i >> level) == (j >> level) + 1) & ((i >> level) % 2 == 1)
        x_part = multiply(x, tl.where(corner, first, 0.0), PARTS)
        y_part = multiply(y, tl.where(corner, second, 0.0), PARTS)
        x -= multiply(x_part, x, PARTS)
        y -= multiply(y_part, y, PARTS)
    return x, y
