"""Real graphs and real capture failures on an NVIDIA GPU, and the same answers as transformers on the CPU."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ostinato.delegate import Method, Program, load_program
from ostinato.delegate.artifact.files import open_artifact
from ostinato.delegate.artifact.paths import artifact_paths
from ostinato.export import export_program
from ostinato.runner import Engine

from .comparison import logits_of
from .conftest import CAPITALS
from .modules import MAX_SEQ_LEN, VOCAB, Recurrent, recurrent_methods

pytestmark = pytest.mark.gpu

GRAPH = {"enable_cuda_graph_for_method": "decode"}
# The slot of a language model's session, for methods that take one.
SLOT = torch.tensor([0])


@pytest.fixture(scope="session")
def recurrent_cuda(exported: Callable[..., Path]) -> Path:
    def build(path: Path) -> None:
        export_program(
            recurrent_methods(Recurrent()),
            path,
            device="cuda",
            metadata={"get_max_seq_len": MAX_SEQ_LEN, "get_vocab_size": VOCAB},
            output_names=("logits",),
        )

    return exported("recurrent-cuda", build)


@pytest.fixture
def program(recurrent_cuda: Path) -> Iterator[Program]:
    with load_program(recurrent_cuda) as loaded:
        yield loaded


def step(method: Method, token: int, position: int, device: str = "cpu") -> Tensor:
    """Make one decode step; return the logits [vocab] on the host."""
    inputs = (torch.tensor([[token]], device=device), torch.tensor([position], device=device), SLOT)
    return method.execute(inputs[: len(method.inputs)])[0][0].cpu().clone()


def walk(method: Method, steps: int, device: str = "cpu") -> Tensor:
    """Make `steps` decode steps from position 0, and from 0 again when the positions run out; return logits [steps,
    vocab]."""
    return torch.stack([step(method, 7 * i % VOCAB, i % MAX_SEQ_LEN, device) for i in range(steps)])


def test_replay_is_bit_equal_to_disabled(recurrent_cuda: Path) -> None:
    with load_program(recurrent_cuda) as first, load_program(recurrent_cuda) as second:
        replayed, plain = first.load_method("decode", GRAPH), second.load_method("decode")
        assert torch.equal(walk(replayed, 64), walk(plain, 64))
        assert (replayed.stats.warmups, replayed.stats.captures, replayed.stats.replays) == (3, 1, 60)
        assert replayed.stats.next_phase == "replay" and replayed.stats.fallback_reason is None
        for key, state in first.mutable_buffers.items():
            assert torch.equal(state, second.mutable_buffers[key]), key
        assert first.mutable_buffers["steps"].item() == 164


def test_equals_the_eager_module(program: Program) -> None:
    module = Recurrent()
    prefill, decode = program.load_method("prefill"), program.load_method("decode", GRAPH)
    tokens = torch.arange(20)[None] % VOCAB
    (got,) = prefill.execute((tokens[:, :8], torch.arange(8)))
    torch.testing.assert_close(got, module(tokens[:, :8], torch.arange(8)), rtol=1e-5, atol=1e-5)
    for t in range(8, 20):
        want = module(tokens[:, t : t + 1], torch.tensor([t]))[0]
        torch.testing.assert_close(step(decode, int(tokens[0, t]), t), want, rtol=1e-5, atol=1e-5)


def test_inputs_on_host_and_device_agree(recurrent_cuda: Path) -> None:
    with load_program(recurrent_cuda) as first, load_program(recurrent_cuda) as second:
        host, device = first.load_method("decode", GRAPH), second.load_method("decode", GRAPH)
        assert torch.equal(walk(host, 12), walk(device, 12, "cuda"))


def test_misaligned_device_slices_are_read_right(program: Program) -> None:
    prefill = program.load_method("prefill")
    tokens = torch.arange(16, device="cuda")[None] % VOCAB
    positions = torch.arange(-3, 13, device="cuda")
    (sliced,) = prefill.execute((tokens[:, 3:10], positions[3:10]))
    (whole,) = prefill.execute((tokens[:, 3:10].cpu(), positions[3:10].cpu()))
    assert torch.equal(sliced, whole)
    (strided,) = prefill.execute((tokens[:, ::2], torch.arange(8)))
    (packed,) = prefill.execute((tokens[:, ::2].contiguous(), torch.arange(8)))
    assert torch.equal(strided, packed)


def test_outputs_are_host_copies_or_the_static_buffer(program: Program) -> None:
    copied = program.load_method("decode", GRAPH)
    results = [copied.execute((torch.tensor([[1]]), torch.tensor([i])))[0] for i in range(6)]
    assert all(result.device.type == "cpu" for result in results)
    assert len({result.data_ptr() for result in results}) == 6
    kept = program.load_method("decode", {**GRAPH, "skip_copy_output_to_cpu_for_method": "decode"})
    outputs = [kept.execute((torch.tensor([[1]]), torch.tensor([i])))[0] for i in range(8)]
    assert all(output.is_cuda for output in outputs)
    assert len({output.data_ptr() for output in outputs[3:]}) == 1


@pytest.mark.parametrize("shared", [False, True])
def test_streams(recurrent_cuda: Path, shared: bool) -> None:
    """Prefill and decode pass the state on in order, on whichever streams they run."""
    options = {"use_shared_cuda_stream": shared}
    module = Recurrent()
    with load_program(recurrent_cuda) as loaded:
        prefill, decode = loaded.load_method("prefill", options), loaded.load_method("decode", {**GRAPH, **options})
        for _ in range(3):
            prefill.execute((torch.tensor([[1, 2, 3]]), torch.arange(3)))
            module(torch.tensor([[1, 2, 3]]), torch.arange(3))
            for t in range(3, 9):
                want = module(torch.tensor([[t]]), torch.tensor([t]))[0]
                torch.testing.assert_close(step(decode, t, t), want, rtol=1e-5, atol=1e-5)


def test_constants_stand_at_one_address_and_equal_the_file(program: Program, recurrent_cuda: Path) -> None:
    entries = open_artifact(*artifact_paths(recurrent_cuda))[1].entries
    prefill, decode = program.load_method("prefill"), program.load_method("decode")
    for name, key in prefill._entry.record.constants.items():
        tensor = prefill._bound[name]
        twin = next(n for n, k in decode._entry.record.constants.items() if k == key)
        assert tensor.is_cuda and tensor.data_ptr() == decode._bound[twin].data_ptr()
        assert torch.equal(tensor.cpu(), entries[key].tensor())
    for name, key in prefill._entry.record.buffers.items():
        twin = next(n for n, k in decode._entry.record.buffers.items() if k == key)
        assert prefill._bound[name].data_ptr() == decode._bound[twin].data_ptr()
    assert program.stats.shared == program.stats.constants > 0
    apart = program.load_method("decode", {"weight_sharing_across_methods": False})
    keys = apart._entry.record.constants
    assert all(apart._bound[name].data_ptr() != decode._bound[name].data_ptr() for name in keys)


def test_a_real_capture_failure_falls_back(recurrent_cuda: Path) -> None:
    """CUDA itself refuses a synchronisation inside a capture."""
    with load_program(recurrent_cuda) as broken, load_program(recurrent_cuda) as whole:
        decode, plain = broken.load_method("decode", GRAPH), whole.load_method("decode")
        assert decode._code is not None
        run = decode._code.run_segment

        def synchronising(index: int, values: dict[int, Tensor]) -> None:
            run(index, values)
            torch.cuda.synchronize()

        decode._code.run_segment = synchronising  # type: ignore[method-assign]
        assert torch.equal(walk(decode, 10), walk(plain, 10))
        assert (decode.stats.next_phase, decode.stats.fallbacks, decode.stats.captures) == ("disabled", 1, 0)
        assert "captur" in (decode.stats.fallback_reason or "")
        assert broken.mutable_buffers["steps"].item() == 110
        # torch and CUDA still work, and so does another capture.
        again = broken.load_method("decode", GRAPH)
        assert torch.equal(walk(again, 10), walk(plain, 10))
        assert again.stats.captures == 1
    assert float((torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")).sum()) == 512


def test_a_bystander_that_allocates_does_not_break_the_capture(program: Program) -> None:
    stop = threading.Event()

    def allocate() -> None:
        held = []
        while not stop.is_set():
            held.append(torch.empty(1 << 20, device="cuda"))
            if len(held) > 64:
                held.clear()
                torch.cuda.empty_cache()

    bystander = threading.Thread(target=allocate)
    bystander.start()
    try:
        decode = program.load_method("decode", GRAPH)
        walk(decode, 8)
    finally:
        stop.set()
        bystander.join()
    assert (decode.stats.captures, decode.stats.fallbacks) == (1, 0)


def test_two_threads_are_serialised(program: Program) -> None:
    decode = program.load_method("decode", GRAPH)

    def work() -> None:
        for i in range(100):
            step(decode, i % VOCAB, i % MAX_SEQ_LEN)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert program.mutable_buffers["steps"].item() == 300


def test_two_programs_capture_at_once(recurrent_cuda: Path) -> None:
    """Programs share the stream that captures use. The work of one must not get into the graph of another."""
    results: dict[int, Tensor] = {}

    def work(index: int) -> None:
        with load_program(recurrent_cuda) as loaded:
            for _ in range(5):
                decode = loaded.load_method("decode", {**GRAPH, "cuda_graph_warmup_steps": 1})
                results[index] = walk(decode, 12)
                assert decode.stats.fallbacks == 0

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with load_program(recurrent_cuda) as loaded:
        want = walk(loaded.load_method("decode"), 12)
    assert len(results) == 3
    assert all(torch.equal(got, want) for got in results.values())


def test_close_frees_device_memory(recurrent_cuda: Path) -> None:
    def use() -> None:
        with load_program(recurrent_cuda) as loaded:
            walk(loaded.load_method("decode", GRAPH), 8)

    use()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        use()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= before


@pytest.mark.parametrize(("fixture", "bound"), [("capitals_cuda", 1e-4), ("capitals_bfloat16_states", 1e-2)])
def test_capitals_logits_are_those_of_transformers(fixture: str, bound: float, request: pytest.FixtureRequest) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(CAPITALS, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    with load_program(request.getfixturevalue(fixture)) as loaded:
        prefill, decode = loaded.load_method("prefill"), loaded.load_method("decode", GRAPH)
        for length in (1, 2, 3, 31, 63, 64, 65, 128, 200):
            tokens = torch.randint(0, 1500, (1, length + 4), generator=generator)
            with torch.no_grad():
                want = reference(tokens).logits[0]
            method = prefill if length > 1 else decode
            got = [method.execute((tokens[:, :length], torch.arange(length), SLOT.repeat(length)))[0][0]]
            got += [step(decode, int(tokens[0, t]), t) for t in range(length, length + 4)]
            for i, logits in enumerate(got):
                expected = want[length - 1 + i]
                assert (logits - expected).norm() / expected.norm() < bound, (length, i)


@pytest.mark.parametrize("fixture", ["capitals_cuda", "capitals_bfloat16", "capitals_bfloat16_states"])
def test_capitals_answers_and_replays(fixture: str, request: pytest.FixtureRequest) -> None:
    artifact = request.getfixturevalue(fixture)
    tokens = {}
    for graph in (False, True):
        with Engine.load(artifact, cuda_graph=graph) as engine:
            assert "".join(engine.generate("What is the capital of France?")) == "Paris"
            prompt = engine.encode_prompt("What is the capital of Japan?")
            tokens[graph] = list(engine.generate_tokens(prompt, max_new_tokens=80, ignore_eos=True))
            stats = engine.model.method_stats["decode_sample"]
            assert (stats["replays"] > 60) is graph and stats["fallbacks"] == 0
    assert tokens[False] == tokens[True]


def test_prompts_in_buckets(capitals_cuda: Path) -> None:
    """Every length up to past the largest bucket that fits, and prompts in random parts, over a state full of NaN."""
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(CAPITALS, dtype=torch.float32).eval()
    tokens = torch.randint(0, 1500, (240,), generator=torch.Generator().manual_seed(2)).tolist()
    with torch.no_grad():
        want = reference(torch.tensor([tokens])).logits[0]
    with Engine.load(capitals_cuda, cuda_graph=True, warmup_steps=1) as engine:
        buckets = engine.model.prefill_buckets
        assert buckets == (16, 32, 64, 128, 192, 224)
        done = engine.warm_up()
        assert [(one.rows, one.given_up) for one in done.captured] == [(rows, None) for rows in (*buckets[::-1], 1, 1)]
        for tensor in engine.program.mutable_buffers.values():
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
        for length in range(len(tokens), 0, -1):
            logits = logits_of(engine.model, tokens[:length]).cpu()
            assert (logits - want[length - 1]).norm() / want[length - 1].norm() < 1e-4, length
        draw = random.Random(1)
        for _ in range(8):
            at = 0
            while at < len(tokens):
                end = min(len(tokens), at + draw.randint(1, 240))
                logits = logits_of(engine.model, tokens[at:end], at).cpu()
                assert (logits - want[end - 1]).norm() / want[end - 1].norm() < 1e-4, (at, end)
                at = end
        # Short prompts are rows of one session.
        methods = {engine.model.prompt_method(bucket) for bucket in engine.model.prefill_buckets}
        stats = [engine.model.method_stats[name] for name in methods]
        assert sum(one["fallbacks"] for one in stats) == 0 and sum(one["replays"] for one in stats) > 180
        assert sum(len(one["plans"]) for one in stats) == len(buckets)


def test_sessions_side_by_side(capitals_cuda: Path) -> None:
    """Each session gets transformers' tokens, with and without a graph, while others join and leave. Steps begin ahead."""
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(CAPITALS, dtype=torch.float32).eval()
    prompts = [
        [(31 * index + 7 * place) % 1500 for place in range(length)] for index, length in enumerate((5, 70, 1, 130))
    ]
    for graph in (False, True):
        with Engine.load(capitals_cuda, cuda_graph=graph, warmup_steps=1, sessions=4) as engine:
            assert engine.model.row_buckets == ((2, 4) if graph else ())
            sessions = []
            for prompt in prompts:
                sessions.append(engine.open_session())
                sessions[-1].prefill(prompt)
                for _ in range(6):
                    engine.step(sessions, more=True)
            sessions.pop(1).close()
            for _ in range(6):
                engine.step(sessions, more=True)
            other = sessions[0].fork()
            assert list(other.generate(5, eos_ids=())) == list(sessions[0].generate(5, eos_ids=()))
            answers = [
                (session.tokens, prompt) for session, prompt in zip(sessions, (prompts[0], *prompts[2:]), strict=True)
            ]
            for tokens, prompt in answers:
                with torch.no_grad():
                    logits = reference(torch.tensor([tokens])).logits[0]
                assert tokens[len(prompt) :] == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
            stats = engine.model.method_stats
            assert all(one["fallbacks"] == 0 for one in stats.values())
            assert not graph or any(stats[engine.model.step_method(rows)]["replays"] for rows in (2, 4))


def test_capitals_replay_is_bit_equal(capitals_cuda: Path) -> None:
    logits = {}
    for graph in (False, True):
        with load_program(capitals_cuda) as loaded:
            prefill = loaded.load_method("prefill")
            decode = loaded.load_method("decode", GRAPH if graph else None)
            prefill.execute((torch.arange(20)[None], torch.arange(20), SLOT.repeat(20)))
            logits[graph] = torch.stack([step(decode, 3 * t, t) for t in range(20, 84)])
    assert torch.equal(logits[False], logits[True])
