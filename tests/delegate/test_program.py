"""`load_program` -> `Program` -> `Method`: what they say of themselves, and what they compute."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ostinato.delegate import (
    ClosedError,
    Dim,
    InputError,
    Method,
    OptionError,
    Program,
    StateKind,
    Target,
    load_program,
)
from ostinato.delegate.artifact.target import check_target
from ostinato.delegate.sampling_params import SamplingTensors

from ..modules import MAX_SEQ_LEN, VOCAB, WIDTH, Recurrent
from ..processes import PATIENCE
from .helpers import FIRST_STEPS, GRAPH, step_inputs, steps_made

CONSTANT_BYTES = 2 * VOCAB * WIDTH * 4
BUFFER_BYTES = MAX_SEQ_LEN * WIDTH * 4 + WIDTH * 4 + 8


@pytest.fixture
def program(recurrent_artifact: Path) -> Iterator[Program]:
    with load_program(recurrent_artifact) as loaded:
        yield loaded


def inputs_at(tokens: list[int], start: int) -> tuple[Tensor, Tensor]:
    return torch.tensor([tokens]), torch.arange(start, start + len(tokens))


def conversation(prefill: Method, decode: Method, module: Recurrent, prompt: list[int], answer: list[int]) -> None:
    """Run a prompt through `prefill`, then tokens through `decode`; each step must be what torch computes."""
    inputs = inputs_at(prompt, 0)
    torch.testing.assert_close(prefill.execute(inputs)[0], module(*inputs))
    for offset, token in enumerate(answer):
        inputs = inputs_at([token], len(prompt) + offset)
        torch.testing.assert_close(decode.execute(inputs)[0], module(*inputs))


def test_what_the_program_says_of_itself(program: Program) -> None:
    assert program.method_names == {"prefill", "decode"}
    assert program.metadata["get_max_seq_len"] == MAX_SEQ_LEN
    assert program.metadata["get_vocab_size"] == VOCAB
    assert program.metadata["get_eos_ids"] in (3, [3])
    assert program.device == torch.device("cpu")
    assert isinstance(program.target, Target)
    assert program.target.device == "cpu"
    check_target(program.target)


def test_specs(program: Program) -> None:
    one, length = Dim(1, 1), Dim(2, MAX_SEQ_LEN - 1, "T")
    prefill, decode = program.load_method("prefill"), program.load_method("decode")
    assert (prefill.name, decode.name) == ("prefill", "decode")
    for method, size in ((prefill, length), (decode, one)):
        tokens, input_pos = method.inputs
        assert (tokens.name, tokens.dtype, tokens.shape) == ("tokens", "int64", (one, size))
        assert (input_pos.name, input_pos.dtype, input_pos.shape) == ("input_pos", "int64", (size,))
        assert tokens.value_range == (0, VOCAB - 1)
        assert input_pos.value_range == (0, MAX_SEQ_LEN - 1)
        (logits,) = method.outputs
        assert (logits.name, logits.dtype, logits.shape) == ("logits", "float32", (one, Dim(VOCAB, VOCAB)))
    assert prefill.inputs[0].shape_text == f"[1, T=2..{MAX_SEQ_LEN - 1}]"


@pytest.mark.parametrize("options", [{}, {**GRAPH, "cuda_graph_warmup_steps": 1}], ids=["disabled", "graph"])
@pytest.mark.parametrize("length", [2, 3, 17, MAX_SEQ_LEN - 1])
def test_prefill_hands_its_state_to_decode(program: Program, options: dict[str, str | int], length: int) -> None:
    prompt = [(3 * index + 1) % VOCAB for index in range(length)]
    answer = [(5 * index) % VOCAB for index in range(min(6, MAX_SEQ_LEN - length))]
    conversation(program.load_method("prefill"), program.load_method("decode", options), Recurrent(), prompt, answer)


def test_second_conversation_starts_anew_at_position_0(program: Program) -> None:
    prefill, decode = program.load_method("prefill"), program.load_method("decode", GRAPH)
    conversation(prefill, decode, Recurrent(), [1, 2, 3, 4, 5], [6, 7, 8, 9, 10])
    conversation(prefill, decode, Recurrent(), [9, 0], [4, 4, 1])
    # A conversation can also consist of single tokens only.
    conversation(decode, decode, Recurrent(), [2], [3, 5])


def test_methods_loaded_in_either_order_share_state(recurrent_artifact: Path) -> None:
    for order in (("prefill", "decode"), ("decode", "prefill")):
        with load_program(recurrent_artifact) as program:
            methods = {name: program.load_method(name) for name in order}
            conversation(methods["prefill"], methods["decode"], Recurrent(), [5, 6, 7], [8, 9])


def test_one_copy_of_constants_and_buffers(program: Program) -> None:
    prefill = program.load_method("prefill")
    alone = program.stats
    assert (alone.constants, alone.constant_bytes, alone.shared, alone.bytes_saved) == (2, CONSTANT_BYTES, 0, 0)
    decode = program.load_method("decode")
    assert addresses(prefill) == addresses(decode)
    assert set(addresses(decode)) == {"embed", "head", "cache", "total", "steps"}
    both = program.stats
    assert (both.constants, both.constant_bytes) == (2, CONSTANT_BYTES)
    assert (both.shared, both.bytes_saved) == (2, CONSTANT_BYTES)
    assert (both.mutable_buffers, both.mutable_buffer_bytes) == (3, BUFFER_BYTES)
    decode.close()
    assert (program.stats.shared, program.stats.bytes_saved) == (0, 0)


def test_three_handles_save_two_copies(program: Program) -> None:
    for name in ("prefill", "decode", "decode"):
        program.load_method(name)
    assert (program.stats.shared, program.stats.bytes_saved) == (2, 2 * CONSTANT_BYTES)


def test_without_weight_sharing(program: Program) -> None:
    prefill = program.load_method("prefill")
    decode = program.load_method("decode", {"weight_sharing_across_methods": False})
    ours, theirs = addresses(prefill), addresses(decode)
    assert all(ours[key] != theirs[key] for key in ("embed", "head"))
    assert all(ours[key] == theirs[key] for key in ("cache", "total", "steps"))
    assert (program.stats.shared, program.stats.bytes_saved) == (0, 0)
    conversation(prefill, decode, Recurrent(), [1, 2, 3], [4, 5, 6])


def addresses(method: Method) -> dict[str, int]:
    """Address of each constant and buffer that the code is bound to, by fully qualified name."""
    record = method._entry.record
    names = {**record.constants, **record.buffers}
    return {key: method._bound[name].data_ptr() for name, key in names.items()}


def test_first_value_of_a_buffer_is_honoured(program: Program) -> None:
    decode = program.load_method("decode")
    assert int(program.mutable_buffers["steps"]) == FIRST_STEPS
    assert program.mutable_buffers["cache"].count_nonzero() == 0
    decode.execute(step_inputs(0))
    assert steps_made(program) == 1
    # A second handle must not put the first value back.
    program.load_method("decode").execute(step_inputs(1))
    assert steps_made(program) == 2


def test_programs_do_not_share_state(recurrent_artifact: Path, program: Program) -> None:
    with load_program(recurrent_artifact) as other:
        mine, theirs = program.load_method("decode"), other.load_method("decode")
        mine.execute(step_inputs(0))
        assert (steps_made(program), steps_made(other)) == (1, 0)
        theirs.execute(step_inputs(0))
        assert (steps_made(program), steps_made(other)) == (1, 1)


def test_reset_puts_the_first_values_back(program: Program) -> None:
    decode = program.load_method("decode")
    for index in range(3):
        decode.execute(step_inputs(index))
    program.reset()
    assert steps_made(program) == 0
    assert all(program.mutable_buffers[key].count_nonzero() == 0 for key in ("cache", "total"))
    module = Recurrent()
    torch.testing.assert_close(decode.execute(step_inputs(5))[0], module(*step_inputs(5)))


@pytest.mark.parametrize("graph", [False, True])
def test_strided_inputs_are_read_as_they_are(program: Program, graph: bool) -> None:
    """A view that is not contiguous is a valid input."""
    options: dict[str, str | int] = {"enable_cuda_graph_for_method": "prefill", "cuda_graph_warmup_steps": 1}
    prefill = program.load_method("prefill", options if graph else {})
    tokens, positions = inputs_at([1, 2, 3, 4, 5], 0)
    strided = torch.stack([tokens, tokens + 3], -1)[..., 0], torch.stack([positions, positions + 7], -1)[:, 0]
    assert not any(tensor.is_contiguous() for tensor in strided)
    expected = Recurrent()(tokens, positions)
    for _ in range(4):
        torch.testing.assert_close(prefill.execute(strided)[0], expected)
    same = torch.full((1, 1), 4).expand(1, 5), positions
    torch.testing.assert_close(prefill.execute(same)[0], Recurrent()(*same))


@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_handles_cannot_be_copied(program: Program, make_copy: object) -> None:
    assert callable(make_copy)
    for handle in (program, program.load_method("decode")):
        with pytest.raises(TypeError, match=f"{type(handle).__name__} cannot be (copied|pickled)"):
            make_copy(handle)


def test_buffers_by_kind(program: Program, capitals_artifact: Path) -> None:
    assert program.buffers_of(StateKind.OTHER) == {}
    program.load_method("decode")
    assert program.buffers_of(StateKind.OTHER).keys() == {"cache", "total", "steps"}
    assert program.buffers_of(StateKind.KV_CACHE) == {}
    with load_program(capitals_artifact) as model:
        model.load_method("decode_sample")
        found = {kind: model.buffers_of(kind) for kind in StateKind}
        assert {key for buffers in found.values() for key in buffers} == model.mutable_buffers.keys()
        assert all(
            model.mutable_buffers[key] is tensor for buffers in found.values() for key, tensor in buffers.items()
        )
        assert {key.rpartition(".")[2] for key in found[StateKind.SAMPLING]} == {
            "token",
            "position",
            "processed",
            *SamplingTensors._fields,
        }
        assert all(found[kind] for kind in (StateKind.KV_CACHE, StateKind.CONVOLUTION, StateKind.RECURRENT))


def test_close(recurrent_artifact: Path) -> None:
    with load_program(recurrent_artifact) as program:
        decode, prefill = program.load_method("decode"), program.load_method("prefill")
        prefill.close()
        prefill.close()
        decode.execute(step_inputs(0))
        with pytest.raises(ClosedError, match="prefill"):
            prefill.execute(inputs_at([1, 2], 0))
    with pytest.raises(ClosedError, match="decode"):
        decode.execute(step_inputs(1))
    with pytest.raises(ClosedError, match="program"):
        program.load_method("decode")
    program.close()
    assert program.stats.constants == 0
    assert program.mutable_buffers == {}


def test_context_manager_closes_on_an_error(recurrent_artifact: Path) -> None:
    with pytest.raises(ZeroDivisionError), load_program(recurrent_artifact) as program:
        decode = program.load_method("decode")
        raise ZeroDivisionError
    with pytest.raises(ClosedError):
        decode.execute(step_inputs(0))


def test_closing_frees_memory(recurrent_artifact: Path) -> None:
    """Closing frees the memory, although torch's container keeps the tensors that were bound to it."""
    program = load_program(recurrent_artifact)
    prefill = program.load_method("prefill")
    decode = program.load_method("decode", {"weight_sharing_across_methods": False})
    decode.execute(step_inputs(0))
    constants = decode._entry.record.constants
    private = [StorageWeakRef(decode._bound[name].untyped_storage()) for name in constants]
    shared = [StorageWeakRef(tensor.untyped_storage()) for tensor in prefill._bound.values()]
    decode.close()
    gc.collect()
    assert all(storage.expired() for storage in private)
    assert not any(storage.expired() for storage in shared)
    prefill.execute(inputs_at([1, 2, 3], 0))
    program.close()
    gc.collect()
    assert all(storage.expired() for storage in shared)


def test_sources(recurrent_artifact: Path, tmp_path: Path) -> None:
    pte, ptd = recurrent_artifact / "model.pte", recurrent_artifact / "model.ptd"
    for source in (recurrent_artifact, str(recurrent_artifact), (pte, ptd), (str(pte), str(ptd)), pte, str(pte)):
        with load_program(source) as program:
            program.load_method("decode").execute(step_inputs(0))
            assert steps_made(program) == 1
    (tmp_path / "other.pte").write_bytes(pte.read_bytes())
    (tmp_path / "weights.ptd").write_bytes(ptd.read_bytes())
    with load_program((tmp_path / "other.pte", tmp_path / "weights.ptd")) as program:
        program.load_method("prefill")


def test_on_load_is_called_with_each_size(recurrent_artifact: Path) -> None:
    sizes: list[int] = []
    with load_program(recurrent_artifact, on_load=sizes.append) as program:
        assert sizes == []
        program.load_method("decode")
        program.load_method("prefill")
    assert sorted(sizes) == sorted([VOCAB * WIDTH * 4, VOCAB * WIDTH * 4, 8])


def test_unknown_method(program: Program) -> None:
    with pytest.raises(OptionError, match=r"no method 'forward'; its methods are: decode, prefill"):
        program.load_method("forward")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_cuda_graph": "decode"}, r"unknown backend option 'enable_cuda_graph' \(did you mean 'enable_cuda_gr"),
        ({"zzz": 1}, "unknown backend option 'zzz'; the options are: .*use_shared_cuda_stream"),
        ({3: 1}, "unknown backend option 3"),
        ({"enable_cuda_graph_for_method": True}, r"takes a string .*, got True \(bool\)"),
        ({"enable_cuda_graph_for_method": ["decode"]}, r"takes a string .*\(list\)"),
        ({"use_shared_cuda_stream": 1}, r"takes True or False, got 1 \(int\)"),
        ({"weight_sharing_across_methods": "yes"}, r"takes True or False, got 'yes' \(str\)"),
        ({"cuda_graph_early_kernels": 0}, r"takes True or False, got 0 \(int\)"),
        ({"cuda_graph_warmup_steps": True}, r"takes an integer, got True \(bool\)"),
        ({"cuda_graph_warmup_steps": 2.5}, r"takes an integer, got 2.5 \(float\)"),
        ({"cuda_graph_warmup_steps": 0}, "must be 1 or more, got 0"),
        ({"cuda_graph_warmup_steps": -3}, "must be 1 or more, got -3"),
        ({"enable_cuda_graph_for_method": "decode,forward"}, "names 'forward'; the program's methods are: decode, pre"),
        ({"skip_copy_output_to_cpu_for_method": "x, y"}, "names 'x', 'y'; the program's methods are: decode, prefill"),
    ],
)
def test_backend_options_are_checked(program: Program, options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        program.load_method("decode", options)  # type: ignore[arg-type]
    program.load_method("decode").execute(step_inputs(0))


@pytest.mark.parametrize("methods", ["decode", "prefill, decode", " decode ,", "prefill,decode,decode"])
def test_method_lists(program: Program, methods: str) -> None:
    assert program.load_method("decode", {"enable_cuda_graph_for_method": methods}).stats.next_phase == "warmup"


@pytest.mark.parametrize("methods", ["", " ", "prefill"])
def test_methods_not_in_the_list_have_no_graph(program: Program, methods: str) -> None:
    assert program.load_method("decode", {"enable_cuda_graph_for_method": methods}).stats.next_phase == "disabled"


@pytest.mark.parametrize("inputs", [None, 5, torch.tensor([[1], [0]])], ids=["None", "int", "one tensor"])
def test_inputs_that_are_no_sequence(program: Program, inputs: object) -> None:
    with pytest.raises(InputError, match="takes a sequence of 2 inputs"):
        program.load_method("decode").execute(inputs)  # type: ignore[arg-type]


RUNTIME = """
import sys
import torch
already = set(sys.modules)
from ostinato.delegate import load_program
program = load_program(sys.argv[1])
prefill = program.load_method("prefill")
decode = program.load_method("decode", {"enable_cuda_graph_for_method": "decode", "cuda_graph_warmup_steps": 1})
prefill.execute((torch.tensor([[1, 2]]), torch.tensor([0, 1])))
for position in range(2, 6):
    decode.execute((torch.tensor([[1]]), torch.tensor([position])))
from ostinato.runner import Engine
engine = Engine.load(sys.argv[1], cuda_graph=True)
assert list(engine.generate_tokens([1, 2, 4], max_new_tokens=6, ignore_eos=True))
heavy = ("executorch.exir", "torch._inductor", "transformers", "torchao", "triton", "ostinato.export", "sympy")
print(sorted(name for name in set(sys.modules) - already if name.startswith(heavy)))
"""


def test_nothing_heavy_is_imported_at_run_time(recurrent_artifact: Path) -> None:
    command = [sys.executable, "-c", RUNTIME, str(recurrent_artifact)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_executorch_opens_the_program(recurrent_artifact: Path) -> None:
    runtime = pytest.importorskip("executorch.runtime")
    program = runtime.Runtime.get().load_program(recurrent_artifact / "model.pte")
    assert {"prefill", "decode", "get_max_seq_len"} <= program.method_names
    assert program.load_method("get_max_seq_len").execute([]) == [MAX_SEQ_LEN]


def test_executorch_reads_the_constants(recurrent_artifact: Path) -> None:
    from executorch.exir._serialize._cord import Cord
    from executorch.extension.flat_tensor.serialize.serialize import FlatTensorSerializer

    payload = FlatTensorSerializer().deserialize(Cord((recurrent_artifact / "model.ptd").read_bytes()))
    assert {"embed", "head", "steps"} < set(payload.named_data)
    values = Recurrent().state_dict()
    for key in ("embed", "head", "steps"):
        entry, tensor = payload.named_data[key], values[key]
        assert entry.tensor_layout is not None
        assert entry.tensor_layout.sizes == list(tensor.shape)
        assert bytes(payload.buffers[entry.buffer_index]) == tensor.numpy().tobytes()
