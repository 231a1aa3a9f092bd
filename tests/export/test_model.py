"""Whole artifacts of the shipped model and of random ones: from a checkpoint to logits, compared with transformers."""

from __future__ import annotations

import io
import json
import math
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.delegate import DeviceMemoryError, StateKind, load_program
from ostinato.delegate.artifact.files import open_constants
from ostinato.delegate.artifact.ptd import Entry
from ostinato.delegate.logits_processing import ProcessingTensors
from ostinato.delegate.sampling_params import SamplingTensors
from ostinato.export import Progress, export_model
from ostinato.export import model as model_module
from ostinato.export.artifact.options import ExportRecord
from ostinato.export.kernels import kernels_for
from ostinato.export.kernels.linear.panels import unpack_panels
from ostinato.export.model import DTYPES
from ostinato.export.models import build_network, read_config
from ostinato.export.models.traffic import decode_bytes, kv_bytes_per_token
from ostinato.export.weights.stream import QuantizedWeights, names_in_panels

from ..conftest import CAPITALS, CAPITALS_LENGTH, only_methods
from ..delegate.loading_cases import OUT_OF_MEMORY
from ..wrappers import allocations, kept_source
from .conversations import converse, errors, run
from .references import (
    CASES,
    FULL,
    LENGTHS,
    LINEAR,
    Reference,
    make_reference,
    shipped_reference,
    stack_rows,
)

STEPS = 4
# A CPU that takes the reference kernels has no methods for rows.
ROWS = ("rows", "rows_hidden") if kernels_for("cpu").max_rows else ()


@dataclass(frozen=True)
class Spec:
    """A model and the settings of its export; all models but `SHIPPED` are random."""

    name: str
    changes: dict[str, Any]
    seed: int
    max_seq_len: int
    dtype: str = "float32"
    samplers: bool = True

    @property
    def methods(self) -> set[str]:
        return {"prefill", "decode"} | ({"sample", "logprobs", "decode_sample", *ROWS} if self.samplers else set())


SHIPPED = Spec("shipped", {}, 0, CAPITALS_LENGTH)
# The shipped model hardly changes when some of its decays change. This model shows that each layer has its own decays.
RANDOM = Spec(
    "random",
    {
        "hidden_size": 48,
        "num_hidden_layers": 4,
        "layer_types": [LINEAR, FULL, LINEAR, FULL],
        "num_key_value_heads": 1,
        "head_dim": 24,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "linear_num_key_heads": 1,
        "linear_key_head_dim": 16,
        "linear_conv_kernel_dim": 3,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "tie_word_embeddings": True,
        "eos_token_id": [7, 9],
    },
    102,
    256,
    samplers=False,
)
SHORT = Spec("random-short", {"layer_types": [FULL, LINEAR], "linear_conv_kernel_dim": 2}, 103, 40, samplers=False)
HALF = Spec(
    "random-half",
    {**CASES["every-expert"], "num_hidden_layers": 2, "layer_types": [LINEAR, FULL]},
    104,
    100,
    "bfloat16",
    samplers=False,
)


@dataclass(frozen=True)
class Artifact:
    """An exported model, and the reference model that it was exported from."""

    spec: Spec
    path: Path
    reference: Reference

    @property
    def constants(self) -> dict[str, Entry]:
        path = self.path / "model.ptd"
        return open_constants(path).entries

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters that the artifact must hold, by our names."""
        return stack_rows(dict(self.reference.model.named_parameters()))

    def value(self, name: str) -> Tensor:
        """Return the stored constant; a weight that kernels read in panels is returned in the checkpoint's order."""
        config = read_config(self.reference.folder)[1]
        network = build_network(config, 8, DTYPES[self.spec.dtype], kernels=kernels_for("cpu"))
        value = self.constants[name].tensor()
        return unpack_panels(None, value, None)[0] if name in names_in_panels(network) else value


Get = Callable[[Spec], Artifact]


@pytest.fixture(scope="session")
def artifact(
    exported: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Get:
    made: dict[str, Artifact] = {}

    def get(spec: Spec) -> Artifact:
        if spec is SHIPPED and spec.name not in made:
            made[spec.name] = Artifact(spec, request.getfixturevalue("capitals_artifact"), shipped_reference(CAPITALS))
        if spec.name not in made:
            reference = make_reference(tmp_path_factory.mktemp(spec.name), spec.changes, spec.seed)

            def build(path: Path) -> None:
                with nullcontext() if spec.samplers else only_methods("prefill", "decode"):
                    export_model(reference.folder, path, max_seq_len=spec.max_seq_len, dtype=spec.dtype)

            extra = repr(spec) + Path(__file__).with_name("references.py").read_text()
            made[spec.name] = Artifact(spec, exported(spec.name, build, extra), reference)
        return made[spec.name]

    return get


@pytest.mark.parametrize("spec", (SHIPPED, RANDOM), ids=lambda spec: spec.name)
def test_logits(artifact: Get, spec: Spec) -> None:
    made = artifact(spec)
    with load_program(made.path) as program:
        # Long prompts come first, so that short ones start from used state.
        for length in sorted(LENGTHS, reverse=True):
            tokens = made.reference.tokens(length + STEPS, seed=length)
            found = errors(converse(program, tokens, length), made.reference.logits(tokens)[length - 1 :])
            assert max(found) < 1e-4, f"{length} tokens: relative errors of prefill and decode steps {found}"


@pytest.mark.parametrize("spec", (SHIPPED, RANDOM), ids=lambda spec: spec.name)
def test_longest_prompt_and_its_last_token(artifact: Get, spec: Spec) -> None:
    made = artifact(spec)
    tokens = made.reference.tokens(spec.max_seq_len)
    with load_program(made.path) as program:
        found = errors(converse(program, tokens, spec.max_seq_len - 1), made.reference.logits(tokens)[-2:])
    assert max(found) < 1e-4, f"relative errors of prefill and decode step {found}"


@pytest.mark.parametrize("spec", (SHIPPED, RANDOM), ids=lambda spec: spec.name)
def test_prefill_in_two_parts(artifact: Get, spec: Spec) -> None:
    made = artifact(spec)
    tokens = made.reference.tokens(124)
    expected = made.reference.logits(tokens)
    with load_program(made.path) as program:
        prefill, decode = program.load_method("prefill"), program.load_method("decode")
        found = [run(prefill, tokens, 0, 70), run(prefill, tokens, 70, 120), run(decode, tokens, 120, 121)]
    assert max(errors(found, expected[[69, 119, 120]])) < 1e-4


@pytest.mark.parametrize("spec", (SHIPPED,), ids=lambda spec: spec.name)
def test_replay_on_the_host_gives_equal_answers(artifact: Get, spec: Spec) -> None:
    made = artifact(spec)
    tokens = made.reference.tokens(30)
    options = {"enable_cuda_graph_for_method": "decode", "cuda_graph_warmup_steps": 2}
    with load_program(made.path) as program:
        plain, replayed = converse(program, tokens, 20), converse(program, tokens, 20, options)
    for one, other in zip(plain, replayed, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("spec", (SHORT,), ids=lambda spec: spec.name)
def test_program_shorter_than_a_chunk(artifact: Get, spec: Spec) -> None:
    made = artifact(spec)
    with load_program(made.path) as program:
        for length in (1, 2, 3, 31, 36, 39):
            tokens = made.reference.tokens(min(length + STEPS, 40), seed=length)
            found = errors(converse(program, tokens, length), made.reference.logits(tokens)[length - 1 :])
            assert max(found) < 1e-4, f"{length} tokens: relative errors of prefill and decode steps {found}"


@pytest.mark.parametrize("spec", (SHIPPED, RANDOM, SHORT, HALF), ids=lambda spec: spec.name)
def test_metadata_and_methods(artifact: Get, spec: Spec) -> None:
    made = artifact(spec)
    config = made.reference.model.config
    network = build_network(read_config(made.reference.folder)[1], spec.max_seq_len, DTYPES[spec.dtype])
    with load_program(made.path) as program:
        assert program.method_names == spec.methods
        metadata = program.metadata
        buffers = json.loads(metadata.pop("get_mutable_buffer_metadata"))["mutable_buffers"]
        record = ExportRecord.from_metadata(metadata, made.path)
        assert (record.options.max_seq_len, record.options.dtype) == (spec.max_seq_len, spec.dtype)
        del metadata["get_export_options"]
        # ExecuTorch cannot tell a list of one number from the number.
        assert metadata == {
            "get_max_seq_len": spec.max_seq_len,
            "get_page_size": 64,
            "get_vocab_size": config.vocab_size,
            "get_n_layers": config.num_hidden_layers,
            "get_eos_ids": config.eos_token_id,
            "get_model_type": "qwen3_5_moe_text",
            "get_activation_dtype": spec.dtype,
            "get_quantization": "none",
            "get_decode_bytes": decode_bytes(network, "cpu"),
            "get_kv_bytes_per_token": kv_bytes_per_token(network),
            "use_kv_cache": True,
            "use_sdpa_with_kv_cache": False,
            "enable_dynamic_shape": True,
            "enable_padded_prefill": True,
            "get_n_cpu_moe": 0,
        }
        prefill, decode = program.load_method("prefill"), program.load_method("decode")
        for name in spec.methods - {"prefill", "decode"}:
            program.load_method(name)
        own = ("token", "position", "processed")
        names = (*own, *SamplingTensors._fields, *ProcessingTensors._fields)
        sampling = [] if spec.samplers else [f"sampling.{name}" for name in names]
        assert sorted([*program.mutable_buffers, *sampling]) == buffers
        longest = spec.max_seq_len - 1
        assert [(spec.name, spec.shape_text) for spec in prefill.inputs] == [
            ("tokens", f"[1, T=2..{longest}]"),
            ("input_pos", f"[T=2..{longest}]"),
            ("slots", f"[T=2..{longest}]"),
        ]
        assert [spec.shape_text for spec in decode.inputs] == ["[1, 1]", "[1]", "[1]"]
        for method, first_slot in ((prefill, -1), (decode, 0)):
            assert [spec.value_range for spec in method.inputs] == [
                (0, config.vocab_size - 1),
                (0, longest),
                (first_slot, 0),
            ]
            assert [(spec.name, spec.dtype, spec.shape_text) for spec in method.outputs] == [
                ("logits", "float32", f"[1, {config.vocab_size}]")
            ]


def test_a_gpu_without_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A weight is quantised on the GPU, also for code for a CPU."""

    def full(weights: QuantizedWeights, name: str) -> Tensor:
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    monkeypatch.setattr(QuantizedWeights, "__getitem__", full)
    with pytest.raises(
        DeviceMemoryError, match=r"ran out of memory while exporting the model; the allocation .* 2.00 GiB"
    ):
        # The length of other tests, whose code is kept.
        export_model(CAPITALS, tmp_path / "artifact", max_seq_len=CAPITALS_LENGTH)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not ROWS, reason="this CPU takes the references")
def test_methods_for_rows(artifact: Get) -> None:
    """A token or position of -1 stands for the one that the slot keeps, a slot of -1 for none. The number of slots is known
    at load."""
    made = artifact(SHIPPED)
    longest, vocabulary = SHIPPED.max_seq_len - 1, made.reference.model.config.vocab_size
    with load_program(made.path, sessions=3) as program:
        for name in ROWS:
            method = program.load_method(name)
            assert [(spec.name, spec.shape_text, spec.value_range) for spec in method.inputs] == [
                ("tokens", f"[T=2..{longest}]", (-1, vocabulary - 1)),
                ("input_pos", f"[T=2..{longest}]", (-1, longest)),
                ("slots", f"[T=2..{longest}]", (-1, 2)),
                ("logits_indices", f"[L=1..{longest}]", (-1, longest - 1)),
            ]
        assert [spec.value_range for spec in program.method_inputs("decode_sample")] == [(0, 2)]


@pytest.mark.parametrize("spec", (SHIPPED, RANDOM), ids=lambda spec: spec.name)
def test_every_parameter_is_stored_once(artifact: Get, spec: Spec) -> None:
    made = artifact(spec)
    stored = made.constants
    wanted = made.parameters
    assert ("lm_head.weight" in wanted) is not spec.changes.get("tie_word_embeddings", False)
    assert wanted.keys() <= stored.keys()
    for name, parameter in wanted.items():
        assert torch.equal(made.value(name), parameter), name
        holders = [key for key, entry in stored.items() if bytes(entry.data) == bytes(stored[name].data)]
        assert holders == [name]
    others = {key: entry.nbytes for key, entry in stored.items() if key not in wanted}
    assert sum(others.values()) < 1024, f"constants that are not parameters: {others}"


@pytest.mark.parametrize("spec", (SHIPPED, RANDOM), ids=lambda spec: spec.name)
def test_state_takes_no_room_and_constants_are_shared(artifact: Get, spec: Spec) -> None:
    made = artifact(spec)
    stored = made.constants
    assert not [key for key in stored if key.endswith(("_cache", "_state"))]
    wanted = made.parameters
    needed = sum(entry.nbytes for entry in stored.values())
    # Each constant adds up to 128 bytes of alignment, a hash of 64 characters, and its name twice.
    assert (made.path / "model.ptd").stat().st_size < needed + len(stored) * 700
    # The only buffers that do not begin with zeros.
    for name in ("top_p", "repetition_penalty", "allowed_tokens"):
        assert (stored.pop(f"sampling.{name}", None) is not None) is spec.samplers
    with load_program(made.path) as program:
        program.load_method("prefill")
        program.load_method("decode")
        stats = program.stats
        assert stats.constants == len(stored)
        assert stats.shared >= len(wanted)
        assert stats.bytes_saved >= sum(parameter.nbytes for parameter in wanted.values())
        tables = program.buffers_of(StateKind.BLOCK_TABLE)
        assert all(not tensor.any() for name, tensor in program.mutable_buffers.items() if name not in tables)
        # The one session has all pages.
        assert [table.tolist() for table in tables.values()] == [
            [list(range(group.pages))] for group in program.capacity.groups
        ]


@pytest.mark.parametrize("spec", (SHIPPED,), ids=lambda spec: spec.name)
def test_caches_and_experts_are_never_copied(artifact: Get, spec: Spec) -> None:
    """A write that the compiler could not put back in place would copy a cache in every call. So would a transpose that
    became a copy of the experts."""
    made = artifact(spec)
    config = made.reference.model.config
    pages = -(-spec.max_seq_len // 64)
    cache = math.prod((pages, config.num_key_value_heads, 64, config.head_dim))
    experts = math.prod((config.num_experts, config.hidden_size, config.moe_intermediate_size))
    with load_program(made.path) as program:
        program.load_method("decode")
        caches = [tensor for name, tensor in program.mutable_buffers.items() if name.endswith("_cache")]
        assert [tensor.numel() for tensor in caches] == [cache, cache]
    for method in ("decode", "prefill", *ROWS):
        shapes = allocations(kept_source(made.path, method))
        # All tensors that methods for rows allocate have one row per input row, so their sizes are not fixed.
        assert bool(shapes) is (method not in ROWS) and "aoti_torch_cpu_attend_step(" in kept_source(made.path, method)
        large = [shape for shape in shapes if math.prod(shape) >= min(cache, experts)]
        assert not large, f"{method} allocates {large}"


@pytest.mark.parametrize("spec", (HALF,), ids=lambda spec: spec.name)
def test_bfloat16(artifact: Get, spec: Spec) -> None:
    made = artifact(spec)
    stored = made.constants
    for name, parameter in made.parameters.items():
        exact = name.endswith(("norm.weight", "A_log", "dt_bias"))
        assert stored[name].dtype == (torch.float32 if exact else torch.bfloat16), name
        assert torch.equal(made.value(name), parameter if exact else parameter.bfloat16()), name
    with load_program(made.path) as program:
        for length in (1, 2, 31, 64, 90):
            tokens = made.reference.tokens(length + STEPS, seed=length)
            found = errors(converse(program, tokens, length), made.reference.logits(tokens)[length - 1 :])
            assert max(found) < 5e-2, f"{length} tokens: relative errors of prefill and decode steps {found}"
        program.load_method("decode")
        dtypes = {name.rpartition("_")[2]: tensor.dtype for name, tensor in program.mutable_buffers.items()}
        assert dtypes["cache"] == torch.bfloat16


def test_notes(capitals_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines say what a person would not expect, before anything slow begins: here, before anything is traced."""
    folder = Path(shutil.copytree(capitals_checkpoint, tmp_path / "checkpoint"))
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    settings.pop("torch_dtype", None)

    def notes(**options: Any) -> list[str]:
        progress = Progress(io.StringIO())
        export_model(folder, tmp_path / "artifact", progress=progress, **options)
        assert isinstance(progress.stream, io.StringIO)
        lines = progress.stream.getvalue().splitlines()
        return [line.strip() for line in lines if not line.lstrip().startswith("check checkpoint")]

    def nothing(methods: dict[str, Any], *_: Any, **__: Any) -> None:
        # A network of ours is never exported in training mode, which `export_program` would warn of.
        modules = [module for method in methods.values() for link in method.links for module in link.module.modules()]
        assert modules and not any(module.training for module in modules)

    monkeypatch.setattr(model_module, "export_program", nothing)
    assert notes() == []
    path.write_text(json.dumps({**settings, "dtype": "float16"}))
    assert notes() == ["the checkpoint's float16 becomes float32: --dtype bfloat16 takes half the memory"]
    assert notes(dtype="bfloat16") == notes(dtype="float32") == []
    (folder / "tokenizer.json").unlink()
    said = f"{folder} has no tokenizer: the artifact takes token ids, and `ostinato run` cannot use it"
    assert notes(dtype="float32") == [said]
