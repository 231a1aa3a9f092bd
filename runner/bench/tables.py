"""Text of tables and records, the same for all commands and scripts. The package tabulate makes the tables."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

Side = Literal["left", "right"]


def table(columns: Mapping[str, Side], rows: Iterable[Sequence[str]], markdown: bool = False) -> str:
    """Text of a table, without a newline at the end.

    Args:
        columns: header -> alignment of the cells below it: "right" for numbers.
        rows: the text of one cell per column.
        markdown: whether the table is for a Markdown file instead of a terminal.
    """
    # Imported here: a command that prints no table does not wait for the import.
    from tabulate import tabulate

    text = tabulate(
        [[*row] for row in rows],
        list(columns),
        tablefmt="pipe" if markdown else "simple",
        colalign=list(columns.values()),
        disable_numparse=True,
    )
    return "\n".join(line.rstrip() for line in text.splitlines())


def as_json(records: Iterable[Mapping[str, Any]]) -> str:
    """ASCII text of a list with one record per line, without a newline at the end."""
    return "[\n" + ",\n".join(json.dumps(record) for record in records) + "\n]"


def as_csv(records: Iterable[Mapping[str, Any]]) -> str:
    """One line per record below a line of names, without a newline at the end. Lists and tables in a record are left out."""
    flat = [{key: value for key, value in record.items() if not isinstance(value, (list, dict))} for record in records]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(flat[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue().rstrip("\n")
