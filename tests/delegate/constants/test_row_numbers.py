"""Numbers of rows that the host writes: only what differs, and never less."""

from __future__ import annotations

import random
import struct

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ostinato.delegate.constants.row_numbers import RowNumbers
from ostinato.delegate.constants.rows import StateRows, allocate_rows

ROWS = 4
DTYPES = {"heat": torch.float32, "count": torch.int64, "seed": torch.int64, "share": torch.float32}
FIRST = {"heat": 0.7, "count": 40, "seed": -(2**63), "share": 0.1}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def buffers(request: pytest.FixtureRequest) -> dict[str, Tensor]:
    device = torch.device("cuda:0" if request.param == "cuda" else "cpu")
    return allocate_rows({name: ((ROWS,), dtype, device) for name, dtype in DTYPES.items()})


class Writes(TorchDispatchMode):
    """Notes the operators that write, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = function.overloadpacket.__name__
        if name in ("fill_", "copy_", "_foreach_copy_"):
            self.found.append(name)
        return function(*args, **(kwargs or {}))


def row_of(buffers: dict[str, Tensor], row: int) -> dict[str, float]:
    return {name: buffer[row].item() for name, buffer in buffers.items()}


def expected(values: dict[str, float]) -> dict[str, float]:
    return {name: torch.tensor(value, dtype=DTYPES[name]).item() for name, value in values.items()}


def test_only_what_differs_is_written(buffers: dict[str, Tensor]) -> None:
    numbers = RowNumbers(buffers)
    # On the CPU, numbers lie already where they are copied from.
    several = ["_foreach_copy_"] if buffers["heat"].is_cpu else ["copy_", "_foreach_copy_"]
    now: dict[str, float] = {}
    for values, writes in (
        (FIRST, several),
        (FIRST, []),
        ({**FIRST, "seed": 5}, ["fill_"]),
        ({"heat": 0.7}, []),
        ({**FIRST, "count": 2**62}, several),
        ({**FIRST, "count": 2**62}, []),
    ):
        with Writes() as counted:
            numbers.write(2, values)
        assert counted.found == writes
        now |= values
        assert row_of(buffers, 2) == expected(now)
    assert row_of(buffers, 1) == dict.fromkeys(DTYPES, 0)
    with Writes() as counted:
        numbers.overwrite(2, {"count": 7, "seed": 8})
        numbers.overwrite(2, {"count": 7, "seed": 8})
    assert counted.found == 2 * several
    assert row_of(buffers, 2) == expected({**FIRST, "count": 7, "seed": 8})


def test_what_all_rows_have_is_written_to_none(buffers: dict[str, Tensor]) -> None:
    numbers = RowNumbers(buffers)
    numbers.write(2, FIRST)
    numbers.write_all({"heat": 0.5, "count": 9})
    for row, rest in ((1, {"seed": 0, "share": 0}), (2, FIRST)):
        with Writes() as counted:
            numbers.write(row, {"heat": 0.5, "count": 9})
            numbers.copied(row, 3)
            numbers.write(3, {"heat": 0.5, "count": 9})
        assert not counted.found
        assert row_of(buffers, row) == expected({**rest, "heat": 0.5, "count": 9})


def test_what_others_write_is_written_again(buffers: dict[str, Tensor]) -> None:
    numbers, rows, pick = RowNumbers(buffers), StateRows(buffers), random.Random(0)
    for _ in range(300):
        row, other = pick.randrange(ROWS), pick.randrange(ROWS)
        values = {name: pick.choice([FIRST[name], 1]) for name in DTYPES}
        match pick.randrange(7):
            case 0:
                buffers["heat"].zero_()
            case 1:
                buffers["seed"][row] = 3
            case 2:
                rows.copy(row, other)
                numbers.copied(row, other)
            case 3:
                # Past the buffers, as a transfer from the host.
                rows.pieces(1)[0].buffers[:, row] = 0
                numbers.forget(row)
            case 4:
                numbers.write_all({"heat": values["heat"], "count": values["count"]})
                assert [one.tolist() for one in (buffers["heat"], buffers["count"])] == [
                    [expected(values)[name]] * ROWS for name in ("heat", "count")
                ]
            case _:
                numbers.write(row, values)
                assert row_of(buffers, row) == expected(values)


def test_a_row_that_was_written_in_part_is_not_known(buffers: dict[str, Tensor]) -> None:
    numbers = RowNumbers(buffers)
    numbers.write(0, FIRST)
    with pytest.raises(struct.error, match=r"argument out of range|int too large|format requires"):
        numbers.write(0, {**FIRST, "heat": 1.0, "count": 2**70})
    with Writes() as counted:
        numbers.write(0, FIRST)
    assert counted.found
    assert row_of(buffers, 0) == expected(FIRST)
