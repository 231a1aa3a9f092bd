"""`ostinato bench --batch`: sessions that step together. No test asserts a time."""

from __future__ import annotations

import csv
import json
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ostinato.delegate import OptionError
from ostinato.runner.bench.batch_bench import BatchSpec
from ostinato.runner.cli import main
from ostinato.runner.sessions.session import Session
from ostinato.runner.sessions.sessions import Sessions

from ...conftest import CAPITALS_LENGTH
from ...modules import MAX_SEQ_LEN
from ..conftest import Bench, records

SMALL = ["--batch", "1,2,4", "-p", "5", "-n", "4", "-r", "2"]
BATCHES = [1, 2, 4]
ROWS = [(batch, graph) for batch in BATCHES for graph in (False, True)]


def test_records(bench: Bench, capitals_artifact: Path) -> None:
    rows = records(bench, capitals_artifact, *SMALL)
    assert [(row["pl"], row["cuda_graph"]) for row in rows] == ROWS
    for row in rows:
        assert (row["pp"], row["tg"], row["n_kv"]) == (5, 4, 9 * row["pl"])
        assert row["t_pp"] > 0 and row["speed_pp"] == pytest.approx(5 * row["pl"] / row["t_pp"])
        assert row["t_tg"] > 0 and row["speed_tg"] == pytest.approx(4 * row["pl"] / row["t_tg"])
        assert row["step_ms"] == pytest.approx(1e3 * row["t_tg"] / 4)
        # The median of two times lies between the two speeds.
        assert 0 < row["min_tg"] <= row["speed_tg"] <= row["max_tg"]
        # The room that the largest batch needs: 10 positions per session, which fit one page each.
        assert (row["slots"], row["kv_tokens"]) == (4, 4 * 64)
        assert row["slot_bytes"] > 0 and row["page_bytes"] > 0
        # On a CPU a step is the wait for it.
        assert row["host_us"] is None
        assert row["torch"] == torch.__version__ and row["device"]


@pytest.mark.parametrize(("mode", "warm_ups"), [("off", 1), ("on", 4)])
def test_what_is_measured(
    bench: Bench, capitals_artifact: Path, monkeypatch: pytest.MonkeyPatch, mode: str, warm_ups: int
) -> None:
    """Each repetition prefills one prompt per session, samples the first tokens, and steps all sessions together. Prompts and
    steps that have graphs are captured before."""
    prompts: list[list[int]] = []
    steps: list[tuple[int, int, bool]] = []
    prefill, step = Sessions.prefill, Sessions.step

    def prefill_and_keep(sessions: Sessions, session: Session, tokens: Sequence[int]) -> None:
        prompts.append(list(tokens))
        prefill(sessions, session, tokens)

    def step_and_keep(sessions: Sessions, opened: Sequence[Session], more: bool = False) -> list[int]:
        (position,) = {session.position for session in opened}
        steps.append((len(opened), position, more))
        return step(sessions, opened, more)

    monkeypatch.setattr(Sessions, "prefill", prefill_and_keep)
    monkeypatch.setattr(Sessions, "step", step_and_keep)
    bench(capitals_artifact, *SMALL, f"--cuda_graph={mode}")
    assert len(prompts) == (warm_ups + 2) * sum(BATCHES) and {len(prompt) for prompt in prompts} == {5}
    assert len({tuple(prompt) for prompt in prompts}) == max(BATCHES)
    warm_up, once = [(5, False), (6, False)], [(5, False), (6, True), (7, True), (8, True), (9, False)]
    rounds = [*[warm_up] * warm_ups, once, once]
    assert steps == [(batch, *place) for batch in BATCHES for places in rounds for place in places]


def test_each_number_once_and_rising(bench: Bench, capitals_artifact: Path) -> None:
    words = ["--batch", "2,1", "--batch", "2", "-p", "3", "-n", "1", "-r", "1", "--cuda_graph=on"]
    assert [(row["pl"], row["cuda_graph"]) for row in records(bench, capitals_artifact, *words)] == [
        (1, True),
        (2, True),
    ]


def test_room_that_is_asked_for(bench: Bench, refused: Bench, capitals_artifact: Path) -> None:
    words = ["--batch", "1,2", "-p", "5", "-n", "4", "-r", "1"]
    for options, slots, kv_tokens in (
        (["--sessions", "3"], 3, 3 * 64),
        (["--kv-tokens", "500"], 2, 8 * 64),
        (["--sessions", "3", "--kv-tokens", "192"], 3, 192),
    ):
        for row in records(bench, capitals_artifact, *words, *options):
            assert (row["slots"], row["kv_tokens"]) == (slots, kv_tokens)
    long = ["--batch", "2", "-p", "60", "-n", "9", "-r", "1", "--kv-tokens", "128"]
    assert "need 1 more page of 64 positions, 0 of 2 are free" in refused(capitals_artifact, *long)


def test_to_the_last_position(bench: Bench, capitals_artifact: Path) -> None:
    """The token that the last step samples takes no position, but counts towards max_seq_len."""
    answer = CAPITALS_LENGTH - 246
    words = ["--batch", "2", "-p", "245", "-n", answer, "-r", "1", "--cuda_graph=off"]
    (row,) = records(bench, capitals_artifact, *words)
    assert (row["n_kv"], row["kv_tokens"]) == (2 * (CAPITALS_LENGTH - 1), 2 * 4 * 64)


def test_a_program_of_one_session(bench: Bench, refused: Bench, recurrent_artifact: Path) -> None:
    (row,) = records(bench, recurrent_artifact, "--batch", "1", "-p", "5", "-n", "4", "-r", "1", "--cuda_graph=off")
    assert (row["pl"], row["slots"], row["kv_tokens"]) == (1, 1, 0)
    assert "the program's state has room for one session, got sessions=2" in refused(
        recurrent_artifact, "--batch", "2", "-p", "5", "-n", "4"
    )


def test_table(capsys: pytest.CaptureFixture[str], capitals_artifact: Path) -> None:
    assert main(["bench", str(capitals_artifact), *SMALL]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].split("  ")[0] == "sessions" or lines[0].lstrip().startswith("sessions")
    assert all(header in lines[0] for header in ("mode", "prompts, tokens/s", "answers, tokens/s", "ms per step"))
    rows = [line.split() for line in lines[2 : 2 + len(ROWS)]]
    assert [int(row[0]) for row in rows] == [batch for batch, _ in ROWS]
    # The ratio to the smallest batch in the same mode.
    assert [row[-1] for row in rows[:2]] == ["1.00", "1.00"]
    for part in (
        "each session: a prompt of 5 tokens, and 4 steps behind it",
        "room: 4 sessions of ",
        "4 pages of 64 positions",
        f"torch {torch.__version__}",
    ):
        assert part in out
    assert all(line == line.rstrip() for line in lines)
    assert "note: this artifact runs on the CPU" in err
    said = [line.split() for line in err.splitlines() if "ms" in line and "batch" in line]
    assert [line[line.index("batch") + 1] for line in said] == [str(batch) for batch in BATCHES] * 2


def test_ways_of_sampling(bench: Bench, capitals_artifact: Path) -> None:
    ways = [
        {"temperature": 1.0, "seed": 1},
        {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2, "logprobs": 2},
    ]
    words = [word for way in ways for word in ("--sampling", json.dumps(way))]
    options = ["--batch", "2", "-p", 4, "-n", 3, "-r", 1, "--cuda_graph", "off", *words]
    found = records(bench, capitals_artifact, *options)
    assert [row["sampling"] for row in found] == ways
    lines = bench(capitals_artifact, *options).splitlines()
    assert ["sampling" in lines[0], json.dumps(ways[1]) in lines[3], "speed-up" in lines[0]] == [True] * 3
    assert lines[2].split()[-1] == "1.000"


def test_markdown(bench: Bench, capitals_artifact: Path) -> None:
    lines = bench(capitals_artifact, *SMALL, "--output", "md").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert rows[0] == [
        "sessions",
        "mode",
        "prompts, tokens/s",
        "answers, tokens/s",
        "min .. max",
        "ms per step",
        "speed-up",
    ]
    assert [(int(row[0]), row[1] == "--cuda_graph") for row in rows[2:]] == ROWS
    assert any(line.startswith("- machine: ") for line in lines)


def test_csv(bench: Bench, capitals_artifact: Path) -> None:
    rows = list(csv.DictReader(bench(capitals_artifact, *SMALL, "-o", "csv").splitlines()))
    assert [(int(row["pl"]), row["cuda_graph"] == "True") for row in rows] == ROWS
    assert all(float(row["speed_tg"]) > 0 for row in rows)


@pytest.mark.gpu
def test_on_a_gpu(bench: Bench, capitals_cuda: Path) -> None:
    for row in records(bench, capitals_cuda, *SMALL):
        assert 0 < row["host_us"] < 1e3 * row["step_ms"] * row["tg"]
    lines = bench(capitals_cuda, *SMALL).splitlines()
    assert "Python, us" in lines[0] and any(line.startswith("Python: on the host, of each step") for line in lines)


def test_save_and_plot(bench: Bench, capitals_artifact: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shown = bench(capitals_artifact, *SMALL, "--save", tmp_path / "batch.json", "--plot", tmp_path / "batch.png")
    assert [(row["pl"], row["cuda_graph"]) for row in json.loads((tmp_path / "batch.json").read_text())] == ROWS
    assert "answers, tokens/s" in shown
    data = (tmp_path / "batch.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 1000 and height > 500


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch", ""], "--batch takes whole numbers, 0 or more, separated by commas; got ''"),
        (["--batch", "2,x"], "--batch takes whole numbers, 0 or more, separated by commas; got '2,x'"),
        (
            ["--batch", "2", "--sampling", '{"heat": 1}'],
            "--sampling has 'heat', which is none of temperature, top_k, top_p,",
        ),
        (["--batch", "2", "--sampling", '{"top_k": -1}'], "top_k must be 0 (off) or more, got -1"),
        (
            ["--sampling", "{}"],
            "--sampling says how the sessions of --batch and of --load sample: give one of these, too",
        ),
        (["--batch", "0,2"], "--batch takes numbers of sessions from 1 on, and needs a prompt (-p) and an answer (-n)"),
        (["--batch", "2", "-p", "0"], "--batch takes numbers of sessions from 1 on, and needs a prompt (-p)"),
        (["--batch", "2", "-n", "0"], "--batch takes numbers of sessions from 1 on, and needs a prompt (-p)"),
        (["--batch", "2", "-p", "5,6"], "with --batch, -p and -n take one number each, and there is no -d"),
        (["--batch", "2", "-n", "5,6"], "with --batch, -p and -n take one number each, and there is no -d"),
        (["--batch", "2", "-d", "0"], "with --batch, -p and -n take one number each, and there is no -d"),
        (["--batch", "2", "-r", "0"], "-r must be 1 or more, got 0"),
        (
            ["--batch", "2", "-p", "246", "-n", "5"],
            f"a session would have 252 tokens, max_seq_len is {CAPITALS_LENGTH}: ask for less, or export with a larger",
        ),
        (["--batch", "1,2", "--sessions", "1"], "--batch needs 2 sessions, got --sessions 1"),
        (["--batch", "2", "--kv-tokens", "0"], "kv_tokens must be an integer of 1 or more, got 0"),
        (["--batch", "2", "-p", "5", "-n", "4", "--kv-tokens", "64"], "2 sessions need a page of 64 positions each"),
        # Both have 128 tokens by default.
        (["--batch", "2"], f"a session would have 257 tokens, max_seq_len is {CAPITALS_LENGTH}"),
        (
            ["--batch", "2", "-p", "5", "-n", "4", "--prefill-buckets", "1024"],
            f"prefill bucket 1024 is longer than max_seq_len {CAPITALS_LENGTH}",
        ),
    ],
)
def test_bad_options(refused: Bench, capitals_artifact: Path, words: list[str], message: str) -> None:
    assert message in refused(capitals_artifact, *words)


def test_what_cannot_be_written_is_said_first(refused: Bench, capitals_artifact: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert f"--save: no such folder: {missing}" in refused(capitals_artifact, *SMALL, "--save", missing / "batch.json")
    assert "cannot be written: No such file" in refused(capitals_artifact, *SMALL, "--plot", missing / "batch.png")


def test_programs_that_cannot_be_measured(refused: Bench, tmp_path: Path, recurrent_artifact: Path) -> None:
    assert "no such folder" in refused(tmp_path / "nothing", *SMALL)
    assert f"a session would have 40 tokens, max_seq_len is {MAX_SEQ_LEN}" in refused(
        recurrent_artifact, "--batch", "1", "-p", "35", "-n", "4"
    )


@pytest.mark.parametrize(
    "numbers", [((), 5, 4, 1), ((1, 0), 5, 4, 1), ((-1,), 5, 4, 1), ((1,), 0, 4, 1), ((1,), 5, -1, 1)]
)
def test_a_spec_of_nothing(numbers: tuple[tuple[int, ...], int, int, int]) -> None:
    with pytest.raises(OptionError, match="--batch takes numbers of sessions from 1 on, and needs a prompt"):
        BatchSpec(*numbers)
