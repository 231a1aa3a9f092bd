"""The operations behind the logits that scripts/bench_kernels.py times: sampling, and log-probabilities."""

from __future__ import annotations

from dataclasses import replace

from kernel_arguments import Arguments, RandomTensors, Shapes
from kernel_case import Case

from ostinato.delegate.logits_processing import ProcessingTensors
from ostinato.delegate.sampling_params import MAX_LOGPROBS, SamplingParams
from ostinato.export.kernels.operands import LastTokens


def sampling_cases(shapes: Shapes, rows: int) -> list[Case]:
    """The cases of sampling, and of log-probabilities. Greedy sampling counts for a step; the others are measured beside it.

    Each launch samples at other positions, since a search depends on the noise. Params are measured with logits that are
    almost equally likely, as random weights give, and, behind "@peaked", with logits of which few are likely.
    """
    vocabulary = shapes.config.vocab_size

    def case(name: str, params: SamplingParams, calls: int = 0, scale: float = 1.0) -> Case:
        def arguments(random: RandomTensors) -> Arguments:
            return {
                "logits": random.wide(rows, vocabulary, scale=scale),
                "positions": random.positions(rows),
                "slots": random.slots(rows),
                "last": LastTokens(random.whole(0, rows), random.whole(0, rows)),
                "params": random.sampling(params, rows),
                "processing": random.processing(params, rows),
            }

        counts = "processing.given.output_counts"
        return Case(
            f"sample/{name}",
            f"{vocabulary:,} logits",
            "sample_next",
            arguments,
            8 * rows,
            calls,
            ("logits", "slots"),
            # Of other rows only `processed` is read.
            moves={} if params.processes else {f"processing.given.{field}": 0.0 for field in ProcessingTensors._fields},
            writes=(counts,) if params.processes else (),
        )

    temperature = SamplingParams(1.0, seed=0)
    filters = {
        "top_p": SamplingParams(1.0, top_p=0.95, seed=0),
        "min_p": SamplingParams(1.0, min_p=0.05, seed=0),
        "top_k": SamplingParams(1.0, 50, seed=0),
        "top_k_20_p": SamplingParams(1.0, 20, 0.95, seed=0),
        "all": SamplingParams(1.0, 50, 0.95, seed=0, min_p=0.05),
        "top_k_1000": SamplingParams(1.0, 1000, 0.95, seed=0),
    }

    def logits_and_tokens(random: RandomTensors) -> Arguments:
        return {"logits": random.wide(rows, vocabulary), "tokens": random.whole(0, rows)}

    written = 8 * rows * (1 + min(MAX_LOGPROBS, vocabulary))
    logprobs = Case(
        "logprobs", f"{vocabulary:,} logits", "logprobs", logits_and_tokens, written, 0, ("logits", "tokens")
    )
    return [
        case("greedy", SamplingParams(seed=0), 1),
        case("temperature", temperature),
        *(case(name, params) for name, params in filters.items()),
        case("temperature+penalties", _penalised(temperature)),
        case("all+penalties", _penalised(filters["all"])),
        *(case(f"{name}@peaked", params, scale=4.0) for name, params in filters.items()),
        logprobs,
    ]


def _penalised(params: SamplingParams) -> SamplingParams:
    """The same with all that changes logits, but for `min_tokens`, which is a bias, too."""
    return replace(
        params, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={7: 1.0, 8: -1.0}
    )
