"""Rows of state: buffers side by side, whose rows are copied together, beside copies of each buffer's row by itself."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ostinato.delegate import Growth, Program, RowTransfers, load_program
from ostinato.delegate.code.used_streams import UsedStreams
from ostinato.delegate.constants.rows import StateRows, allocate_rows
from ostinato.delegate.torch_internals import ALIGNMENT

ROWS = 5
# Three sizes of rows, one of them in two dtypes; a row of 3 bytes, and rows of nothing.
SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "layers.0.recurrent": ((4, 64, 32), torch.float32),
    "layers.10.recurrent": ((4, 64, 32), torch.float32),
    "layers.2.recurrent": ((4, 64, 32), torch.float32),
    "layers.0.conv": ((3, 7), torch.bfloat16),
    "layers.2.conv": ((3, 7), torch.bfloat16),
    "table": ((9,), torch.int32),
    "position": ((), torch.int64),
    "token": ((), torch.int64),
    "pair": ((2,), torch.float32),
    "odd": ((3,), torch.uint8),
    "nothing": ((0, 4), torch.float32),
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device("cuda:0" if request.param == "cuda" else "cpu")


def filled(buffers: dict[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """Fill with random bits, NaN among them, and return copies."""
    generator = torch.Generator().manual_seed(seed)
    for buffer in buffers.values():
        bits = torch.randint(256, (buffer.nbytes,), generator=generator, dtype=torch.uint8)
        buffer.copy_(bits.view(buffer.dtype).view(buffer.shape))
    return {name: buffer.clone() for name, buffer in buffers.items()}


def bits(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)


@pytest.fixture(params=["side by side", "apart", "one apart"])
def buffers(request: pytest.FixtureRequest, device: torch.device) -> dict[str, Tensor]:
    layouts = {name: ((ROWS, *inner), dtype, device) for name, (inner, dtype) in SHAPES.items()}
    made = allocate_rows(layouts)
    apart = {"apart": list(SHAPES), "one apart": ["layers.10.recurrent", "token"]}.get(request.param, [])
    return made | {name: torch.zeros_like(made[name]) for name in apart}


def test_a_row_is_copied_in_all_buffers(buffers: dict[str, Tensor]) -> None:
    expected, rows = filled(buffers), StateRows(buffers)
    assert sorted(rows.bytes_by_name) == sorted(SHAPES)
    assert rows.row_bytes == sum(math.prod(inner) * dtype.itemsize for inner, dtype in SHAPES.values())
    for source, target in ((0, 4), (4, 1), (2, 0), (3, 3)):
        rows.copy(source, target)
        for buffer in expected.values():
            buffer[target] = buffer[source].clone()
    for name, buffer in expected.items():
        assert torch.equal(bits(buffers[name]), bits(buffer)), name


def test_buffers_lie_side_by_side(device: torch.device) -> None:
    made = allocate_rows({name: ((ROWS, *inner), dtype, device) for name, (inner, dtype) in SHAPES.items()})
    for name, (inner, dtype) in SHAPES.items():
        assert (made[name].shape, made[name].dtype) == ((ROWS, *inner), dtype)
        assert made[name].is_contiguous() and made[name].device == device
        assert made[name].data_ptr() % ALIGNMENT == 0 and not made[name].any()
    # recurrent; conv; table; position, token and pair; odd; nothing
    rows = StateRows(made)
    assert len(rows._stacks) == 6
    # One kernel for words, and one more for bytes.
    assert [{view.dtype for view in views} for views in rows._row(0)] == [{torch.int32}, {torch.uint8}]
    expected = filled(made)
    for name, buffer in expected.items():
        assert torch.equal(bits(made[name]), bits(buffer)), name


def test_memory_goes_with_the_last_buffer(device: torch.device) -> None:
    layouts = {name: ((ROWS, *inner), dtype, device) for name, (inner, dtype) in SHAPES.items()}
    made = allocate_rows(layouts)
    rows = StateRows(made)
    rows.copy(0, 1)
    storage = StorageWeakRef(made["layers.0.recurrent"].untyped_storage())
    del rows
    for name in ("layers.0.recurrent", "layers.2.recurrent"):
        made[name].set_()  # type: ignore[call-overload]
    assert not storage.expired()
    made["layers.10.recurrent"].set_()  # type: ignore[call-overload]
    assert storage.expired()


@pytest.mark.parametrize("piece_bytes", [40, 700, 1 << 20])
def test_rows_go_to_the_host_and_come_back(
    buffers: dict[str, Tensor], piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces of any size: whole buffers, several of them, or some rows of one. The bytes do not depend on the pieces."""
    monkeypatch.setattr("ostinato.delegate.constants.rows.PIECE_BYTES", piece_bytes)
    device = buffers["table"].device
    transfers, rows, expected = RowTransfers(device, UsedStreams(device)), StateRows(buffers), filled(buffers)
    chosen = [3, 0, 4]
    host = transfers.to_host([(rows, chosen), (rows, [2]), (rows, [])])
    host.mark.wait()
    assert host.nbytes == 4 * rows.row_bytes
    names = list(rows.bytes_by_name)
    found = torch.cat(host.data)
    wanted = [bits(expected[name][chosen]) for name in names] + [bits(expected[name][2]) for name in names]
    assert torch.equal(found, torch.cat(wanted))
    # To other rows. What is queued after `hold_back` sees them.
    transfers.to_device(host, [(rows, [1, 2, 3]), (rows, [0]), (rows, [])]).hold_back()
    for name, buffer in expected.items():
        now = buffer[[2, 3, 0, 4, 4]]
        assert torch.equal(bits(buffers[name]), bits(now)), name
    transfers.close()


def test_few_copies_over_the_bus(buffers: dict[str, Tensor]) -> None:
    """Pieces lie together, but where one would begin at an address that its elements cannot have."""
    rows, other = StateRows(buffers), StateRows({"logits": torch.zeros(1, 8, device=buffers["table"].device)})
    transfers = RowTransfers(buffers["table"].device, UsedStreams(buffers["table"].device))
    # Behind all of these with even sizes come 3 bytes, and then the logits.
    host = transfers.to_host([(rows, [2]), (rows, []), (other, [0])])
    assert [data.nbytes for data in host.data][-1] == 32
    assert len(host.data) <= 4
    host.mark.wait()
    transfers.close()


def test_transfers_follow_each_other(buffers: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits between them, and each takes the place of the rows that the one before has taken away."""
    monkeypatch.setattr("ostinato.delegate.constants.rows.PIECE_BYTES", 20_000)
    device, pick = buffers["table"].device, random.Random(0)
    transfers, rows, expected = RowTransfers(device, UsedStreams(device)), StateRows(buffers), filled(buffers)
    for _ in range(30):
        taken, given = (pick.sample(range(ROWS), 3) for _ in range(2))
        host = transfers.to_host([(rows, taken)])
        host.mark.hold_back()
        for buffer in buffers.values():
            buffer[given] = 0
        transfers.to_device(host, [(rows, given)]).hold_back()
        for buffer in expected.values():
            kept = buffer[taken].clone()
            buffer[given] = kept
    for name, buffer in expected.items():
        assert torch.equal(bits(buffers[name]), bits(buffer)), name
    transfers.close()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def program(request: pytest.FixtureRequest) -> Iterator[Program]:
    artifact: Path = request.getfixturevalue("capitals_cuda" if request.param == "cuda" else "capitals_artifact")
    with load_program(artifact, sessions=2, snapshots=3) as program:
        program.load_method("decode")
        yield program


def test_rows_of_a_program(program: Program) -> None:
    """Few kernels copy a row, also of another set of state, and of buffers that another method brings."""
    own = program.rows_of(Growth.SLOTS)
    assert program.rows_of(Growth.SLOTS) is own
    assert own.row_bytes == sum(buffer[0].nbytes for buffer in program.buffers_that_grow(Growth.SLOTS).values())
    sizes = {buffer[0].nbytes for buffer in program.buffers_that_grow(Growth.SLOTS).values()}
    assert len(own._stacks) == len(sizes)
    assert len(program.rows_of(Growth.PAGES)._stacks) == 1
    for name in ("decode_sample", "sample"):
        program.load_method(name)
    more = program.rows_of(Growth.SLOTS)
    assert more.row_bytes == program.capacity.slot_bytes > own.row_bytes
    state = program.new_state()
    program.bind_state(state)
    expected = filled({key: state[key] for key in more.bytes_by_name})
    program.rows_of(Growth.SLOTS).copy(0, 4)
    for key, buffer in expected.items():
        buffer[4] = buffer[0].clone()
        assert torch.equal(bits(state[key]), bits(buffer)), key
    assert len(program.rows_of(Growth.SLOTS)._stacks) == len({state[key][0].nbytes for key in more.bytes_by_name})
    program.bind_state()
    assert program.rows_of(Growth.SLOTS).bytes_by_name == more.bytes_by_name
    # Nothing was copied there.
    assert all(
        torch.equal(program.mutable_buffers[key][4], program.mutable_buffers[key][3]) for key in more.bytes_by_name
    )


def test_a_closed_program_keeps_no_memory(program: Program) -> None:
    program.rows_of(Growth.SLOTS).copy(0, 4)
    storages = [StorageWeakRef(buffer.untyped_storage()) for buffer in program.mutable_buffers.values()]
    program.close()
    gc.collect()
    assert all(storage.expired() for storage in storages)
