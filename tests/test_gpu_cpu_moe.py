"""On an NVIDIA GPU: models that keep routed experts on the host, held against one that keeps them on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ostinato.delegate import InputError, load_program
from ostinato.export import export_model

from .comparison import relative_error
from .conftest import methods_alone
from .export.conversations import converse, errors, run
from .export.references import CASES, Reference, make_reference

pytestmark = pytest.mark.gpu

CHANGES = CASES["five-layers"]
LAYERS, MAX_SEQ_LEN, TOLERANCE = 5, 256, 1e-4
LENGTHS, STEPS = (1, 2, 31, 64, 65, 200), 8
GRAPH = {"enable_cuda_graph_for_method": "decode"}

Get = Callable[[int], Path]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(tmp_path_factory.mktemp("five-layers"), CHANGES, seed=105)


@pytest.fixture(scope="module")
def artifact(exported: Callable[..., Path], reference: Reference) -> Get:
    """`artifact(n)` has the routed experts of the first n layers on the host."""

    def get(on_host: int) -> Path:
        def build(path: Path) -> None:
            with methods_alone("prefill", "decode", *["prefill_streamed"][: on_host > 0]):
                export_model(reference.folder, path, device="cuda", max_seq_len=MAX_SEQ_LEN, cpu_moe=on_host)

        extra = repr(CHANGES) + Path(__file__).with_name("export").joinpath("references.py").read_text()
        return exported(f"cpu-moe-cuda-{on_host}", build, extra)

    return get


@pytest.fixture(scope="module")
def expected(artifact: Get, reference: Reference) -> dict[int, Tensor]:
    """The logits of the program that keeps all on the GPU, after prompts of these lengths and the steps that follow."""
    with load_program(artifact(0)) as program:
        return {length: torch.stack(converse(program, tokens_of(reference, length), length)) for length in LENGTHS}


def tokens_of(reference: Reference, length: int) -> Tensor:
    return reference.tokens(length + STEPS, seed=length)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("on_host", (2, LAYERS))
def test_logits(artifact: Get, reference: Reference, expected: dict[int, Tensor], on_host: int, graph: bool) -> None:
    with load_program(artifact(on_host)) as program:
        for length in LENGTHS:
            found = converse(program, tokens_of(reference, length), length, GRAPH if graph else None)
            assert max(errors(found, expected[length])) < TOLERANCE, length


@pytest.mark.parametrize("on_host", (2, LAYERS))
def test_experts_on_both_sides(artifact: Get, reference: Reference, expected: dict[int, Tensor], on_host: int) -> None:
    """The first experts of each layer on the device and the others on the host, from none to all of them; steps go on from
    there."""
    with load_program(artifact(on_host)) as program:
        split, decode = program.load_method("prefill_streamed"), program.load_method("decode", GRAPH)
        assert split.inputs[2].value_range is not None
        count = split.inputs[2].value_range[1]
        for length in (one for one in LENGTHS if one > 1):
            tokens = tokens_of(reference, length)
            for streamed in (0, 1, count // 2, count - 1, count):
                inputs = (
                    tokens_of(reference, length)[:, :length].contiguous(),
                    torch.arange(length),
                    torch.tensor([streamed]),
                )
                found = [split.execute(inputs)[0][0]]
                found += [run(decode, tokens, at, at + 1) for at in range(length, length + STEPS)]
                assert max(errors(found, expected[length])) < TOLERANCE, (length, streamed)
        with pytest.raises(InputError, match=f"'streamed': values must lie in 0..{count}, got {count + 1}"):
            split.execute((*inputs[:2], torch.tensor([count + 1])))


@pytest.mark.parametrize("on_host", (2, LAYERS))
def test_2000_steps(artifact: Get, reference: Reference, on_host: int) -> None:
    """Each conversation begins at position 0 again. Nothing falls back, and nothing is allocated for good."""
    tokens = reference.tokens(MAX_SEQ_LEN)
    with load_program(artifact(on_host)) as program:
        decode = program.load_method("decode", GRAPH)

        def step(index: int) -> Tensor:
            at = index % MAX_SEQ_LEN
            return run(decode, tokens, at, at + 1)

        for index in range(MAX_SEQ_LEN):
            last = step(index)
        before = torch.cuda.memory_allocated()
        for index in range(2000):
            logits = step(index)
            if index == MAX_SEQ_LEN - 1:
                assert relative_error(logits, last) < TOLERANCE
        assert torch.cuda.memory_allocated() <= before
        stats, plan = decode.stats, decode.stats.last_plan
        assert (stats.phase, stats.captures, stats.fallbacks) == ("replay", 1, 0)
        assert (plan.on_host, plan.captured, plan.pieces) == (on_host, 2 * on_host + 1, 3 * on_host + 1)
        assert stats.replays == MAX_SEQ_LEN + 2000 - stats.warmups - stats.captures


@pytest.mark.parametrize("on_host", (2, LAYERS))
def test_routed_experts_take_no_memory_of_the_gpu(artifact: Get, on_host: int) -> None:
    with load_program(artifact(on_host)) as program:
        decode = program.load_method("decode", GRAPH)
        constants = decode._entry.record.constants
        places = {key: decode._bound[name].device.type for name, key in constants.items() if ".mlp.experts." in key}
        assert places == {
            f"model.layers.{index}.mlp.experts.{name}": "cpu" if index < on_host else "cuda"
            for index in range(LAYERS)
            for name in ("gate_up_proj", "down_proj")
        }
