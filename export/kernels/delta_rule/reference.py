"""The gated delta rule, token by token and in chunks, and the convolution ahead of it, in plain PyTorch.

One head keeps a state `S` of shape [K, V]. For each token::

    S = exp(g) * S;   S = S + k (beta * (v - S^T k))^T;   o = S^T q

with `g <= 0` a log decay and `beta` in (0, 1) a write strength (Gated Delta Networks, arXiv:2412.06464). The chunked form
does the tokens of a chunk by matrix products, after the UT transform of DeltaNet (arXiv:2406.06484), and the
chunks by a scan of doubling strides, so that the graph has no loop and the number of tokens can stay symbolic.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.export.kernels.operands import Convolution, Decay, RowIndex, is_padding, length_of, runs_of

CHUNK = 64
# The largest matrix that is cheaper to invert whole than in blocks: smaller products take no less time.
SMALL = 8


def convolve(x: Tensor, conv: Convolution, index: RowIndex) -> Tensor:
    """The causal convolution of a gated delta-net layer for a prompt, and SiLU.

    Args:
        x: [T, C], possibly columns of a wider tensor.
        conv: of C channels, in x's dtype; its state is written in place where the slot is: the inputs up to the last token.
        index: of one run, and perhaps padding behind it; where it begins at 0 the old state counts as zeros.

    Returns:
        [T, C] in x's dtype; sums are float32.
    """
    state, slot = conv.state, index.slots[:1]
    before = state.index_select(0, slot)[0]
    before = torch.where(index.positions[0] == 0, torch.zeros_like(before), before)
    tokens = x.shape[0]
    window = torch.cat((before, x), dim=0)
    taps = conv.weight[:, 0, :].float().t()
    # One fused multiply-add per tap (there are about 4): faster than a convolution call, and no library kernel is needed.
    out = sum(taps[i] * window[i : i + tokens].float() for i in range(taps.shape[0]))
    assert isinstance(out, Tensor)
    # As many inputs as the state has, up to the last token's.
    last = length_of(index.positions) + torch.arange(before.shape[0], device=x.device)
    state.index_copy_(0, slot, window.index_select(0, last).unsqueeze(0))
    return F.silu(out).to(x.dtype)


def gated_delta_rule(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    decay: Decay,
    state: Tensor,
    index: RowIndex,
    key_heads: int,
    max_tokens: int,
) -> Tensor:
    """The delta rule of a gated delta-net layer for a prompt, from the convolution's output to the heads' outputs.

    Queries and keys are L2-normalised, queries scaled by K ** -0.5; g is `decay` of a, `beta = sigmoid(b)`. Value head h
    takes key head h // (value heads / key heads).

    Args:
        mixed: [T, key_heads K + key_heads K + H V]: q, k and v side by side, after the convolution and its SiLU.
        a, b: [T, H], the gates' projections; like `mixed`, possibly columns of a wider tensor.
        decay: of H heads.
        state: [slots, H, K, V] float32; the prompt's slot is written in place: the state after the last token.
        index: of one run, and perhaps padding behind it; where it begins at 0 the old state counts as zeros.
        key_heads: how many key heads.
        max_tokens: upper bound of T, known when the graph is made.

    Returns:
        [T, H, V] in mixed's dtype.
    """
    _, heads, key_dim, value_dim = state.shape
    tokens, positions, slot = mixed.shape[0], index.positions, index.slots[:1]
    before = state.index_select(0, slot)[0]
    before = torch.where(positions[0] == 0, torch.zeros_like(before), before)
    q, k, v = mixed.float().split((key_heads * key_dim, key_heads * key_dim, heads * value_dim), dim=1)
    q = _key_heads(q, key_dim, heads // key_heads) * key_dim**-0.5
    k = _key_heads(k, key_dim, heads // key_heads)
    v = v.unflatten(1, (heads, value_dim)).transpose(0, 1)
    beta = torch.sigmoid(b).float().t()
    g = (-decay.a_log.float().exp() * F.softplus(a.float() + decay.dt_bias.float())).t()
    if tokens == 1:
        out, after = recurrent_step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], before)
        out = out.unsqueeze(1)
    else:
        # A token of zeros leaves the state alone.
        padding = is_padding(positions)
        k, v = k.masked_fill(padding[:, None], 0), v.masked_fill(padding[:, None], 0)
        g, beta = g.masked_fill(padding, 0), beta.masked_fill(padding, 0)
        out, after = chunked_gated_delta_rule(q, k, v, g, beta, before, max_tokens)
    state.index_copy_(0, slot, after.unsqueeze(0))
    return out.transpose(0, 1).to(mixed.dtype)


def delta_step(
    mixed: Tensor, gates: Tensor, decay: Decay, state: Tensor, index: RowIndex, norm_weight: Tensor, key_heads: int
) -> tuple[Tensor, Tensor]:
    """`gated_delta_rule` of any runs, and the gated norm except for its division by each head's root mean square.

    That division is one factor per head, which the product behind it applies, from `squares`.

    Args:
        mixed: [T, 2 key_heads K + 2 H V]: q, k, v after the convolution and its SiLU, and z, the norm's gate.
        gates: [T, 2 H] float32: b, then a.
        decay: of H heads.
        state: [slots, H, K, V] float32, written in place where the slots have rows.
        index: of the rows; where a run begins at 0 its old state counts as zeros.
        norm_weight: [V] float32, no offset.
        key_heads: how many key heads.

    Returns:
        (out [T, H V] in mixed's dtype: o * norm_weight * silu(z); squares [T H, P] float32, whose sum over P, here 1, is
        that of o^2).
    """
    tokens = mixed.shape[0]
    _, heads, _, value_dim = state.shape
    qkv, z = mixed.split((mixed.shape[1] - heads * value_dim, heads * value_dim), dim=1)
    b, a = gates.chunk(2, dim=1)
    o = mixed.new_zeros(tokens, heads, value_dim, dtype=torch.float32)
    for _, rows in runs_of(index.slots):
        here = RowIndex(*(values[rows] for values in index))
        o[rows] = gated_delta_rule(
            qkv[rows], a[rows], b[rows], decay, state, here, key_heads, max_tokens=tokens
        ).float()
    out = o * norm_weight.float() * F.silu(z.float()).unflatten(1, (heads, value_dim))
    return out.reshape(tokens, -1).to(mixed.dtype), o.square().sum(-1).view(-1, 1)


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """`x / |x|` over the last dimension, eps under the root as in flash-linear-attention."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def _key_heads(x: Tensor, key_dim: int, repeats: int) -> Tensor:
    """[T, key heads * K] -> [value heads, T, K], normalised, repeated where value heads share."""
    heads = l2_normalize(x.unflatten(1, (-1, key_dim)))
    return heads.repeat_interleave(repeats, dim=1).transpose(0, 1)


def recurrent_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token.

    Args:
        q, k: [H, K] float32, normalised, q scaled.
        v: [H, V] float32.
        g, beta: [H] float32.
        state: [H, K, V] float32.

    Returns:
        (output [H, V], new state [H, K, V]).
    """
    state = state * g.exp()[:, None, None]
    predicted = (state * k[:, :, None]).sum(1)
    delta = (v - predicted) * beta[:, None]
    state = state + k[:, :, None] * delta[:, None, :]
    return (state * q[:, :, None]).sum(1), state


def naive_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition, a plain loop: the reference for the two forms that the model uses. Shapes as in the chunked form."""
    outputs = []
    for t in range(q.shape[1]):
        out, state = recurrent_step(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], state)
        outputs.append(out)
    return torch.stack(outputs, 1), state


def chunked_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, max_tokens: int
) -> tuple[Tensor, Tensor]:
    """Any number of tokens up to `max_tokens`.

    Args:
        q, k: [H, T, K] float32, normalised, q scaled.
        v: [H, T, V] float32.
        g, beta: [H, T] float32.
        state: [H, K, V] float32, the state before the first token.
        max_tokens: upper bound of T, known when the graph is made; it sets the number of scan steps.

    Returns:
        (output [H, T, V], state after the last token [H, K, V]).
    """
    heads, tokens, key_dim = q.shape
    value_dim = v.shape[-1]
    rows = _split_chunks(torch.cat((q, k, v, g.unsqueeze(-1), beta.unsqueeze(-1)), dim=-1))
    q, k, v, g, beta = rows.split((key_dim, key_dim, value_dim, 1, 1), dim=-1)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()

    decay = g.cumsum(1)
    # The mask goes in before the exponential: above the diagonal the difference is positive and could overflow.
    pair = (decay - decay.transpose(1, 2)).masked_fill(~causal, -torch.inf).exp()
    k_beta = k * beta
    inverse = invert_unit_lower(torch.bmm(k_beta, k.transpose(1, 2)) * pair)
    solved = torch.bmm(inverse, torch.cat((k_beta * decay.exp(), v * beta), dim=-1))
    keys, values = solved.split((key_dim, value_dim), dim=-1)

    last = decay[:, -1:]
    written = torch.bmm((k * (last - decay).exp()).transpose(1, 2), solved)
    eye = torch.eye(key_dim, dtype=k.dtype, device=k.device)
    maps = torch.cat((last.exp() * eye - written[..., :key_dim], written[..., key_dim:]), dim=-1)
    states = _scan_chunks(maps, state, _chunk_count(max_tokens))
    starts, after = states[: maps.shape[0]], states[maps.shape[0] :]

    attention = torch.bmm(q, k.transpose(1, 2)) * pair
    out = torch.bmm(q * decay.exp(), starts) + torch.bmm(attention, values - torch.bmm(keys, starts))
    out = out.unflatten(0, (-1, heads)).transpose(1, 2).flatten(0, 1)
    # A selection and no slice: whether a slice is the whole would be a condition on T.
    return out.index_select(0, torch.arange(tokens, device=out.device)).transpose(0, 1), after


def _split_chunks(x: Tensor) -> Tensor:
    """[H, T, D] -> [chunks * H, CHUNK, D], zeros behind: a token of zeros with g = 0 leaves the state alone.

    Chunks come first, so that no stride depends on T: the compiler's algebra on such strides took half of its time.
    """
    heads, tokens, size = x.shape
    chunks = _chunk_count(tokens)
    padded = F.pad(x.transpose(0, 1), (0, 0, 0, 0, 0, chunks * CHUNK - tokens))
    return padded.reshape(chunks, CHUNK, heads, size).transpose(1, 2).reshape(chunks * heads, CHUNK, size)


def _chunk_count(tokens: int) -> int:
    """Chunks for `tokens`, the last of them empty.

    Two at least: torch.export takes a size of one for a constant, and the graph would fit short prompts only. One quotient
    and no sum, so that its solver sees a product of it to be divisible by it.
    """
    return (tokens + 2 * CHUNK - 1) // CHUNK


def invert_unit_lower(matrix: Tensor) -> Tensor:
    """Inverse of `I + strictly_lower(matrix)`, [..., n, n] with n a power of two.

    Blocks of twice the size from the inverses of their diagonal blocks: [[A, 0], [C, B]] has the lower left block
    -B^-1 C A^-1. Summing the Neumann series instead takes as few products, but its terms grow like binomials when
    the keys repeat (one repeated token is enough), and float32 loses every digit.
    """
    n = matrix.shape[-1]
    matrices = matrix.reshape(-1, n, n)
    size = min(n, SMALL)
    inverse = _invert_small(_diagonal_blocks(matrices, size))
    while size < n:
        top, bottom = inverse.unflatten(0, (-1, 2)).unbind(1)
        lower = _diagonal_blocks(matrices, 2 * size)[:, size:, :size]
        corner = torch.bmm(torch.bmm(bottom, lower), top)
        inverse = torch.cat((F.pad(top, (0, size)), torch.cat((-corner, bottom), dim=2)), dim=1)
        size *= 2
    return inverse.reshape(matrix.shape)


def _diagonal_blocks(matrices: Tensor, size: int) -> Tensor:
    """[N, n, n] -> [N * n / size, size, size]."""
    count, n, _ = matrices.shape
    if size == n:
        return matrices
    tiles = matrices.reshape(count, n // size, size, n // size, size)
    return tiles.diagonal(dim1=1, dim2=3).movedim(-1, 1).flatten(0, 1)


def _invert_small(matrices: Tensor) -> Tensor:
    """`invert_unit_lower` with all blocks of a size in one matrix: mostly products with zeros, but two for each size."""
    n = matrices.shape[-1]
    index = torch.arange(n, device=matrices.device)
    # The highest bit in which row and column differ is the size of the block whose lower left part an element is in.
    differ = (index.unsqueeze(1) ^ index).tril(-1)
    inverse = torch.eye(n, dtype=matrices.dtype, device=matrices.device) - matrices.masked_fill(differ != 1, 0)
    size = 2
    while size < n:
        corner = matrices.masked_fill(differ // size != 1, 0)
        inverse = inverse - torch.bmm(torch.bmm(inverse, corner), inverse)
        size *= 2
    return inverse


def _scan_chunks(maps: Tensor, state: Tensor, max_chunks: int) -> Tensor:
    """States before each chunk and after the last, [(chunks + 1) * H, K, V].

    An inclusive scan in log2(max_chunks + 1) strides: first (A1, U1) and then (A2, U2) is (A2 A1, A2 U1 + U2).

    Args:
        maps: [chunks * H, K, K + V]: A and U side by side, of what a chunk does to a state: `A @ state + U`.
        state: [H, K, V], before the first.
        max_chunks: upper bound of the chunks.
    """
    heads, key_dim, value_dim = state.shape
    # The state is what a chunk ahead of the first would leave, whatever was before.
    maps = torch.cat((F.pad(state, (key_dim, 0)), maps), dim=0)
    is_a = torch.arange(key_dim + value_dim, device=maps.device) < key_dim
    same = torch.eye(key_dim, key_dim + value_dim, dtype=maps.dtype, device=maps.device)
    for step in range(math.ceil(math.log2(max_chunks + 1))):
        front = same.expand(2**step * heads, *same.shape)
        earlier = torch.cat((front, maps), dim=0)[: maps.shape[0]]
        maps = torch.bmm(maps[..., :key_dim], earlier) + maps.masked_fill(is_a, 0)
    return maps[..., key_dim:]
