"""The gated delta rule, token by token and in chunks, and the convolution ahead of it, in plain PyTorch.

One head keeps a state `S` of shape [K, V]. For each token::

    S = exp(g) * S;   S = S + k (beta * (v - S^T k))^T;   o = S^T q

with `g <= 0` a log decay and `beta` in (0, 1) a write strength (Gated Delta Networks, arXiv:2412.06464). The chunked form
computes the tokens of a chunk by matrix products, with the UT transform of DeltaNet (arXiv:2406.06484). It computes the
chunks by a scan with doubling strides, so that the graph has no loop and the number of tokens can stay symbolic.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.export.kernels.operands import Convolution, Decay, RecurrentState, RowIndex, runs_of, token_count

CHUNK = 64
# Size of the largest matrix that is cheaper to invert whole than in blocks: smaller products take no less time.
SMALL = 8


def convolve(x: Tensor, conv: Convolution, index: RowIndex) -> Tensor:
    """The causal convolution and SiLU of a gated delta-net layer, for a prompt.

    Args:
        x: [T, C], possibly columns of a wider tensor.
        conv: C channels, in x's dtype. The state of the slot is written in place: the last inputs up to the last token's.
        index: one run, perhaps with padding behind it. If the run begins at 0, the old state counts as zeros.

    Returns:
        [T, C] in x's dtype; sums are float32, or float64 where x is.
    """
    state, slot = conv.state, index.slots[:1]
    before = state.index_select(0, slot)[0]
    before = torch.where(index.positions[0] == 0, torch.zeros_like(before), before)
    tokens = x.shape[0]
    window = torch.cat((before, x), dim=0)
    wide = torch.promote_types(x.dtype, torch.float32)
    taps = conv.weight[:, 0, :].to(wide).t()
    # One fused multiply-add per tap (there are about 4): faster than a convolution call, and no library kernel is needed.
    out = sum(taps[i] * window[i : i + tokens].to(wide) for i in range(taps.shape[0]))
    assert isinstance(out, Tensor)
    # The rows of the new state: its last one is the last token's input.
    last = token_count(index.slots) + torch.arange(before.shape[0], device=x.device)
    state.index_copy_(0, slot, window.index_select(0, last).unsqueeze(0))
    return F.silu(out).to(x.dtype)


def conv_rows(product: Tensor, conv: Convolution, index: RowIndex) -> Tensor:
    """`convolve` of any runs over the first C of the products [T, N]; the others are copied, and padding gives zeros."""
    channels = conv.state.shape[2]
    mixed = torch.zeros_like(product)
    for _, rows in runs_of(index.slots):
        out = convolve(product[rows, :channels], conv, RowIndex(*(values[rows] for values in index)))
        mixed[rows] = torch.cat((out, product[rows, channels:]), dim=1)
    return mixed


def gated_delta_rule(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    decay: Decay,
    state: RecurrentState,
    index: RowIndex,
    key_heads: int,
    max_tokens: int,
) -> Tensor:
    """The delta rule of a gated delta-net layer for a prompt, from the convolution's output to the heads' outputs.

    Queries and keys are L2-normalised, queries scaled by K ** -0.5; g is `decay` for a, `beta = sigmoid(b)`. Value head h
    takes key head h // (value heads / key heads).

    Args:
        mixed: [T, key_heads K + key_heads K + H V]: q, k and v side by side, after the convolution and its SiLU.
        a, b: [T, H], the projections of the gates; like `mixed`, possibly columns of a wider tensor.
        decay: parameters of H heads.
        state: states of H heads. The prompt's slot is written in place: the state after the last token, with no update
            pending.
        index: one run, perhaps with padding behind it. If the run begins at 0, the old state counts as zeros.
        key_heads: number of key heads.
        max_tokens: upper bound of T, known when the graph is made.

    Returns:
        [T, H, V] in mixed's dtype.
    """
    _, heads, key_dim, value_dim = state.stored.shape
    tokens, positions, slot = mixed.shape[0], index.positions, index.slots[:1]
    before = whole_states(state, slot)[0]
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
        # A token of zeros leaves the state as it is.
        padding = index.slots < 0
        k, v = k.masked_fill(padding[:, None], 0), v.masked_fill(padding[:, None], 0)
        g, beta = g.masked_fill(padding, 0), beta.masked_fill(padding, 0)
        out, after = chunked_gated_delta_rule(q, k, v, g, beta, before, max_tokens)
    state.stored.index_copy_(0, slot, after.unsqueeze(0).to(state.stored.dtype))
    if state.updates is not None:
        # The counts of pending updates.
        state.updates[:, :, -1, -(value_dim // 8) :].index_fill_(0, slot, 0)
    return out.transpose(0, 1).to(mixed.dtype)


def whole_states(state: RecurrentState, slots: Tensor) -> Tensor:
    """Return the states of some slots with their pending updates: [N, H, K, V] in float32, or float64 if they are stored so.

    Args:
        slots: [N] int64.
    """
    whole = state.stored.index_select(0, slots)
    whole = whole.to(torch.promote_types(whole.dtype, torch.float32))
    if state.keys is None or state.updates is None:
        return whole
    keys, updates = (
        state.keys.index_select(0, slots).to(whole.dtype),
        state.updates.index_select(0, slots).to(whole.dtype),
    )
    keys = keys.repeat_interleave(whole.shape[1] // keys.shape[1], dim=1)
    count = updates[:, :, -1, -1, None, None]
    for place in range(keys.shape[2]):
        decay = updates[:, :, -1, place, None, None].exp()
        after = whole * decay + keys[:, :, place, :, None] * updates[:, :, place, None, :]
        whole = torch.where(place < count, after, whole)
    return whole


def delta_step(
    mixed: Tensor,
    gates: Tensor,
    decay: Decay,
    state: RecurrentState,
    index: RowIndex,
    norm_weight: Tensor,
    key_heads: int,
) -> tuple[Tensor, Tensor]:
    """`gated_delta_rule` for any runs, and the gated norm without its division by each head's root mean square.

    That division is one factor per head. The next product computes it from `squares` and applies it.

    Args:
        mixed: [T, 2 key_heads K + 2 H V]: q, k and v after the convolution and its SiLU, then z, the norm's gate.
        gates: [T, 2 H] float32: b, then a.
        decay: parameters of H heads.
        state: states of H heads, written in place for slots that have rows. Here no update is left pending; a GPU's kernels
            may leave that of a single row.
        index: any runs. If a run begins at 0, its old state counts as zeros.
        norm_weight: [V] float32.
        key_heads: number of key heads.

    Returns:
        (out [T, H V] in mixed's dtype: o * norm_weight * silu(z); squares [T H, P] float32, whose sum over P is that
        of o^2; here P = 1).
    """
    tokens = mixed.shape[0]
    _, heads, _, value_dim = state.stored.shape
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
    """`x / |x|` over the last dimension, with eps under the root as in flash-linear-attention."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def _key_heads(x: Tensor, key_dim: int, repeats: int) -> Tensor:
    """[T, key heads * K] -> [value heads, T, K], normalised. A key head is repeated for each of its value heads."""
    heads = l2_normalize(x.unflatten(1, (-1, key_dim)))
    return heads.repeat_interleave(repeats, dim=1).transpose(0, 1)


def recurrent_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Take the state through one token.

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


def chunked_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, max_tokens: int
) -> tuple[Tensor, Tensor]:
    """Take the state through any number of tokens up to `max_tokens`.

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
    # The mask is applied before the exponential: above the diagonal the difference is positive, and `exp` could overflow.
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
    # A selection, not a slice: whether a slice takes everything would be a condition on T.
    return out.index_select(0, torch.arange(tokens, device=out.device)).transpose(0, 1), after


def _split_chunks(x: Tensor) -> Tensor:
    """[H, T, D] -> [chunks * H, CHUNK, D], with zeros behind: a token of zeros with g = 0 leaves the state as it is.

    Chunks come first, so that no stride depends on T: the compiler spent half of its time on the algebra of such strides.
    """
    heads, tokens, size = x.shape
    chunks = _chunk_count(tokens)
    padded = F.pad(x.transpose(0, 1), (0, 0, 0, 0, 0, chunks * CHUNK - tokens))
    return padded.reshape(chunks, CHUNK, heads, size).transpose(1, 2).reshape(chunks * heads, CHUNK, size)


def _chunk_count(tokens: int) -> int:
    """Number of chunks for `tokens`. The last chunk is empty.

    There are at least two: torch.export takes a size of one for a constant, and the graph would fit only short prompts. The
    number is one quotient, not a sum, so that torch's solver sees that its multiples are divisible by it.
    """
    return (tokens + 2 * CHUNK - 1) // CHUNK


def invert_unit_lower(matrix: Tensor) -> Tensor:
    """Inverse of `I + strictly_lower(matrix)`, [..., n, n] with n a power of two.

    Each step inverts blocks of twice the size from the inverses of their diagonal blocks: the inverse of [[A, 0], [C, B]] has
    the lower left block -B^-1 C A^-1. The Neumann series would take as few products, but its terms grow like binomials when
    keys repeat (one repeated token is enough), and float32 loses every digit.
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
    """`invert_unit_lower` on whole matrices: only two products for each size of blocks, though most factors are zeros."""
    n = matrices.shape[-1]
    index = torch.arange(n, device=matrices.device)
    # The highest bit in which row and column differ is the size of the lower left block that an element belongs to.
    differ = (index.unsqueeze(1) ^ index).tril(-1)
    inverse = torch.eye(n, dtype=matrices.dtype, device=matrices.device) - matrices.masked_fill(differ != 1, 0)
    size = 2
    while size < n:
        corner = matrices.masked_fill(differ // size != 1, 0)
        inverse = inverse - torch.bmm(torch.bmm(inverse, corner), inverse)
        size *= 2
    return inverse


def _scan_chunks(maps: Tensor, state: Tensor, max_chunks: int) -> Tensor:
    """States before each chunk and after the last one, [(chunks + 1) * H, K, V].

    This is an inclusive scan in log2(max_chunks + 1) strides. The map (A1, U1), then (A2, U2), is (A2 A1, A2 U1 + U2).

    Args:
        maps: [chunks * H, K, K + V], A and U side by side. A chunk turns a state into `A @ state + U`.
        state: [H, K, V], before the first chunk.
        max_chunks: upper bound of the number of chunks.
    """
    heads, key_dim, value_dim = state.shape
    # The state becomes the map of a chunk ahead of the first one: A = 0, U = state.
    maps = torch.cat((F.pad(state, (key_dim, 0)), maps), dim=0)
    is_a = torch.arange(key_dim + value_dim, device=maps.device) < key_dim
    same = torch.eye(key_dim, key_dim + value_dim, dtype=maps.dtype, device=maps.device)
    for step in range(math.ceil(math.log2(max_chunks + 1))):
        front = same.expand(2**step * heads, *same.shape)
        earlier = torch.cat((front, maps), dim=0)[: maps.shape[0]]
        maps = torch.bmm(maps[..., :key_dim], earlier) + maps.masked_fill(is_a, 0)
    return maps[..., key_dim:]
