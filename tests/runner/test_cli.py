"""The commands as a shell runs them: what goes to stdout, what to stderr, and how they end."""

from __future__ import annotations

import argparse
import fcntl
import io
import json
import os
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, make_dataclass
from pathlib import Path

import pytest

from ostinato.delegate import load_program
from ostinato.runner import SamplingParams, __version__
from ostinato.runner.cli import main
from ostinato.runner.commands import options as command_options
from ostinato.runner.commands import run as command_run

from ..processes import CLI, INTERRUPTIBLE_CLI, PATIENCE
from .conftest import run_here

# On Linux. `fcntl` has this name only there.
F_SETPIPE_SZ = 1031
QUESTION = "What is the capital of France?"


def ostinato(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLI, *map(str, words)], capture_output=True, text=True, timeout=PATIENCE)


# --- run


def test_stdout_is_the_answer_alone(capitals_artifact: Path) -> None:
    done = ostinato("run", capitals_artifact, "--prompt", QUESTION)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Paris\n"
    (line,) = done.stderr.splitlines()
    assert line.startswith("prompt: ")
    assert "tokens/s | decode: " in line
    assert line.endswith(" run | stop")


@pytest.mark.parametrize("option", ["--cuda_graph", "--cuda-graph"])
def test_cuda_graph(capitals_artifact: Path, option: str) -> None:
    done = ostinato("run", capitals_artifact, "--prompt", QUESTION, option, "--ignore-eos", "--max-new-tokens", "9")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Paris")
    with load_program(capitals_artifact) as program:
        on_cpu = program.device.type == "cpu"
    lines = done.stderr.splitlines()
    assert len(lines) == (2 if on_cpu else 1)
    assert not on_cpu or "no graph for --cuda_graph to capture" in lines[0]
    assert lines[-1].endswith("steps: 3 warmup, 1 capture, 4 replay | length")


def test_json(capitals_artifact: Path) -> None:
    done = ostinato("run", capitals_artifact, "--prompt", QUESTION, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert {
        "text",
        "tokens",
        "prompt_tokens",
        "prefill_seconds",
        "decode_seconds",
        "decode_tokens_per_second",
        "finish_reason",
        "methods",
        "constants",
    } <= set(result)
    assert (result["text"], result["finish_reason"]) == ("Paris", "stop")
    assert result["methods"]["decode_sample"]["runs"] == len(result["tokens"]) - 1
    assert set(result["methods"]["decode_sample"]) == {
        "next_phase",
        "runs",
        "warmups",
        "captures",
        "replays",
        "fallbacks",
        "fallback_reason",
        "plans",
        "dropped",
    }
    assert result["constants"]["shared"] == result["constants"]["count"] > 0


def test_raw(capsys: pytest.CaptureFixture[str], capitals_artifact: Path) -> None:
    text = run_here(capsys, "run", capitals_artifact, "--raw", "--prompt", "The capital of France is")
    with_template = run_here(capsys, "run", capitals_artifact, "--json", "--prompt", "The capital of France is")
    raw = run_here(capsys, "run", capitals_artifact, "--json", "--raw", "--prompt", "The capital of France is")
    assert json.loads(raw)["text"] == text.removesuffix("\n")
    assert json.loads(raw)["prompt_tokens"] < json.loads(with_template)["prompt_tokens"]


def test_sampling_options(capsys: pytest.CaptureFixture[str], capitals_artifact: Path) -> None:
    words = ["run", capitals_artifact, "--prompt", QUESTION, "--ignore-eos", "--max-new-tokens", 20]
    hot = [*words, "--temperature", 3.0, "--top-k", 50, "--top-p", 0.99]
    assert run_here(capsys, *hot, "--seed", 1) == run_here(capsys, *hot, "--seed", 1)
    assert run_here(capsys, *hot, "--seed", 1) != run_here(capsys, *hot, "--seed", 2)
    assert run_here(capsys, *words, "--temperature", 3.0, "--top-k", 1) == run_here(capsys, *words)


def test_room_that_is_asked_for(capsys: pytest.CaptureFixture[str], capitals_artifact: Path) -> None:
    words = ["run", capitals_artifact, "--prompt", QUESTION]
    whole = run_here(capsys, *words, "--ignore-eos")
    assert run_here(capsys, *words, "--ignore-eos", "--sessions", 3) == whole
    assert run_here(capsys, *words, "--kv-tokens", 64, "--sessions", 1) == "Paris\n"
    # When the pages run out, the answer's beginning and the reason are printed.
    assert main([*map(str, words), "--kv-tokens", "64", "--ignore-eos"]) == 0
    ended = capsys.readouterr()
    assert ended.out.endswith("\n") and whole.startswith(ended.out[:-1]) and len(ended.out) > len("Paris\n")
    assert "| kv_tokens" in ended.err and "note: there are no more pages" in ended.err
    # There is no answer, so there is no line to end.
    assert main(["run", str(capitals_artifact), "--prompt", QUESTION * 8, "--kv-tokens", "64"]) == 2
    ended = capsys.readouterr()
    assert ended.out == "" and "needs 2 pages of 64 positions, there are 1" in ended.err
    for option, value, message in (
        ("--sessions", "0", "sessions must be an integer of 1 or more, got 0"),
        ("--kv-tokens", "-1", "kv_tokens must be an integer of 1 or more, got -1"),
        ("--gpu-memory-fraction", "1.5", "gpu_memory_fraction must be more than 0 and at most 1, got 1.5"),
        ("--gpu-memory-fraction", "0.5", "gpu_memory_fraction is for programs on a GPU; on a CPU give sessions"),
    ):
        assert main([*map(str, words), option, value]) == 2
        assert message in capsys.readouterr().err


def test_each_field_of_sampling_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def options() -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser()
        command_run.add_arguments(parser)
        return parser

    given = options().parse_args(["artifact", "--prompt", "x"])
    assert {item.name: getattr(given, item.name) for item in fields(SamplingParams)} == asdict(SamplingParams())
    words = ["--temperature", "0.5", "--top-k", "3", "--top-p", "0.9", "--seed", "7"]
    given = options().parse_args(["artifact", "--prompt", "x", *words])
    found = [getattr(given, name) for name in ("temperature", "top_k", "top_p", "seed")]
    assert found == [0.5, 3, 0.9, 7]
    assert [type(value) for value in found] == [float, int, float, int]
    words = ["--logit-bias", '{"5": -100}', "--stop-token-ids", "3,4", "--logprobs", "2"]
    given = options().parse_args(["artifact", "--prompt", "x", *words])
    assert (given.logit_bias, given.stop_token_ids, given.logprobs) == ({"5": -100}, [3, 4], 2)
    metadata = {"metavar": "P", "help": "keep tokens this close to the best"}
    more = make_dataclass(
        "More", [("typical_p", float, field(default=0.25, metadata=metadata))], bases=(SamplingParams,), frozen=True
    )
    monkeypatch.setattr(command_options, "SamplingParams", more)
    assert options().parse_args(["artifact", "--prompt", "x"]).typical_p == 0.25
    assert options().parse_args(["artifact", "--prompt", "x", "--typical-p", "0.5"]).typical_p == 0.5
    assert "--typical-p P" in options().format_help() and metadata["help"] in options().format_help()


def test_failed_capture_is_told(
    capsys: pytest.CaptureFixture[str], capitals_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load_program(capitals_artifact) as program:
        if program.device.type != "cpu":
            pytest.skip("the host's recorder is what fails here")
    from ostinato.delegate.graphs.recorders import HostGraphRecorder

    def fail(*_: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(HostGraphRecorder, "record", fail)
    words = [
        "run",
        str(capitals_artifact),
        "--prompt",
        QUESTION,
        "--cuda_graph",
        "--ignore-eos",
        "--max-new-tokens",
        "9",
    ]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Paris")
    assert "warning: decode_sample: a capture failed, what it was for has no graph: RuntimeError: injected" in err


@dataclass
class Blocked:
    """A `run` that waits for its reader, in the middle of an answer."""

    process: subprocess.Popen[bytes]
    reader: int

    def rest(self) -> bytes:
        """All that is left to read from its stdout."""
        data = b""
        while piece := os.read(self.reader, 65536):
            data += piece
        return data.lstrip(b".")

    def finish(self) -> str:
        error = self.process.communicate(timeout=PATIENCE)[1].decode()
        assert "Traceback" not in error
        assert "Exception" not in error
        return error


@pytest.fixture
def blocked(capitals_artifact: Path) -> Iterator[Blocked]:
    """A `run` whose pipe is almost full, so that the answer cannot end before the test acts."""
    reader, writer = os.pipe()
    size = fcntl.fcntl(writer, F_SETPIPE_SZ, 4096)
    os.write(writer, b"." * (size - 40))
    words = ["run", str(capitals_artifact), "--prompt", QUESTION, "--ignore-eos"]
    command = [*INTERRUPTIBLE_CLI, *words]
    process = subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE, start_new_session=True)
    os.close(writer)
    # The answer's first word is in the pipe; the rest has no room.
    while struct.unpack("i", fcntl.ioctl(reader, termios.FIONREAD, b"\0" * 4))[0] < size - 40 + len("Paris"):
        time.sleep(0.05)
        assert process.poll() is None
    yield Blocked(process, reader)
    process.kill()
    process.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="needs F_SETPIPE_SZ")
def test_interrupt(blocked: Blocked) -> None:
    os.killpg(blocked.process.pid, signal.SIGINT)
    text = blocked.rest()
    error = blocked.finish()
    assert blocked.process.returncode == 130
    assert text.startswith(b"Paris")
    assert text.endswith(b"\n")
    assert error.rstrip().endswith("| interrupted")


@pytest.mark.skipif(sys.platform != "linux", reason="needs F_SETPIPE_SZ")
def test_reader_goes_away(blocked: Blocked) -> None:
    """The command ends quietly: `ostinato run ... | head -c 1`."""
    os.close(blocked.reader)
    assert blocked.finish() == ""
    assert blocked.process.returncode == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(
    "words",
    [
        ["inspect"],
        ["inspect", "--json"],
        ["run", "--prompt", QUESTION],
        ["bench", "-p2", "-n2", "-d0", "-r1"],
    ],
    ids=" ".join,
)
def test_full_disk(capitals_artifact: Path, words: list[str]) -> None:
    command = [words[0], str(capitals_artifact), *words[1:]]
    with open("/dev/full", "w") as full:
        done = subprocess.run([*CLI, *command], stdout=full, stderr=subprocess.PIPE, text=True, timeout=PATIENCE)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "error: the output: No space left on device"
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_a_stderr_that_is_full(capitals_artifact: Path) -> None:
    """The status says what stderr cannot; an answer is one without its figures too. Without PYTHONUNBUFFERED Python keeps
    what it could not write, and tries again at exit."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    for artifact, expected in ((str(capitals_artifact), (0, "Paris\n")), ("nothing", (2, ""))):
        with open("/dev/full", "w") as full:
            command = [*CLI, "run", artifact, "--prompt", QUESTION]
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=full, text=True, timeout=PATIENCE, env=environment
            )
        assert (done.returncode, done.stdout) == expected


def test_no_stdout(capitals_artifact: Path) -> None:
    command = f"{sys.executable} -m ostinato.runner.cli run {capitals_artifact} --prompt '{QUESTION}' >&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0 and done.stderr.endswith("| stop\n")


def test_a_terminal_that_takes_ascii_only(monkeypatch: pytest.MonkeyPatch, capitals_artifact: Path) -> None:
    """As with PYTHONIOENCODING=ascii: other characters are shown as Python writes them, and JSON is ASCII anyway."""
    words = ["run", str(capitals_artifact / "model.pte"), "--prompt", "What is the capital of São Tomé and Príncipe?"]
    for more, written in (([], "S\\xe3o Tom\\xe9\n"), (["--json"], r"S\u00e3o Tom\u00e9")):
        stdout = io.TextIOWrapper(io.BytesIO(), "ascii")
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main([*words, *more]) == 0
        assert written in stdout.buffer.getvalue().decode()  # type: ignore[attr-defined]


# Imports that catch Ctrl-C and go on, as some of torch's do.
SWALLOWING = """
import importlib, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from ostinato.runner.cli import main
import_module = importlib.import_module
def swallowing(name):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        pass
    return import_module(name)
importlib.import_module = swallowing
sys.exit(main())
"""


@pytest.mark.parametrize("command", ["run", "chat", "export", "recompile", "bench", "inspect"])
def test_interrupt_during_imports(command: str) -> None:
    done = subprocess.run([sys.executable, "-c", SWALLOWING, command], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


# --- the command itself


@pytest.mark.parametrize(
    "words", [["--help"], *([name, "--help"] for name in ("run", "chat", "inspect", "export", "serve"))]
)
def test_help(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: ostinato")
    for text in {
        "run": ["--prompt", "--cuda-graph", "--seed", "make room for (default: 1)"],
        "export": ["--max-seq-len"],
        "inspect": ["the digest that run, chat, bench and serve take"],
        "serve": ["make room for (default: 8, with a GPU 64)"],
    }.get(words[0], []):
        assert text in " ".join(out.split())


def test_without_words_it_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown, error = capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["--help"])
    assert (capsys.readouterr().out, error) == (shown, "")


def test_version_and_the_package_as_a_command() -> None:
    command = [sys.executable, "-m", "ostinato.runner"]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"ostinato {__version__}\n", "")
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout.startswith("usage: ostinato ")


def test_help_and_version_import_nothing_heavy() -> None:
    code = (
        "import sys, contextlib\nfrom ostinato.runner.cli import main\n"
        "for word in ('--help', '--version'):\n    with contextlib.suppress(SystemExit):\n        main([word])\n"
        "print([name for name in ('torch', 'numpy', 'shtab', 'jinja2', 'tokenizers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_run_imports_no_compiler(recurrent_artifact: Path) -> None:
    code = (
        "import sys; from ostinato.runner.cli import main; main(sys.argv[1:]); "
        "print([m for m in sys.modules if m.startswith(('executorch.exir', 'ostinato.export'))], file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, "inspect", str(recurrent_artifact)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.stderr == "[]\n"
