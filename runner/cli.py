"""`ostinato`: export, recompile, run, chat, serve, bench, eval, inspect."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from contextlib import suppress
from typing import Any, NoReturn, TextIO

from .completion import SHELLS, PrintCompletion
from .imports import long_imports

# Name -> (module, what it does). Each module has `add_arguments(parser)` and `main(arguments) -> exit status`. Only the
# module of the chosen command is imported. So `run` imports no compiler, and this package imports nothing of export/.
COMMANDS = {
    "export": ("ostinato.export.commands.export", "a Hugging Face checkpoint -> an artifact (needs a C++ compiler)"),
    "recompile": ("ostinato.export.commands.recompile", "an artifact -> the same, compiled for this machine"),
    "run": ("ostinato.runner.commands.run", "answer a prompt with an artifact"),
    "chat": ("ostinato.runner.commands.chat", "talk with an artifact in the terminal"),
    "serve": ("ostinato.runner.commands.serve", "serve an artifact over HTTP, with OpenAI's interface"),
    "bench": ("ostinato.runner.commands.bench", "measure how fast an artifact runs"),
    "eval": ("ostinato.runner.commands.eval", "measure an artifact's perplexity over a text"),
    "inspect": ("ostinato.runner.commands.inspect", "show what an artifact holds"),
}


class _PrintVersion(argparse.Action):
    """Option that prints the version and ends. It is looked up only here: that takes 50 ms."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        from ostinato.delegate import __version__

        print(f"{parser.prog} {__version__}")
        parser.exit()


def main(argv: list[str] | None = None) -> int:
    """Run one command. Exit status: 0 done, 1 a part has an error (see `run`), 2 an error in the arguments or the files, 130
    interrupted."""
    _prepare_streams()
    try:
        return _status(argv)
    finally:
        _drop_rest(sys.stderr)


def _status(argv: list[str] | None) -> int:
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        with suppress(OSError):
            print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The program that reads our output has ended (`ostinato run ... | head`).
        _drop_rest(sys.stdout)
        return 0
    except MemoryError:
        _complain("the host has not enough memory for this")
        return 2
    except OSError as error:
        # An error without a file's name comes from stdout, which may be on a full disk.
        _complain(f"{error.filename or 'the output'}: {error.strerror or error}")
        _drop_rest(sys.stdout)
        return 2


def _run(argv: list[str] | None) -> int:
    words = sys.argv[1:] if argv is None else argv
    chosen = next((word for word in words if word in COMMANDS), None)
    completing = bool(words) and words[0].startswith("--print-completion")
    parser = _Parser(
        prog="ostinato",
        description="Run language models exported ahead of time, from Python, at the speed of the memory.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print the version and exit")
    parser.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=SHELLS,
        metavar="SHELL",
        help=f"print a script that completes commands, options and files in {', '.join(SHELLS)}, and exit",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    module = None
    for name, (where, summary) in COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )
        if completing or name == chosen:
            with long_imports():
                module = importlib.import_module(where)
            command.description = module.__doc__
            module.add_arguments(command)
    if not words:
        parser.print_help()
        return 0
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        commands.choices[arguments.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    for option, value in vars(arguments).items():
        # argparse gives an empty list for `--option=--`.
        if value == [] or (isinstance(value, list) and [] in value):
            parser.error(f"argument --{option.replace('_', '-')}: expected one argument")
    assert module is not None
    from ostinato.delegate.errors import OstinatoError

    try:
        return module.main(arguments)
    except OstinatoError as error:
        _complain(str(error))
        return 2


class _Parser(argparse.ArgumentParser):
    """Ends with one line, as all errors do."""

    def error(self, message: str) -> NoReturn:
        _complain(f"{message} (see {self.prog} --help)")
        sys.exit(2)


def _complain(text: str) -> None:
    """Print an error as one line: a name in it may hold line breaks. If stderr takes nothing, the status must say it."""
    with suppress(OSError):
        print("error:", " ".join(text.splitlines()), file=sys.stderr)


def _prepare_streams() -> None:
    """Make both streams take every text: where a descriptor is closed, Python gives None."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _drop_rest(stream: TextIO) -> None:
    """Drop what a stream does not take. Without this, Python complains at exit of stdout, and ends with 120 for stderr."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    sys.exit(main())
