"""`Result`: an answer with its figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

DEFAULT_MAX_NEW_TOKENS = 256


@dataclass
class Result:
    """One finished answer.

    `finish_reason`: "stop" (end-of-sequence token), "length" (`max_new_tokens`), "max_seq_len" or "interrupted".
    If an end-of-sequence token was sampled, `tokens` ends with it, and `text` leaves it out. Prefill times include the
    sampling of the first token; decode times are of every token after it.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    finish_reason: str = "interrupted"
    methods: dict[str, dict[str, Any]] = field(default_factory=dict)
    constants: dict[str, int] = field(default_factory=dict)

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        steps = len(self.tokens) - 1
        return steps / self.decode_seconds if steps > 0 and self.decode_seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        data = asdict(self)
        data["prefill_tokens_per_second"] = self.prefill_tokens_per_second
        data["decode_tokens_per_second"] = self.decode_tokens_per_second
        return data
