"""Parameters of sampling, as a caller gives them and as a program takes them, and the log-probabilities that they ask for.

`sampling.py` and `logits_processing.py` say what they mean.
"""

from __future__ import annotations

import operator
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import OptionError

if TYPE_CHECKING:
    from torch import Tensor

# A lower temperature samples the most likely token, like 0: divided by it, large logits would be infinite, and so all equal.
MIN_TEMPERATURE = 1e-30
# More than any vocabulary has, and no more than the tensor's dtype holds.
MAX_TOP_K = 2**31 - 1
# Ranges of OpenAI's interface; vLLM has the same, but for the biases.
MAX_PENALTY, MAX_BIAS, MAX_LOGPROBS = 2.0, 100.0, 20
# The largest float32, and the smallest normal one.
MAX_FLOAT32, TINY_FLOAT32 = (2 - 2.0**-23) * 2.0**127, 2.0**-126


def _option(default: Any, metavar: str, text: str) -> Any:
    """A field of `SamplingParams` and, with the same name, an option of the command line."""
    return field(default=default, metadata={"metavar": metavar, "help": text})


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling, with the names that vLLM gives them. Every field is also an option of `ostinato run`.

    An output is a token that was sampled, or appended, since the session's last prompt. All tokens before are the prompt.

    Attributes:
        temperature: divisor of the logits; 0, or less than MIN_TEMPERATURE, takes the most likely token.
        top_k: number of most likely tokens to keep; tokens as likely as the last of them stay too. 0 keeps all.
        top_p: share of the probability to keep. Among the tokens that top_k keeps, the smallest set of most likely tokens
            that reaches this share of their probability stays, and tokens as likely as the last of them. 1 keeps all.
        seed: start of the noise: the same seed samples the same tokens from the same logits. None: a new seed each time.
        min_p: smallest probability to keep, as a share of the most likely token's, at this temperature. It applies to the
            tokens that top_k and top_p keep. 0 keeps all.
        repetition_penalty: divisor of positive logits, and factor of others, of all tokens in prompt and output; more than 0.
        presence_penalty: subtracted from the logits of all tokens in the output; -2 to 2.
        frequency_penalty: the same, times the number of times that the token stands in the output.
        logit_bias: token -> number that is added to its logit, -100 to 100, before the penalties.
        min_tokens: number of outputs before a token can end the answer.
        stop_token_ids: tokens that end an answer beside the model's own.
        logprobs: number of most likely tokens whose log-probabilities are given with each output, and with its own: 0 to 20.
            They come from the logits as the model gives them. None: none.
        prompt_logprobs: the same for each token of the prompt of `Engine.generate`. A session has `Session.prompt_logprobs`.

    Raises:
        OptionError: a value out of range.
    """

    temperature: float = _option(0.0, "T", "0 (default): most likely token")
    top_k: int = _option(0, "K", "keep the K most likely tokens; 0 (default): all")
    top_p: float = _option(1.0, "P", "keep the most likely tokens that have this share together; 1 (default): all")
    seed: int | None = _option(None, "N", "sample the same tokens again")
    min_p: float = _option(0.0, "P", "keep tokens at least P times as likely as the most likely one; 0 (default): all")

    repetition_penalty: float = _option(
        1.0, "R", "divide the logits of tokens that were there before; 1 (default): off"
    )
    presence_penalty: float = _option(0.0, "P", "subtract from the logits of tokens in the answer; 0 (default): off")
    frequency_penalty: float = _option(0.0, "P", "the same for each time that the token is there; 0 (default): off")
    logit_bias: Mapping[int, float] | None = field(
        default=None, hash=False, metadata={"metavar": "JSON", "help": "add to the logits of tokens: '{\"42\": -100}'"}
    )
    min_tokens: int = _option(0, "N", "end the answer after N tokens at the earliest")
    stop_token_ids: Sequence[int] | None = _option(None, "N,N", "more tokens that end the answer")
    logprobs: int | None = _option(
        None, "N", "log-probabilities of each token and of the N most likely ones, with --json"
    )
    prompt_logprobs: int | None = _option(None, "N", "the same for each token of the prompt, with --json")

    def __post_init__(self) -> None:
        self._check_mappings()
        for item in fields(self):
            if item.name in ("logit_bias", "stop_token_ids"):
                continue
            value, kind = getattr(self, item.name), Real if isinstance(item.default, float) else Integral
            if not isinstance(value, kind) and not (value is None and item.default is None):
                what = "a number" if kind is Real else "a whole number"
                raise OptionError(f"{item.name} must be {what}, got {value!r}")
            if kind is Real and isinstance(value, int) and abs(value) > MAX_FLOAT32:
                raise OptionError(f"{item.name} must be a number that float32 holds, got {value}")
        if not 0 <= self.temperature < float("inf"):
            raise OptionError(f"temperature must be a number of 0 or more, got {self.temperature}")
        if self.top_k < 0:
            raise OptionError(f"top_k must be 0 (off) or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise OptionError(f"top_p must be more than 0 and at most 1, got {self.top_p}")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise OptionError(f"seed must be 0 to 2**64 - 1, got {self.seed}")
        if not 0 <= self.min_p <= 1:
            raise OptionError(f"min_p must be 0 (off) to 1, got {self.min_p}")
        if not 0 < self.repetition_penalty < float("inf"):
            raise OptionError(f"repetition_penalty must be more than 0, 1 is off; got {self.repetition_penalty}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -MAX_PENALTY <= getattr(self, name) <= MAX_PENALTY:
                raise OptionError(f"{name} must be -2 to 2, 0 is off; got {getattr(self, name)}")
        if self.min_tokens < 0:
            raise OptionError(f"min_tokens must be 0 (off) or more, got {self.min_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not 0 <= count <= MAX_LOGPROBS:
                raise OptionError(f"{name} must be 0 to {MAX_LOGPROBS}, got {count}")

    def _check_mappings(self) -> None:
        """Check the parameters that are not a number. Token ids may be text, as they are in JSON."""
        if self.logit_bias is not None:
            try:
                bias = {int(token): float(value) for token, value in self.logit_bias.items()}
            except (AttributeError, TypeError, ValueError, OverflowError):
                raise OptionError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}") from None
            if not all(-MAX_BIAS <= value <= MAX_BIAS for value in bias.values()):
                raise OptionError(f"logit_bias must be -100 to 100 for each token, got {self.logit_bias!r}")
            object.__setattr__(self, "logit_bias", bias)
        if self.stop_token_ids is not None:
            try:
                stops = tuple(operator.index(token) for token in self.stop_token_ids)
            except TypeError:
                raise OptionError(f"stop_token_ids must be token ids, got {self.stop_token_ids!r}") from None
            object.__setattr__(self, "stop_token_ids", stops)

    @property
    def processes(self) -> bool:
        """Whether logits are changed before a token is sampled from them."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.min_tokens
        )

    def ends(self, eos_ids: Iterable[int]) -> frozenset[int]:
        """The tokens that end an answer: `eos_ids`, and `stop_token_ids`."""
        return frozenset((*eos_ids, *(self.stop_token_ids or ())))

    def numbers(self) -> dict[str, int | float]:
        """The values of `SamplingTensors` by name. Without a seed, a random one is taken; the most likely token needs none.

        Values that the tensors cannot hold become the nearest ones that mean the same.
        """
        greedy = self.temperature < MIN_TEMPERATURE
        seed = self.seed if self.seed is not None else 0 if greedy else secrets.randbits(63)
        return {
            "temperature": 0.0 if greedy else min(float(self.temperature), MAX_FLOAT32),
            "top_k": min(int(self.top_k), MAX_TOP_K),
            # A share of 0 would keep no token.
            "top_p": max(float(self.top_p), TINY_FLOAT32),
            # The same 64 bits as a signed number.
            "seed": seed - (1 << 64) if seed >= 1 << 63 else seed,
            "min_p": float(self.min_p),
        }

    def tensors(self) -> SamplingTensors:
        """Return the parameters of sampling itself as tensors on the host, see `numbers`."""
        # Imported here: the command line reads the parameters first, and torch takes a second.
        import torch

        dtypes = {int: torch.int64, float: torch.float32}
        return SamplingTensors(
            **{name: torch.tensor([value], dtype=dtypes[type(value)]) for name, value in self.numbers().items()}
        )


class SamplingTensors(NamedTuple):
    """The fields of `SamplingParams` that `sampling.sample` takes, [1] each: floats in float32, integers in int64."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor
    min_p: Tensor


class TokenLogprobs(NamedTuple):
    """Log-probabilities of a token and of the most likely ones, from the logits as the model gives them.

    Attributes:
        token: the token id.
        logprob: natural logarithm of its probability.
        rank: number of tokens that are at least as likely; 1 is the most likely one.
        top: the most likely tokens with their log-probabilities, the most likely first.
    """

    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]
