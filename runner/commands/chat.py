"""Talk with an artifact in the terminal: each turn prefills only what is new. /help lists the commands.

stdout gets only the answers; all else goes to stderr. Where standard input is no terminal, each of its lines is a turn.
Exit status: 0 done, 2 an error in the arguments or the files, or in a turn that was not typed, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from ostinato.delegate.errors import InputError, OptionError, OstinatoError
from ostinato.runner.text.tokenizer import Tokenizer

from .options import (
    add_graph_option,
    add_load_options,
    add_sampling_options,
    add_template_options,
    load_engine,
    sampling_params_of,
    say,
    warn_of_fallbacks,
)

if TYPE_CHECKING:
    from ostinato.runner.conversation import Conversation
    from ostinato.runner.stream import Result, Stream

# A person can end an answer, so this is longer than what `run` has.
MAX_NEW_TOKENS = 1024
# Behind the question and the answer of each of the last two turns: /undo and /retry go on from there. Keys and values alone
# need no rows.
SNAPSHOTS = 4

# Name -> (what it takes, what it does). `Chat` has a method with each name.
COMMANDS = {
    "system": ("[TEXT]", "set the system message; without TEXT: none"),
    "reset": ("", "forget the conversation, but not the system message"),
    "undo": ("", "take the last turn back"),
    "retry": ("", "answer the last question again"),
    "fork": ("", "go on from here in a second conversation"),
    "switch": ("N", "go back to conversation N"),
    "save": ("FILE", "write the conversation to FILE, and its session to FILE.session"),
    "load": ("FILE", "go on with what was saved"),
    "stats": ("", "tokens, and how fast the last answer was"),
    "help": ("", "this list"),
    "exit": ("", "end, as Ctrl-D does"),
}
KEYS = (
    "Alt-Enter, or a backslash at the end: another line. Ctrl-C: stop the answer. Up and down: what was typed before."
)

# Control characters of an answer are not for the terminal, where they could do anything.
_CONTROL = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "\N{REPLACEMENT CHARACTER}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", metavar="ARTIFACT", help="artifact folder")
    add_template_options(parser)
    add_graph_option(parser)
    add_load_options(parser)
    parser.add_argument(
        "--max-new-tokens", type=int, default=MAX_NEW_TOKENS, metavar="N", help="of each answer; default: %(default)s"
    )
    # Log-probabilities are for `run --json`.
    add_sampling_options(parser, leave_out=("logprobs", "prompt_logprobs"))
    parser.add_argument("--history", type=Path, metavar="FILE", help="keep what is typed in a file, for the next time")


def main(arguments: argparse.Namespace) -> int:
    params = sampling_params_of(arguments)
    typed = os.isatty(0) and sys.stdout.isatty()
    if arguments.history is not None:
        _check_history(arguments.history)

    def check(tokenizer: Tokenizer) -> None:
        if not tokenizer.has_template:
            raise InputError("the artifact has no chat template, which a conversation needs; `run --raw` goes without")
        system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
        tokenizer.render([*system, {"role": "user", "content": "Hello"}], arguments.chat_template_kwargs)

    with load_engine(arguments, snapshots=SNAPSHOTS, check=check) as engine:
        from ostinato.runner.conversation import Conversation

        first = Conversation(
            engine,
            chat_template_kwargs=arguments.chat_template_kwargs,
            max_new_tokens=arguments.max_new_tokens,
            sampling_params=params,
        )
        if arguments.system is not None:
            first.set_system(arguments.system)
        chat = Chat(first, typed)
        with _interrupts(chat, typed):
            for line in _typed(chat, arguments.history) if typed else _piped(chat):
                chat.take(line)
                if chat.ended:
                    break
    return 2 if chat.failed and not typed else 0


def _check_history(path: Path) -> None:
    try:
        path.open("ab").close()
    except OSError as error:
        raise OptionError(f"--history: {path} cannot be written: {error.strerror}") from error


class Chat:
    """Conversations, one of which goes on with each line.

    Args:
        first: a new conversation.
        typed: whether a person reads the answers in a terminal, and may stop them with Ctrl-C.

    Attributes:
        failed: whether a line has failed.
        ended: whether /exit was given.
    """

    def __init__(self, first: Conversation, typed: bool) -> None:
        self._all = [first]
        self._number = 0
        self._typed = typed
        self._last: Result | None = None
        self._stopped = self.failed = self.ended = False

    @property
    def prompt(self) -> str:
        """Text before the next line."""
        return f"{self._number + 1}> " if len(self._all) > 1 else "> "

    def take(self, line: str) -> None:
        """Answer a line, or do what it says. An error is one line on stderr."""
        self._stopped = False
        try:
            if not line.strip():
                return
            if line.startswith("/"):
                self._do(line)
            else:
                self._show(self._conversation.ask(line))
        except OstinatoError as error:
            self.complain(str(error))

    def stop(self) -> None:
        """End the answer after the step that is under way: one that is broken off would leave the state in the middle."""
        self._stopped = True

    def complain(self, text: str) -> None:
        self.failed = True
        say(" ".join(f"error: {text}".splitlines()))

    def system(self, text: str) -> None:
        self._conversation.set_system(text)

    def reset(self) -> None:
        self._conversation.reset()

    def undo(self) -> None:
        say(f"undone: {_short(self._conversation.undo())}")

    def retry(self) -> None:
        self._show(self._conversation.retry())

    def fork(self) -> None:
        self._all.append(self._conversation.fork())
        before, self._number = self._number, len(self._all) - 1
        say(f"this is conversation {self._number + 1} now; /switch {before + 1} goes back")

    def switch(self, number: str) -> None:
        if number not in {str(one + 1) for one in range(len(self._all))}:
            raise InputError(f"there are conversations 1 to {len(self._all)}, got {_short(number)}")
        self._number = int(number) - 1
        turns = self._conversation.turns
        say(f"this is conversation {number}, with {turns} turn{'s' * (turns != 1)}")

    def save(self, name: str) -> None:
        self._conversation.save(Path(name).expanduser())
        say(f"saved as {name}, and its session as {name}.session")

    def load(self, name: str) -> None:
        problem = self._conversation.load(Path(name).expanduser())
        turns = self._conversation.turns
        say(f"loaded {turns} turn{'s' * (turns != 1)}, {self._conversation.position} tokens in the session")
        if problem is not None:
            say(f"note: the next turn computes the session again: {problem}")

    def stats(self) -> None:
        text = f"session: {self._conversation.position} of {self._conversation.max_seq_len} tokens"
        if self._last is not None:
            text += f" | {figures(self._last)}"
        say(text)

    def help(self) -> None:
        words = {name: f"/{name} {takes}" for name, (takes, _) in COMMANDS.items()}
        width = max(map(len, words.values()))
        for name, (_, what) in COMMANDS.items():
            say(f"{words[name]:<{width}}  {what}")
        say(KEYS)

    def exit(self) -> None:
        self.ended = True

    @property
    def _conversation(self) -> Conversation:
        return self._all[self._number]

    def _do(self, line: str) -> None:
        """Run a command. Raises InputError: there is no such command, or it takes something else."""
        name, _, rest = line[1:].strip().partition(" ")
        rest = rest.strip()
        if name not in COMMANDS:
            raise InputError(f"/{_short(name)} is no command; there are {', '.join('/' + one for one in COMMANDS)}")
        takes, _ = COMMANDS[name]
        if rest and not takes:
            raise InputError(f"/{name} stands alone, got {_short(rest)}")
        if not rest and takes and not takes.startswith("["):
            raise InputError(f"/{name} takes {takes}")
        method: Callable[..., None] = getattr(self, name)
        method(*([rest] if takes else []))

    def _show(self, answer: Stream[str]) -> None:
        """Print an answer as it comes."""
        result = answer.result
        before = self._last.methods if self._last else {}
        begun = ended = False
        try:
            for text in answer:
                if self._typed:
                    text = text.translate(_CONTROL)
                    text = text if begun else text.lstrip()
                if text:
                    sys.stdout.write(text)
                    sys.stdout.flush()
                    begun, ended = True, text.endswith("\n")
                if self._stopped:
                    answer.close()
        finally:
            if (begun and not ended) or (not self._typed and result.tokens):
                sys.stdout.write("\n")
                sys.stdout.flush()
        self._last = result
        if result.finish_reason == "interrupted":
            say("stopped" if result.tokens else "stopped before the answer began")
        elif result.finish_reason != "stop":
            say(f"the answer ends here: {_LIMITS[result.finish_reason]}")
        warn_of_fallbacks(result.methods, before)


_LIMITS = {
    "length": "it has --max-new-tokens tokens",
    "max_seq_len": "the conversation is as long as the artifact allows; /undo or /reset makes room",
    "kv_tokens": "there are no more pages; /undo or /reset makes room",
}


def figures(result: Result) -> str:
    """One line about an answer."""
    return (
        f"prompt: {result.prompt_tokens} tokens, {result.reused_tokens} reused, {result.prefilled_tokens} prefilled | "
        f"first token after {result.prefill_seconds:.3f} s | "
        f"answer: {len(result.tokens)} tokens, {result.decode_tokens_per_second:.1f} tokens/s | {result.finish_reason}"
    )


def _short(text: str) -> str:
    """The text in one line of some 60 characters."""
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."


@contextmanager
def _interrupts(chat: Chat, typed: bool) -> Iterator[None]:
    """Have Ctrl-C only stop the chat's answer, where a person types; else it ends the program as always."""

    def press(signum: int, frame: FrameType | None) -> None:
        chat.stop()

    before = signal.signal(signal.SIGINT, press) if typed else None
    try:
        yield
    finally:
        if typed:
            signal.signal(signal.SIGINT, before)


def _piped(chat: Chat) -> Iterator[str]:
    """Yield the lines of standard input; one that ends with a backslash goes on with the next."""
    with open(0, "rb", closefd=False) as stream:
        begun = ""
        for data in stream:
            try:
                line = begun + data.decode().removesuffix("\n").removesuffix("\r")
            except UnicodeDecodeError as error:
                chat.complain(f"standard input is not UTF-8 text: {error.reason} at byte {error.start} of the line")
                continue
            begun = f"{line[:-1]}\n" if line.endswith("\\") else ""
            if not begun:
                yield line
        if begun:
            yield begun


def _typed(chat: Chat, history: Path | None) -> Iterator[str]:
    """Yield what is typed."""
    # Imported here: standard input that is no terminal does not need it.
    from prompt_toolkit import PromptSession
    from prompt_toolkit.buffer import Buffer
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.shortcuts import CompleteStyle

    keys = KeyBindings()

    @keys.add("enter")
    def enter(event: KeyPressEvent) -> None:
        buffer: Buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def another_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(
        history=None if history is None else FileHistory(str(history)),
        key_bindings=keys,
        multiline=True,
        completer=WordCompleter([f"/{name}" for name in COMMANDS], sentence=True),
        complete_style=CompleteStyle.READLINE_LIKE,
        complete_while_typing=False,
        prompt_continuation=lambda width, *_: " " * width,
    )
    say("/help lists the commands; Ctrl-D ends")
    while True:
        say("")
        try:
            yield session.prompt(chat.prompt)
        except KeyboardInterrupt:
            # What was typed is dropped, as in a shell.
            continue
        except EOFError:
            return
