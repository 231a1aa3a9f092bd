"""scripts/bench_kernels.py: what it counts, what it checks, what it prints."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.export.kernels import Kernels
from ostinato.export.kernels.operands import KVCache, Norm, Place, Weight
from ostinato.export.models import build_network
from ostinato.export.models.qwen3_5 import Qwen3_5Config
from ostinato.export.models.traffic import decode_bytes, kv_bytes_per_token

from .conftest import ROOT
from .export.kernels.conftest import repaired_interpreter  # noqa: F401  (a fixture, for the kernels on a CPU)

pytest.importorskip("triton")
sys.path.append(str(ROOT / "scripts"))

import bench_kernels
import kernel_timing
from bench_kernels import Measurement
from kernel_arguments import Draw, Shapes, tensors_of, with_tensors
from kernel_cases import CONV_ROWS, Case, decode_cases, distinct_experts
from kernel_timing import Timing, check, copies_of, difference

from ostinato.delegate.sampling import Sampling
from ostinato.export.kernels.cuda import CudaKernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLAGSHIP = ROOT / "tests" / "assets" / "configs" / "Qwen3.5-35B-A3B"
SAMPLING_BYTES = sum(value.nbytes for value in Sampling().inputs())
DENSE = ROOT / "tests" / "assets" / "configs" / "Qwen3.5-0.8B"
# Every kind of layer at sizes for the interpreter.
TINY: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 33,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "dtype": "bfloat16",
}
# With --max-seq-len 5120 and --group-size 128, bytes: weights at half a byte + scales at two for 128, then the rest.
FLAGSHIP_BYTES = {
    # 12,288 rows of 2,048; the gates' rows and taps in bfloat16; the convolution's state read and written; x, the norm,
    # position and slot; out, gates.
    "norm_linear_conv": 12288 * (1024 + 32) + 64 * 2048 * 2 + 8192 * 4 * 2 + 2 * (3 * 8192 * 2) + 4096 + 8192 + 2 * 8
    + 12288 * 2 + 64 * 4,
    # 32 states of 128 x 128 in float32, read and written; q, k, v and z, gates, two numbers a head, norm, place; out.
    "delta_step": 2 * (32 * 128 * 128 * 4) + 12288 * 2 + 64 * 4 + 2 * 32 * 4 + 128 * 4 + 2 * 8 + 4096 * 2,
    "linear_add/delta_net": 2048 * (2048 + 64) + 4096 * 2 + 2048 * 2 + 2048 * 2,
    "norm_linear/qkv": 9216 * (1024 + 32) + 4096 + 8192 + 9216 * 2,
    # At position 0 one key and one value of two heads of 256 are written. A page of 64 positions has a number of four bytes.
    "attend_step@0": 9216 * 2 + 2 * 256 * 4 + 2 * 64 * 4 + 2 * 8 + 1 * 2 * 2 * 256 * 2 + 0 + 4096 * 2,
    "attend_step@4000": 9216 * 2 + 2 * 256 * 4 + 2 * 64 * 4 + 2 * 8 + 4001 * 2 * 2 * 256 * 2 + 250 + 4096 * 2,
    "linear_add/attention": 2048 * (2048 + 64) + 4096 * 2 + 2048 * 2 + 2048 * 2,
    "route_logits": 257 * 2048 * 2 + 4096 + 8192 + 257 * 2,
    # Eight routed experts and the shared one, 1,024 rows of 2,048 each; x, the norm, logits; hidden.
    "experts_gate_up": 9 * 1024 * (1024 + 32) + 4096 + 8192 + 257 * 2 + 9 * 512 * 2,
    "experts_down": 9 * 2048 * (256 + 8) + 9 * 512 * 2 + 257 * 2 + 4096 + 4096,
    "norm_linear/lm_head": 248320 * (1024 + 32) + 4096 + 8192 + 248320 * 4,
    # Beside the logits position and slot, the options, the last token and its position; the token.
    "sample/greedy": 248320 * 4 + 2 * 8 + SAMPLING_BYTES + 2 * 8 + 8,
    "sample/top_p": 248320 * 4 + 2 * 8 + SAMPLING_BYTES + 2 * 8 + 8,
}  # fmt: skip


# Of 8 rows: weights once, what is a row's eight times.
EIGHT_BYTES = {
    "norm_linear_conv": 12288 * (1024 + 32) + 64 * 2048 * 2 + 8192 * 4 * 2 + 8192
    + 8 * (2 * (3 * 8192 * 2) + 4096 + 2 * 8 + 12288 * 2 + 64 * 4),
    "conv_rows": 8192 * 4 * 2 + 8 * (2 * (3 * 8192 * 2) + 2 * 8 + 2 * 12288 * 2),
    "delta_step": 2 * 32 * 4 + 128 * 4 + 8 * (2 * (32 * 128 * 128 * 4) + 12288 * 2 + 64 * 4 + 2 * 8 + 4096 * 2),
    "linear_add/delta_net": 2048 * (2048 + 64) + 8 * (4096 * 2 + 2048 * 2 + 2048 * 2),
    "norm_linear/qkv": 9216 * (1024 + 32) + 8192 + 8 * (4096 + 9216 * 2),
    "attend_step@4000": 2 * 256 * 4 + 8 * (9216 * 2 + 2 * 64 * 4 + 2 * 8 + 4001 * 2 * 2 * 256 * 2 + 4096 * 2) + 2000,
    "linear_add/attention": 2048 * (2048 + 64) + 8 * (4096 * 2 + 2048 * 2 + 2048 * 2),
    # 57.4 of the 256 routed experts are expected to be chosen, and there is the shared one.
    "sparse_moe": (256 * (1 - (31 / 32) ** 8) + 1) * (1024 * (1024 + 32) + 2048 * (256 + 8)) + 257 * 2048 * 2 + 8192
    + 8 * (2 * 4096 + 8),
    "norm_linear/lm_head": 248320 * (1024 + 32) + 8192 + 8 * (4096 + 248320 * 4),
    "sample/greedy": 8 * (248320 * 4 + 2 * 8 + SAMPLING_BYTES + 2 * 8 + 8),
    "sample/top_p": 8 * (248320 * 4 + 2 * 8 + SAMPLING_BYTES + 2 * 8 + 8),
}  # fmt: skip


def flagship(depths: tuple[int, ...] = (0, 4000), rows: int = 1) -> tuple[Shapes, list[Case]]:
    shapes = Shapes.of_folder(FLAGSHIP, 128, 5120)
    return shapes, decode_cases(shapes, depths, rows)


def tiny_shapes(group: int | None = 32, **changes: Any) -> Shapes:
    return Shapes(Qwen3_5Config.from_dict({**TINY, **changes}), group, 48)


def tiny_cases() -> dict[str, tuple[Shapes, Case]]:
    """Every kernel by a name, of one row and of three, over int4 weights and over bfloat16 ones, in a model with experts and
    in a dense one."""
    found: dict[str, tuple[Shapes, Case]] = {}
    for rows, group, quant in ((1, 32, "int4"), (1, None, "none"), (3, 32, "int4"), (3, None, "none")):
        for changes in ({}, {"model_type": "qwen3_5_text", "intermediate_size": 64}):
            shapes = tiny_shapes(group, **changes)
            for case in decode_cases(shapes, (0, 40), rows):
                if group is not None or any(
                    name.startswith(("weight.", "routed.")) for name in tensors_of(case.arguments(Draw(shapes, "meta")))
                ):
                    found.setdefault(f"{case.name}-{quant}-{rows}", (shapes, case))
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
    # By counting: what 64 rows of 8 draws each leave out.
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
    assert [case.calls for case in cases] == [linear] * 3 + [full] * 4 + [every] * 3 + [1, 1, 0]
    _, cases = flagship(rows=8)
    assert [case.calls for case in cases] == [linear, 0, linear, linear] + [full] * 4 + [every] + [1, 1, 0]
    assert {case.rows for case in cases} == {8}


@pytest.mark.parametrize("group", (128, None), ids=["int4", "bfloat16"])
@pytest.mark.parametrize("folder", [FLAGSHIP, DENSE], ids=["moe", "dense"])
def test_bytes_are_those_that_the_program_states(folder: Path, group: int | None) -> None:
    """Apart from activations, which stay in the cache, and the embedding's row."""
    depth = 99
    shapes = Shapes.of_folder(folder, group, depth + 1)
    network = build_network(shapes.config, depth + 1, torch.bfloat16, group_size=group)
    stated = decode_bytes(network, "cuda") + (depth + 1) * kv_bytes_per_token(network)
    counted = sum(case.calls * case.bytes_moved(shapes) for case in decode_cases(shapes, (depth,)))
    assert stated < counted < 1.012 * stated


def test_a_model_without_experts_has_two_products_instead() -> None:
    shapes = Shapes.of_folder(DENSE, 128, 64)
    names = [case.name for case in decode_cases(shapes, (0,))]
    assert [name for name in names if name.endswith(("swiglu", "/down"))] == ["norm_swiglu", "linear_add/down"]
    assert not any("expert" in name or "route" in name for name in names)


def test_a_kind_of_layer_that_is_not_there_has_no_cases() -> None:
    shapes = tiny_shapes(layer_types=["full_attention"] * 2)
    for rows in (1, 2):
        functions = {case.function for case in decode_cases(shapes, (0,), rows)}
        assert not {"norm_linear_conv", "delta_step", CONV_ROWS} & functions


def test_drawn_logits_have_no_ties() -> None:
    shapes, _ = flagship()
    assert len(Draw(shapes, "cpu").distinct(257).unique()) == 257


def test_drawn_rows_choose_the_same_experts_when_rounded() -> None:
    torch.manual_seed(0)
    draw = Draw(flagship()[0], "cpu")
    norm, gate = draw.norm(2048), draw.normal(256, 2048, scale=2 * 2048**-0.5)
    x = draw.clear_choices(16, norm, gate, 8)
    assert x.shape == (16, 2048) and x.dtype == torch.bfloat16
    exact = norm(x.double()) @ gate.double().t()
    rounded = (norm(x).bfloat16().float() @ gate.float().t()).bfloat16()
    for one, other in zip(exact.topk(8).indices, rounded.topk(8).indices, strict=True):
        assert set(one.tolist()) == set(other.tolist())


def test_each_row_has_pages_of_its_own() -> None:
    table = Draw(flagship()[0], "cpu").order(5, 3)
    assert table.shape == (3, 5) and sorted(table.flatten().tolist()) == list(range(15))


def test_tensors_of_records() -> None:
    x, values, keys = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    arguments = {"x": x, "weight": Weight(values), "place": Place(x, x, x, x), "cache": KVCache(keys, keys, x)}
    names = ["x", "weight.values", *(f"place.{name}" for name in ("positions", "slots", "cos", "sin"))]
    names += [f"cache.{name}" for name in ("keys", "values", "table")]
    assert list(tensors_of(arguments)) == names
    assert tensors_of(arguments)["cache.values"] is keys


def test_records_with_other_tensors() -> None:
    norm = with_tensors(Norm(torch.ones(2), 1e-6), lambda tensor: tensor + 1)
    assert isinstance(norm, Norm) and norm.weight.tolist() == [2, 2] and norm.eps == 1e-6
    place = with_tensors(Place(*torch.zeros(4, 1)), lambda tensor: tensor + 1)
    assert isinstance(place, Place) and place.sin.tolist() == [1]
    assert with_tensors(torch.bfloat16, lambda tensor: tensor + 1) is torch.bfloat16


@pytest.mark.parametrize("rows", (1, 8))
@pytest.mark.parametrize("folder", [FLAGSHIP, DENSE], ids=["moe", "dense"])
def test_cases_name_their_own_arguments(folder: Path, rows: int) -> None:
    """A wrong name would be left out without a word."""
    shapes = Shapes.of_folder(folder, 128, 5120)
    for case in decode_cases(shapes, (0,), rows):
        arguments = case.arguments(Draw(shapes, "meta"))
        assert set(case.activations) <= set(arguments), case.name
        assert {*case.moves, *case.writes} - {"squares.sums"} <= set(tensors_of(arguments)), case.name


@pytest.mark.parametrize("name", tiny_cases())
def test_kernels_agree_with_their_references(name: str) -> None:
    shapes, case = tiny_cases()[name]
    torch.manual_seed(1)
    outcome = check(case, shapes, DEVICE)
    assert outcome.failure is None
    assert outcome.error <= kernel_timing.TOLERANCE[torch.bfloat16]


def fake_case(monkeypatch: pytest.MonkeyPatch, kernel: Any, writes: tuple[str, ...] = ()) -> Case:
    """y = x + state and state = 2 state, computed by `kernel`."""

    def reference(x: Tensor, state: Tensor) -> Tensor:
        y = x + state
        state *= 2
        return y

    for kernels, function in ((Kernels, reference), (CudaKernels, kernel)):
        monkeypatch.setattr(kernels, "operation", staticmethod(function), raising=False)

    def arguments(draw: Draw) -> dict[str, Any]:
        return {"x": draw.wide(8), "state": draw.wide(8)}

    return Case("operation", "8", "operation", arguments, 32, 1, ("x",), moves={"state": 2}, writes=writes)


def test_check_sees_a_right_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(x: Tensor, state: Tensor) -> Tensor:
        y = x + state
        state.mul_(2)
        return y

    outcome = check(fake_case(monkeypatch, kernel, ("state",)), tiny_shapes(), DEVICE)
    assert outcome.failure is None and outcome.error < 1e-6


def test_check_sees_one_wrong_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(x: Tensor, state: Tensor) -> Tensor:
        y = x + state
        y[5] += 0.01
        return y

    outcome = check(fake_case(monkeypatch, kernel), tiny_shapes(), DEVICE)
    assert outcome.failure is not None and outcome.failure.startswith("output 0 is off by")


def test_check_sees_what_was_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(x: Tensor, state: Tensor) -> Tensor:
        y = torch.empty_like(x)
        y[:7] = (x + state)[:7]
        return y

    outcome = check(fake_case(monkeypatch, kernel), tiny_shapes(), DEVICE)
    assert outcome.failure == "output 0 is off by inf"


def test_check_sees_a_state_that_did_not_move(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = check(fake_case(monkeypatch, lambda x, state: x + state, ("state",)), tiny_shapes(), DEVICE)
    assert outcome.failure is not None and outcome.failure.startswith("state is off by")


def test_integers_must_be_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert difference(torch.tensor([3]), torch.tensor([3])) == 0
    assert difference(torch.tensor([3]), torch.tensor([2])) > 0
    assert difference(torch.tensor([3]), torch.tensor([3, 3])) == float("inf")


def test_copies_exceed_the_cache() -> None:
    shapes, cases = flagship()
    by_name = {case.name: case for case in cases}
    l2_bytes, free = 50_000_000, 100_000_000_000
    # 262 MB each, and two at least.
    assert copies_of(by_name["norm_linear/lm_head"], shapes, l2_bytes, free) == (2, False)
    # 9.74 MB of a set's 278 MB are read.
    assert copies_of(by_name["experts_gate_up"], shapes, l2_bytes, free) == (21, False)
    assert copies_of(by_name["experts_gate_up"], shapes, l2_bytes, free // 20) == (8, False)
    # 33 kB each.
    assert copies_of(by_name["attend_step@0"], shapes, l2_bytes, free) == (kernel_timing.MAX_COPIES, True)


def measurements(*names: str, rows: int = 1) -> list[Measurement]:
    _, cases = flagship(rows=rows)
    by_name = {case.name: case for case in cases}
    return [
        Measurement(by_name[name], 4_330_496, 1.0, 2e-3, None, False, Timing(2.0, 1), Timing(1.25, 1))
        for name in names or by_name
    ]


def test_table() -> None:
    found = measurements("linear_add/attention")
    lines = bench_kernels.render(found, [bench_kernels.total(found, 0)], markdown=False).splitlines()
    cells = [re.split(r" {2,}", line) for line in lines]
    assert cells[0] == list(bench_kernels.COLUMNS)
    assert cells[2:] == [
        [
            "linear_add/attention",
            "2,048 x 4,096",
            "10",
            "4.33 MB",
            "1.00",
            "2.00",
            "50%",
            "1.25",
            "80%",
            "12.5",
            "2.0e-03",
        ],
        ["one token at depth 0", "80,000 tokens/s", "10 kernels", "10.0", "20.00", "50%", "12.50", "80%", "12.5"],
    ]


def test_table_of_several_rows() -> None:
    found = measurements("linear_add/attention", rows=8)
    lines = bench_kernels.render(found, [bench_kernels.total(found, 0)], markdown=False).splitlines()
    cells = [re.split(r" {2,}", line) for line in lines]
    assert [cells[0][2], cells[0][-2]] == ["per step", "us per step"]
    assert cells[3][:3] == ["8 tokens at depth 0", "640,000 tokens/s", "10 kernels"]


def test_markdown() -> None:
    lines = bench_kernels.render(measurements("route_logits"), [], markdown=True).splitlines()
    assert lines[1].count("|") == lines[0].count("|") == lines[2].count("|")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == list(bench_kernels.COLUMNS)
    expected = "route_logits | 257 x 2,048 | 40 | 4.33 MB | 1.00 | 2.00 | 50% | 1.25 | 80% | 50.0 | 2.0e-03"
    assert cells[2] == expected.split(" | ")


def test_a_total_takes_one_depth_and_what_a_token_needs() -> None:
    found = bench_kernels.total(measurements(), 4000)
    # Six a delta-net layer, six and the attention a full one, head and greedy sampling.
    calls = 30 * 6 + 10 * 6 + 2
    assert found == bench_kernels.Total(1, 4000, calls, 2.0 * calls, 1.25 * calls, calls)


def test_a_total_without_a_time_for_each_has_none() -> None:
    whole, other = measurements("route_logits", "experts_down")
    broken = Measurement(other.case, 1, 1.0, None, "failed")
    found = bench_kernels.total([whole, broken], 0)
    assert (found.floor, found.ordinary, found.early, found.kernels) == (80.0, None, None, None)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--kernels", "norm_linear,norm"], "--kernels: no norm; there are: norm_linear_conv, delta_step"),
        (["--depth", "0,5120"], "--depth 5120 needs a --max-seq-len above it, got 5120"),
        (["--config", "nowhere"], "no such folder: nowhere"),
        (["--json", "no/where.json"], "--json: no such folder"),
        (
            ["--rows", "8,64", "--kernels", "experts_down"],
            "--kernels: no experts_down; there are: norm_linear_conv, conv_rows",
        ),
    ],
)
def test_what_cannot_be_done_is_said(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_kernels.main(words) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--depth", "0,x"],
        ["--depth", ""],
        ["--reps", "0"],
        ["--group-size", "48"],
        ["--rows", "0"],
        ["--rows", "8,257"],
    ],
)
def test_words_that_are_no_numbers(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        bench_kernels.main(words)
    assert caught.value.code == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_kernels.main([]) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("quant", ("int4", "none"))
def test_a_run(quant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    words = ["--config", str(tmp_path), "--group-size", "32", "--max-seq-len", "64", "--depth", "0,40", "--reps", "2"]
    words += ["--rows", "1,8,20"]
    assert bench_kernels.main([*words, "--quant", quant, "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert all(kernel["us"] > 0 and kernel["failure"] is None for kernel in found["kernels"])
    assert [(one["rows"], one["depth"]) for one in found["totals"]] == [
        (rows, depth) for rows in (1, 8, 20) for depth in (0, 40)
    ]
    printed = capsys.readouterr().out
    assert "one token at depth 40" in printed and "20 tokens at depth 40" in printed


@pytest.mark.gpu
def test_a_wrong_kernel_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = fake_case(monkeypatch, lambda x, state: x - state)
    monkeypatch.setattr(bench_kernels, "chosen_cases", lambda shapes, arguments: [wrong])
    assert bench_kernels.main([]) == 1
    assert "failed: operation of 1 rows: output 0 is off by" in capsys.readouterr().err
