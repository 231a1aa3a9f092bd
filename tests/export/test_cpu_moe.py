"""Programs that keep routed experts on the host, compared with one that keeps them on the device. Without a GPU both are the
CPU."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from ostinato.delegate import InputError, load_program
from ostinato.delegate.code.method_code import MethodCode
from ostinato.export import export_model

from ..comparison import relative_error
from ..conftest import only_methods
from .conversations import SLOT, converse, errors, run
from .memory import MIB, anonymous_memory
from .references import CASES, Reference, make_reference

CHANGES = CASES["five-layers"]
LAYERS, MAX_SEQ_LEN, TOLERANCE = 5, 256, 1e-4
# Long prompts come first, so that short ones start from used state.
LENGTHS, STEPS = (200, 65, 64, 31, 2, 1), 6
GRAPH: dict[str, bool | int | str] = {"enable_cuda_graph_for_method": "decode", "cuda_graph_warmup_steps": 2}

Get = Callable[[int], Path]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(tmp_path_factory.mktemp("five-layers"), CHANGES, seed=105)


@pytest.fixture(scope="module")
def artifact(exported: Callable[..., Path], reference: Reference, device: str) -> Get:
    """`artifact(n)`: a program that keeps the routed experts of the first n layers on the host."""

    def get(on_host: int) -> Path:
        def build(path: Path) -> None:
            with only_methods("prefill", "decode", *["prefill_streamed"][: on_host > 0]):
                export_model(reference.folder, path, device=device, max_seq_len=MAX_SEQ_LEN, cpu_moe=on_host)

        extra = repr(CHANGES) + Path(__file__).with_name("references.py").read_text()
        return exported(f"cpu-moe-{device}-{on_host}", build, extra)

    return get


@pytest.fixture(scope="module")
def tokens(reference: Reference) -> dict[int, Tensor]:
    """For each length: the tokens of a prompt and of the steps after it."""
    return {length: reference.tokens(length + STEPS, seed=length) for length in LENGTHS}


@pytest.fixture(scope="module")
def expected(artifact: Get, tokens: dict[int, Tensor]) -> dict[int, Tensor]:
    """For each length: the logits of the program that keeps everything on the device."""
    with load_program(artifact(0)) as program:
        return {length: torch.stack(converse(program, tokens[length], length)) for length in LENGTHS}


@pytest.mark.parametrize("length", LENGTHS)
def test_the_program_without_is_right(
    reference: Reference, tokens: dict[int, Tensor], expected: dict[int, Tensor], length: int
) -> None:
    theirs = reference.logits(tokens[length])[length - 1 :]
    assert max(errors(list(expected[length]), theirs)) < TOLERANCE


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("on_host", (2, LAYERS))
def test_logits(
    artifact: Get, tokens: dict[int, Tensor], expected: dict[int, Tensor], on_host: int, graph: bool
) -> None:
    with load_program(artifact(on_host)) as program:
        for length in LENGTHS:
            found = errors(converse(program, tokens[length], length, GRAPH if graph else None), expected[length])
            assert max(found) < TOLERANCE, f"{length} tokens: relative errors of prefill and decode steps {found}"


@pytest.mark.gpu
@pytest.mark.parametrize("on_host", (1, 3, 4))
def test_every_other_number_of_layers(
    artifact: Get, tokens: dict[int, Tensor], expected: dict[int, Tensor], device: str, on_host: int
) -> None:
    """Other numbers of layers, on a GPU only: on the CPU the exports take too long. models/test_qwen3_5.py runs these
    networks in eager mode."""
    if device == "cpu":
        pytest.skip("for a GPU")
    test_logits(artifact, tokens, expected, on_host, graph=True)


@pytest.mark.parametrize("on_host", (2, LAYERS))
def test_one_piece_per_layer_runs_on_the_host(artifact: Get, reference: Reference, on_host: int) -> None:
    tokens = reference.tokens(8)
    with load_program(artifact(on_host)) as program:
        decode = program.load_method("decode", GRAPH)
        for at in range(8):
            run(decode, tokens, at, at + 1)
        stats, plan = decode.stats, decode.stats.plans[-1]
        assert (stats.next_phase, stats.warmups, stats.captures, stats.replays) == ("replay", 2, 1, 5)
        assert (stats.fallbacks, plan.called_because, plan.given_up) == (0, {}, None)
        assert plan.on_host == plan.called == on_host
        # Per layer on the host, the device has one piece before it and one beside it, and one more behind the last.
        assert (plan.captured, plan.pieces) == (2 * on_host + 1, 3 * on_host + 1)


def prompt(tokens: Tensor, length: int, streamed: int) -> tuple[Tensor, ...]:
    """Return the inputs of `prefill_streamed`."""
    return tokens[:, :length].contiguous(), torch.arange(length), SLOT.repeat(length), torch.tensor([streamed])


@pytest.mark.parametrize("on_host", (2, LAYERS))
def test_experts_on_both_sides(
    artifact: Get, tokens: dict[int, Tensor], expected: dict[int, Tensor], on_host: int
) -> None:
    """The first experts of each layer are on the device and the others on the host, from none to all of them. Decode steps
    follow."""
    with load_program(artifact(on_host)) as program:
        split, decode = program.load_method("prefill_streamed"), program.load_method("decode", GRAPH)
        assert split.inputs[3].value_range is not None
        count = split.inputs[3].value_range[1]
        for length in (one for one in LENGTHS if one > 1):
            for streamed in (0, 1, count // 2, count - 1, count):
                found = [split.execute(prompt(tokens[length], length, streamed))[0][0]]
                found += [run(decode, tokens[length], at, at + 1) for at in range(length, length + STEPS)]
                assert max(errors(found, expected[length])) < TOLERANCE, (length, streamed)
        # With graphs around the streamed experts, the number of these experts may change from call to call.
        captured = program.load_method(
            "prefill_streamed", {**GRAPH, "enable_cuda_graph_for_method": "prefill_streamed"}
        )
        for streamed in (2, count, 0, 3, count, 1):
            (logits,) = captured.execute(prompt(tokens[31], 31, streamed))
            assert max(errors([logits[0]], expected[31][:1])) < TOLERANCE, streamed
        assert captured.stats.next_phase == "replay" and captured.stats.fallbacks == 0
        with pytest.raises(InputError, match=f"'streamed': values must lie in 0..{count}, got {count + 1}"):
            split.execute(prompt(tokens[31], 31, count + 1))


def test_the_device_gets_its_work_while_the_host_computes(artifact: Get, reference: Reference) -> None:
    """The operator of the experts lets other Python threads run while it computes. Otherwise they would wait for a second
    here."""
    begun: list[tuple[bool, float, float]] = []
    run_segment = MethodCode.run_segment

    def timed(code: MethodCode, index: int, values: dict[int, Tensor]) -> None:
        begin = time.perf_counter()
        run_segment(code, index, values)
        begun.append((code.segments[index].on_host, begin, time.perf_counter()))

    def beside() -> bool:
        hosted = [(begin, end) for on_host, begin, end in begun if on_host]
        queued = [begin for on_host, begin, _ in begun if not on_host]
        return any(first < begin < last for first, last in hosted for begin in queued)

    interval = sys.getswitchinterval()
    with load_program(artifact(LAYERS)) as program:
        prefill = program.load_method("prefill")
        tokens = reference.tokens(200)
        run(prefill, tokens, 0, 200)
        sys.setswitchinterval(1.0)
        try:
            with mock.patch.object(MethodCode, "run_segment", timed):
                for _ in range(50):
                    run(prefill, tokens, 0, 200)
                    if beside():
                        return
        finally:
            sys.setswitchinterval(interval)
    pytest.fail("nothing was queued while the host computed, in 50 prompts")


@pytest.mark.parametrize("on_host", (2, LAYERS))
def test_graphs_of_prompts(artifact: Get, tokens: dict[int, Tensor], expected: dict[int, Tensor], on_host: int) -> None:
    """Each length has one plan, and each prompt starts from the state that the one before left."""
    lengths = [length for length in LENGTHS if length > 1]
    with load_program(artifact(on_host)) as program:
        prefill = program.load_method("prefill", {**GRAPH, "enable_cuda_graph_for_method": "prefill"})
        for _ in range(4):
            found = [run(prefill, tokens[length], 0, length) for length in lengths]
            assert max(errors(found, torch.stack([expected[length][0] for length in lengths]))) < TOLERANCE
        assert [plan.on_host for plan in prefill.stats.plans] == [on_host] * len(lengths)
        assert (prefill.stats.replays, prefill.stats.fallbacks) == (len(lengths), 0)


@pytest.mark.parametrize(("on_host", "on_gpu"), [(2, 2_000), (LAYERS, 100_000)])
def test_many_steps(artifact: Get, reference: Reference, device: str, on_host: int, on_gpu: int) -> None:
    """Each conversation begins at position 0 again. No step falls back, and no memory stays allocated."""
    tokens, steps = reference.tokens(MAX_SEQ_LEN), 2_000 if device == "cpu" else on_gpu
    with load_program(artifact(on_host)) as program:
        decode = program.load_method("decode", GRAPH)

        def step(index: int) -> Tensor:
            at = index % MAX_SEQ_LEN
            return run(decode, tokens, at, at + 1)

        first = [step(index).clone() for index in range(MAX_SEQ_LEN)]
        before, allocated = anonymous_memory(), torch.cuda.memory_allocated() if device == "cuda" else 0
        for index in range(steps):
            logits = step(index)
            if index % 997 == 0:
                assert relative_error(logits, first[index % MAX_SEQ_LEN]) < TOLERANCE, index
        assert anonymous_memory() - before < 4 * MIB
        assert device == "cpu" or torch.cuda.memory_allocated() <= allocated
        stats, plan = decode.stats, decode.stats.plans[-1]
        assert (stats.next_phase, stats.captures, stats.fallbacks) == ("replay", 1, 0)
        assert (plan.on_host, plan.captured, plan.pieces) == (on_host, 2 * on_host + 1, 3 * on_host + 1)
        assert stats.replays == MAX_SEQ_LEN + steps - stats.warmups - stats.captures


@pytest.mark.parametrize("on_host", (2, LAYERS))
def test_routed_experts_take_no_memory_of_the_gpu(artifact: Get, device: str, on_host: int) -> None:
    with load_program(artifact(on_host)) as program:
        decode = program.load_method("decode", GRAPH)
        constants = decode._entry.record.constants
        places = {key: decode._bound[name].device.type for name, key in constants.items() if ".mlp.experts." in key}
        assert places == {
            f"model.layers.{index}.mlp.experts.{name}": "cpu" if index < on_host else device
            for index in range(LAYERS)
            for name in ("gate_up_proj", "down_proj")
        }


@pytest.mark.parametrize("on_host", (0, 2, LAYERS))
def test_routed_experts_stay_on_the_files_map(artifact: Get, on_host: int) -> None:
    """The host has only the routed experts, and no copies of them."""
    wanted = {
        f"model.layers.{index}.{name}"
        for index in range(on_host)
        for name in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    }
    with load_program(artifact(on_host)) as program:
        names = ("prefill", "decode", "prefill_streamed") if on_host else ("prefill", "decode")
        methods = [program.load_method(name) for name in names]
        stored = program._pool._file.entries
        for method in methods:
            record = method._entry.record
            assert {record.constants[name] for name in record.host_names} == wanted
            for name in record.host_names:
                key = record.constants[name]
                assert method._bound[name].data_ptr() == stored[key].tensor().data_ptr(), key


@pytest.mark.parametrize("on_host", (0, 2, LAYERS))
def test_metadata(artifact: Get, on_host: int) -> None:
    with load_program(artifact(on_host)) as program:
        assert program.metadata["get_n_cpu_moe"] == on_host
        assert program.metadata["enable_padded_prefill"]
        assert ("prefill_streamed" in program.method_names) is (on_host > 0)
