"""Tables and records as all commands and scripts print them; tabulate does the work of tables."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

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


def as_json(records: Iterable[Mapping[str, Any]]) -> str:
    """A list with a record on each line, without a newline at its end."""
    return "[\n" + ",\n".join(json.dumps(record, ensure_ascii=False) for record in records) + "\n]"


def as_csv(records: Iterable[Mapping[str, Any]]) -> str:
    """A line for each record, under one of names, without a newline at its end; what is a list or a table is left out."""
    flat = [{key: value for key, value in record.items() if not isinstance(value, (list, dict))} for record in records]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(flat[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue().rstrip("\n")
