"""`ostinato bench --load`: callers over AsyncEngine. No test asserts a time."""

from __future__ import annotations

import csv
import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ostinato.delegate import OptionError
from ostinato.runner.bench import load_bench
from ostinato.runner.bench.load_bench import Load, LoadMeasurement, LoadSpec, Sample, percentile
from ostinato.runner.cli import main
from ostinato.runner.scheduler.messages import Request

from ..conftest import Bench, records

SMALL = ["--load", "-p", "16", "-n", "8"]
COUNTS = {"put_back": 0, "refused": 0, "steps": 4, "host_seconds": None, "wait_seconds": None}


def test_callers(bench: Bench, capitals_artifact: Path) -> None:
    rows = records(bench, capitals_artifact, *SMALL, "--concurrency", "4,1", "--requests", "9", "--seed", "3")
    assert [row["max_concurrency"] for row in rows] == [1, 4]
    prompts = set()
    for row in rows:
        samples = row["samples"]
        assert (row["completed"], row["failed"], row["error"], len(samples)) == (9, 0, None, 9)
        assert {sample["caller"] for sample in samples} == set(range(row["max_concurrency"]))
        for sample in samples:
            # 20 % less or more than the mean, by default.
            assert 12 <= sample["input_tokens"] <= 20 and 6 <= sample["output_tokens"] <= 10
            assert len(sample["itl_ms"]) == sample["output_tokens"] - 1 and sample["ttft_ms"] > 0
        prompts.add(tuple(sample["input_tokens"] for sample in samples))
        assert row["total_input_tokens"] == sum(sample["input_tokens"] for sample in samples)
        assert row["total_output_tokens"] == sum(sample["output_tokens"] for sample in samples)
        seconds = row["duration"]
        assert row["output_throughput"] == pytest.approx(row["total_output_tokens"] / seconds)
        assert row["request_throughput"] == pytest.approx(9 / seconds)
        assert row["total_token_throughput"] == pytest.approx(
            (row["total_input_tokens"] + row["total_output_tokens"]) / seconds
        )
        for name in ("ttft", "tpot", "itl"):
            assert 0 <= row[f"median_{name}_ms"] <= row[f"p95_{name}_ms"] <= row[f"p99_{name}_ms"]
        # Steps that other sessions share are fewer than tokens.
        assert 0 < row["steps"] <= row["total_output_tokens"] + 2 * 9
        assert 0 < row["mean_in_flight"] <= row["max_concurrency"]
        # On a CPU a step is the wait for it.
        assert row["host_us_per_step"] is row["wait_us_per_step"] is None and row["ms_per_step"] > 0
        assert row["put_back"] == row["refused"] == 0 and row["client_cpu_share"] > 0
        # A page for each session, and one to spare.
        assert (row["sessions"], row["kv_tokens"]) == (4, 4 * 2 * 64)
    # Other loads send other requests.
    assert len(prompts) == 2


def test_a_rate(bench: Bench, capitals_artifact: Path) -> None:
    words = ["--rate", "400", "--requests", "6", "--range-ratio", "0", "--sessions", "3"]
    (row,) = records(bench, capitals_artifact, *SMALL, *words)
    assert (row["max_concurrency"], row["request_rate"], row["sessions"]) == (None, 400.0, 3)
    assert row["steady_output_throughput"] is None
    assert [(one["input_tokens"], one["output_tokens"]) for one in row["samples"]] == [(16, 8)] * 6
    sent = [one["sent"] for one in row["samples"]]
    assert sent == sorted(sent) and len(set(sent)) == 6


def test_conversations(bench: Bench, capitals_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Request] = []
    outputs = load_bench.AsyncEngine.outputs

    def keep(engine: Any, request: Request) -> Any:
        sent.append(request)
        return outputs(engine, request)

    monkeypatch.setattr(load_bench.AsyncEngine, "outputs", keep)
    words = ["--concurrency", "2", "--turns", "3", "--requests", "7", "--shared-prefix", "5", "--range-ratio", "0"]
    (row,) = records(bench, capitals_artifact, *SMALL, *words)
    # Whole conversations: seven requests are nine. Two more warm up.
    assert (row["completed"], len(sent)) == (9, 2 + 9)
    assert Counter(one["turn"] for one in row["samples"]) == {0: 3, 1: 3, 2: 3}
    # Each begins with all that was said before, which is not computed again.
    turns = {turn: [request for request in sent[2:] if len(request.tokens) == 5 + 16 + 24 * turn] for turn in range(3)}
    assert [len(requests) for requests in turns.values()] == [3, 3, 3]
    assert len({tuple(request.tokens[:5]) for request in sent[2:]}) == 1
    assert len({tuple(request.tokens[5:]) for request in turns[0]}) == 3
    assert {tuple(request.tokens[:21]) for request in turns[2]} == {tuple(request.tokens) for request in turns[0]}
    # All but an answer's last token, and the new ones.
    assert row["total_reused_tokens"] >= 3 * (28 + 52)
    # 5 + 3 * (16 + 8) positions are two pages.
    assert row["kv_tokens"] == 2 * 3 * 64


def test_duration(bench: Bench, capitals_artifact: Path) -> None:
    (row,) = records(bench, capitals_artifact, *SMALL, "--concurrency", "2", "--duration", "0.2")
    assert row["completed"] >= 2 and all(sample["sent"] < 0.2 for sample in row["samples"])


def test_requests_that_fail(bench: Bench, capitals_artifact: Path) -> None:
    words = ["--concurrency", "6", "--sessions", "1", "--max-waiting", "1", "--requests", "12", "--range-ratio", "0"]
    (row,) = records(bench, capitals_artifact, *SMALL, *words)
    failed = [sample for sample in row["samples"] if sample["error"]]
    assert row["failed"] == len(failed) == row["refused"] > 0 and row["completed"] == 12 - len(failed)
    assert "which is the most: ask again later" in row["error"]
    assert row["total_output_tokens"] == 8 * row["completed"]


def test_table(bench: Bench, capitals_artifact: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    saved, plot = tmp_path / "load.json", tmp_path / "load.png"
    words = ["--concurrency", "1,4", "--requests", "8", "--sampling", '{"temperature": 1.0, "seed": 1}']
    lines = bench(capitals_artifact, *SMALL, *words, "--save", saved, "--plot", plot).splitlines()
    assert lines[0].split()[:2] == ["callers", "requests"] and "between tokens, ms" in lines[0]
    assert [line.split()[:2] for line in lines[2:4]] == [["1", "8"], ["4", "8"]]
    assert "each request: 12 to 20 random tokens, and 6 to 10 tokens of answer" in lines
    assert any(line.startswith("4: ") and "of a core" in line for line in lines)
    rows = json.loads(saved.read_text())
    assert [row["sampling"] for row in rows] == [{"temperature": 1.0, "seed": 1}] * 2
    assert plot.read_bytes()[:4] == b"\x89PNG"


def test_csv_and_markdown(bench: Bench, capitals_artifact: Path) -> None:
    words = [capitals_artifact, *SMALL, "--concurrency", "1", "--requests", "2"]
    (row,) = csv.DictReader(bench(*words, "-o", "csv").splitlines())
    assert row["max_concurrency"] == "1" and "samples" not in row and float(row["output_throughput"]) > 0
    assert bench(*words, "-o", "md").startswith("|   callers |")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--concurrency", "0"], "--concurrency takes numbers of callers from 1 on, got 0"),
        (["--concurrency", "x"], "--concurrency takes whole numbers"),
        (["--rate", "x"], "--rate takes requests per second, separated by commas; got 'x'"),
        (["--rate", "-1"], "--rate takes requests per second, above 0, got -1"),
        (["--rate", "1", "--concurrency", "1"], "--concurrency or --rate, not both"),
        (["--range-ratio", "1"], "--range-ratio must be at least 0 and below 1, got 1"),
        (["--duration", "nan"], "--duration must be a number of seconds above 0"),
        (["--requests", "0"], ": --requests must be 1 or more, got 0"),
        (["--turns", "0"], ": --turns must be 1 or more, got 0"),
        (["--shared-prefix", "-1"], ": --shared-prefix must be 0 or more, got -1"),
        (["--turns", "40"], "max_seq_len is"),
        (["--max-step-ms", "0"], "--max-step-ms must be above 0"),
        (["--max-waiting", "0"], "--max-waiting must be 1 or more"),
        (["--cuda_graph", "both"], "--cuda_graph on or off, not both"),
        (["--batch", "2"], "--load does not go with --batch"),
        (["-d", "2"], "--load does not go with -d"),
        (["-p", "1,2"], "-p, -n and --sampling are given once"),
        (["--sampling", '{"heat": 1}'], "--sampling has 'heat'"),
    ],
)
def test_options_that_cannot_be(refused: Bench, capitals_artifact: Path, words: list[str], reason: str) -> None:
    assert reason in refused(capitals_artifact, *SMALL, *words)


def test_options_of_load_alone(refused: Bench, capitals_artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--turns is an option of --load" in refused(capitals_artifact, "--turns", "2")
    assert main(["bench", str(capitals_artifact / "nowhere"), "--load"]) == 2
    assert "nowhere" in capsys.readouterr().err


# --- figures of made-up samples


def sample(caller: int, sent: float, *arrivals: float, error: str | None = None) -> Sample:
    return Sample(caller, 0, 10, len(arrivals), sent, list(arrivals), len(arrivals), error=error)


def test_steady() -> None:
    """From the last caller's first token, at 2, to the first caller's end, at 7: six tokens."""
    first = [sample(0, 0, 1, 2, 3, 4), sample(0, 4, 5, 6, 7)]
    second = [sample(1, 0, 2, 5, 9)]
    row = LoadMeasurement(Load(2), (*first, *second), 10.0, 0.1, COUNTS)
    assert row.steady_speed == pytest.approx(6 / 5)
    assert (row.speed, row.output_tokens, row.prompt_tokens) == (1.0, 10, 30)
    assert row.in_flight == pytest.approx((4 + 3 + 9) / 10)
    assert LoadMeasurement(Load(3), row.samples, 10.0, 0.1, COUNTS).steady_speed is None
    assert LoadMeasurement(Load(1), (sample(0, 0, 1),), 1.0, 0.1, COUNTS).steady_speed is None


def test_what_failed_is_in_no_figure() -> None:
    row = LoadMeasurement(Load(1), (sample(0, 0, 1, 2), sample(0, 2, 3, error="gone")), 4.0, 0.1, COUNTS)
    assert (row.failed, row.output_tokens, row.prompt_tokens, len(row.done)) == (1, 2, 10, 1)
    assert row.per_step("host_seconds") is None and row.per_step("put_back") == 0


def test_times_of_a_request() -> None:
    one = sample(0, 1.0, 1.5, 1.6, 1.9)
    assert one.ttft_ms == pytest.approx(500) and one.tpot_ms == pytest.approx(200)
    assert one.itl_ms == pytest.approx([100, 300])
    assert sample(0, 1.0, 1.5).tpot_ms is None


@pytest.mark.parametrize(("percent", "expected"), [(0, 1), (50, 2.5), (95, 3.85), (100, 4)])
def test_percentile(percent: float, expected: float) -> None:
    assert percentile([4, 2, 1, 3], percent) == pytest.approx(expected)
    assert percentile([], percent) is None and percentile([7.0], percent) == 7.0


def test_lengths() -> None:
    spec = LoadSpec((Load(2),), 1000, 10, range_ratio=0.25, turns=2, shared_prefix=7)
    assert (spec.range_of(1000), spec.range_of(10), spec.range_of(1)) == ((750, 1250), (7, 13), (1, 2))
    assert spec.positions == 7 + 2 * (1250 + 13)
    drawn = random.Random(0)
    found = [load_bench._conversation(spec, drawn, 50, [1] * 7) for _ in range(200)]
    lengths = [len(prompt) for one in found for prompt in (one.prompts[0][7:], one.prompts[1])]
    assert min(lengths) >= 750 and max(lengths) <= 1250
    # The mean of 400 lengths: within five of its standard deviations.
    assert sum(lengths) / len(lengths) == pytest.approx(1000, abs=5 * 500 / math.sqrt(12 * 400))


def test_number_of_requests() -> None:
    spec = LoadSpec((Load(1),), 10, 10)
    assert [spec.conversations(Load(callers)) for callers in (1, 4, 32)] == [16, 16, 128]
    assert spec.conversations(Load(rate=2.0)) == 60
    assert LoadSpec((Load(1),), 10, 10, duration=1.0).conversations(Load(1)) == math.inf
    assert LoadSpec((Load(1),), 10, 10, requests=5, turns=2).conversations(Load(1)) == 3
    with pytest.raises(OptionError, match="needs --concurrency or --rate"):
        LoadSpec((), 10, 10)
