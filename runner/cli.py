"""`ostinato`: export, run, bench, inspect."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import Any

from .completion import SHELLS, PrintCompletion

# Name -> (module, what it does). Each module has `add_arguments(parser)` and `main(arguments) -> exit status`. Only the
# module of the chosen command is imported. So `run` imports no compiler, and this package imports nothing of export/.
COMMANDS = {
    "export": ("ostinato.export.command", "a Hugging Face checkpoint -> an artifact (needs a C++ compiler)"),
    "run": ("ostinato.runner.commands.run", "answer a prompt with an artifact"),
    "bench": ("ostinato.runner.commands.bench", "measure how fast an artifact runs"),
    "inspect": ("ostinato.runner.commands.inspect", "show what an artifact holds"),
}


class _PrintVersion(argparse.Action):
    """Option that prints the version and ends. It is looked up only here: that takes 50 ms."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        from ostinato.delegate import __version__

        print(f"{parser.prog} {__version__}")
        parser.exit()


def main(argv: list[str] | None = None) -> int:
    """Run one command. Exit status: 0 done, 2 an error in the arguments or the files, 130 interrupted."""
    words = sys.argv[1:] if argv is None else argv
    chosen = next((word for word in words if word in COMMANDS), None)
    completing = bool(words) and words[0].startswith("--print-completion")
    parser = argparse.ArgumentParser(
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
            module = importlib.import_module(where)
            command.description = module.__doc__
            module.add_arguments(command)
    if not words:
        parser.print_help()
        return 0
    arguments = parser.parse_args(words)
    assert module is not None
    from ostinato.delegate.errors import OstinatoError

    try:
        return module.main(arguments)
    except OstinatoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The program that reads our output has ended (`ostinato run ... | head`). Without this, Python complains at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
