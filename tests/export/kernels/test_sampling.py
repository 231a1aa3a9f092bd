"""Sampling: known answers, statistics, the reference against sorting in float64, the kernel against the reference."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ostinato.delegate.sampling import SamplingParams, SamplingTensors, gumbel_noise, philox
from ostinato.export.kernels.operands import LastTokens
from ostinato.export.kernels.sampling import reference, sample_triton

from .conftest import traced_layer
from .sampling_cases import OPTIONS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 248_320
SIZES = [1, 97, 300]
if DEVICE == "cuda":
    OPTIONS = [
        *OPTIONS,
        SamplingParams(1.0, 100, 0.999),
        SamplingParams(1.0, 1000),
        SamplingParams(1.3, 50_000, 0.9999),
    ]
    SIZES += [2048, 2049, 151_936, VOCAB]


def random_logits(kind: str, vocab: int, seed: int = 0) -> Tensor:
    x = torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed))
    if kind == "peaked":
        x = x.mul(12).sub(30)
    if kind == "flat":
        x = x.mul(1e-3)
    if kind == "tied":
        x = x.mul(1.5).round()
    return x.to(DEVICE)


KINDS = ["random", "peaked", "flat", "tied"]


SLOTS, SLOT = 3, 2


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, device=DEVICE)


class Arguments:
    """What a sampling call reads besides the logits, on the device, and a workspace. `seed`: 64 bits, signed or not.

    The options are those of SLOT; other slots have ones that nobody may follow.
    """

    def __init__(self, options: SamplingParams, seed: int = 0) -> None:
        inputs = replace(options, seed=seed % 2**64).tensors()
        self.params = SamplingTensors(*(value.repeat(SLOTS).to(DEVICE) for value in inputs))
        for values in self.params:
            values[:SLOT] = torch.nan if values.is_floating_point() else -7
        self.last = LastTokens(*(numbers(-1, -2, -3) for _ in range(2)))
        self.workspace = torch.zeros(reference.workspace_size(), dtype=torch.int64, device=DEVICE)

    def sample(self, function: Callable[..., Tensor], logits: Tensor, position: int) -> int:
        """The token that `sample_next`, of the reference or the kernel, draws for a position."""
        token = function(logits, numbers(position - 1), numbers(SLOT), self.last, self.params, self.workspace)
        assert token.shape == (1,) and token.dtype == torch.int64
        assert self.last.token.tolist() == [-1, -2, int(token)] and self.last.position.tolist() == [-1, -2, position]
        assert self.workspace[0] == 0
        return int(token)


def kept_tokens(logits: Tensor, options: SamplingParams) -> tuple[Tensor, Tensor]:
    """(tokens that are kept, tokens that are not), most likely first, by sorting in float64."""
    x, order = logits[0].double().cpu().sort(descending=True, stable=True)
    inside = x >= x[min(options.top_k or len(x), len(x)) - 1]
    probabilities = (x / options.temperature).masked_fill(~inside, -torch.inf).softmax(0)
    needed = int((probabilities.cumsum(0) < options.top_p - 1e-9).sum()) + 1 if options.top_p < 1 else len(x)
    inside &= x >= x[min(needed, int(inside.sum())) - 1]
    inside &= ((x - x[0]) / options.temperature).exp() >= options.min_p - 1e-9
    return order[inside], order[~inside]


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
    def noise(seed: int, position: int, count: int) -> Tensor:
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
    "options",
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
def test_frequencies(options: SamplingParams) -> None:
    """Chi-square of draws against the softmax of what is kept, at one seed, over positions."""
    logits = random_logits("random", 11, seed=1)
    kept, _ = kept_tokens(logits, options)
    function = sample_triton.sample_next if DEVICE == "cuda" else reference.sample_next
    arguments, samples = Arguments(options, seed=99), 3000
    counts = torch.zeros(11, dtype=torch.float64)
    for position in range(samples):
        counts[arguments.sample(function, logits, position)] += 1
    expected = (logits[0].double().cpu()[kept] / options.temperature).softmax(0) * samples
    assert counts[kept].sum() == samples
    statistic = ((counts[kept] - expected) ** 2 / expected).sum()
    freedom = len(kept) - 1
    # By Wilson and Hilferty, one in 3,000 is above.
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.4 * (2 / (9 * freedom)) ** 0.5) ** 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
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
def test_kept_set(kind: str, options: SamplingParams) -> None:
    """Where the last token that is kept wins it is drawn, and where the first that is not would win it is not."""
    vocab = 61
    logits = random_logits(kind, vocab, seed=4) * (0.1 if kind == "peaked" else 1)
    kept, dropped = kept_tokens(logits, options)
    arguments = Arguments(options, seed=11)
    seed, positions = arguments.params.seed[SLOT:].cpu(), torch.arange(4000).unsqueeze(1)
    noise = torch.vmap(lambda position: gumbel_noise(seed, position, vocab))(positions)
    scores = logits[0].cpu() / options.temperature + noise
    last = (scores[:, kept].argmax(1) == len(kept) - 1).nonzero().flatten()[:3]
    first = (scores.argmax(1) == dropped[0]).nonzero().flatten()[:3]
    assert len(last) and len(first)
    for position in torch.cat([last, first]).tolist():
        expected = int(kept[scores[position, kept].argmax()])
        assert arguments.sample(reference.sample_next, logits, position) == expected
        assert arguments.sample(sample_triton.sample_next, logits, position) == expected


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_kernel_draws_as_the_reference(kind: str, vocab: int, options: SamplingParams) -> None:
    for seed in range(10 if DEVICE == "cuda" else 1):
        logits = random_logits(kind, vocab, seed)
        arguments = Arguments(options, seed=seed * 0x123456789ABCDEF - 5)
        position = 7 + (seed << 33)
        expected = arguments.sample(reference.sample_next, logits, position)
        for _ in range(2):
            assert arguments.sample(sample_triton.sample_next, logits, position) == expected


def test_ties_go_to_the_first() -> None:
    logits = torch.tensor([[1.0, 3.0, 0.0, 3.0, 3.0]], device=DEVICE)
    zeros = torch.tensor([[-1.0, -0.0, 0.0]], device=DEVICE)
    for function in (reference.sample_next, sample_triton.sample_next):
        assert Arguments(SamplingParams()).sample(function, logits, 0) == 1
        assert Arguments(SamplingParams()).sample(function, zeros, 0) == 1
        # All three that are as likely as the first are kept.
        sampled = {Arguments(SamplingParams(1.0, 1, 0.2)).sample(function, logits, position) for position in range(25)}
        assert sampled == {1, 3, 4}


@pytest.mark.parametrize(
    "options",
    [SamplingParams(), SamplingParams(1.0), SamplingParams(1.0, 2, 0.9), SamplingParams(0.5, top_p=0.5)],
    ids=str,
)
def test_infinity_and_nan(options: SamplingParams) -> None:
    nan, inf = torch.nan, torch.inf
    cases = {(nan, 1.0, -inf, nan): {1}, (nan,) * 3: {0}, (-inf,) * 3: {0}, (0.0, inf, nan, -inf): {1}}
    for numbers, allowed in cases.items():
        logits = torch.tensor([numbers], device=DEVICE)
        for function in (reference.sample_next, sample_triton.sample_next):
            assert Arguments(options).sample(function, logits, 3) in allowed


@pytest.mark.parametrize("function", ["reference", "kernel"])
def test_steps_draw_what_single_calls_draw(function: str) -> None:
    """Each begins with the position that the one ahead has left."""
    module: Any = reference if function == "reference" else sample_triton
    arguments = Arguments(SamplingParams(0.9, 30, 0.95), seed=2**63 - 1)
    last, slots = LastTokens(numbers(0, 0, 3), numbers(0, 0, 40)), numbers(SLOT)
    for step in range(4):
        logits = random_logits("random", 120, seed=step)
        positions = last.position[SLOT:].clone()
        sampled = module.sample_next(logits, positions, slots, last, arguments.params, arguments.workspace)
        assert last.position.tolist() == [0, 0, 41 + step] and last.token.tolist() == [0, 0, int(sampled)]
        assert int(sampled) == arguments.sample(reference.sample_next, logits, 41 + step)


@pytest.mark.parametrize("function", [reference.sample_next, sample_triton.sample_next], ids=["reference", "kernel"])
def test_padding_leaves_no_trace(function: Callable[..., Tensor]) -> None:
    arguments = Arguments(SamplingParams())
    function(
        random_logits("random", 50), numbers(3), numbers(-1), arguments.last, arguments.params, arguments.workspace
    )
    assert all(values.tolist() == [-1, -2, -3] for values in vars(arguments.last).values())


class Exported(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("workspace", torch.zeros(reference.workspace_size(), dtype=torch.int64))

    def forward(
        self, logits: Tensor, index: tuple[Tensor, Tensor], last: list[Tensor], params: SamplingTensors
    ) -> Tensor:
        return reference.sample_next(logits, *index, LastTokens(*last), params, self.workspace)  # type: ignore[arg-type]


def test_reference_is_exported() -> None:
    def inputs(options: SamplingParams) -> tuple[Any, ...]:
        arguments = Arguments(options, seed=17)
        params = SamplingTensors(*(value.cpu() for value in arguments.params))
        last = [values.cpu() for values in vars(arguments.last).values()]
        return random_logits("random", 50).cpu(), (torch.tensor([8]), torch.tensor([SLOT])), last, params

    program = torch.export.export(Exported(), inputs(OPTIONS[0])).run_decompositions()
    for options in OPTIONS:
        found, expected = inputs(options), inputs(options)
        assert torch.equal(program.module()(*found), Exported()(*expected))
        assert all(map(torch.equal, found[2], expected[2])) and found[2][1].tolist() == [-1, -2, 9]


def run_program(index: int, programs: int, arguments: tuple[Tensor, ...], vocab: int, block: int) -> None:
    """One program of several, in a process of its own."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    set_index, set_count = builder.set_grid_idx, builder.set_grid_dim
    builder.set_grid_idx = lambda *_: set_index(index, 0, 0)
    builder.set_grid_dim = lambda *_: set_count(programs, 1, 1)
    torch.set_num_threads(1)
    sample_triton.sample_early[(1,)](*arguments, VOCAB=vocab, PROGRAMS=programs, BLOCK=block, EARLY=False)


@pytest.mark.skipif(DEVICE == "cuda", reason="the GPU runs several programs in the tests above")
@pytest.mark.parametrize(
    "options",
    [
        SamplingParams(),
        SamplingParams(1.0),
        SamplingParams(0.8, top_p=0.9),
        SamplingParams(0.6, 2),
        SamplingParams(1.1, 20, 0.9),
        SamplingParams(0.9, min_p=0.1),
        SamplingParams(1.1, 20, 0.9, min_p=0.2),
    ],
    ids=str,
)
def test_programs_that_meet(options: SamplingParams) -> None:
    """Three programs at once, on shared memory."""
    vocab, block, programs = 300, 128, 3
    sampling = Arguments(options, seed=23)
    out = torch.tensor([-1])
    context = multiprocessing.get_context("fork")
    for step in range(3):
        logits = random_logits("random", vocab, seed=step)
        index, last = (torch.tensor([5 + step]), torch.tensor([SLOT])), vars(sampling.last).values()
        arguments = (logits, *index, *last, *sampling.params, sampling.workspace, out)
        for tensor in arguments:
            tensor.share_memory_()
        running = [
            context.Process(target=run_program, args=(index, programs, arguments, vocab, block), daemon=True)
            for index in range(programs)
        ]
        for process in running:
            process.start()
        for process in running:
            process.join(60)
            process.kill()
        assert [process.exitcode for process in running] == [0] * programs
        expected = Arguments(options, seed=23).sample(reference.sample_next, logits, 6 + step)
        assert int(out) == int(sampling.last.token[SLOT]) == expected
        assert int(sampling.last.position[SLOT]) == 6 + step and int(sampling.workspace[0]) == 0


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_replay_reads_new_values() -> None:
    arguments = Arguments(SamplingParams())
    logits = random_logits("random", VOCAB)
    positions, slots = numbers(0), numbers(SLOT)
    sample_triton.sample_next(logits, positions, slots, arguments.last, arguments.params, arguments.workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample_triton.sample_next(logits, positions, slots, arguments.last, arguments.params, arguments.workspace)
    for step, options in enumerate(OPTIONS * 5):
        fresh = Arguments(options, seed=step)
        for kept, new in zip(arguments.params, fresh.params, strict=True):
            kept.copy_(new)
        logits.copy_(random_logits(KINDS[step % 4], VOCAB, step))
        positions.fill_(step)
        graph.replay()
        assert int(arguments.last.position[SLOT]) == step + 1
        assert int(arguments.last.token[SLOT]) == fresh.sample(reference.sample_next, logits, step + 1)


LAYER = """
import torch
from ostinato.delegate.sampling import SamplingParams, SamplingTensors
from ostinato.export.kernels.operands import LastTokens
from ostinato.export.kernels.sampling.reference import workspace_size
from ostinato.export.kernels.sampling.sample_triton import sample_next

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name, value in SamplingParams().tensors()._asdict().items():
            self.register_buffer(name, value.repeat(2))
        self.register_buffer("position", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("token", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("workspace", torch.zeros(workspace_size(), dtype=torch.int64))

    def forward(self, logits, positions):
        params = SamplingTensors(*(getattr(self, name) for name in SamplingTensors._fields))
        last = LastTokens(self.token, self.position)
        return sample_next(logits, positions, positions, last, params, self.workspace)

inputs = (torch.zeros(1, 300), torch.arange(1))
"""


def test_traced() -> None:
    """The parameters go through as one list, and none of them is taken for written."""
    operators, buffers, shapes = traced_layer(LAYER)
    assert operators == ["ostinato.sample_next.default"]
    assert buffers == ["position", "token", "workspace"]
    assert shapes == [(1,)]
