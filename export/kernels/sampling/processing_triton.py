# mypy: allow-untyped-defs
"""Changes of a row's logits before a token is sampled from them: `processed` of `delegate.logits_processing`, bit for bit.

`rank_rows_early` stores the changed logits of such a row, and reads them again. Of a row that is sampled from the logits as
they are, it reads only that it is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.delegate.logits_processing import MAX_BIASES, Processing

OFF = tl.constexpr(Processing.OFF.value)
IN_STEP = tl.constexpr(Processing.IN_STEP.value)
LATER = tl.constexpr(Processing.LATER.value)
BIASES = tl.constexpr(MAX_BIASES)


@triton.jit
def mode_of(processed_ptr, temperature_ptr, slot, own, LATE: tl.constexpr):
    """(whether the row's logits are processed, the temperature at which it is sampled)."""
    processed = tl.load(processed_ptr + own)
    temperature = tl.load(temperature_ptr + own)
    if LATE:
        return (slot >= 0) & (processed != OFF), temperature
    else:
        return (slot >= 0) & (processed == IN_STEP), tl.where(processed == LATER, 0.0, temperature)


@triton.jit
def biases_of(tokens_ptr, ends_ptr, begin, BLOCK: tl.constexpr):
    """(index of a slot's first bias for a token from `begin` on, index behind the last one for BLOCK tokens from there)."""
    entries = tl.arange(0, BIASES)
    tokens = tl.load(tokens_ptr + entries)
    listed = tl.load(ends_ptr + entries) > 0
    # One sum has both numbers.
    ahead = (listed & (tokens < begin)).to(tl.int32) + ((listed & (tokens < begin + BLOCK)).to(tl.int32) << 16)
    both = tl.sum(ahead, 0)
    return both & 0xFFFF, both >> 16


@triton.jit
def change_quads(
    changed_row,
    x_row,
    quads,
    own,
    position,
    first,
    end,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    prompt_tokens,
    output_counts,
    bias_tokens,
    bias_values,
    bias_ends,
    allowed_tokens,
    VOCAB: tl.constexpr,
):
    """Store the processed logits of quads of tokens in `changed_row`.

    Args:
        x_row: the logits as they are.
        own: the row's slot.
        first, end: see `biases_of`.
        repetition_ptr to allowed_tokens: the fields of `ProcessingTensors`, in order.
    """
    tokens = quads[:, None] * 4 + tl.arange(0, 4)[None, :]
    own = own.to(tl.int64)
    x = tl.load(x_row + tokens, mask=tokens < VOCAB, other=0.0)
    for entry in range(first, end):
        place = own * BIASES + entry
        value = tl.where(position < tl.load(bias_ends + place), tl.load(bias_values + place), 0.0)
        x = tl.where(tokens == tl.load(bias_tokens + place), x + value, x)
    counts = tl.load(output_counts + own * VOCAB + tokens, mask=tokens < VOCAB, other=0)
    # A quad's tokens are bits of one word.
    words = own * ((VOCAB + 31) // 32) + quads // 8
    prompt = tl.load(prompt_tokens + words, mask=quads * 4 < VOCAB, other=0)
    allowed = tl.load(allowed_tokens + words, mask=quads * 4 < VOCAB, other=0)
    repetition = tl.load(repetition_ptr + own)
    presence = tl.load(presence_ptr + own)
    frequency = tl.load(frequency_ptr + own)
    bits = tokens & 31
    x = tl.where((allowed[:, None] >> bits) & 1 != 0, x, -float("inf"))
    # `tl.fma` with 0 is a product that is rounded by itself: a compiler makes one operation of a product and a difference.
    repeated = ((prompt[:, None] >> bits) & 1 != 0) | (counts > 0)
    x = tl.where(repeated, tl.where(x > 0, tl.div_rn(x, repetition), tl.fma(x, repetition, 0.0)), x)
    x = x - tl.fma(frequency, counts.to(tl.float32), 0.0) - tl.where(counts > 0, presence, 0.0)
    tl.store(changed_row + tokens, x, mask=tokens < VOCAB)
