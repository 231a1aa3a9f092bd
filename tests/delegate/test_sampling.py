"""Sampling of a token from logits: the noise, which tokens are kept, how often each is sampled, and that a seed repeats
them."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields

import pytest
import torch

from ostinato.delegate import OptionError
from ostinato.delegate.sampling import gumbel_noise, most_likely, philox, sample
from ostinato.delegate.sampling_params import SamplingParams, SamplingTensors

LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.5, 0.0, -3.0])


def samples(sampling: SamplingParams, count: int, logits: torch.Tensor = LOGITS) -> list[int]:
    """One token for each of the first `count` positions."""
    params = sampling.tensors()
    positions = torch.arange(count)[:, None]
    found = torch.vmap(lambda position: sample(logits, position, params))(positions)[:, 0].tolist()
    # One call for all positions is a hundred times as fast as one call for each, and gives the same.
    for position in {0, count // 2, count - 1}:
        assert int(sample(logits, positions[position], params)) == found[position]
    return found


def test_greedy_takes_the_most_likely() -> None:
    assert samples(SamplingParams(), 5) == [1] * 5
    assert samples(SamplingParams(), 1, torch.tensor([-torch.inf, -1e30, -torch.inf])) == [1]


def test_greedy_takes_the_first_of_equals() -> None:
    assert samples(SamplingParams(temperature=0), 5, torch.tensor([1.0, 3.0, 3.0, 3.0])) == [1] * 5


@pytest.mark.parametrize("temperature", [0.1, 1.0, 5.0])
def test_top_k_of_one_is_greedy(temperature: float) -> None:
    assert set(samples(SamplingParams(temperature=temperature, top_k=1, seed=1), 50)) == {1}


def test_a_small_top_p_is_greedy() -> None:
    assert set(samples(SamplingParams(temperature=2.0, top_p=1e-6, seed=1), 50)) == {1}


@pytest.mark.parametrize("temperature", [1e-300, 1e-46, 1e-38, 1e-31, 1e-30])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    """Divided by it, all of these logits would be infinite."""
    assert set(samples(SamplingParams(temperature, seed=1), 50, LOGITS + 30)) == {1}
    assert set(samples(SamplingParams(temperature, seed=1, top_p=0.5, min_p=0.1), 50, LOGITS * 1e4)) == {1}


def test_numbers_that_tensors_do_not_hold() -> None:
    everything = set(range(len(LOGITS)))
    assert set(samples(SamplingParams(1e300, seed=1), 200)) == everything
    assert set(samples(SamplingParams(1e300, seed=1, min_p=1.0), 200)) == {1}
    assert set(samples(SamplingParams(3.0, seed=1, top_k=10**30), 500)) == everything
    assert set(samples(SamplingParams(3.0, seed=1, top_p=1e-300), 50)) == {1}
    assert set(samples(SamplingParams(3.0, seed=1, min_p=1e-300), 500)) == everything


@pytest.mark.parametrize("top_k", [2, 3, 6, 100])
def test_top_k_keeps_the_k_most_likely(top_k: int) -> None:
    found = set(samples(SamplingParams(temperature=3.0, top_k=top_k, seed=2), 2000))
    assert found == set(LOGITS.topk(min(top_k, len(LOGITS))).indices.tolist())


@pytest.mark.parametrize(("top_k", "kept"), [(1, {1, 2, 3}), (2, {1, 2, 3}), (3, {1, 2, 3}), (4, {0, 1, 2, 3, 5})])
def test_top_k_keeps_all_that_are_as_likely_as_the_last(top_k: int, kept: set[int]) -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, 3.0, 0.0, 1.0])
    assert set(samples(SamplingParams(temperature=3.0, top_k=top_k, seed=2), 500, logits)) == kept


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.4, {3}), (0.5, {3}), (0.51, {3, 0}), (0.75, {3, 0}), (0.8, {3, 0, 2}), (0.95, {0, 1, 2, 3})]
)
def test_top_p_keeps_the_token_that_crosses(top_p: float, kept: set[int]) -> None:
    logits = torch.tensor([0.26, 0.09, 0.15, 0.50]).log()
    assert set(samples(SamplingParams(temperature=1.0, top_p=top_p, seed=3), 2000, logits)) == kept


def test_top_p_counts_what_top_k_left() -> None:
    # 0.5, 0.26, 0.15, 0.09: of the first two, 0.5 is two thirds.
    logits = torch.tensor([0.26, 0.09, 0.15, 0.50]).log()
    assert set(samples(SamplingParams(temperature=1.0, top_k=2, top_p=0.6, seed=3), 500, logits)) == {3}
    assert set(samples(SamplingParams(temperature=1.0, top_k=2, top_p=0.7, seed=3), 500, logits)) == {3, 0}


@pytest.mark.parametrize(
    ("min_p", "kept"),
    [(1.0, {3}), (0.53, {3}), (0.51, {3, 0}), (0.29, {3, 0, 2}), (0.17, {0, 1, 2, 3}), (0.0, {0, 1, 2, 3})],
)
def test_min_p_is_a_share_of_the_most_likely(min_p: float, kept: set[int]) -> None:
    # 0.26 / 0.50 = 0.52, 0.15 / 0.50 = 0.30, 0.09 / 0.50 = 0.18.
    logits = torch.tensor([0.26, 0.09, 0.15, 0.50]).log()
    assert set(samples(SamplingParams(temperature=1.0, seed=3, min_p=min_p), 2000, logits)) == kept


def test_min_p_counts_probabilities_at_the_temperature() -> None:
    # At temperature 2 the ratios are the square roots: 0.72, 0.55 and 0.42.
    logits = torch.tensor([0.26, 0.09, 0.15, 0.50]).log()
    assert set(samples(SamplingParams(temperature=2.0, seed=3, min_p=0.5), 2000, logits)) == {0, 2, 3}
    # Each option only removes tokens; the strictest one decides.
    assert set(samples(SamplingParams(temperature=2.0, top_k=2, seed=3, min_p=0.5), 2000, logits)) == {0, 3}
    assert set(samples(SamplingParams(temperature=2.0, top_k=3, top_p=0.9, seed=3, min_p=0.7), 2000, logits)) == {0, 3}


def test_min_p_keeps_ties() -> None:
    logits = torch.tensor([1.0, 2.0, 2.0, 0.0])
    assert set(samples(SamplingParams(temperature=1.0, seed=3, min_p=1.0), 200, logits)) == {1, 2}
    assert samples(SamplingParams(temperature=0.0, seed=3, min_p=0.9), 3, logits) == [1, 1, 1]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.0, seed=4),
        SamplingParams(temperature=0.5, seed=5),
        SamplingParams(temperature=2.0, seed=6),
        SamplingParams(temperature=1.0, top_k=3, seed=7),
        SamplingParams(temperature=1.0, top_p=0.75, seed=8),
    ],
    ids=str,
)
def test_frequencies_are_those_of_softmax(sampling: SamplingParams) -> None:
    logits = LOGITS.double() / sampling.temperature
    if sampling.top_k:
        logits[logits < logits.topk(sampling.top_k).values[-1]] = -torch.inf
    if sampling.top_p < 1:
        logits[[0, 2, 4, 5]] = -torch.inf  # 0.50 + 0.30 is over 0.75.
    expected = logits.softmax(-1)
    count = 6000
    found = Counter(samples(sampling, count))
    chi_square = 0.0
    for token, probability in enumerate(expected.tolist()):
        if probability == 0:
            assert found[token] == 0
        else:
            chi_square += (found[token] - count * probability) ** 2 / (count * probability)
    # The threshold for 5 degrees of freedom: one seed in a thousand exceeds 20.5.
    assert chi_square < 20.5


@pytest.mark.parametrize("sampling", [SamplingParams(1.0, seed=11), SamplingParams(0.7, 4, 0.9, seed=0)], ids=str)
def test_a_seed_repeats(sampling: SamplingParams) -> None:
    assert samples(sampling, 100) == samples(sampling, 100)
    other = SamplingParams(sampling.temperature, sampling.top_k, sampling.top_p, seed=12)
    assert samples(other, 100) != samples(sampling, 100)


def test_without_a_seed_samples_differ() -> None:
    assert samples(SamplingParams(temperature=1.0), 100) != samples(SamplingParams(temperature=1.0), 100)


def test_other_random_numbers_do_not_matter() -> None:
    sampling = SamplingParams(temperature=1.0, seed=9)
    torch.manual_seed(1)
    first = samples(sampling, 50)
    torch.manual_seed(2)
    assert samples(sampling, 50) == first
    torch.manual_seed(3)
    before = torch.rand(1)
    torch.manual_seed(3)
    samples(SamplingParams(temperature=1.0), 5)
    assert torch.equal(torch.rand(1), before)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Those of Random123's file `kat_vectors`."""
    words = [torch.tensor([word]) for word in (*counter, *key)]
    found = philox((words[0], words[1], words[2], words[3]), (words[4], words[5]))
    assert tuple(int(word) for word in found) == expected


def test_noise_is_of_seed_position_and_token() -> None:
    def noise(seed: int, position: int, count: int) -> torch.Tensor:
        return gumbel_noise(torch.tensor([seed]), torch.tensor([position]), count)

    assert torch.equal(noise(5, 7, 10), noise(5, 7, 333)[:10])
    sampled = torch.stack(
        [noise(seed, position, 333) for seed in (0, 1, 2**32, -1) for position in (0, 1, 2**32)]
    ).flatten()
    assert sampled.isfinite().all() and len(sampled.unique()) > 0.999 * len(sampled)


def test_noise_has_gumbels_moments() -> None:
    noise = torch.cat(
        [gumbel_noise(torch.tensor([3]), torch.tensor([position]), 50_000) for position in range(4)]
    ).double()
    deviation = torch.pi / 6**0.5
    assert abs(noise.mean() - 0.5772156649) < 4 * deviation / len(noise) ** 0.5
    assert abs(noise.std() / deviation - 1) < 0.01
    # Euler's distribution function at a few positions, to four standard deviations.
    for x in (-1.5, 0.0, 1.0, 5.0, 8.0):
        below = torch.tensor(-x).double().exp().neg().exp()
        assert abs((noise < x).double().mean() - below) < 4 * (below * (1 - below) / len(noise)) ** 0.5


@pytest.mark.parametrize(
    "logits",
    [
        LOGITS,
        torch.tensor([1.0, 3.0, 3.0]),
        torch.tensor([torch.nan, -5.0, torch.inf, torch.inf]),
        torch.full((4,), torch.nan),
    ],
    ids=["distinct", "ties", "not finite", "nan"],
)
def test_most_likely_is_what_a_temperature_of_0_samples(logits: torch.Tensor) -> None:
    (token,) = set(samples(SamplingParams(), 3, logits))
    assert (
        int(most_likely(logits)) == token == int(logits.nan_to_num(nan=-torch.inf, posinf=torch.finfo().max).argmax())
    )


def test_inputs_are_the_fields() -> None:
    params = SamplingParams(0.5, 7, 0.25, seed=2**64 - 1).tensors()
    assert (params.temperature, params.top_k, params.top_p, params.seed) == (0.5, 7, 0.25, -1)
    assert (params.temperature.dtype, params.top_k.dtype) == (torch.float32, torch.int64)
    assert (params.top_p.dtype, params.seed.dtype) == (torch.float32, torch.int64)
    assert all(value.shape == (1,) for value in params)
    assert [value.dtype for value in SamplingParams(temperature=1, top_p=1).tensors()] == [
        value.dtype for value in params
    ]
    assert set(SamplingTensors._fields) <= {item.name for item in fields(SamplingParams)}


def test_logits_are_left_alone() -> None:
    logits = LOGITS.clone()
    samples(SamplingParams(temperature=1.0, top_k=2, top_p=0.5, seed=1), 3, logits)
    assert torch.equal(logits, LOGITS)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": -0.5},
        {"top_p": 1.01},
        {"top_p": float("nan")},
        {"min_p": -0.1},
        {"min_p": 1.01},
        {"min_p": float("nan")},
        {"seed": -1},
        {"seed": 1 << 64},
    ],
    ids=str,
)
def test_values_out_of_range(values: dict[str, float]) -> None:
    (name,) = values
    with pytest.raises(OptionError, match=name):
        SamplingParams(**values)  # type: ignore[arg-type]
