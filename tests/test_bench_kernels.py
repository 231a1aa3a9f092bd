"""scripts/bench_kernels.py: what it checks, what it prints."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.export.formats.int4 import Int4
from ostinato.export.formats.int4_min import Int4Min
from ostinato.export.formats.int8 import Int8
from ostinato.export.kernels import Kernels

from .conftest import ROOT
from .export.kernels.conftest import repaired_interpreter  # noqa: F401  (a fixture, for the kernels on a CPU)

pytest.importorskip("triton")
sys.path.append(str(ROOT / "scripts"))

import bench_kernels
import kernel_timing
from bench_kernels import Measurement
from kernel_arguments import RandomTensors
from kernel_case import Case
from kernel_timing import Timing, check, copies_of, difference

from ostinato.export.kernels.cuda import CudaKernels

from .kernel_shapes import TINY, flagship, tiny_shapes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def fake_case(monkeypatch: pytest.MonkeyPatch, kernel: Any, writes: tuple[str, ...] = ()) -> Case:
    """y = x + state and state = 2 state, computed by `kernel`."""

    def reference(x: Tensor, state: Tensor) -> Tensor:
        y = x + state
        state *= 2
        return y

    for kernels, function in ((Kernels, reference), (CudaKernels, kernel)):
        monkeypatch.setattr(kernels, "operation", staticmethod(function), raising=False)

    def arguments(random: RandomTensors) -> dict[str, Any]:
        return {"x": random.wide(8), "state": random.wide(8)}

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
    # A copy has 262 MB, and there are at least two copies.
    assert copies_of(by_name["norm_linear/lm_head"], shapes, l2_bytes, free) == (2, False)
    # Each run reads 9.74 MB of a copy's 278 MB.
    assert copies_of(by_name["experts_gate_up"], shapes, l2_bytes, free) == (21, False)
    assert copies_of(by_name["experts_gate_up"], shapes, l2_bytes, free // 20) == (8, False)
    # A copy has 33 kB.
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
    # Six calls per delta-net layer and six per attention layer; then the head and greedy sampling.
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
        (["--group-size", "48"], "unsupported group size 48 for int4; supported are: 32, 64, 128"),
        (["--quant", "int4_min", "--group-size", "64"], "unsupported group size 64 for int4_min; supported are: 32"),
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
        ["--group-size", "x"],
        ["--quant", "int3"],
        ["--scale-dtype", "float32"],
        ["--rows", "0"],
        ["--rows", "8,513"],
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


def test_operations_without_a_kernel_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then there is no sum over a step."""
    shapes = tiny_shapes()
    every = bench_kernels.decode_cases(shapes, (0,), 1)
    assert bench_kernels.complete(every, shapes, (0,), 1)
    some = [replace(case, missing="too large") if case.name == "experts_down" else case for case in every]
    monkeypatch.setattr(bench_kernels, "decode_cases", lambda shapes, depths, rows: some)
    cases = bench_kernels.chosen_cases(shapes, bench_kernels.parse_arguments(["--depth", "0"]))
    assert cases == [case for case in every if case.name != "experts_down"]
    assert not bench_kernels.complete(cases, shapes, (0,), 1)


def test_the_formats_of_an_export_have_its_options() -> None:
    """The formats, and the group sizes where none is given."""
    chosen = {
        quant: bench_kernels.format_of(bench_kernels.parse_arguments(["--quant", quant]))
        for quant in ("none", "int4", "int4_min", "int8")
    }
    assert chosen == {"none": None, "int4": Int4(128), "int4_min": Int4Min(32), "int8": Int8(32)}
    words = ["--quant", "int8", "--group-size", "64", "--scale-dtype", "float16"]
    assert bench_kernels.format_of(bench_kernels.parse_arguments(words)) == Int8(64, torch.float16)


DENSE = {"model_type": "llama", "intermediate_size": 64, "layer_types": None, "attention_bias": True}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("quant", "changes"),
    [("int4", {}), ("none", {}), ("int4", DENSE), ("int4_min", DENSE), ("int8", DENSE), ("none", DENSE)],
)
def test_a_run(quant: str, changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, **changes}))
    words = ["--config", str(tmp_path), "--group-size", "32", "--max-seq-len", "64", "--depth", "0,40", "--reps", "2"]
    words += ["--rows", "1,8,20,512"]
    assert bench_kernels.main([*words, "--quant", quant, "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert all(kernel["us"] > 0 and kernel["failure"] is None for kernel in found["kernels"])
    assert [(one["rows"], one["depth"]) for one in found["totals"]] == [
        (rows, depth) for rows in (1, 8, 20, 512) for depth in (0, 40)
    ]
    printed = capsys.readouterr().out
    assert "one token at depth 40" in printed and "20 tokens at depth 40" in printed


@pytest.mark.gpu
def test_a_wrong_kernel_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = fake_case(monkeypatch, lambda x, state: x - state)
    monkeypatch.setattr(bench_kernels, "chosen_cases", lambda shapes, arguments: [wrong])
    assert bench_kernels.main([]) == 1
    assert "failed: operation of 1 rows: output 0 is off by" in capsys.readouterr().err
