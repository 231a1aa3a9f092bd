"""Tables as all commands and scripts print them; tabulate does the work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

Side = Literal["left", "right"]


def table(columns: Mapping[str, Side], rows: Iterable[Sequence[str]], markdown: bool = False) -> str:
    """A table without a newline at its end.

    Args:
        columns: header -> where its cells stand: "right" for numbers.
        rows: one cell per column, as it is to be read.
        markdown: for a Markdown file instead of a terminal.
    """
    # Imported here: what prints no table does not wait for it.
    from tabulate import tabulate

    text = tabulate(
        [[*row] for row in rows],
        list(columns),
        tablefmt="pipe" if markdown else "simple",
        colalign=list(columns.values()),
        disable_numparse=True,
    )
    return "\n".join(line.rstrip() for line in text.splitlines())
