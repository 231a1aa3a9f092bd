"""All forms of sampling against one definition."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ostinato.delegate.logits_processing import Processing, ProcessingTensors, processing_tensors
from ostinato.delegate.sampling import gumbel_noise
from ostinato.delegate.sampling_params import SamplingParams, SamplingTensors
from ostinato.export.kernels.operands import LastTokens, LogitsProcessing
from ostinato.export.kernels.sampling import reference

from .runs import DEVICE
from .sampling_cases import (
    ALL_PARAMS,
    KINDS,
    PARAMS,
    PENALTIES,
    Sample,
    check,
    make,
    make_all,
    random_logits,
)
from .sampling_forms import FORMS, each_form


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "vocab"), [(name, vocab) for name, form in FORMS.items() for vocab in form.vocabs])
def test_definition(sample_of: Callable[[str], Sample], name: str, vocab: int, kind: str) -> None:
    """All params together. Twice: a launch leaves nothing to the next one."""
    form, sample = FORMS[name], sample_of(name)
    for turn in range(form.turns):
        case = make_all(kind, vocab, form.params, turn, form.device)
        (found, last), (again, kept) = check(case, sample), case.run(sample)
        assert found == again and torch.equal(last.token, kept.token) and torch.equal(last.position, kept.position)


@functools.cache
def noise_of_positions(seed: int, vocab: int) -> Tensor:
    """Noise of positions 0 to 3,999: [positions, vocab]."""
    positions = torch.arange(4000)[:, None]
    return torch.vmap(lambda position: gumbel_noise(torch.tensor([seed]), position, vocab))(positions)


def kept_tokens(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Return the tokens that are kept and those that are not, most likely first, by sorting logits [V] in float64."""
    x, order = logits.double().sort(descending=True, stable=True)
    inside = x >= x[min(params.top_k or len(x), len(x)) - 1]
    probabilities = (x / params.temperature).masked_fill(~inside, -torch.inf).softmax(0)
    needed = int((probabilities.cumsum(0) < params.top_p - 1e-9).sum()) + 1 if params.top_p < 1 else len(x)
    inside &= x >= x[min(needed, int(inside.sum())) - 1]
    inside &= ((x - x[0]) / params.temperature).exp() >= params.min_p - 1e-9
    return order[inside], order[~inside]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1.0, 5),
        SamplingParams(1.0, top_p=0.7),
        SamplingParams(0.9, 12, 0.8),
        SamplingParams(2.0, 40, 0.99),
        SamplingParams(1.0, 40, min_p=0.15),
        SamplingParams(1.5, 30, 0.95, min_p=0.3),
    ],
    ids=str,
)
@each_form
def test_kept_tokens(sample_of: Callable[[str], Sample], name: str, params: SamplingParams, kind: str) -> None:
    """Where the last token that is kept wins it is sampled, and where the first that is not would win it is not."""
    vocab, seed = 61, 11
    logits = random_logits(kind, 1, vocab, seed=4) * (0.1 if kind == "peaked" else 1)
    kept, dropped = kept_tokens(logits[0], params)
    scores = logits / params.temperature + noise_of_positions(seed, vocab)
    last = (scores[:, kept].argmax(1) == len(kept) - 1).nonzero().flatten()[:3]
    first = (scores.argmax(1) == dropped[0]).nonzero().flatten()[:3]
    assert len(last) and len(first)
    places = torch.cat([last, first])
    slots, positions = [2] * len(places), (places - 1).tolist()
    case = make(logits, slots, replace(params, seed=seed), positions, FORMS[name].device)
    assert check(case, sample_of(name))[0] == kept[scores[places][:, kept].argmax(1)].tolist()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1.0),
        SamplingParams(0.7, 6),
        SamplingParams(1.5, top_p=0.8),
        SamplingParams(0.8, 7, 0.9),
        SamplingParams(1.0, min_p=0.2),
        SamplingParams(1.5, 8, 0.9, min_p=0.3),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "name", ("rows", "rows one by one") if DEVICE == "cuda" else ("reference", "C++", "C++ row by row")
)
def test_frequencies(sample_of: Callable[[str], Sample], name: str, params: SamplingParams) -> None:
    """Chi-square of samples against the softmax of what is kept, at one seed, over positions."""
    logits, samples = random_logits("random", 1, 11, seed=1), 3000
    kept, _ = kept_tokens(logits[0], params)
    case = make(logits, [2] * samples, replace(params, seed=99), device=FORMS[name].device)
    counts = torch.tensor(case.run(sample_of(name))[0]).bincount(minlength=11).double()
    expected = (logits[0].double()[kept] / params.temperature).softmax(0) * samples
    assert counts[kept].sum() == samples
    statistic = ((counts[kept] - expected) ** 2 / expected).sum()
    freedom = len(kept) - 1
    # By Wilson and Hilferty, one in 3,000 is above.
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.4 * (2 / (9 * freedom)) ** 0.5) ** 3


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1.5, top_p=0.2),
        SamplingParams(1.0, top_p=0.5),
        SamplingParams(3.0, 60, 0.3),
        SamplingParams(1.0, 60),
        SamplingParams(2.0, 9, 0.7, min_p=0.2),
        SamplingParams(2.0, top_p=0.4, min_p=0.3),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ("random", "tied"))
@each_form
def test_the_best_of_all_is_often_left_out(
    sample_of: Callable[[str], Sample], name: str, kind: str, params: SamplingParams
) -> None:
    logits = random_logits(kind, 1, 300, 7)
    case = make(logits, [2] * 16, replace(params, seed=2**63 + 11), device=FORMS[name].device)
    found, _ = check(case, sample_of(name))
    assert len({*found}) > 3


@pytest.mark.parametrize("top_k", [30, 31, 32, 33])
@each_form
def test_ties_where_a_list_ends(sample_of: Callable[[str], Sample], name: str, top_k: int) -> None:
    """The tokens of places 31 to 34 are as likely as each other: with the first of them all are kept. A list has 32."""
    order = random_logits("random", 1, 300, 7)[0].argsort(descending=True)
    logits = torch.zeros(1, 300)
    logits[0, order] = torch.tensor([*range(30), *[30] * 4, *range(31, 297)]) * -0.01
    case = make(logits, [2] * 24, SamplingParams(3.0, top_k, seed=5), device=FORMS[name].device)
    found, _ = check(case, sample_of(name))
    assert {*found} <= {*order[: 30 if top_k == 30 else 34].tolist()}


MIXES = {
    "one row": [3],
    "padding": [-1],
    "only padding": [-1, -1],
    "padding ahead": [-1, 3, 1],
    "padding behind": [1, 3, -1, -1],
    "padding between": [3, -1, 1, -1],
    "slot 0": [0, 1],
    "slots descending": [*range(14, -1, -1)],
    "slots three times": [*range(15)] * 3,
    "several rows and padding": [5, -1, 2, 2, 2, -1],
    "several rows of each": [2, 2, 2, 4, 4, -1, 1, 1],
    "one slot": [7] * 20,
    # As many rows as are compared at a time, and more, with a slot whose rows are far from each other.
    "256 rows": [1, *[-1] * 255],
    "270 rows": [1, *[-1] * 267, 2, 1],
}


@pytest.mark.parametrize("mix", MIXES)
@each_form
def test_rows_of_slots(sample_of: Callable[[str], Sample], name: str, mix: str) -> None:
    """Each by its slot's params. Of a slot with several rows the last one's token is kept. Padding leaves no trace, and slots
    without rows stay as they are."""
    slots, form = MIXES[mix], FORMS[name]
    vocab = 40 if len(slots) > 100 else 300 if form.is_interpreted else 20_000
    params = {slot: replace(ALL_PARAMS[slot], seed=3 * slot) for slot in slots if slot >= 0}
    positions = torch.randint(-1, 2**40, (len(slots),), generator=torch.Generator().manual_seed(1)).tolist()
    case = make(random_logits("random", len(slots), vocab), slots, params, positions, form.device)
    found, last = check(case, sample_of(name))
    tokens, places = case.last.token.tolist(), case.last.position.tolist()
    for slot, token, position in zip(slots, found, positions, strict=True):
        if slot >= 0:
            tokens[slot], places[slot] = token, position + 1
    assert last.token.tolist() == tokens and last.position.tolist() == places


@each_form
def test_ties_go_to_the_first(sample_of: Callable[[str], Sample], name: str) -> None:
    sample, device = sample_of(name), FORMS[name].device
    logits = torch.tensor([[1.0, 3.0, 0.0, 3.0, 3.0], [-1.0, -0.0, 0.0, -2.0, -0.0]])
    assert check(make(logits, [1, 2], SamplingParams(), device=device), sample)[0] == [1, 1]
    assert check(make(logits[1:, :3], [2], SamplingParams(), device=device), sample)[0] == [1]
    # All three that are as likely as the first are kept.
    case = make(logits[:1], [1] * 25, SamplingParams(1.0, 1, 0.2, seed=3), device=device)
    assert {*check(case, sample)[0]} == {1, 3, 4}


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(1.0),
        SamplingParams(1.0, 2, 0.9),
        SamplingParams(0.5, top_p=0.5),
        SamplingParams(1.0, min_p=0.5),
    ],
    ids=str,
)
@each_form
def test_infinity_and_nan(sample_of: Callable[[str], Sample], name: str, params: SamplingParams) -> None:
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor([[nan, 1.0, -inf, nan], [nan] * 4, [-inf] * 4, [0.0, inf, nan, -inf]])
    seeded = {slot: replace(params, seed=slot) for slot in range(1, 5)}
    for vocab in (4, 3):
        case = make(logits[:, :vocab], [1, 2, 3, 4], seeded, [2] * 4, FORMS[name].device)
        assert check(case, sample_of(name))[0] == [1, 0, 0, 1]


@each_form
def test_many_logits_that_are_not_finite(sample_of: Callable[[str], Sample], name: str) -> None:
    form, sample = FORMS[name], sample_of(name)
    case = make_all("random", 300, form.params, device=form.device)
    case.logits[:, ::3], case.logits[:, 1::7], case.logits[:, 50:52] = torch.nan, -torch.inf, torch.inf
    check(case, sample)
    for value in (torch.nan, -torch.inf):
        check(replace(case, logits=torch.full_like(case.logits, value)), sample)


@each_form
def test_params_that_keep_nothing(sample_of: Callable[[str], Sample], name: str) -> None:
    """An export tries kernels on random params: the token must exist all the same, for what is done with it next."""
    form = FORMS[name]
    case = make_all("random", 300, form.params, device=form.device)
    for change in ({"min_p": 3.0}, {"min_p": -1.0, "top_p": -0.5}, {"min_p": 3.0, "top_p": 0.5, "top_k": 2}):
        values = {key: torch.full_like(getattr(case.params, key), value) for key, value in change.items()}
        # The case itself checks the range.
        replace(case, params=case.params._replace(**values)).run(sample_of(name))


@each_form
def test_steps_go_on_from_what_is_kept(sample_of: Callable[[str], Sample], name: str) -> None:
    """Each begins with the position that the one ahead has left."""
    params = {19: SamplingParams(0.9, 30, 0.95, seed=2**63 - 1), 4: SamplingParams(1.2, seed=2**64 - 1)}
    case = make(random_logits("random", 2, 120), [19, 4], params, [39, 2**32 - 3], FORMS[name].device)
    for step in range(4):
        logits = random_logits("random", 2, 120, seed=step).to(case.logits)
        found, last = check(replace(case, logits=logits), sample_of(name))
        assert last.token[case.slots].tolist() == found
        assert last.position[case.slots].tolist() == [40 + step, 2**32 - 2 + step]
        case = replace(case, last=last, positions=last.position[case.slots])


class Exported(torch.nn.Module):
    def forward(
        self,
        logits: Tensor,
        index: tuple[Tensor, Tensor],
        last: list[Tensor],
        params: SamplingTensors,
        processed: Tensor,
        given: ProcessingTensors,
    ) -> Tensor:
        return reference.sample_next(
            logits, *index, LastTokens(*last), params, LogitsProcessing(processed, ProcessingTensors(*given))
        )


def test_the_reference_is_exported() -> None:
    def inputs(params: SamplingParams) -> tuple[Any, ...]:
        case = make(random_logits("random", 1, 50), [2], replace(params, seed=17), [8], "cpu")
        case = case.processes({2: (Processing.IN_STEP, processing_tensors(PENALTIES, [3, 4, 4], 1, 50, ()))})
        last, processing = [case.last.token, case.last.position], case.processing
        return case.logits, (case.positions, case.slots), last, case.params, processing.processed, processing.given

    program = torch.export.export(Exported(), inputs(PARAMS[0])).run_decompositions()
    for params in PARAMS:
        found, expected, (*_, (_, positions), _, _, given) = (inputs(params) for _ in range(3))
        token = program.module()(*found)
        assert torch.equal(token, Exported()(*expected))
        positions[2] = 9
        given.output_counts[2, token] += 1
        assert all(map(torch.equal, found[2], expected[2])) and torch.equal(found[2][1], positions)
        assert torch.equal(found[5].output_counts, given.output_counts)
