"""Tests scripts/kernel_cases.py: the kernels of a step, the bytes that they move, and their agreement with the references."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.export.formats.format import Format
from ostinato.export.formats.int4 import Int4
from ostinato.export.formats.int4_min import Int4Min
from ostinato.export.formats.int8 import Int8
from ostinato.export.formats.quantization import Quantization
from ostinato.export.kernels.operands import KVCache, Norm, RowIndex, Weight
from ostinato.export.models import build_network
from ostinato.export.models.traffic import decode_bytes, kv_bytes_per_token

from .conftest import ROOT
from .export.kernels.conftest import repaired_interpreter  # noqa: F401  (a fixture, for the kernels on a CPU)

pytest.importorskip("triton")
sys.path.append(str(ROOT / "scripts"))

from kernel_arguments import RandomTensors, Shapes, tensors_of, with_tensors
from kernel_case import CONV_ROWS, Case
from kernel_cases import decode_cases, distinct_experts, prompt_case
from kernel_timing import TOLERANCE, check

from ostinato.delegate.sampling_params import SamplingParams

from .export.networks import qwen3_5
from .kernel_shapes import FLAGSHIP, flagship, tiny_shapes

QUANTS = (Quantization(128), Quantization(32, format="int4_min"), Quantization(32, format="int8"))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FILTERS = ("top_p", "min_p", "top_k", "top_k_20_p", "all", "top_k_1000")
SAMPLED = (
    *("sample/greedy", "sample/temperature"),
    *(f"sample/{name}{logits}" for logits in ("", "@peaked") for name in FILTERS),
)
PROCESSED = ("sample/temperature+penalties", "sample/all+penalties")
SAMPLING_BYTES = sum(value.nbytes for value in SamplingParams().tensors())
# Penalties; two bitmasks; counts; biases.
PROCESSING_BYTES = 3 * 4 + 2 * 4 * 248320 // 32 + 248320 * 4 + 512 * (8 + 4 + 8)
CONFIGS = ROOT / "tests" / "assets" / "configs"
DENSE = CONFIGS / "Qwen3.5-0.8B"
# Bytes with --max-seq-len 5120 and --group-size 128. Quantised weights come first: half a byte each, and two bytes of scale
# per 128 weights.
FLAGSHIP_BYTES = {
    # 12,288 rows of 2,048; the gates' rows and taps in bfloat16; the convolution's state read and written; x, the norm,
    # position and slot; out, gates.
    "norm_linear_conv": 12288 * (1024 + 32) + 64 * 2048 * 2 + 8192 * 4 * 2 + 2 * (3 * 8192 * 2) + 4096 + 8192 + 2 * 8
    + 12288 * 2 + 64 * 4,
    # 32 states of 128 x 128 in float32, read and written; q, k, v and z; gates; two numbers per head; norm; index; out.
    "delta_step": 2 * (32 * 128 * 128 * 4) + 12288 * 2 + 64 * 4 + 2 * 32 * 4 + 128 * 4 + 2 * 8 + 4096 * 2,
    "linear_add/delta_net": 2048 * (2048 + 64) + 4096 * 2 + 2048 * 2 + 2048 * 2,
    "norm_linear/qkv": 9216 * (1024 + 32) + 4096 + 8192 + 9216 * 2,
    # At position 0, one key and one value of two heads of 256 are written. The number of a page (64 positions) has four
    # bytes.
    "attend_step@0": 9216 * 2 + 2 * 256 * 4 + 2 * 64 * 4 + 2 * 8 + 1 * 2 * 2 * 256 * 2 + 0 + 4096 * 2,
    "attend_step@4000": 9216 * 2 + 2 * 256 * 4 + 2 * 64 * 4 + 2 * 8 + 4001 * 2 * 2 * 256 * 2 + 250 + 4096 * 2,
    "linear_add/attention": 2048 * (2048 + 64) + 4096 * 2 + 2048 * 2 + 2048 * 2,
    "route_logits": 257 * 2048 * 2 + 4096 + 8192 + 257 * 2,
    # Eight routed experts and the shared one, 1,024 rows of 2,048 each; x, the norm, logits; hidden.
    "experts_gate_up": 9 * 1024 * (1024 + 32) + 4096 + 8192 + 257 * 2 + 9 * 512 * 2,
    "experts_down": 9 * 2048 * (256 + 8) + 9 * 512 * 2 + 257 * 2 + 4096 + 4096,
    "norm_linear/lm_head": 248320 * (1024 + 32) + 4096 + 8192 + 248320 * 4,
    # The logits; position and slot; the sampling options, and whether they process logits; the last token and its position;
    # the new token.
    **dict.fromkeys(SAMPLED, 248320 * 4 + 2 * 8 + SAMPLING_BYTES + 8 + 2 * 8 + 8),
    **dict.fromkeys(PROCESSED, 248320 * 4 + 2 * 8 + SAMPLING_BYTES + 8 + 2 * 8 + 8 + PROCESSING_BYTES),
    # The logits and the token; its rank, the 20 most likely tokens, and the log-probabilities of all.
    "logprobs": 248320 * 4 + 8 + 21 * 8,
}  # fmt: skip


# Bytes of 8 rows: the weights once, and eight times all that belongs to one row.
EIGHT_BYTES = {
    "norm_linear_conv": 12288 * (1024 + 32) + 64 * 2048 * 2 + 8192 * 4 * 2 + 8192
    + 8 * (2 * (3 * 8192 * 2) + 4096 + 2 * 8 + 12288 * 2 + 64 * 4),
    "conv_rows": 8192 * 4 * 2 + 8 * (2 * (3 * 8192 * 2) + 2 * 8 + 2 * 12288 * 2),
    # A state is written in one of eight steps; its seven updates are read as often as the three and a half that are pending
    # on average, and seven are written in eight steps.
    "delta_step": 2 * 32 * 4 + 128 * 4 + 8 * (1.125 * (32 * 128 * 128 * 4) + 12288 * 2 + 64 * 4 + 2 * 8 + 4096 * 2)
    + 8 * (1 / 2 + 1 / 8) * (16 * 7 * 128 * 2 + 32 * 8 * 128 * 4),
    "linear_add/delta_net": 2048 * (2048 + 64) + 8 * (4096 * 2 + 2048 * 2 + 2048 * 2),
    "norm_linear/qkv": 9216 * (1024 + 32) + 8192 + 8 * (4096 + 9216 * 2),
    "attend_step@4000": 2 * 256 * 4 + 8 * (9216 * 2 + 2 * 64 * 4 + 2 * 8 + 4001 * 2 * 2 * 256 * 2 + 4096 * 2) + 2000,
    "linear_add/attention": 2048 * (2048 + 64) + 8 * (4096 * 2 + 2048 * 2 + 2048 * 2),
    # 8 rows are expected to choose 57.4 of the 256 routed experts; the shared one is added.
    "sparse_moe": (256 * (1 - (31 / 32) ** 8) + 1) * (1024 * (1024 + 32) + 2048 * (256 + 8)) + 257 * 2048 * 2 + 8192
    + 8 * (2 * 4096 + 8),
    "norm_linear/lm_head": 248320 * (1024 + 32) + 8192 + 8 * (4096 + 248320 * 4),
    **dict.fromkeys(SAMPLED, 8 * (248320 * 4 + 2 * 8 + SAMPLING_BYTES + 8 + 2 * 8 + 8)),
    **dict.fromkeys(PROCESSED, 8 * (248320 * 4 + 2 * 8 + SAMPLING_BYTES + 8 + 2 * 8 + 8 + PROCESSING_BYTES)),
    "logprobs": 8 * (248320 * 4 + 8 + 21 * 8),
}  # fmt: skip


# Models of the size of `TINY`: with experts, without, and with neither delta-nets nor gates nor norms of queries and keys.
MODELS: tuple[dict[str, Any], ...] = (
    {},
    {"model_type": "qwen3_5_text", "intermediate_size": 64},
    {"model_type": "llama", "intermediate_size": 64, "layer_types": None, "attention_bias": True},
)
FORMATS: tuple[Format | None, ...] = (Int4(32), None, Int8(32), Int4Min(32, torch.float16))


def tiny_cases() -> dict[str, tuple[Shapes, Case]]:
    """Return a case of every kernel by name: for one row and for three, and where there is a weight, in every format."""
    found: dict[str, tuple[Shapes, Case]] = {}
    for rows, form, changes in product((1, 3), FORMATS, MODELS):
        shapes = tiny_shapes(form, **changes)
        for case in [*decode_cases(shapes, (0, 40), rows), prompt_case(shapes, rows)]:
            names = tensors_of(case.arguments(RandomTensors(shapes, "meta")))
            if case.missing is None and (form == FORMATS[0] or any(".values" in name for name in names)):
                bias = "+bias" if "weight.bias" in names else ""
                plain = "" if shapes.config.attention.gated or "attend" not in case.name else "+plain"
                found.setdefault(f"{case.name}{bias}{plain}-{form}-{rows}", (shapes, case))
    return found


def test_bytes_of_the_flagship() -> None:
    shapes, cases = flagship()
    assert {case.name: case.bytes_moved(shapes) for case in cases} == FLAGSHIP_BYTES


def test_bytes_of_eight_rows() -> None:
    shapes, cases = flagship((4000,), rows=8)
    found = {case.name: case.bytes_moved(shapes) for case in cases}
    assert found.keys() == EIGHT_BYTES.keys()
    for name, wanted in EIGHT_BYTES.items():
        assert found[name] == round(wanted), name


def test_distinct_experts() -> None:
    assert distinct_experts(256, 8, 1) == 8
    assert distinct_experts(4, 4, 3) == 4
    # The mean over 50 trials: 64 rows choose 8 experts each.
    generator = torch.Generator().manual_seed(0)
    counts = [len(torch.rand(64, 256, generator=generator).topk(8).indices.unique()) for _ in range(50)]
    assert distinct_experts(256, 8, 64) == pytest.approx(sum(counts) / 50, rel=5e-3)


def test_bytes_read_count_a_state_once() -> None:
    shapes, cases = flagship()
    by_name = {case.name: case for case in cases}
    step = by_name["delta_step"]
    written = 32 * 128 * 128 * 4 + 4096 * 2
    assert step.bytes_read(shapes) == step.bytes_moved(shapes) - written
    down = by_name["experts_down"]
    assert down.bytes_read(shapes) == down.bytes_moved(shapes) - 4096


def test_calls_of_the_flagship() -> None:
    _, cases = flagship()
    linear, full, every = (30, 10, 40)
    # Greedy sampling counts, sampling with other params and log-probabilities are measured beside it.
    measured = [0] * (len(SAMPLED) + len(PROCESSED))
    assert [case.calls for case in cases] == [linear] * 3 + [full] * 4 + [every] * 3 + [1, 1] + measured
    _, cases = flagship(rows=8)
    assert [case.calls for case in cases] == [linear, 0, linear, linear] + [full] * 4 + [every] + [1, 1] + measured
    assert {case.rows for case in cases} == {8}


@pytest.mark.parametrize("quant", (*QUANTS, None), ids=str)
@pytest.mark.parametrize(
    "folder", [FLAGSHIP, DENSE, CONFIGS / "Llama-3.1-8B", CONFIGS / "Qwen3-8B"], ids=lambda f: f.name
)
def test_bytes_are_those_that_the_program_states(folder: Path, quant: Quantization | None) -> None:
    """The counts are those that the program states, except for activations, which stay in the cache, and the embedding's
    row."""
    depth = 99
    shapes = Shapes.of_folder(folder, None if quant is None else quant.weights, depth + 1)
    network = build_network(shapes.config, depth + 1, torch.bfloat16, quant=quant)
    stated = decode_bytes(network, "cuda") + (depth + 1) * kv_bytes_per_token(network)
    counted = sum(case.calls * case.bytes_moved(shapes) for case in decode_cases(shapes, (depth,)))
    assert stated < counted < 1.012 * stated


def test_a_model_without_experts_has_two_products_instead() -> None:
    shapes = Shapes.of_folder(DENSE, Int4(128), 64)
    names = [case.name for case in decode_cases(shapes, (0,))]
    assert [name for name in names if name.endswith(("swiglu", "/down"))] == ["norm_swiglu", "linear_add/down"]
    assert not any("expert" in name or "route" in name for name in names)


def test_a_kind_of_layer_that_is_not_there_has_no_cases() -> None:
    shapes = tiny_shapes(layer_types=["full_attention"] * 2)
    for rows in (1, 2):
        functions = {case.function for case in decode_cases(shapes, (0,), rows)}
        assert not {"norm_linear_conv", "delta_step", CONV_ROWS} & functions


def test_random_logits_have_no_ties() -> None:
    shapes, _ = flagship()
    assert len(RandomTensors(shapes, "cpu").distinct(257).unique()) == 257


def test_random_rows_choose_the_same_experts_when_rounded() -> None:
    torch.manual_seed(0)
    random = RandomTensors(flagship()[0], "cpu")
    norm, gate = random.norm(2048), random.normal(256, 2048, scale=2 * 2048**-0.5)
    x = random.clear_choices(16, norm, gate, 8)
    assert x.shape == (16, 2048) and x.dtype == torch.bfloat16
    exact = norm(x.double()) @ gate.double().t()
    rounded = (norm(x).bfloat16().float() @ gate.float().t()).bfloat16()
    for one, other in zip(exact.topk(8).indices, rounded.topk(8).indices, strict=True):
        assert set(one.tolist()) == set(other.tolist())


def test_each_row_has_pages_of_its_own() -> None:
    table = RandomTensors(flagship()[0], "cpu").order(5, 3)
    assert table.shape == (3, 5) and sorted(table.flatten().tolist()) == list(range(15))


def test_tensors_of_records() -> None:
    x, values, keys = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    arguments = {"x": x, "weight": Weight(values), "index": RowIndex(x, x, x, x), "cache": KVCache(keys, keys, x)}
    names = ["x", "weight.values", *(f"index.{name}" for name in ("positions", "slots", "cos", "sin"))]
    names += [f"cache.{name}" for name in ("keys", "values", "table")]
    assert list(tensors_of(arguments)) == names
    assert tensors_of(arguments)["cache.values"] is keys


def test_records_with_other_tensors() -> None:
    norm = with_tensors(Norm(torch.ones(2), 1e-6), lambda tensor: tensor + 1)
    assert isinstance(norm, Norm) and norm.weight.tolist() == [2, 2] and norm.eps == 1e-6
    index = with_tensors(RowIndex(*torch.zeros(4, 1)), lambda tensor: tensor + 1)
    assert isinstance(index, RowIndex) and index.sin.tolist() == [1]
    assert with_tensors(torch.bfloat16, lambda tensor: tensor + 1) is torch.bfloat16


def test_operations_without_a_kernel_say_why() -> None:
    """The limits of an operation's kernels decide."""
    shapes = Shapes.of_folder(FLAGSHIP, Int4(128), 64)
    assert not any(case.missing for case in decode_cases(shapes, (0,)))
    odd = Shapes(replace(qwen3_5(shapes.config), moe_intermediate_size=96), Int4(128), 64)
    for rows, names in ((1, {"experts_gate_up", "experts_down"}), (8, {"sparse_moe"})):
        missing = {case.name: case.missing for case in decode_cases(odd, (0,), rows) if case.missing}
        assert missing.keys() == names
        assert all("intermediate size must be a multiple of 128" in str(why) for why in missing.values())


@pytest.mark.parametrize("rows", (1, 8))
@pytest.mark.parametrize("form", (Int4(128), Int4Min(), None), ids=str)
@pytest.mark.parametrize("folder", [FLAGSHIP, DENSE, CONFIGS / "Qwen3-8B"], ids=lambda folder: folder.name)
def test_cases_name_their_own_arguments(folder: Path, form: Format | None, rows: int) -> None:
    """Every name that a case gives is an argument: a wrong name would be ignored silently."""
    shapes = Shapes.of_folder(folder, form, 5120)
    for case in decode_cases(shapes, (0,), rows):
        arguments = case.arguments(RandomTensors(shapes, "meta"))
        assert set(case.activations) <= set(arguments), case.name
        assert {*case.moves, *case.writes} - {"squares.sums"} <= set(tensors_of(arguments)), case.name


@pytest.mark.parametrize("name", tiny_cases())
def test_kernels_agree_with_their_references(name: str) -> None:
    shapes, case = tiny_cases()[name]
    torch.manual_seed(1)
    outcome = check(case, shapes, DEVICE)
    assert outcome.failure is None
    assert outcome.error <= TOLERANCE[torch.bfloat16]
