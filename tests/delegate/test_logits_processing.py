"""Logits as they are sampled from, and log-probabilities, beside transformers' processors."""

from __future__ import annotations

import pytest
import torch

from ostinato.delegate import OptionError
from ostinato.delegate.logits_processing import (
    MAX_BIASES,
    ProcessingTensors,
    bitmask,
    logprob_tensors,
    processed,
    processing_tensors,
    token_logprobs,
)
from ostinato.delegate.sampling_params import SamplingParams

VOCAB = 100
HISTORY = [1, 2, 3, 31, 32, 99, 3, 3, 64]
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0))


def changed(
    params: SamplingParams, prompt_end: int = 5, position: int = len(HISTORY), allowed: torch.Tensor | None = None
) -> torch.Tensor:
    given = processing_tensors(params, HISTORY, prompt_end, VOCAB, {0, 7}, allowed)
    return processed(LOGITS[None], torch.tensor([position]), given)[0]


def test_nothing_is_asked_for() -> None:
    assert not SamplingParams(temperature=1.0, top_k=3, logprobs=2, stop_token_ids=[3]).processes
    assert torch.equal(changed(SamplingParams()), LOGITS)


def test_repetition_penalty_is_that_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    expected = transformers.RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([HISTORY]), LOGITS[None].clone())[0]
    assert torch.equal(changed(SamplingParams(repetition_penalty=1.3)), expected)
    # Prompt and output count alike.
    assert torch.equal(changed(SamplingParams(repetition_penalty=1.3), prompt_end=0), expected)


def test_presence_and_frequency_count_the_output_alone() -> None:
    counts = torch.bincount(torch.tensor(HISTORY[5:]), minlength=VOCAB)
    assert counts.max() == 2
    found = changed(SamplingParams(presence_penalty=0.5, frequency_penalty=-0.25))
    torch.testing.assert_close(found, LOGITS - 0.5 * (counts > 0) + 0.25 * counts)


def test_biases() -> None:
    expected = LOGITS.clone()
    expected[[3, 99]] += torch.tensor([100.0, -2.5])
    assert torch.equal(changed(SamplingParams(logit_bias={3: 100, 99: -2.5})), expected)
    # From JSON, token ids are text.
    assert torch.equal(changed(SamplingParams(logit_bias={"3": 100.0, "99": -2.5})), expected)  # type: ignore[dict-item]
    # Biases come first.
    both = changed(SamplingParams(logit_bias={3: 100.0}, repetition_penalty=2.0))
    assert both[3] == (LOGITS[3] + 100) / 2


def test_no_stop_before_min_tokens() -> None:
    params = SamplingParams(min_tokens=5, stop_token_ids=[9, 7])
    for position in (5, 9):
        found = changed(params, position=position)
        assert found[[0, 7, 9]].tolist() == [-torch.inf] * 3
        found[[0, 7, 9]] = LOGITS[[0, 7, 9]]
        assert torch.equal(found, LOGITS)
    assert torch.equal(changed(params, position=10), LOGITS)


def test_a_bitmask() -> None:
    for allowed in ([0, 31, 32, 63, 64, 99], [5]):
        found = changed(SamplingParams(logit_bias={5: 1.0}), allowed=bitmask(allowed, VOCAB))
        assert found.isfinite().nonzero().flatten().tolist() == allowed
    assert bitmask([0, 33], 40).tolist() == [1, 2] and bitmask([31], 32).tolist() == [-(2**31)]
    assert bitmask([], 33).tolist() == [0, 0]


def test_rows_by_themselves() -> None:
    """Each row is changed by its own parameters."""
    options = (
        SamplingParams(),
        SamplingParams(repetition_penalty=0.5),
        SamplingParams(logit_bias={4: 3.0}, min_tokens=9),
    )
    rows = [processing_tensors(params, HISTORY, 5, VOCAB, {0, 7}) for params in options]
    logits = LOGITS.repeat(3, 1) * torch.tensor([[1.0], [2.0], [-1.0]])
    position = torch.tensor([len(HISTORY)])
    together = processed(
        logits, position.repeat(3), ProcessingTensors(*(torch.cat(parts) for parts in zip(*rows, strict=True)))
    )
    for row, given in enumerate(rows):
        assert torch.equal(together[row], processed(logits[row : row + 1], position, given)[0])


def test_logprobs() -> None:
    logits = torch.stack([LOGITS, LOGITS * 30])
    tokens = [5, int(LOGITS.argmax())]
    found = token_logprobs(tokens, logprob_tensors(logits, torch.tensor(tokens)), 3)
    expected = logits.double().log_softmax(1)
    for row, one in enumerate(found):
        assert one.token == tokens[row]
        assert one.logprob == pytest.approx(expected[row, tokens[row]].item(), abs=1e-5)
        assert one.rank == 1 + int((logits[row] > logits[row, tokens[row]]).sum())
        assert [token for token, _ in one.top] == expected[row].topk(3).indices.tolist()
        assert [value for _, value in one.top] == pytest.approx(expected[row].topk(3).values.tolist(), abs=1e-5)
    (own,) = token_logprobs([5], logprob_tensors(LOGITS[None], torch.tensor([5])), 0)
    assert own.top == [] and own.logprob == pytest.approx(expected[0, 5].item(), abs=1e-5)
    (few,) = token_logprobs([0], logprob_tensors(LOGITS[None, :4], torch.tensor([0])), 20)
    assert len(few.top) == 4


def test_what_there_is_no_room_for() -> None:
    many = {token: 1.0 for token in range(600)}
    with pytest.raises(OptionError, match=f"are 600 together, {MAX_BIASES} at most"):
        processing_tensors(SamplingParams(logit_bias=many), (), 0, 1000, ())
    for params in (SamplingParams(logit_bias={100: 1.0}), SamplingParams(min_tokens=1, stop_token_ids=[-1])):
        with pytest.raises(OptionError, match=r"take tokens of 0 to 99, got (100|-1)"):
            changed(params)
