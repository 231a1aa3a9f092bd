"""Scripts with which a shell completes the command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

SHELLS = ("bash", "zsh", "fish", "tcsh")


class PrintCompletion(argparse.Action):
    """Option that prints the script for a shell, and ends. Its parser needs the arguments of all commands.

    shtab writes the script once, so pressing a key starts no Python. It is imported only here.
    """

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        import shtab

        for action in _actions(parser):
            if action.metavar in ("ARTIFACT", "DIR"):
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
            elif str(action.metavar).startswith("FILE"):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        print(shtab.complete(parser, values))
        parser.exit()


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and of its commands. argparse has no public list of them; shtab reads the same one."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
