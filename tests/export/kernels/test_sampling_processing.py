"""All forms of sampling from processed logits against one definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ostinato.delegate.logits_processing import (
    MAX_BIASES,
    NEVER_ENDS,
    Processing,
    ProcessingTensors,
    bitmask,
    processing_tensors,
)
from ostinato.delegate.sampling_params import SamplingParams

from .runs import DEVICE
from .sampling_cases import ALL_PARAMS, PARAMS, PENALTIES, Case, Sample, check, make, make_all, random_logits
from .sampling_forms import FORMS, each_form

GREEDY = SamplingParams()
FILTERED = SamplingParams(1.2, 30, 0.95, seed=5, min_p=0.01)
# With tokens at borders of blocks, words and quads, negative penalties, and frequent tokens.
OPTIONS = (
    PENALTIES,
    SamplingParams(repetition_penalty=1.7),
    SamplingParams(repetition_penalty=0.6, presence_penalty=-1.5),
    SamplingParams(frequency_penalty=-0.3),
    SamplingParams(frequency_penalty=1.1, presence_penalty=0.7),
    SamplingParams(logit_bias={0: 3.0, 31: -100.0, 32: 2.5, 33: 0.0, 63: 1.0, 64: 1.5, 96: 4.0}),
    SamplingParams(min_tokens=3, stop_token_ids=list(range(0, 97, 2)), logit_bias={2: 5.0, 5: 1.0}),
    SamplingParams(repetition_penalty=1.01, frequency_penalty=0.01, logit_bias={4: -1.0}, min_tokens=10**9),
)


def histories(vocab: int, count: int, seed: int = 0) -> list[int]:
    """Return tokens of which some are frequent."""
    random = torch.Generator().manual_seed(seed)
    return [int(token) for token in (torch.rand(count, generator=random) ** 3 * vocab).long().clamp(max=vocab - 1)]


def of(params: SamplingParams, vocab: int, seed: int = 0, prompt_end: int = 40) -> ProcessingTensors:
    """Return what processes a slot's logits by these params, with those biases whose token the vocabulary has."""
    bias = {token: value for token, value in (params.logit_bias or {}).items() if token < vocab}
    stops = [token for token in params.stop_token_ids or () if token < vocab]
    fitting = replace(params, logit_bias=bias, stop_token_ids=stops)
    allowed = None if seed % 3 else bitmask([token for token in range(vocab) if token % 7 != seed % 7], vocab)
    return processing_tensors(fitting, histories(vocab, 120, seed), prompt_end, vocab, {min(vocab - 1, 3)}, allowed)


def mixed(case: Case, late: bool) -> Case:
    """Make some slots as they are, some processed in the step, and some later."""
    vocab, slots = case.logits.shape[1], sorted({slot for slot in case.slots.tolist() if slot >= 0})
    whens = (Processing.IN_STEP, Processing.OFF, Processing.LATER, Processing.IN_STEP)
    found = {slot: (whens[slot % 4], of(OPTIONS[slot % len(OPTIONS)], vocab, slot)) for slot in slots}
    return case.processes({slot: how for slot, how in found.items() if how[0] is not Processing.OFF}, late)


@pytest.mark.parametrize(("kind", "late"), [("random", False), ("tied", True)])
@pytest.mark.parametrize(("name", "vocab"), [(name, vocab) for name, form in FORMS.items() for vocab in form.vocabs])
def test_definition(sample_of: Callable[[str], Sample], name: str, vocab: int, kind: str, late: bool) -> None:
    """Some rows as they are, others processed. Twice: a launch leaves nothing to the next one."""
    form, sample = FORMS[name], sample_of(name)
    case = mixed(make_all(kind, vocab, form.params, 1, form.device), late)
    (found, kept), (again, _) = check(case, sample), case.run(sample)
    assert found == again
    assert (kept.counts != case.processing.given.output_counts).sum() >= 3


@each_form
def test_what_is_processed_changes_tokens(sample_of: Callable[[str], Sample], name: str) -> None:
    """A step leaves alone what is sampled later, and takes the most likely token there."""
    sample, device = sample_of(name), FORMS[name].device
    logits = torch.zeros(1, 50)
    logits[0, [7, 9, 20]] = torch.tensor([5.0, 4.5, 4.25])
    given = processing_tensors(SamplingParams(frequency_penalty=1.0), [7, 9], 0, 50, ())
    params = SamplingParams(100.0, top_k=1, seed=4)
    found = {}
    for when, late in ((Processing.OFF, False), (Processing.IN_STEP, False), (Processing.LATER, False)):
        case = make(logits, [3], params, device=device).processes({3: (when, given)}, late)
        found[when, late] = check(case, sample)[0]
        found[when, True] = check(replace(case, late=True), sample)[0]
    assert found == {
        (Processing.OFF, False): [7],
        (Processing.OFF, True): [7],
        (Processing.IN_STEP, False): [20],
        (Processing.IN_STEP, True): [20],
        (Processing.LATER, False): [7],
        (Processing.LATER, True): [20],
    }


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if not form.single])
def test_several_rows_of_a_slot(sample_of: Callable[[str], Sample], name: str, late: bool) -> None:
    """All are processed by the counts before the call, and the last one's token is counted. Padding counts nothing."""
    slots = [5, 5, 5, -1, 1, 2, -1, 2]
    case = make(random_logits("random", len(slots), 300), slots, FILTERED, [40] * len(slots), FORMS[name].device)
    how = {slot: (Processing.IN_STEP, of(PENALTIES, 300, slot)) for slot in (0, 2, 5)}
    case = case.processes(how, late)
    found, kept = check(case, sample_of(name))
    counted = case.processing.given.output_counts.clone()
    counted[[5, 2], [found[2], found[7]]] += 1
    assert torch.equal(kept.counts, counted)


@each_form
def test_counts_go_on(sample_of: Callable[[str], Sample], name: str) -> None:
    """With a penalty, the same logits give one token after the other, until each has come up."""
    form, sample = FORMS[name], sample_of(name)
    logits = torch.arange(64.0).flip(0)[None] / 100
    case = make(logits, [4], GREEDY, device=form.device)
    case = case.processes(
        {4: (Processing.IN_STEP, processing_tensors(SamplingParams(presence_penalty=2.0), (), 0, 64, ()))}
    )
    tokens = []
    for _ in range(9):
        found, kept = check(case, sample)
        tokens += found
        given = case.processing.given._replace(output_counts=kept.counts)
        case = replace(case, last=kept, processing=replace(case.processing, given=given))
    assert tokens == list(range(9)) and case.processing.given.output_counts.sum(1).tolist()[4] == 9


def biased(logits: Tensor, tokens: Sequence[int], values: Sequence[float], ends: Sequence[int], device: str) -> Case:
    vocab = logits.shape[1]
    given = processing_tensors(GREEDY, (), 0, vocab, ())
    for kept, numbers in ((given.bias_tokens, tokens), (given.bias_values, values), (given.bias_ends, ends)):
        kept[0, : len(numbers)] = torch.tensor(numbers, dtype=kept.dtype)
    case = make(logits, [1, 2], SamplingParams(1.5, 20, seed=8), [9, 10], device)
    return case.processes({slot: (Processing.IN_STEP, given) for slot in (1, 2)})


@pytest.mark.parametrize("count", [1, 2, 31, 97, MAX_BIASES])
@each_form
def test_biases(sample_of: Callable[[str], Sample], name: str, count: int) -> None:
    """At borders of blocks, several of one token, and as many as there may be. Some end before a row's position."""
    form, vocab = FORMS[name], 300
    random = torch.Generator().manual_seed(count)
    borders = [0, 0, 3, 4, 31, 31, 31, 32, 63, 64, 95, 96, 255, 256, vocab - 1, vocab - 1]
    drawn = torch.randint(vocab, (MAX_BIASES,), generator=random).tolist()
    tokens = sorted([*borders, *drawn][:count])
    values = (torch.randn(count, generator=random) * 3).tolist()
    ends = [(10, 11, NEVER_ENDS)[place % 3] for place in range(count)]
    check(biased(random_logits("random", 2, vocab), tokens, values, ends, form.device), sample_of(name))


@each_form
def test_one_block_has_all_biases(sample_of: Callable[[str], Sample], name: str) -> None:
    tokens, values = [33] * MAX_BIASES, [0.01] * MAX_BIASES
    case = biased(random_logits("flat", 2, 300), tokens, values, [NEVER_ENDS] * MAX_BIASES, FORMS[name].device)
    check(case, sample_of(name))
    greedy = replace(case, params=case.params._replace(temperature=torch.zeros_like(case.params.temperature)))
    assert check(greedy, sample_of(name))[0] == [33, 33]


@pytest.mark.parametrize("allowed", [[5], [0, 299], [31, 32, 64], []])
@each_form
def test_bitmasks(sample_of: Callable[[str], Sample], name: str, allowed: list[int]) -> None:
    """Where no token is allowed, all are equally unlikely."""
    given = processing_tensors(GREEDY, (), 0, 300, (), bitmask(allowed, 300))
    case = make(
        random_logits("random", 3, 300), [1, 2, 4], SamplingParams(2.0, top_p=0.9, seed=1), None, FORMS[name].device
    )
    found, _ = check(case.processes({slot: (Processing.IN_STEP, given) for slot in (1, 4)}), sample_of(name))
    assert not allowed or {found[0], found[2]} <= {*allowed}


@each_form
def test_no_stop_before_min_tokens(sample_of: Callable[[str], Sample], name: str) -> None:
    """The token at `position` 12 is the third output after a prompt of 10."""
    logits = torch.zeros(1, 40)
    logits[0, [6, 8, 11]] = torch.tensor([9.0, 8.0, 7.0])
    params = SamplingParams(min_tokens=3, stop_token_ids=[6])
    given = processing_tensors(params, [0] * 10, 10, 40, {8})
    case = make(logits, [1, 2, 3], GREEDY, [10, 11, 12], FORMS[name].device)
    case = case.processes({slot: (Processing.IN_STEP, given) for slot in (1, 2, 3)})
    assert check(case, sample_of(name))[0] == [11, 11, 6]


@each_form
def test_logits_that_are_not_finite(sample_of: Callable[[str], Sample], name: str) -> None:
    form, sample = FORMS[name], sample_of(name)
    case = mixed(make_all("random", 300, form.params, device=form.device), late=False)
    case.logits[:, ::3], case.logits[:, 1::7], case.logits[:, 50:52] = torch.nan, -torch.inf, torch.inf
    check(case, sample)
    check(replace(case, logits=torch.full_like(case.logits, torch.nan)), sample)


@pytest.mark.parametrize("late", [False, True])
@each_form
def test_random_state(sample_of: Callable[[str], Sample], name: str, late: bool) -> None:
    """An export tries kernels on random state: the token must exist all the same, and nothing else may be touched."""
    form = FORMS[name]
    case = make_all("random", 300, form.params[:4], device=form.device)
    random = torch.Generator().manual_seed(3)
    given = ProcessingTensors(
        *(
            torch.randn(value.shape, generator=random).to(value)
            if value.is_floating_point()
            else torch.randint(-(2**31), 2**31, value.shape, generator=random).to(value)
            for value in case.processing.given
        )
    )
    if name == "reference":
        # It scatters by these.
        given.bias_tokens.remainder_(300)
    whens = torch.randint(-5, 6, case.processing.processed.shape, generator=random).to(case.slots)
    # The case itself checks the range.
    replace(case, processing=replace(case.processing, processed=whens, given=given), late=late).run(sample_of(name))


@pytest.mark.parametrize("params", (PARAMS[3], ALL_PARAMS[-2], GREEDY), ids=str)
def test_whole_vocabulary(sample_of: Callable[[str], Sample], params: SamplingParams) -> None:
    """In the C++ kernel all threads share a single row, and each has rows of its own."""
    vocab = 248_320
    names = ("rows", "rows one by one") if DEVICE == "cuda" else ("C++", "C++ row by row")
    for name in names:
        case = make(random_logits("random", 3, vocab), [1, 2, 3], replace(params, seed=6), None, FORMS[name].device)
        how = {slot: (Processing.IN_STEP, of(OPTIONS[slot], vocab, slot)) for slot in (1, 3)}
        check(case.processes(how), sample_of(name))
