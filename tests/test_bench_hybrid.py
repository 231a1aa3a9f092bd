"""scripts/bench_hybrid.sh on the CPU with a small model, from the export to the plot; and its goals over made-up figures."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ostinato.runner.cli import main as ostinato_main

from .conftest import ROOT, only_methods
from .processes import PATIENCE

sys.path.append(str(ROOT / "scripts"))

import bench_hybrid
from hybrid_results import Result, findings, render
from hybrid_timeline import Span, draw, window

TINY: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}
# Two experts, with 128 rows of 64 weights and 64 rows of 64 weights each: half a byte per weight, and two bytes of scale per
# 32 weights.
EXPERT_BYTES = 2 * (128 + 64) * (32 + 2 * 2)
# A script that answers like llama-bench, faster than a model of any size, and keeps the arguments it was given.
LLAMA_BENCH = """#!{python}
import json, pathlib, sys
pathlib.Path({asked!r}).write_text(json.dumps(sys.argv[1:]))
tests = [(16, 0), (0, 4)]
print(json.dumps([{{"n_prompt": p, "n_gen": n, "n_depth": 0, "avg_ts": 1e9}} for p, n in tests]))
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


@pytest.fixture
def artifact(exported: Callable[..., Path], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The artifact that the script exports, without the methods that sample."""

    def export(*words: str) -> str:
        with only_methods("prefill", "decode"):
            assert ostinato_main(list(words)) == 0
        return ""

    def build(path: Path) -> None:
        monkeypatch.setattr(bench_hybrid, "ostinato", export)
        words = ["--model", str(tiny), "--device", "cpu", "--group-size", "32", "--output", str(tmp_path), "--keep"]
        with bench_hybrid.exported(1, bench_hybrid.parse(words)) as (made, seconds):
            assert seconds is not None and seconds > 0
        shutil.move(made, path)

    return exported("hybrid", build, json.dumps(TINY))


def test_a_run(artifact: Path, tiny: Path, tmp_path: Path) -> None:
    """The whole script runs, except for the export: its artifact is there."""
    pytest.importorskip("matplotlib")
    output = tmp_path / "output"
    output.mkdir()
    (output / "1").symlink_to(artifact)
    llama, gguf = tmp_path / "llama-bench", tmp_path / "model.gguf"
    llama.write_text(LLAMA_BENCH.format(python=sys.executable, asked=str(tmp_path / "asked.json")))
    llama.chmod(0o755)
    gguf.touch()
    words = ["--device", "cpu", "--model", tiny, "--output", output, "-p", "16", "-n", "4", "-r", "2"]
    words += ["--layers", "1", "--llama-bench", llama, "--gguf", gguf]
    words += ["--plot", tmp_path / "plot.png", "--json", tmp_path / "found.json", "--timeline"]
    done = subprocess.run(
        ["bash", ROOT / "scripts" / "bench_hybrid.sh", *map(str, words)],
        env={**os.environ, "OSTINATO_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert "$ ostinato export" not in done.stderr

    header, _, decode, prefill = done.stdout.splitlines()[3:7]
    columns = "N test tokens/s llama.cpp ratio experts/token copy GB/s of copy computing host memory"
    assert header.split() == columns.split()
    assert decode.split()[:2] == ["1", "tg4"]
    assert prefill.split()[:2] == ["1", "pp16"]
    asked = json.loads((tmp_path / "asked.json").read_text())
    assert " ".join(asked) == f"-m {gguf} -ngl 99 -ncmoe 1 -fa 1 -p 16 -n 4 -r 2 -o json"
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"
    (result,) = json.loads((tmp_path / "found.json").read_text())["results"]
    assert result["expert_bytes"] == EXPERT_BYTES
    assert {name: len(samples) for name, samples in result["samples"].items()} == {"pp16": 2, "tg4": 2}
    assert result["peers"] == {"pp16": 1e9, "tg4": 1e9}
    assert result["copy_share"] > 0 and result["computing_share"] > 0
    assert result["host_memory"] > 0 and result["device_used"] is None and result["no_graph"] is None
    token, *_, on_host = result["timelines"][0].splitlines()
    assert token.startswith("one token, two layers: ") and on_host.startswith("CPU experts |") and "#" in on_host
    assert f"N = 1: {token}" in done.stdout and "N = 1: a prompt of 16, two layers: " in done.stdout
    # The run did not make this artifact, so it stays.
    assert (artifact / "model.pte").exists() and (output / "1").is_symlink()


def test_lanes() -> None:
    """The window begins at the second of four layers and ends at the fourth. A column with very little work stays empty."""
    spans = [Span("GPU", 0, 50), Span("GPU", 104, 105.2), Span("GPU", 299.95, 300.05)]
    spans += [Span("CPU experts", begin, begin + 20) for begin in (50, 100, 200, 300)]
    spans.sort(key=lambda span: span.begin)
    assert window(spans, 2) == (100, 300) and window(spans, 4) == (0, 320)
    title, device, on_host = draw("a token", spans, *window(spans, 2)).splitlines()
    assert title == "a token: 200 us, 2.0 us for each column"
    assert device == f"GPU         |{'  #':<100}| 1 us"
    assert on_host == f"CPU experts |{10 * '#':<50}{10 * '#':<50}| 40 us"


def test_a_folder_that_holds_something_else(artifact: Path, tiny: Path, tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "0").symlink_to(artifact)
    words = ["--device", "cpu", "--model", str(tiny), "--output", str(tmp_path), "-p", "16", "-n", "4"]
    assert bench_hybrid.main([*words, "--layers", "0"]) == 2
    assert "has the experts of 1 layers on the host and is for cpu, expected 0 and cpu: " in capfd.readouterr().err


@pytest.mark.parametrize("keep", [True, False])
def test_what_was_exported_is_deleted(keep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def export(*words: str) -> str:
        asked.append(words)
        (tmp_path / "20").mkdir()
        return ""

    monkeypatch.setattr(bench_hybrid, "ostinato", export)
    arguments = bench_hybrid.parse(["--output", str(tmp_path), *(["--keep"] if keep else [])])
    with pytest.raises(ZeroDivisionError), bench_hybrid.exported(20, arguments) as (artifact, _):
        assert artifact.is_dir()
        raise ZeroDivisionError
    assert artifact.is_dir() == keep
    (words,) = asked
    expected = "--load-format dummy --quant int4 --group-size 128 --device cuda --n-cpu-moe 20 --max-seq-len 5120"
    assert words[:3] == ("export", "--model", str(bench_hybrid.CONFIG))
    assert words[3:] == (*expected.split(), "--output", str(tmp_path / "20"))


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--layers", "2"], "--layers takes numbers from 0 to 1, the model's layers with experts; got [2]"),
        (["-p", "5121"], "5121"),
        (["--json", "no/where.json"], "--json: no such folder"),
        (["--plot", "plot"], "there is no suffix"),
        (["--llama-bench", "nowhere", "--gguf", "nowhere"], "no such file: nowhere"),
    ],
)
def test_refused_before_an_export(
    words: list[str], complaint: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.delattr(bench_hybrid, "ostinato")
    assert bench_hybrid.main(["--model", str(tiny), "--output", str(tmp_path), *words]) == 2
    assert complaint in capsys.readouterr().err


# --- goals


def made_up(layers: int, decode: float, prefill: float, **others: Any) -> Result:
    samples = {"pp512": [1.0, prefill, 1e6], "pp2048": [5000.0], "tg128": [decode]}
    numbers = {"device_loaded": 4 * 10**9, "device_used": 44 * 10**8, "host_memory": 9 * 10**8, "expert_bytes": 5e8}
    figures: dict[str, Any] = {**numbers, "computing_seconds": 0.0075, "copy_speed": 1e11, **others}
    return Result(layers, "NVIDIA H200 (sm_90)", "a processor, 16 threads", samples, **figures)


GOOD = (made_up(40, 96.0, 2801.0, export_seconds=89.9), made_up(20, 151.0, 3501.0))
PEERS = {"tg128": 90.0, "pp512": 2700.0, "pp2048": 5100.0}


def missed(*results: Result) -> list[str]:
    return [one.what for one in findings(results, 128) if not one.held]


def test_all_goals_held() -> None:
    found = findings(GOOD, 128)
    assert [one.what for one in found] == [
        "40 layers, tg128",
        "40 layers, pp512",
        "40 layers, GPU memory",
        "40 layers, host memory",
        "40 layers, export",
        "20 layers, tg128",
        "20 layers, pp512",
    ]
    assert missed(*GOOD) == []
    # A small deficit is noise. Other numbers of layers have no goals of their own.
    assert missed(replace(GOOD[0], peers=PEERS), made_up(10, 1.0, 1.0)) == []


@pytest.mark.parametrize(
    ("result", "complaint"),
    [
        (made_up(40, 94.9, 2801.0), "40 layers, tg128"),
        (made_up(40, 96.0, 2799.0), "40 layers, pp512"),
        (made_up(40, 96.0, 2801.0, export_seconds=90.1), "40 layers, export"),
        (made_up(40, 96.0, 2801.0, device_used=46 * 10**8), "40 layers, GPU memory"),
        (made_up(40, 96.0, 2801.0, device_used=None), "40 layers, GPU memory"),
        (made_up(40, 96.0, 2801.0, host_memory=11 * 10**8), "40 layers, host memory"),
        (made_up(20, 149.0, 3501.0, device_used=13 * 10**9), "20 layers, tg128"),
        (made_up(20, 151.0, 3499.0), "20 layers, pp512"),
        (replace(GOOD[1], samples={"tg128": [151.0], "pp2048": [5000.0]}), "20 layers, pp512"),
        (replace(GOOD[0], peers={**PEERS, "pp2048": 5200.0}), "40 layers, pp2048 over llama.cpp"),
        (made_up(10, 50.0, 1.0, peers={"tg128": 52.0}), "10 layers, tg128 over llama.cpp"),
    ],
)
def test_a_goal_that_was_missed(result: Result, complaint: str) -> None:
    assert missed(result) == [complaint]


@pytest.mark.parametrize(
    ("words", "held_to"),
    [
        ([], True),
        (["--layers", "40"], True),
        (["--skip-goals"], False),
        (["--device", "cpu"], False),
        (["--group-size", "32"], False),
        (["--model", "elsewhere"], False),
    ],
)
def test_goals_are_for_the_default_model(words: list[str], held_to: bool) -> None:
    assert bench_hybrid.has_goals(bench_hybrid.parse(words)) is held_to


def test_the_exit_status_and_what_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    results = [replace(GOOD[0], peers=PEERS), made_up(20, 149.0, 3501.0)]
    monkeypatch.setattr(bench_hybrid, "run", lambda arguments: results)
    assert bench_hybrid.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines[5:11]]
    # 5e8 bytes per token: at 96 tokens/s they take 48 % of 100 GB/s; read in 7.5 ms, 67 %.
    assert " ".join(rows[0]) == "40 tg128 96.0 90.0 1.07 500.0 MB 100.0 48% 67% 4.40 GB 900.00 MB"
    assert rows[1] == ["40", "pp512", "2,801.0", "2,700.0", "1.04"]
    assert rows[5] == ["20", "pp2048", "5,000.0"]
    assert [line for line in lines if line.startswith("MISSED: ")] == [
        "MISSED: 20 layers, tg128: 149.0 tokens/s, wanted: 150 or more"
    ]
    results[1] = GOOD[1]
    assert bench_hybrid.main([]) == 0
    assert "MISSED" not in capsys.readouterr().out


def test_nothing_on_the_host_has_no_share() -> None:
    result = made_up(0, 1000.0, 27000.0, expert_bytes=0.0, computing_seconds=None)
    assert (result.copy_share, result.computing_share) == (None, None)
    assert "of copy  " not in render([result]).splitlines()[2]
