"""Measures how far logits depend on the number of rows of a step: each session alone, against the same session in a batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.delegate import Method
from ostinato.delegate.artifact.names import META_VOCAB_SIZE, ROWS_METHODS
from ostinato.delegate.errors import OptionError
from ostinato.runner import Engine
from ostinato.runner.bench.tables import table
from ostinato.runner.model.batch import Run

# Most tokens of a session's prompt; the first session has one. A prompt and the token after it fit in one page.
MAX_TOKENS = 60
# A session is far off if its logits differ by more than this part of the largest one: more than rounding does by itself.
FAR = 0.1


@dataclass(frozen=True)
class Difference:
    """Result for one bucket.

    Attributes:
        bucket: rows of the call.
        compared: number of sessions whose logits were compared. For each, the largest difference of a logit is divided by the
            largest logit of the session alone.
        median, largest: median and largest of these quotients.
        far: number of sessions whose quotient is above FAR.
        other_tokens: number of sessions for which another token is the most likely one.
    """

    bucket: int
    compared: int
    median: float
    largest: float
    far: int
    other_tokens: int


def sessions_for(buckets: Iterable[int]) -> int:
    """Number of free sessions that `bucket_differences` needs: odd, so that the last call of each bucket has padding."""
    return max(buckets) - 1


def bucket_differences(engine: Engine, buckets: Sequence[int]) -> list[Difference]:
    """Compare the logits of a step of one row with those of steps that have each bucket's number of rows.

    The sessions have prompts of 1 to MAX_TOKENS random tokens. Each takes its next token several times from the same state:
    first alone, by `decode`, then for each bucket in calls of this number of rows. The last call of a bucket has rows of
    padding.

    Args:
        engine: engine of the artifact. `sessions_for(buckets)` sessions, and a page for each, are free.
        buckets: numbers of rows, each 2 or more and even, so that no bucket is always full.

    Raises:
        OptionError: no method of the program takes this number of rows; or a bucket is odd.
    """
    methods = [
        engine.program.load_method(name, {"skip_copy_output_to_cpu_for_method": name})
        for name in ROWS_METHODS
        if name in engine.program.method_names
    ]
    max_rows = max((method.inputs[0].shape[0].max for method in methods), default=0)
    if max(buckets) > max_rows or any(bucket < 2 or bucket % 2 for bucket in buckets):
        raise OptionError(f"buckets are even numbers of rows from 2 to {max_rows} of this program, got {list(buckets)}")
    generator = torch.Generator().manual_seed(1)
    vocabulary = int(engine.program.metadata[META_VOCAB_SIZE])
    sessions = [engine.open_session() for _ in range(sessions_for(buckets))]
    for number, session in enumerate(sessions):
        session.prefill(torch.randint(vocabulary, (1 + number % MAX_TOKENS,), generator=generator).tolist())
    slots, positions = (torch.tensor([getattr(one, name) for one in sessions]) for name in ("slot", "position"))
    following = torch.randint(vocabulary, (len(sessions),), generator=generator)
    buffers = engine.program.mutable_buffers
    state = {key: tensor.clone() for key, tensor in buffers.items()}

    def restore() -> None:
        for key, tensor in state.items():
            buffers[key].copy_(tensor)

    alone = torch.stack(
        [
            engine.model.step([Run(session.slot, [token], session.position)]).logits[-1].clone()
            for session, token in zip(sessions, following.tolist(), strict=True)
        ]
    )
    scale, likely = alone.abs().amax(1), alone.argmax(1)
    found = []
    for bucket in buckets:
        restore()
        method = next(one for one in methods if bucket <= one.inputs[0].shape[0].max)
        logits = torch.cat(
            [
                _rows(method, bucket, *(values[first : first + bucket] for values in (following, positions, slots)))
                for first in range(0, len(sessions), bucket)
            ]
        )
        apart = (logits - alone).abs().amax(1) / scale
        others, far = int((logits.argmax(1) != likely).sum()), int((apart > FAR).sum())
        found.append(Difference(bucket, len(sessions), apart.median().item(), apart.max().item(), far, others))
    for session in sessions:
        session.close()
    return found


def _rows(method: Method, bucket: int, tokens: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
    """Logits [rows, vocab] of one row per session, in a call that is padded to the bucket; a copy on the device."""
    padding = torch.full((bucket - len(slots),), -1)
    inputs = [torch.cat((values, padding)) for values in (tokens, positions, slots)]
    return method.execute((*inputs, torch.arange(bucket)))[1][: len(slots)].clone()


def render(found: Sequence[Difference]) -> str:
    """The table, with one line for each bucket. It ends without a newline."""
    columns = ("rows", "median difference", "largest", f"over {FAR:.0%}", "other token")
    rows = [
        (
            str(one.bucket),
            f"{one.median:.1e}",
            f"{one.largest:.1e}",
            str(one.far),
            f"{one.other_tokens} of {one.compared}",
        )
        for one in found
    ]
    return table(dict.fromkeys(columns, "right"), rows)
