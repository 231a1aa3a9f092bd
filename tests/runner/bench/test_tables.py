"""Tests of the function that writes all tables."""

from __future__ import annotations

from ostinato.runner.bench.tables import Side, table

COLUMNS: dict[str, Side] = {"test": "left", "tokens/s": "right", "note": "left"}
ROWS = [["pp512", "1,234.5", "left as it is"], ["", "9.50", ""], ["007", "1e3", "-"]]


def test_numbers_stand_right_and_text_left() -> None:
    assert table(COLUMNS, ROWS).splitlines() == [
        "test      tokens/s  note",
        "------  ----------  -------------",
        "pp512      1,234.5  left as it is",
        "              9.50",
        "007            1e3  -",
    ]


def test_markdown() -> None:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table(COLUMNS, ROWS, True).splitlines()]
    assert lines[0] == list(COLUMNS)
    assert [(cell[0], cell[-1]) for cell in lines[1]] == [(":", "-"), ("-", ":"), (":", "-")]
    # No cell is parsed as a number and written differently.
    assert lines[2:] == ROWS


def test_no_rows() -> None:
    assert table(COLUMNS, []).splitlines()[0].split() == list(COLUMNS)
