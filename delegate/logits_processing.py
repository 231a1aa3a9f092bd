"""Changes of logits before a token is sampled from them, and their log-probabilities, in plain PyTorch.

As `sampling.py`, this is the one definition that export and runner share: the kernels of programs that sample on the device
are tested against it, and the runner calls it for programs that return logits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .errors import OptionError
from .sampling import finite
from .sampling_params import MAX_LOGPROBS, SamplingParams, TokenLogprobs

# Tokens with a bias of their own, and tokens that `min_tokens` forbids, for one session.
MAX_BIASES = 512
# Allowed tokens and tokens of prompts are bits of such words.
WORD_BITS = 32
ALL_BITS = -1
# A position that no token has.
NEVER_ENDS = 2**62


class Processing(IntEnum):
    """Use of a slot's logits by a step: the value of the state `processed`."""

    # It samples from them as they are.
    OFF = 0
    # It changes them by the slot's `ProcessingTensors`, samples, and counts the token.
    IN_STEP = 1
    # The slot's bitmask is not known before the step. It takes the most likely token, and counts nothing; the token is
    # sampled later, from the same logits.
    LATER = 2


class ProcessingTensors(NamedTuple):
    """Penalties, biases and allowed tokens of R rows, or of all slots, as `processed` takes them.

    Bitmasks have W = ceil(vocab / 32) words. Token i is bit i % 32 of word i // 32, as in vLLM and xgrammar.

    Attributes:
        repetition_penalty, presence_penalty, frequency_penalty: [R] float32.
        prompt_tokens: [R, W] int32, bitmask of the prompt's tokens.
        output_counts: [R, vocab] int32, how often each token was sampled.
        bias_tokens: [R, MAX_BIASES] int64, in ascending order, then any tokens where nothing is left to add. Only kernels
            need the order.
        bias_values: [R, MAX_BIASES] float32, added to the logits of `bias_tokens`, one after the other.
        bias_ends: [R, MAX_BIASES] int64; from this position on the bias is not added. 0 where nothing is left to add.
        allowed_tokens: [R, W] int32, bitmask; all other tokens get a logit of minus infinity.
    """

    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    prompt_tokens: Tensor
    output_counts: Tensor
    bias_tokens: Tensor
    bias_values: Tensor
    bias_ends: Tensor
    allowed_tokens: Tensor


def processed(logits: Tensor, positions: Tensor, given: ProcessingTensors) -> Tensor:
    """Return logits as they are sampled from: with biases, allowed tokens and penalties, in this order, as in vLLM.

    Args:
        logits: [R, vocab] float32.
        positions: [R] int64, position of the token that is sampled from each row.
        given: on the device of the logits.

    Returns:
        [R, vocab] float32.
    """
    tokens = torch.arange(logits.shape[1], device=logits.device)
    values = torch.where(positions[:, None] < given.bias_ends, given.bias_values, 0.0)
    x = logits.scatter_add(1, given.bias_tokens, values)
    x = torch.where(_bits(given.allowed_tokens, tokens), x, -torch.inf)
    counts = given.output_counts
    repeated = _bits(given.prompt_tokens, tokens) | (counts > 0)
    penalty = given.repetition_penalty[:, None]
    x = torch.where(repeated, torch.where(x > 0, x / penalty, x * penalty), x)
    return x - given.frequency_penalty[:, None] * counts - given.presence_penalty[:, None] * (counts > 0)


def processing_tensors(
    params: SamplingParams,
    history: Sequence[int],
    prompt_end: int,
    vocab: int,
    eos_ids: Collection[int],
    allowed_tokens: Tensor | None = None,
) -> ProcessingTensors:
    """Return what `processed` takes for one session, R = 1, on the host.

    Args:
        params: the session's parameters.
        history: its tokens so far.
        prompt_end: number of those that count as the prompt. All others were sampled.
        vocab: number of tokens that the model has.
        eos_ids: tokens that end an answer. `min_tokens` forbids them, and `stop_token_ids`.
        allowed_tokens: [W] int32 bitmask; None: all.

    Raises:
        OptionError: a token of `logit_bias` or `stop_token_ids` out of range, or more than MAX_BIASES of them.
    """
    biases = checked_biases(params, prompt_end, vocab, eos_ids)
    tokens, values, ends = zip(*sorted(biases), *[(0, 0.0, 0)] * (MAX_BIASES - len(biases)), strict=True)
    counts = np.bincount(np.array(history[prompt_end:], np.int64), minlength=vocab).astype(np.int32)
    repetition, presence, frequency = (
        torch.tensor([value], dtype=torch.float32)
        for value in (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    )
    every = torch.full((words_of(vocab),), ALL_BITS, dtype=torch.int32)
    return ProcessingTensors(
        repetition,
        presence,
        frequency,
        bitmask(history[:prompt_end], vocab)[None],
        torch.from_numpy(counts)[None],
        torch.tensor([tokens]),
        torch.tensor([values], dtype=torch.float32),
        torch.tensor([ends]),
        (every if allowed_tokens is None else allowed_tokens)[None],
    )


def checked_biases(
    params: SamplingParams, prompt_end: int, vocab: int, eos_ids: Collection[int]
) -> list[tuple[int, float, int]]:
    """Return tokens, what is added to their logits, and up to which position. See `processing_tensors`."""
    biases = [(token, value, NEVER_ENDS) for token, value in (params.logit_bias or {}).items()]
    if params.min_tokens:
        end = min(prompt_end + params.min_tokens, NEVER_ENDS)
        biases += [(token, -torch.inf, end) for token in sorted(params.ends(eos_ids))]
    if len(biases) > MAX_BIASES:
        raise OptionError(
            f"logit_bias and the tokens that min_tokens forbids are {len(biases)} together, {MAX_BIASES} at most"
        )
    wrong = [token for token, _, _ in biases if not 0 <= token < vocab]
    if wrong:
        raise OptionError(f"logit_bias and stop_token_ids take tokens of 0 to {vocab - 1}, got {wrong[0]}")
    return biases


def bitmask(tokens: Sequence[int], vocab: int) -> Tensor:
    """Return [W] int32 with the bits of these tokens. Raises IndexError: a token out of range."""
    # By numpy: for this many elements torch starts its threads, which may have to wait for a core.
    present = np.zeros(words_of(vocab) * WORD_BITS, np.bool_)
    present[np.array(tokens, np.int64)] = True
    return torch.from_numpy(np.packbits(present, bitorder="little").view("<i4").astype(np.int32))


def words_of(vocab: int) -> int:
    """Number of words W of a bitmask."""
    return (vocab + WORD_BITS - 1) // WORD_BITS


def logprob_tensors(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `token_logprobs` makes records of, on the device of the logits.

    Logits that are not finite count as in `sampling.sample`. C is MAX_LOGPROBS or, if that is less, the vocabulary's size.

    Args:
        logits: [R, vocab] float32.
        tokens: [R] int64.

    Returns:
        [R, 1 + C] int32: number of tokens that are at least as likely as the row's token, then the C most likely tokens in
        order; of equally likely ones the lower comes first. And [R, 1 + C] float32: log-probabilities of the row's token and
        of these.
    """
    x = finite(logits)
    ids = x.sort(dim=1, descending=True, stable=True).indices[:, :MAX_LOGPROBS]
    rank = (x >= x.gather(1, tokens[:, None])).sum(1, keepdim=True)
    values = x.log_softmax(1).gather(1, torch.cat([tokens[:, None], ids], 1))
    return torch.cat([rank, ids], 1).to(torch.int32), values


def token_logprobs(tokens: Sequence[int], tensors: Sequence[Tensor], count: int) -> list[TokenLogprobs]:
    """Return the records of `tokens`, with `count` most likely ones each, from what `logprob_tensors` gives."""
    numbers, values = (tensor[: len(tokens), : 1 + count].tolist() for tensor in tensors)
    return [
        TokenLogprobs(token, own, rank, list(zip(ids, top, strict=True)))
        for token, (rank, *ids), (own, *top) in zip(tokens, numbers, values, strict=True)
    ]


def _bits(words: Tensor, tokens: Tensor) -> Tensor:
    """[R, W] int32 -> [R, vocab] bool."""
    return (words.index_select(1, tokens // WORD_BITS) >> (tokens % WORD_BITS).to(torch.int32)) & 1 != 0
