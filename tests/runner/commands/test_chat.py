"""`ostinato chat`: with lines from a pipe, and in a terminal, where Ctrl-C stops an answer."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ostinato.runner import Engine
from ostinato.runner.cli import main
from ostinato.runner.commands.chat import COMMANDS

from ...conftest import CAPITALS_LENGTH, Fails
from ...processes import CLI, PATIENCE
from ..conftest import standard_input

FRANCE, PERU, CHAD = (f"What is the capital of {country}?" for country in ("France", "Peru", "Chad"))
STATS = re.compile(r"session: (\d+) of (\d+) tokens \| prompt: (\d+) tokens, (\d+) reused, (\d+) prefilled")

Chatted = Callable[..., tuple[int, list[str], list[str]]]


@pytest.fixture
def chatted(capsys: pytest.CaptureFixture[str], capitals_artifact: Path) -> Chatted:
    """`chatted(lines, option, ...)`: run the command in this process; return its status, and its lines to both streams."""

    def run(lines: list[str], *words: object) -> tuple[int, list[str], list[str]]:
        capsys.readouterr()
        with standard_input("\n".join(lines).encode(errors="surrogateescape")):
            status = main(["chat", str(capitals_artifact), *map(str, words)])
        shown = capsys.readouterr()
        return status, shown.out.splitlines(), shown.err.splitlines()

    return run


def test_piped_lines_are_turns(capitals_artifact: Path) -> None:
    """In a process of its own: stdout has the answers alone, and nothing of a terminal is imported."""
    code = (
        "import sys; from ostinato.runner.cli import main; status = main(sys.argv[1:])\n"
        "print([name for name in sys.modules if name == 'prompt_toolkit'], file=sys.stderr); sys.exit(status)"
    )
    command = [sys.executable, "-c", code, "chat", str(capitals_artifact)]
    done = subprocess.run(command, input=f"{FRANCE}\r\n\n{PERU}\n", capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Paris\nLima\n", "[]\n")


def test_stats_say_what_was_prefilled(chatted: Chatted, capitals_artifact: Path) -> None:
    status, out, err = chatted([FRANCE, "/stats", PERU, "/stats", "/retry", "/stats"])
    assert (status, out) == (0, ["Paris", "Lima", "Lima"])
    found = [tuple(map(int, match.groups())) for line in err if (match := STATS.match(line))]
    (first, second, again) = found
    with Engine.load(capitals_artifact) as engine:
        turns = [{"role": "user", "content": FRANCE}]
        assert first[1:] == (CAPITALS_LENGTH, len(engine.encode_prompt(turns)), 0, len(engine.encode_prompt(turns)))
        turns += [{"role": "assistant", "content": "Paris"}, {"role": "user", "content": PERU}]
        whole = len(engine.encode_prompt(turns))
    # What the model has run in the first turn is not prefilled; the token that ended the answer is, and after /retry what
    # begins an answer.
    assert second[2:] == (whole, first[0] - 1, whole - first[0] + 1)
    assert again[:3] == second[:3] and 0 < again[4] <= 5
    assert re.search(r"\| first token after \d\.\d{3} s \| answer: \d tokens, \d+\.\d tokens/s \| stop$", err[-1])


def test_undo_reset_and_system(chatted: Chatted) -> None:
    lines = [FRANCE, PERU, "/undo", "/stats", "/system Be brief.", CHAD, "/stats", "/reset", "/stats", FRANCE, "/stats"]
    status, out, err = chatted(lines)
    assert (status, out) == (0, ["Paris", "Lima", "N'Djamena", "Paris"])
    assert err[0] == f"undone: {PERU}"
    # The system message stands before all that the session had, and stays when the rest is forgotten.
    after_system, forgotten, last = (line for line in err[2:])
    assert ", 0 reused" in after_system and ", 0 reused" in last
    assert forgotten.startswith("session: 0 of ")
    prompt = re.compile(r"prompt: (\d+) tokens")
    shorter = chatted([FRANCE, "/stats"])[2][0]
    assert int(prompt.search(last)[1]) > int(prompt.search(shorter)[1])  # type: ignore[index]
    assert chatted([FRANCE, "/stats"], "--system", "Be brief.")[2][0].split(" | ")[1] == last.split(" | ")[1]


def test_fork_and_switch(chatted: Chatted) -> None:
    lines = [FRANCE, "/fork", PERU, "/stats", "/switch 1", CHAD, "/stats", "/switch 2", "/switch 2", "/retry", "/undo"]
    status, out, err = chatted([*lines, "/switch 3", "/switch x"])
    assert (status, out) == (2, ["Paris", "Lima", "N'Djamena", "Lima"])
    assert err[0] == "this is conversation 2 now; /switch 1 goes back"
    assert err[2] == "this is conversation 1, with 1 turn"
    assert all(", 0 reused" not in line for line in err if "reused" in line)
    assert err[4:6] == ["this is conversation 2, with 2 turns"] * 2
    assert err[6] == f"undone: {PERU}"
    assert err[7:] == [f"error: there are conversations 1 to 2, got {name}" for name in ("3", "x")]


def test_save_and_load_in_another_process(chatted: Chatted, capitals_artifact: Path, tmp_path: Path) -> None:
    file = tmp_path / "a talk.json"
    status, _, err = chatted(["/system Be brief.", FRANCE, f"/save {file}", PERU, "/stats"])
    assert status == 0 and err[0] == f"saved as {file}, and its session as {file}.session"
    lines = f"/load {file}\n{PERU}\n/stats\n"
    command = [*CLI, "chat", str(capitals_artifact)]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (0, "Lima\n"), done.stderr
    loaded, stats = done.stderr.splitlines()
    assert re.fullmatch(r"loaded 1 turn, \d+ tokens in the session", loaded)
    assert STATS.match(stats)[0] == STATS.match(err[-1])[0]  # type: ignore[index]
    (tmp_path / "a talk.json.session").write_bytes(b"")
    status, out, err = chatted([f"/load {file}", PERU])
    assert (status, out) == (0, ["Lima"])
    assert err[1].startswith("note: the next turn computes the session again: ")


def test_errors_are_a_line_and_the_conversation_goes_on(chatted: Chatted, tmp_path: Path) -> None:
    lines = [FRANCE, "/undone", "/undo it", "/switch", f"/load {tmp_path}", FRANCE * 40, "caf\udce9", PERU]
    status, out, err = chatted(lines)
    assert (status, out) == (2, ["Paris", "Lima"])
    assert err[0] == f"error: /undone is no command; there are {', '.join('/' + name for name in COMMANDS)}"
    assert err[1:4] == [
        "error: /undo stands alone, got it",
        "error: /switch takes N",
        f"error: {tmp_path} cannot be read: Is a directory",
    ]
    assert err[4].startswith("error: the conversation has ") and f"max_seq_len is {CAPITALS_LENGTH}" in err[4]
    assert err[5:] == ["error: standard input is not UTF-8 text: invalid continuation byte at byte 3 of the line"]
    status, out, err = chatted([FRANCE * 20, FRANCE], "--kv-tokens", 64)
    assert (status, out) == (2, ["Paris"])
    (line,) = err
    assert line.startswith("error: the prompt has ") and "more kv_tokens" in line and "\n" not in line


def test_answers_that_end_early_say_why(chatted: Chatted) -> None:
    status, out, err = chatted([FRANCE], "--max-new-tokens", 1)
    assert (status, len(out)) == (0, 1) and err == ["the answer ends here: it has --max-new-tokens tokens"]
    (line,) = chatted([FRANCE], "--min-tokens", 9999)[2]
    assert line.startswith("the answer ends here: the conversation is as long as the artifact allows")
    (line,) = chatted([FRANCE], "--min-tokens", 9999, "--kv-tokens", 64)[2]
    assert line.startswith("the answer ends here: there are no more pages")


def test_help_exit_and_lines_that_go_on(chatted: Chatted) -> None:
    status, out, err = chatted(["/help", "What is the capital\\", "of France?", "/stats", "/exit", PERU])
    assert status == 0 and len(out) == 1
    assert [line.split()[0] for line in err[: len(COMMANDS)]] == [f"/{name}" for name in COMMANDS]
    assert "Ctrl-C" in err[len(COMMANDS)]
    one_line = chatted(["What is the capital of France?", "/stats"])[2][0]
    # The line break is a token of its own.
    assert STATS.match(err[-1])[3] != STATS.match(one_line)[3]  # type: ignore[index]
    assert chatted([]) == (0, [], [])


def test_options(chatted: Chatted, fails: Fails, capitals_artifact: Path, tmp_path: Path) -> None:
    hot = ["--temperature", 3.0, "--min-tokens", 20, "--max-new-tokens", 20]
    assert chatted([FRANCE], *hot, "--seed", 1)[1] == chatted([FRANCE], *hot, "--seed", 1)[1]
    assert chatted([FRANCE], *hot, "--seed", 1)[1] != chatted([FRANCE], *hot, "--seed", 2)[1]
    status, out, _ = chatted([FRANCE, PERU], "--cuda_graph", "--min-tokens", 9)
    assert status == 0 and out[0].startswith("Paris")
    for words, message in (
        (["--max-new-tokens", 0], "max_new_tokens must be 1 or more, got 0"),
        (["--top-p", 2], "top_p must be more than 0 and at most 1"),
        (["--history", "/"], "--history: / cannot be written: Is a directory"),
    ):
        assert message in fails("chat", capitals_artifact, *words)
    plain = Path(shutil.copytree(capitals_artifact, tmp_path / "plain"))
    for file in (plain / "tokenizer_config.json", plain / "chat_template.jinja"):
        file.unlink(missing_ok=True)
    assert "has no chat template, which a conversation needs" in fails("chat", plain)


# --- in a terminal

# Answers are slow enough to be stopped. SIGINT has the default handler, as an interactive shell starts commands.
SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from ostinato.runner.cli import main
from ostinato.runner.sessions.sessions import Sessions
step = Sessions.step
def slow(*arguments, **named):
    time.sleep(0.05)
    return step(*arguments, **named)
Sessions.step = slow
sys.exit(main())
"""
UP, ALT_ENTER, CTRL_C, CTRL_D = "\x1b[A", "\x1b\r", "\x03", "\x04"


@dataclass
class Terminal:
    """A `chat` with a terminal of its own."""

    process: subprocess.Popen[bytes]
    master: int
    shown: str = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, pattern: str) -> str:
        """Read until the pattern is shown; return all up to it, from the last time on, without escape codes."""
        end = time.monotonic() + PATIENCE
        while not (found := re.search(pattern, self.shown, re.DOTALL)):
            assert time.monotonic() < end, self.shown
            if select.select([self.master], [], [], 1)[0]:
                data = os.read(self.master, 65536).decode(errors="replace")
                self.shown = re.sub(r"\x1b(\[[?0-9;]*[a-zA-Z]|[=>])", "", self.shown + data)
        text, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return text

    def end(self) -> int:
        return self.process.wait(PATIENCE)


@pytest.fixture
def terminal(capitals_artifact: Path) -> Iterator[Callable[..., Terminal]]:
    """`terminal(option, ...)`: start the command, and wait until it asks."""
    started: list[Terminal] = []

    def start(*words: object) -> Terminal:
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 40, 200, 0, 0))
        # It asks the terminal where the cursor is, and nothing here answers.
        environment = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
        process = subprocess.Popen(
            [sys.executable, "-c", SLOW, "chat", str(capitals_artifact), *map(str, words)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        started.append(Terminal(process, master))
        started[-1].wait_for("/help lists the commands; Ctrl-D ends")
        started[-1].wait_for(">")
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()
        os.close(one.master)


def test_ctrl_c_stops_the_answer_and_not_the_program(terminal: Callable[..., Terminal]) -> None:
    chat = terminal("--min-tokens", 200)
    chat.type(f"{FRANCE}\r")
    chat.wait_for("Paris")
    # Whoever presses it several times has not left.
    for _ in range(5):
        chat.type(CTRL_C)
    chat.wait_for("stopped\r\n")
    chat.wait_for(">")
    chat.type("/stats\r")
    stopped = re.search(r"answer: (\d+) tokens", chat.wait_for(r"\| interrupted"))
    assert stopped is not None and int(stopped[1]) < 200
    # At the prompt it drops what was typed.
    chat.wait_for(">")
    chat.type(f"nothing{CTRL_C}")
    chat.wait_for("nothing.*>")
    chat.type(f"{PERU}\r")
    chat.wait_for("Lima")
    chat.process.send_signal(signal.SIGINT)
    chat.wait_for("stopped\r\n")
    chat.wait_for(">")
    chat.type(CTRL_D)
    assert chat.end() == 0


def test_lines_history_and_exit(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    file = tmp_path / "history"
    chat = terminal("--history", file)
    # Two ways to another line; then both again with the arrow.
    for _ in range(2):
        chat.type(f"one{ALT_ENTER}two\\\rthree\r" if not file.read_text() else f"{UP}{UP}{UP}\r")
        chat.wait_for("three")
        chat.wait_for("\n.*>")
    chat.type("/undo\r")
    chat.wait_for("undone: one two three")
    chat.wait_for(">")
    chat.type("/fork\r")
    chat.wait_for("this is conversation 2 now")
    chat.wait_for("2>")
    chat.type("/exit\r")
    assert chat.end() == 0
    assert [line for line in file.read_text().splitlines() if line.startswith("+")][:3] == ["+one", "+two", "+three"]


def test_control_characters_stay_out_of_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    from ostinato.runner import Result, Stream
    from ostinato.runner.commands.chat import Chat

    class Said:
        def ask(self, text: str) -> Stream[str]:
            return Stream((piece for piece in ("\n", " \x1b]52;c;x\x07", "a\tb\n")), Result(finish_reason="stop"))

    for typed, expected in ((True, "\ufffd]52;c;x\ufffda\tb\n"), (False, "\n \x1b]52;c;x\x07a\tb\n")):
        Chat(Said(), typed).take("hello")  # type: ignore[arg-type]
        assert capsys.readouterr().out == expected
