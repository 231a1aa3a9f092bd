"""`ostinato bench`: what it measures, what it prints, and what it refuses. No test asserts a time."""

from __future__ import annotations

import csv
import json
import math
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from ostinato.delegate import load_program
from ostinato.delegate.graphs.recorders import HostGraphRecorder
from ostinato.runner.bench.report import Reads
from ostinato.runner.cli import main
from ostinato.runner.model.steps import HostSteps, Pending, Stepped

from ...conftest import CAPITALS_LENGTH
from ...modules import MAX_SEQ_LEN, VOCAB, WIDTH, Recurrent, recurrent_methods
from ...processes import PATIENCE
from ..conftest import SMALL, Bench, ForwardArtifact, records

SMALL_DECODE = 5  # The row of tg4 with a graph.
NAMES = ["pp5", "pp2", "tg4", "pp5 @ d6", "pp2 @ d6", "tg4 @ d6"]

# --- what is measured


def test_records(bench: Bench, recurrent_artifact: Path) -> None:
    rows = records(bench, recurrent_artifact, *SMALL)
    assert [(row["test"], row["cuda_graph"]) for row in rows] == [(name, g) for name in NAMES for g in (False, True)]
    for row in rows:
        tokens = row["n_prompt"] + row["n_gen"]
        assert row["test"].split(" @ d") == [
            f"{'pp' if row['n_prompt'] else 'tg'}{tokens}",
            *([str(row["n_depth"])] if row["n_depth"] else []),
        ]
        assert len(row["samples_ns"]) == len(row["samples_ts"]) == 2
        assert row["samples_ts"] == pytest.approx([tokens / ns * 1e9 for ns in row["samples_ns"]])
        assert 0 < row["min_ts"] <= row["median_ts"] <= row["max_ts"] == max(row["samples_ts"])
        assert row["median_ts"] == pytest.approx(sum(row["samples_ts"]) / 2)
        assert row["copy_bytes_per_second"] > 0
        assert row["max_seq_len"] == MAX_SEQ_LEN
        assert row["fallback_reason"] is None
    bases = {row["test"]: row["median_ts"] for row in rows if not row["cuda_graph"]}
    assert [row["ratio"] for row in rows] == pytest.approx([row["median_ts"] / bases[row["test"]] for row in rows])


def test_every_step_is_counted(bench: Bench, recurrent_artifact: Path) -> None:
    """First comes an answer of 5 steps, whose prompt of 5 tokens is prefilled twice. Then each test has a warm-up and 2
    repetitions."""
    plain, graph = records(bench, recurrent_artifact, *SMALL)[:2]
    steps = 5 + 2 * (1 + 2 * 4)
    fills = 1
    for row in (plain, graph):
        assert row["methods"]["prefill"]["runs"] == 2 + 4 * (1 + 2) + fills
    assert plain["methods"]["decode"]["runs"] == steps
    decode = graph["methods"]["decode"]
    assert (decode["warmups"], decode["captures"], decode["replays"]) == (3, 1, steps - 4)
    counts = [[(phase["name"], phase["calls"]) for phase in row["phases"]] for row in (plain, graph)]
    assert counts == [[("prefill", 5), ("run", 5)], [("prefill", 5), ("warmup", 3), ("capture", 1), ("replay", 1)]]
    assert all(phase["seconds"] > 0 for row in (plain, graph) for phase in row["phases"])


@pytest.mark.parametrize("artifact", ["recurrent_artifact", "chunked_artifact"])
def test_each_repetition_starts_from_the_state_at_its_depth(
    bench: Bench, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, artifact: str
) -> None:
    """Every token that was decoded is the one that the plain module gives."""
    # For each answer: the number of tokens before it, and the list to which its steps append.
    runs: list[tuple[int, list[int]]] = []
    launch = HostSteps.launch

    def spy(steps: HostSteps, sessions: Sequence[Stepped], ahead: bool) -> list[Pending]:
        tokens = sessions[0].tokens
        if not runs or runs[-1][1] is not tokens:
            runs.append((len(tokens) - 1, tokens))
        return launch(steps, sessions, ahead)

    monkeypatch.setattr(HostSteps, "launch", spy)
    bench(request.getfixturevalue(artifact), "-p", 12, "-n", 7, "-d", "0,12,5,1", "-r", 3)
    long = [(tokens[:held], tokens[held:]) for held, tokens in runs if len(tokens) - held == 8]
    depths = [0, 12, 5, 1]
    # The first answer of each mode follows its prompt of 12.
    per_mode = [12] + [depth for depth in depths for _ in range(3)]
    assert [len(prompt) for prompt, _ in long] == per_mode * 2
    module = Recurrent()
    for prompt, answer in long:
        held = prompt + answer[:1]
        expected = answer[:1]
        for position in range(len(prompt), len(prompt) + 7):
            tokens, positions = (
                ([held], list(range(len(held)))) if len(expected) == 1 else ([expected[-1:]], [position])
            )
            expected.append(int(module(torch.tensor(tokens), torch.tensor(positions)).argmax()))
        assert answer == expected


@pytest.mark.parametrize(
    ("words", "modes"),
    [
        ([], [False, True]),
        (["--cuda_graph", "both"], [False, True]),
        (["--cuda_graph"], [True]),
        (["--cuda-graph=on"], [True]),
        (["--cuda-graph", "off"], [False]),
    ],
)
def test_modes(bench: Bench, recurrent_artifact: Path, words: list[str], modes: list[bool]) -> None:
    rows = records(bench, recurrent_artifact, "-p", 0, "-n", 2, "-d", 0, "-r", 1, *words)
    assert [row["cuda_graph"] for row in rows] == modes
    assert all((row["ratio"] is None) == (len(modes) == 1) for row in rows)
    # No prompt was asked for, so none was made.
    assert rows[0]["methods"]["prefill"]["runs"] == 0


def test_one_prompt_token_is_decodes(bench: Bench, recurrent_artifact: Path) -> None:
    (row,) = records(bench, recurrent_artifact, "-p", 1, "-n", 0, "-d", 0, "-r", 2, "--cuda_graph=off")
    assert (row["test"], row["methods"]["prefill"]["runs"]) == ("pp1", 0)
    assert row["methods"]["decode"]["runs"] == 1 + 5 + 3


def test_up_to_the_last_position(bench: Bench, chunked_artifact: Path) -> None:
    rows = records(bench, chunked_artifact, "-p", f"{MAX_SEQ_LEN},2", "-n", MAX_SEQ_LEN, "-d", 0, "-r", 1)
    assert {row["test"] for row in rows} == {f"pp{MAX_SEQ_LEN}", "pp2", f"tg{MAX_SEQ_LEN}"}
    (row, _) = records(bench, chunked_artifact, "-p", 0, "-n", 2, "-d", MAX_SEQ_LEN - 2, "-r", 1)
    assert row["test"] == f"tg2 @ d{MAX_SEQ_LEN - 2}"


def test_from_within_a_page_to_the_last_position(bench: Bench, capitals_artifact: Path) -> None:
    """The page in which a depth ends exists twice: as it is at the depth, and as each repetition continues it."""
    rows = records(bench, capitals_artifact, "-p", "51", "-n", "51", "-d", CAPITALS_LENGTH - 51, "-r", 2)
    assert {row["test"] for row in rows} == {"pp51 @ d200", "tg51 @ d200"}


def test_room_that_is_asked_for(bench: Bench, refused: Bench, capitals_artifact: Path) -> None:
    """By default there is one page more than the sessions need. With --kv-tokens there are exactly the pages asked for."""
    words = ["-p", "64", "-n", "0", "-d", "64", "-r", "1", "--cuda_graph=off"]
    for options in (["--kv-tokens", "128"], ["--sessions", "3"], ["--sessions", "1", "--kv-tokens", "200"]):
        assert [row["test"] for row in records(bench, capitals_artifact, *words, *options)] == ["pp64 @ d64"]
    longest = ["-d", str(CAPITALS_LENGTH - 51), "-p", "51", "-n", "0", "-r", "1", "--cuda_graph=off"]
    (one,) = records(bench, capitals_artifact, *longest)
    (two,) = records(bench, capitals_artifact, *longest, "--sessions", "2")
    assert one["test"] == two["test"] == "pp51 @ d200"
    # Each session has a slot and four pages; in addition there are the free page, two snapshots and what a program has once.
    with load_program(capitals_artifact) as program:
        each = program.capacity.slot_bytes + 4 * program.capacity.groups[0].page_bytes
        rest = program.capacity.groups[0].page_bytes + 2 * program.capacity.slot_bytes
    assert two["state_bytes"] - one["state_bytes"] == each
    assert 0 <= one["state_bytes"] - each - rest < 4096
    (none,) = records(bench, capitals_artifact, *words[:4], "-d", "0", *words[6:], "--snapshots", "1")
    assert none["test"] == "pp64"
    message = "there is no room for a snapshot: load the program with more, as in snapshots=1"
    assert message in refused(capitals_artifact, *words, "--snapshots", "0")
    assert "of 64 positions, 0 of 1 are free" in refused(capitals_artifact, *words, "--kv-tokens", "64")


def test_what_a_token_reads(bench: Bench, chunked_artifact: Path, recurrent_artifact: Path) -> None:
    rows = records(bench, chunked_artifact, *SMALL)
    # Steps 1 to 4 after a depth of 6 see 7, 8, 9 and 10 positions.
    reads = {"tg4": 1000 + 24 * 2.5, "tg4 @ d6": 1000 + 24 * 8.5}
    for row in rows:
        expected = reads.get(row["test"])
        assert row["bytes_per_token"] == expected
        assert row["bytes_per_token_exact"]
        if expected is None:
            assert row["copy_share"] is None
        else:
            assert row["copy_share"] == pytest.approx(expected * row["median_ts"] / row["copy_bytes_per_second"])
    (row,) = records(bench, recurrent_artifact, "-p", 0, "-n", 1, "-d", 0, "-r", 1, "--cuda_graph=off")
    # Two matrices; then the buffers cache, total and steps.
    assert row["bytes_per_token"] == 2 * VOCAB * WIDTH * 4 + (MAX_SEQ_LEN * WIDTH * 4 + WIDTH * 4 + 8)
    assert not row["bytes_per_token_exact"]


def test_reads_come_from_the_metadata(chunked_artifact: Path) -> None:
    with load_program(chunked_artifact) as program:
        assert Reads.of(program) == Reads(1000, 24, True)


def test_the_shipped_model(bench: Bench, capitals_artifact: Path) -> None:
    rows = records(bench, capitals_artifact, "-p", 40, "-n", 8, "-d", "0,100", "-r", 2)
    assert [row["test"] for row in rows[::2]] == ["pp40", "tg8", "pp40 @ d100", "tg8 @ d100"]
    assert {row["model_type"] for row in rows} == {"qwen3_5_moe_text"}
    assert rows[1]["methods"]["decode_sample"]["replays"] == 4 + 2 * (1 + 2 * 8)


@pytest.mark.gpu
def test_on_a_gpu(bench: Bench, exported: Callable[..., Path]) -> None:
    from ostinato.export import export_program

    metadata = {"get_max_seq_len": MAX_SEQ_LEN, "get_vocab_size": VOCAB}
    methods = recurrent_methods(Recurrent())
    artifact = exported("bench-cuda", lambda path: export_program(methods, path, device="cuda", metadata=metadata))
    rows = records(bench, artifact, *SMALL)
    decode = rows[1]["methods"]["decode"]
    assert (decode["captures"], decode["replays"], decode["fallback_reason"]) == (1, 5 + 18 - 4, None)
    for row in rows:
        assert row["device_memory_used"] >= row["device_memory_allocated"] > 0
        assert torch.cuda.get_device_name() in row["device"]
    out = bench(artifact, *SMALL)
    assert "in use on the device after loading" in out
    # AOTInductor's own kernels start only when the kernel before has ended.
    kernels = rows[SMALL_DECODE]["kernels_per_token"]
    assert kernels == decode["plans"][-1]["graph_kernels"] == decode["plans"][-1]["graph_nodes"]["kernel"] > 0
    assert rows[SMALL_DECODE]["early_kernels_per_token"] == 0
    assert f"--cuda_graph: {kernels} kernels per token, none of them start before the one ahead has ended" in out


# --- which tests


def test_table(capsys: pytest.CaptureFixture[str], recurrent_artifact: Path) -> None:
    assert main(["bench", str(recurrent_artifact), *SMALL]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("test "))
    rule = lines[at + 1]
    ends = [i for i in range(len(rule)) if rule[i] == "-" and rule[i + 1 : i + 2] in ("", " ")]
    rows = lines[at + 2 : at + 2 + 2 * len(NAMES)]
    assert [row[: ends[0] + 1].strip() for row in rows] == [text for name in NAMES for text in (name, "")]
    for row in rows:
        # Columns stand under their headers, numbers to the right.
        assert float(row[ends[1] + 1 : ends[2] + 1].replace(",", "")) > 0
        assert row[ends[1] + 1 : ends[1] + 3].strip() == ""
    for part in (
        f"artifact  {recurrent_artifact}, loaded in ",
        f"max_seq_len {MAX_SEQ_LEN}",
        f"torch {torch.__version__}",
        " GB/s, read and written, best of ",
        "a token   reads at most 1.33 kB",
        "<= of copy",
        "tokens/s: median of 2 repetitions",
        "first answer, --cuda_graph: prefill 5: ",
        ", warmup 3: ",
        ", capture 1: ",
    ):
        assert part in out
    assert all(line == line.rstrip() for line in lines)
    assert "note: this artifact runs on the CPU" in err
    progress = [line for line in err.splitlines() if line.startswith("[")]
    assert [line.partition("]")[0] for line in progress] == [f"[{i:>2}/12" for i in range(1, 13)]


def test_one_mode_has_no_ratio(bench: Bench, chunked_artifact: Path) -> None:
    out = bench(chunked_artifact, *SMALL, "--cuda_graph=off")
    assert "ratio" not in out
    assert "--cuda_graph" not in out
    assert "a token   reads 1.00 kB + 24 B per position" in out
    assert "<=" not in out
    assert "read/token" not in bench(chunked_artifact, "-p", 4, "-n", 0, "-d", 0, "-r", 1)


def test_markdown(bench: Bench, recurrent_artifact: Path) -> None:
    lines = bench(recurrent_artifact, *SMALL, "--output", "md").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert rows[0][:5] == ["test", "mode", "tokens/s", "min .. max", "ratio"]
    assert {len(row) for row in rows} == {len(rows[0])}
    assert [cell.rstrip("-:") + cell[-1] for cell in rows[1]] == ["-"] * 2 + [":"] * (len(rows[0]) - 2)
    assert [row[0] for row in rows[2::2]] == NAMES
    assert any(line.startswith("- machine: ") for line in lines)


def test_csv(bench: Bench, recurrent_artifact: Path) -> None:
    rows = list(csv.DictReader(bench(recurrent_artifact, *SMALL, "-o", "csv").splitlines()))
    assert [row["test"] for row in rows[::2]] == NAMES
    assert {row["cuda_graph"] for row in rows} == {"False", "True"}
    assert all(float(row["median_ts"]) > 0 and math.isfinite(float(row["stddev_ts"])) for row in rows)
    assert "samples_ns" not in rows[0]


def test_save(bench: Bench, refused: Bench, recurrent_artifact: Path, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    shown = bench(recurrent_artifact, *SMALL, "--save", path)
    saved = json.loads(path.read_text())
    assert {row["test"] for row in saved} == set(NAMES)
    assert all(name in shown for name in NAMES)
    assert "no such folder" in refused(recurrent_artifact, "--save", tmp_path / "missing" / "bench.json")
    # Refused before anything is measured.
    assert "that is a folder" in refused(recurrent_artifact, *SMALL, "--save", tmp_path)
    assert "/proc/bench.json: cannot be written" in refused(recurrent_artifact, *SMALL, "--save", "/proc/bench.json")


def test_left_out_is_said(capsys: pytest.CaptureFixture[str], recurrent_artifact: Path) -> None:
    assert main(["bench", str(recurrent_artifact), "-p", "3", "-n", "2", "-r", "1"]) == 0
    out, err = capsys.readouterr()
    assert f"note: left out: pp3 @ d4000 has 4000 + 3 tokens, max_seq_len is {MAX_SEQ_LEN}" in err
    assert "d4000" not in out


def test_a_failed_capture_is_said(bench: Bench, recurrent_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(HostGraphRecorder, "record", fail)
    said = "--cuda_graph: not all of decode has a graph, a capture failed: RuntimeError: injected"
    assert said in bench(recurrent_artifact, *SMALL).splitlines()
    rows = records(bench, recurrent_artifact, *SMALL)
    reasons = {(row["n_gen"] > 0, row["cuda_graph"]): row["fallback_reason"] for row in rows}
    assert reasons.pop((True, True)) == "RuntimeError: injected" and set(reasons.values()) == {None}


# --- the picture


def test_plot(bench: Bench, recurrent_artifact: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for words in (SMALL, ["-p", 0, "-n", 3, "-d", 4, "-r", 1, "--cuda_graph"]):
        path = tmp_path / "bench.png"
        bench(recurrent_artifact, *words, "--plot", path)
        data = path.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", data[16:24])
        assert width > 1000
        assert height > 500
        path.unlink()


def test_plot_is_checked_first(refused: Bench, recurrent_artifact: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "folder.png").mkdir()
    for name, message in (
        ("bench.xyz", "'.xyz' is not a picture format; use .png"),
        ("bench", "there is no suffix; use .png"),
        ("missing/bench.png", "cannot be written: No such file or directory"),
        ("folder.png", "that is a folder"),
    ):
        assert message in refused(recurrent_artifact, *SMALL, "--plot", tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


def test_plot_without_matplotlib(
    refused: Bench, recurrent_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    line = refused(recurrent_artifact, *SMALL, "--plot", tmp_path / "bench.png")
    assert line == "error: --plot needs matplotlib: pip install 'ostinato[plot]'"


# --- bad input


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-p", "12a"], "-p takes whole numbers, 0 or more, separated by commas; got '12a'"),
        (["-n", "1,,2"], "-n takes whole numbers"),
        (["-d", "-1"], "-d takes whole numbers"),
        (["-p", ""], "-p takes whole numbers"),
        (["-p", "40"], "pp40 has 40 tokens, max_seq_len is 32"),
        (["-p", "4", "-n", "4", "-d", "30"], "pp4 @ d30 has 30 + 4 tokens"),
        (["-r", "0", "-p", "4"], "-r must be 1 or more, got 0"),
        (["-p", "0", "-n", "0"], "there is nothing to measure"),
        ([], "there is nothing to measure; pp512 has 512 tokens"),
    ],
)
def test_bad_options(refused: Bench, recurrent_artifact: Path, words: list[str], message: str) -> None:
    assert message in refused(recurrent_artifact, *words)


def test_the_flag_of_run_before_the_artifact(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--cuda_graph", "artifact/"])
    assert stop.value.code == 2
    assert "takes on, off or both, got 'artifact/': write ARTIFACT first" in capsys.readouterr().err


def test_not_an_artifact(refused: Bench, tmp_path: Path) -> None:
    assert "no such folder" in refused(tmp_path / "nothing")
    assert "it has no model.pte" in refused(tmp_path)


def test_programs_that_cannot_be_measured(refused: Bench, forward_artifact: ForwardArtifact) -> None:
    silent = forward_artifact("static")
    assert "bench needs to know get_vocab_size, which the program lacks" in refused(silent, *SMALL)
    assert "this program takes tokens alone" in refused(forward_artifact("stateless"), *SMALL)


def test_help_imports_no_compiler_and_no_matplotlib() -> None:
    code = (
        "import sys, atexit; from ostinato.runner.cli import main; names = ('executorch', 'ostinato.export', 'matplotlib'); "
        "atexit.register(lambda: print([m for m in sys.modules if m.startswith(names)], file=sys.stderr)); "
        "main(['bench', '--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout.startswith("usage: ostinato bench")
    for option in ("-p N,N", "--cuda-graph", "--plot", "llama-bench"):
        assert option in done.stdout
    assert done.stderr == "[]\n"
