"""A prompt and decode steps through a loaded program, which give logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ostinato.delegate import Method, Program

from ..comparison import relative_error

SLOT = torch.tensor([0])


def run(method: Method, tokens: Tensor, begin: int, end: int) -> Tensor:
    """Logits [vocab] after tokens `begin` to `end`, as one call."""
    (logits,) = method.execute((tokens[:, begin:end].contiguous(), torch.arange(begin, end), SLOT.repeat(end - begin)))
    return logits[0]


def converse(program: Program, tokens: Tensor, length: int, options: Mapping[str, Any] | None = None) -> list[Tensor]:
    """Return the logits of a prefill of `length` tokens and of decode steps over the rest. A prompt of one token goes through
    decode."""
    prefill, decode = program.load_method("prefill"), program.load_method("decode", options)
    first = run(decode if length == 1 else prefill, tokens, 0, length)
    found = [first, *(run(decode, tokens, at, at + 1) for at in range(length, tokens.shape[1]))]
    prefill.close()
    decode.close()
    return found


def errors(found: list[Tensor], expected: Tensor) -> list[float]:
    return [relative_error(ours, theirs) for ours, theirs in zip(found, expected, strict=True)]
