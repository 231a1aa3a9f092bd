"""Log-probabilities of a prompt's own tokens, from the logits after the token before each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ostinato.delegate.logits_processing import token_logprobs
from ostinato.delegate.sampling_params import TokenLogprobs
from ostinato.runner.model.model import MAX_LOGITS, Model

# The most tokens whose logits a GPU holds at once: with a vocabulary of 248,320, 254 MB of them. A step of 64 tokens reads
# nearly as many weights as one of 256.
MAX_GPU_LOGITS = 256


def prompt_logprobs(
    model: Model,
    tokens: Sequence[int],
    count: int,
    before: torch.Tensor | None,
    logits_of: Callable[[Sequence[int]], torch.Tensor],
) -> list[TokenLogprobs | None]:
    """Run a prompt, and return a record for each of its tokens, with the `count` most likely tokens in the token's place.

    Only the records' numbers go to the host, and it waits for them once.

    Args:
        before: logits [vocab] after the token before the prompt; None: there is none, and the first record is None.
        logits_of: function that runs tokens, and returns the logits after each of them [n, vocab].
    """
    device = model.program.device
    rows = MAX_GPU_LOGITS if device.type == "cuda" else MAX_LOGITS
    ids = torch.tensor(tokens, device=device)
    parts = [] if before is None else [model.logprobs(before[None], ids[:1])]
    for begin in range(0, len(tokens), rows):
        logits = logits_of(tokens[begin : begin + rows])
        following = ids[begin + 1 : begin + 1 + rows]
        if len(following):
            parts.append(model.logprobs(logits[: len(following)], following))
    first = len(tokens) - sum(len(numbers) for numbers, _ in parts)
    found = [torch.cat(columns).cpu() for columns in zip(*parts, strict=True)]
    return [*[None] * first, *(token_logprobs(tokens[first:], found, count) if found else [])]
