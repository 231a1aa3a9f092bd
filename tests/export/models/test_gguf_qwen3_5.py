"""Qwen3.5 in GGUF files: every tensor as the checkpoint has it, logits as transformers has them, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median
from typing import Any

import gguf
import pytest
import torch

from ostinato.delegate import load_program
from ostinato.delegate.errors import CheckpointError
from ostinato.export import Progress, export_model
from ostinato.export.formats.int4_min import Int4Min
from ostinato.export.formats.int8 import Int8
from ostinato.export.layers.experts import Experts
from ostinato.export.models import build_network, open_gguf, read_config
from ostinato.export.models.qwen3_5_gguf import factor_of
from ostinato.export.weights.stream import formats_of
from ostinato.runner.engine import Engine

from ...comparison import relative_error
from ...conftest import CAPITALS, CAPITALS_LENGTH, export_on_a_gpu, only_methods
from ..conversations import converse, errors
from ..gguf_files import dequantised
from ..gguf_qwen3_5 import in_file, metadata_of, tiled, write_qwen3_5
from ..references import CASES, Reference, load_ours, make_reference, shipped_reference

# Layers of both types; value heads as many as key heads, two and four times as many; tied and biased; dense and with experts.
GRAPH = {"enable_cuda_graph_for_method": "decode", "cuda_graph_warmup_steps": 1}
MODELS = ("three-to-one", "wide-values", "biases", "full-first", "all-linear", "dense", "dense-tied", "dense-wide")


def made(tmp_path: Path, case: str, **file: Any) -> tuple[Path, Reference]:
    reference = make_reference(tmp_path / "checkpoint", CASES[case], seed=3)
    path = tmp_path / "model.gguf"
    write_qwen3_5(path, reference.model, **file)
    return path, reference


def logits(path: Path, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return load_ours(path)(tokens, torch.arange(tokens.shape[1]), torch.zeros(tokens.shape[1], dtype=torch.int64))[
            0
        ]


def assert_same(path: Path, reference: Reference) -> None:
    """Check that parameters are equal bit for bit, but for A_log, which is rounded when the file has its exponential."""
    found, expected = (dict(load_ours(one, 8).named_parameters()) for one in (path, reference.folder))
    assert found.keys() == expected.keys()
    for name, value in found.items():
        if name.endswith("A_log"):
            assert torch.allclose(value, expected[name], rtol=0, atol=5e-7), name
        else:
            assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("case", MODELS)
def test_a_file_is_the_checkpoint(tmp_path: Path, case: str) -> None:
    path, reference = made(tmp_path, case)
    assert read_config(path)[1] == read_config(reference.folder)[1]
    assert_same(path, reference)
    tokens = reference.tokens(65)
    assert relative_error(logits(path, tokens), reference.logits(tokens)[-1]) < 1e-4


def test_an_interval_says_which_layers_are_full_attention(tmp_path: Path) -> None:
    metadata = {"attention.recurrent_layers": None, "full_attention_interval": 2}
    path, reference = made(tmp_path, "dense-wide", metadata=metadata)
    assert read_config(path)[1].layer_types == read_config(reference.folder)[1].layer_types
    # Without the interval, it is 4.
    path, _ = made(tmp_path, "three-to-one", metadata={key: None for key in metadata})
    assert read_config(path)[1].layer_types == read_config(reference.folder)[1].layer_types[:1] * 3 + (
        "full_attention",
    )


def test_fused_projections_of_experts(tmp_path: Path) -> None:
    path, reference = made(tmp_path, "wide-values", fused=True)
    assert "blk.0.ffn_gate_up_exps.weight" in open_gguf(path).file.tensors
    assert_same(path, reference)


def test_a_gate_without_its_dimension_of_one_element(tmp_path: Path) -> None:
    reference = make_reference(tmp_path / "checkpoint", CASES["every-expert"], seed=3)
    gate = reference.model.model.layers[1].mlp.shared_expert_gate.weight.detach()
    write_qwen3_5(tmp_path / "model.gguf", reference.model, more={"blk.1.ffn_gate_inp_shexp.weight": gate.flatten()})
    assert_same(tmp_path / "model.gguf", reference)


def test_quantised_tensors_in_another_order(tmp_path: Path) -> None:
    """Values are dequantised before rows and columns are put in order, whatever blocks they are in: here heads are 8 wide."""
    kinds = {"ssm_out": "Q8_0", "attn_qkv": "Q4_0", "attn_gate": "Q4_1", "ffn_gate_exps": "Q5_0"}
    path, reference = made(tmp_path, "many-experts", kinds=kinds)
    config, parameters, tensors = (
        reference.model.config,
        dict(reference.model.named_parameters()),
        open_gguf(path).tensors,
    )
    for part, (stored, kind) in zip(("out_proj", "in_proj_qkv", "in_proj_z"), kinds.items(), strict=False):
        name = f"model.layers.0.linear_attn.{part}.weight"
        ((_, value),) = in_file(config, name, parameters[name].detach()).items()
        ((_, found),) = in_file(config, name, tensors.read(name)).items()
        assert torch.equal(found, rounded(value, kind)), stored
    gate = parameters["model.layers.1.mlp.experts.gate_up_proj"].detach().chunk(2, dim=1)[0]
    assert torch.equal(tensors.read("model.layers.1.mlp.experts.gate_proj.weight"), rounded(gate, "Q5_0"))


def test_integers_in_another_order(tmp_path: Path) -> None:
    """A file's integers are put in order as they are: rows, and columns by whole groups. Experts too, all in one tensor."""
    sizes = {"hidden_size": 128, "linear_num_value_heads": 4, "linear_value_head_dim": 64, "linear_num_key_heads": 2}
    sizes |= {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "num_hidden_layers": 2}
    reference = make_reference(tmp_path / "checkpoint", {**sizes, "layer_types": None}, seed=3)
    kinds = {
        "ssm_out": "Q4_0",
        "attn_qkv": "Q4_1",
        "attn_gate": "Q4_1",
        "exps": "Q5_0",
        "shexp": "Q8_0",
        "attn_q.": "Q4_1",
    }
    path = tmp_path / "model.gguf"
    write_qwen3_5(path, reference.model, kinds=kinds)
    kept, plain = load_ours(path, 16, keeps=True), dict(load_ours(path, 16).named_parameters())
    formats, compared = formats_of(kept), 0
    for prefix, module in kept.named_modules():
        for name in getattr(module, "formats", {}):
            if f"{prefix}.{name}" in formats:
                assert torch.equal(module.stored(name).dequantized(torch.float32), plain[f"{prefix}.{name}"]), prefix
                compared += 1
    assert compared == len(formats) > 8


def rounded(value: torch.Tensor, kind: str) -> torch.Tensor:
    return dequantised(gguf.quants.quantize(value.contiguous().numpy(), gguf.GGMLQuantizationType[kind]), kind)


def test_layers_that_predict_further_tokens_are_skipped(tmp_path: Path) -> None:
    more = {"blk.4.nextn.eh_proj.weight": torch.ones(32, 64), "blk.4.attn_norm.weight": torch.ones(32)}
    metadata = {
        "block_count": 5,
        "nextn_predict_layers": 1,
        "attention.recurrent_layers": [True, True, True, False, False],
    }
    path, reference = made(tmp_path, "dense", more=more, metadata=metadata)
    assert_same(path, reference)
    family, config = read_config(path)
    weights = family.checkpoint_weights(build_network(config, 8, torch.float32), path, open_gguf(path).tensors)
    assert weights.skipped == [f"mtp.{name}" for name in more]


def test_any_part_of_a_head_may_be_rotated() -> None:
    sizes = [(rotated, head_dim) for head_dim in range(2, 300) for rotated in range(2, head_dim + 1, 2)]
    assert all(int(factor_of(*both) * both[1]) == both[0] for both in sizes)
    assert factor_of(64, 256) == 0.25


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"without": ["blk.0.ssm_a"]}, r"missing \(1\): model\.layers\.0\.linear_attn\.A_log"),
        ({"without": ["blk.1.ffn_up_exps.weight"]}, r"missing \(1\): model\.layers\.1\.mlp\.experts\.up_proj\.weight"),
        (
            {"without": ["blk.1.ffn_up_exps.weight", "blk.1.ffn_gate_exps.weight"]},
            r"missing \(1\): model\.layers\.1\.mlp\.experts\.gate_up_proj",
        ),
        ({"more": {"blk.0.ssm_d": torch.zeros(4)}}, r"unexpected \(1\): blk\.0\.ssm_d"),
        ({"more": {"blk.0.ssm_a.weight": torch.zeros(4)}}, r"unexpected \(1\): blk\.0\.ssm_a\.weight"),
        ({"more": {"blk.4.attn_norm.weight": torch.zeros(32)}}, r"unexpected \(1\): model\.layers\.4\.input_layernorm"),
        (
            {"more": {"blk.3.attn_qkv.weight": torch.zeros(9, 32)}},
            r"unexpected \(1\): model\.layers\.3\.linear_attn\.in_proj_qkv\.weight",
        ),
        ({"more": {"blk.0.ssm_conv1d.weight": torch.zeros(64, 3)}}, r"has shape \[64, 3\], .* asks for \[64, 1, 4\]"),
        ({"more": {"blk.0.ssm_out.weight": torch.zeros(32, 64)}}, r"has shape \[32, 64\], .* asks for \[32, 32\]"),
        ({"more": {"blk.0.ffn_up_exps.weight": torch.zeros(8, 8, 32)}}, r"shape \[8, 8, 32\], .* \[8, 16, 32\]"),
        ({"more": {"blk.0.ffn_gate_inp_shexp.weight": torch.zeros(31)}}, r"shape \[31\], .* asks for \[1, 32\]"),
        (
            {"metadata": {"ssm.inner_size": 33}},
            r"ssm\.inner_size \(33\) is not a multiple of ssm\.time_step_rank \(4\)",
        ),
        ({"metadata": {"ssm.group_count": 3}}, r"linear_num_value_heads \(4\) is not a multiple of .* \(3\)"),
        ({"metadata": {"ssm.group_count": 0}}, r"qwen35moe\.ssm\.group_count must be 1 to \d+, got 0"),
        ({"metadata": {"ssm.state_size": None}}, r"ssm\.state_size must be 1 to \d+, got None"),
        (
            {"metadata": {"ssm.state_size": 9}},
            r"in_proj_qkv\.weight \[64, 32\], .* asks for \[100, 32\] with their rows stacked",
        ),
        ({"metadata": {"ssm.conv_kernel": 1}}, "linear_conv_kernel_dim must be 2 or more"),
        ({"metadata": {"embedding_length": None}}, r"embedding_length must be 1 to \d+, got None"),
        ({"metadata": {"attention.key_length": None}}, r"attention\.key_length must be 1 to \d+, got None"),
        ({"metadata": {"rope.dimension_count": 32}}, "is a rotary dimension of 16|partial_rotary_factor"),
        ({"metadata": {"rope.scaling.type": "yarn"}}, "unsupported rope_type 'yarn'"),
        ({"metadata": {"expert_weights_scale": 2.5}}, "unsupported qwen35moe.expert_weights_scale 2.5"),
        ({"metadata": {"expert_count": None}}, "config.json lacks 'num_experts'"),
        ({"metadata": {"expert_count": 4}}, r"has shape \[8, 32\], .* asks for \[4, 32\]"),
        ({"metadata": {"nextn_predict_layers": 4}}, r"nextn_predict_layers must be less than block_count \(4\), got 4"),
        ({"metadata": {"attention.recurrent_layers": [True]}}, r"true or false for each of 4 layers, got \[True\]"),
        ({"metadata": {"attention.recurrent_layers": [1, 2, 3, 4]}}, r"true or false for each of 4 layers, got \[1, 2"),
    ],
)
def test_refusals(tmp_path: Path, file: dict[str, Any], message: str) -> None:
    path, _ = made(tmp_path, "three-to-one", **file)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_ours(path, 64)
    assert len(str(caught.value).splitlines()) == 1


def test_odd_metadata(tmp_path: Path) -> None:
    """Whatever stands in a file, it is read, or refused in one line."""
    refused = 0
    reference = make_reference(tmp_path / "checkpoint", CASES["short-convolution"], seed=3)
    for key in metadata_of(reference.model.config) | {"nextn_predict_layers": 0, "expert_weights_scale": 1.0}:
        for value in (None, 0, 1, 3, 2**32 - 1, 0.5, math.nan, 1e38, "x", [1, 2], [0.5], ["x"], [True], [False] * 9):
            write_qwen3_5(tmp_path / "model.gguf", reference.model, metadata={key: value})
            try:
                read_config(tmp_path / "model.gguf")
            except CheckpointError as error:
                assert len(str(error).splitlines()) == 1, error
                refused += 1
    assert refused > 150


def test_tiled_heads() -> None:
    """The file's order, by an example: two key heads with three value heads each, of two elements."""
    config = type("Config", (), {"linear_num_key_heads": 2, "linear_num_value_heads": 6})
    assert tiled(torch.arange(12), 0, config, 2).tolist() == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]


def test_an_artifact_from_a_file(tmp_path: Path, capitals_artifact: Path) -> None:
    """Its constants are those of the checkpoint's artifact, byte for byte, and it answers."""
    write_qwen3_5(tmp_path / "model.gguf", shipped_reference(CAPITALS).model)
    export_model(tmp_path / "model.gguf", tmp_path / "artifact", max_seq_len=CAPITALS_LENGTH, progress=Progress())
    ours, theirs = (folder / "model.ptd" for folder in (tmp_path / "artifact", capitals_artifact))
    assert ours.read_bytes() == theirs.read_bytes()
    with Engine.load(tmp_path / "artifact") as found, Engine.load(capitals_artifact) as expected:
        answers = [
            list(one.generate_tokens([7, 8, 9], max_new_tokens=12, ignore_eos=True)) for one in (found, expected)
        ]
    assert answers[0] == answers[1]


# As published files mix them: other types of down projections than of gate and up, of the shared expert, and from layer to
# layer of one type.
MIXED = {
    "norm": "F32",
    "blk.0.ffn_down_exps": "Q6_K",
    "blk.0.ffn_down_shexp": "Q6_K",
    "blk.1.ffn_down_exps": "Q4_K",
    "blk.2.ffn_up_exps": "Q8_0",
    "exps": "Q4_K",
    "blk.1.ffn_gate_shexp": "Q4_K",
    "blk.1.ffn_up_shexp": "Q4_K",
    "shexp.": "Q8_0",
    "attn": "Q8_0",
    "ssm_out": "Q8_0",
}
MIXED_FORMATS = {
    "gate_up_proj": [Int4Min(32, torch.float16), Int4Min(32, torch.float16), Int8(32, torch.float16)],
    "down_proj": [Int8(32, torch.float16), Int4Min(32, torch.float16), Int4Min(32, torch.float16)],
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("on_host", (0, 3))
def test_experts_of_mixed_formats(tmp_path: Path, device: str, on_host: int) -> None:
    """A file's experts as they are, on the device or the host: logits are those of float32 over the same numbers."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
    sizes |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    reference = make_reference(tmp_path / "checkpoint", {**CASES["every-expert"], **sizes}, seed=3)
    path, artifact = tmp_path / "model.gguf", tmp_path / "artifact"
    write_qwen3_5(path, reference.model, MIXED)
    plain = load_ours(path, keeps=True)
    experts = [module for module in plain.modules() if isinstance(module, Experts)]
    for name, formats in MIXED_FORMATS.items():
        assert [one.formats[name] for one in experts] == formats
    methods = ("prefill", "decode", "rows", *["prefill_streamed"][: on_host > 0])
    if device == "cuda":
        export_on_a_gpu(path, artifact, methods, max_seq_len=80, cpu_moe=on_host)
    else:
        with only_methods(*methods):
            export_model(path, artifact, max_seq_len=80, cpu_moe=on_host)
    tokens = reference.tokens(70)
    with torch.no_grad():
        expected = torch.cat(
            [plain(tokens[:, at : at + 1], torch.tensor([at]), torch.tensor([0])) for at in range(tokens.shape[1])]
        )
    # Everything else is in bfloat16; on a CPU, products round their inputs to 8 bits. At some positions that moves logits by
    # 6 %, so the median is tested: in plain PyTorch it is 1.4 %.
    with load_program(artifact) as program:
        found = errors([logits.cpu() for logits in converse(program, tokens, 60, GRAPH)], expected[59:])
        assert median(found) < 3e-2, found
        positions, slots = torch.arange(33), torch.zeros(33, dtype=torch.int64)
        _, logits = program.load_method("rows").execute((tokens[0, :33].contiguous(), positions, slots, positions))
        found = errors(list(logits.cpu()), expected[:33])
        assert median(found) < 3e-2, found
        if on_host:
            inputs = (tokens[:, :33].contiguous(), positions, slots, torch.tensor([2]))
            (logits,) = program.load_method("prefill_streamed").execute(inputs)
            assert relative_error(logits[0].cpu(), expected[32]) < 6e-2
