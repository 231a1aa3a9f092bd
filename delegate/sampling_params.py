"""Parameters of sampling, as a caller gives them and as a program takes them. `sampling.py` says what they mean."""

from __future__ import annotations

import secrets
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


def _option(default: Any, metavar: str, text: str) -> Any:
    """A field of `SamplingParams` and, with the same name, an option of the command line."""
    return field(default=default, metadata={"metavar": metavar, "help": text})


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling. Every field is also an option of `ostinato run`.

    Attributes:
        temperature: divisor of the logits; 0, or less than MIN_TEMPERATURE, takes the most likely token.
        top_k: number of most likely tokens to keep; tokens as likely as the last of them stay too. 0 keeps all.
        top_p: share of the probability to keep. Among the tokens that top_k keeps, the smallest set of most likely tokens
            that reaches this share of their probability stays, and tokens as likely as the last of them. 1 keeps all.
        seed: start of the noise: the same seed samples the same tokens from the same logits. None: a new seed each time.
        min_p: smallest probability to keep, as a share of the most likely token's, at this temperature. It applies to the
            tokens that top_k and top_p keep. 0 keeps all.

    Raises:
        OptionError: a value out of range.
    """

    temperature: float = _option(0.0, "T", "0 (default): most likely token")
    top_k: int = _option(0, "K", "keep the K most likely tokens; 0 (default): all")
    top_p: float = _option(1.0, "P", "keep the most likely tokens that have this share together; 1 (default): all")
    seed: int | None = _option(None, "N", "sample the same tokens again")
    min_p: float = _option(0.0, "P", "keep tokens at least P times as likely as the most likely one; 0 (default): all")

    def __post_init__(self) -> None:
        for item in fields(self):
            value, kind = getattr(self, item.name), Real if isinstance(item.default, float) else Integral
            if not isinstance(value, kind) and not (value is None and item.default is None):
                what = "a number" if kind is Real else "a whole number"
                raise OptionError(f"{item.name} must be {what}, got {value!r}")
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

    def tensors(self) -> SamplingTensors:
        """Return the parameters as inputs of a program, on the host. Without a seed, a random one is taken.

        Values that the tensors cannot hold become the nearest ones that mean the same.
        """
        # Imported here: the command line reads the parameters first, and torch takes a second.
        import torch

        float32 = torch.finfo(torch.float32)
        seed = secrets.randbits(63) if self.seed is None else self.seed
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        values["temperature"] = 0.0 if self.temperature < MIN_TEMPERATURE else min(self.temperature, float32.max)
        values["top_k"] = min(self.top_k, MAX_TOP_K)
        # A share of 0 would keep no token.
        values["top_p"] = max(self.top_p, float32.tiny)
        # The same 64 bits as a signed number.
        values["seed"] = seed - (1 << 64) if seed >= 1 << 63 else seed
        # The dtype follows the field's default, not the value: `SamplingParams(temperature=1)` gives float32.
        dtypes = {item.name: torch.float32 if isinstance(item.default, float) else torch.int64 for item in fields(self)}
        return SamplingTensors(**{name: torch.tensor([value], dtype=dtypes[name]) for name, value in values.items()})


class SamplingTensors(NamedTuple):
    """The fields of `SamplingParams` as inputs of a program, [1] each: floats in float32, integers in int64."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor
    min_p: Tensor
