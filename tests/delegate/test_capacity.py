"""Buffers that grow: the number of their rows is chosen when a program is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ostinato.delegate import InputError, OptionError, load_program
from ostinato.delegate.artifact.records import (
    BufferSpec,
    Dim,
    Growth,
    MethodRecord,
    PageGroup,
    StateForm,
    StateKind,
    TensorSpec,
)
from ostinato.delegate.capacity import Capacity, CapacityOptions, GroupCapacity, choose_capacity, first_block_table

PAGE = 4
# The maximum number of pages of one session.
PAGES = 3
CPU = torch.device("cpu")


class Counters(nn.Module):
    """A count for each session, and the values that it has written: state in slots and in pages."""

    count: Tensor
    written: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.full((2,), 100))
        self.register_buffer("written", torch.zeros(4, PAGE))
        self.register_buffer("table", torch.zeros(2, PAGES, dtype=torch.int32))

    def forward(self, slots: Tensor, values: Tensor) -> Tensor:
        """Count each row, and write its value into the first page of its session, at the session's count - 101.

        Args:
            slots: [R] int64.
            values: [R].

        Returns:
            the counts, [R].
        """
        count = self.count.index_select(0, slots) + 1
        self.count.index_copy_(0, slots, count)
        page = self.table.index_select(0, slots)[:, 0].long()
        self.written.index_put_((page, count - 101), values)
        return count


FORMS = {
    "count": StateForm(StateKind.SAMPLING, Growth.SLOTS),
    "written": StateForm(StateKind.KV_CACHE, Growth.PAGES),
    "table": StateForm(StateKind.BLOCK_TABLE, Growth.SLOTS),
}


@pytest.fixture(scope="module")
def artifact(exported: Callable[..., Path]) -> Path:
    def build(path: Path) -> None:
        from ostinato.export import export_program

        rows = torch.export.Dim("R", min=2, max=8)
        example = (torch.zeros(3, dtype=torch.int64), torch.zeros(3))
        export_program(
            {"count": (Counters(), example, ({0: rows}, {0: rows}))},
            path,
            metadata={"get_page_size": PAGE},
            value_ranges={"slots": (0, Growth.SLOTS)},
            state_forms=FORMS,
        )

    return exported("counters", build, str((PAGE, PAGES)))


def counted(program: object, slots: list[int], value: float = 1.0) -> list[int]:
    method = program.load_method("count")  # type: ignore[attr-defined]
    return method.execute((torch.tensor(slots), torch.full((len(slots),), value)))[0].tolist()


def test_rows_that_the_export_did_not_have(artifact: Path) -> None:
    with load_program(artifact, sessions=7) as program:
        assert program.capacity == Capacity(
            7, PAGE, 8 + 4 * PAGES, (GroupCapacity("global", 0, 7 * PAGES, PAGES, 4 * PAGE),)
        )
        assert program.capacity.kv_tokens == 7 * PAGES * PAGE
        assert counted(program, [6, 2]) == [101, 101]
        assert counted(program, [6, 0, 1], 2.0) == [102, 101, 101]
        assert counted(program, [6, 5], 3.0) == [103, 101]
        buffers = program.mutable_buffers
        assert buffers["count"].tolist() == [101, 101, 101, 100, 100, 101, 103]
        assert buffers["table"].tolist() == torch.arange(7 * PAGES).view(7, PAGES).tolist()
        assert buffers["written"][6 * PAGES].tolist() == [1, 2, 3, 0]
        assert buffers["written"][2 * PAGES].tolist() == [1, 0, 0, 0]
        program.reset()
        assert buffers["count"].tolist() == [100] * 7 and not buffers["written"].any()
        state = program.new_state()
        assert {key: list(tensor.shape) for key, tensor in state.items()} == {
            "count": [7],
            "written": [7 * PAGES, PAGE],
            "table": [7, PAGES],
        }
        program.bind_state(state)
        assert counted(program, [6, 4]) == [101, 101]
        assert buffers["count"].tolist() == [100] * 7


def test_one_session_by_default(artifact: Path) -> None:
    with load_program(artifact) as program:
        assert (program.capacity.slots, program.capacity.group("global").pages) == (1, PAGES)
        assert counted(program, [0, 0]) == [101, 101]
        with pytest.raises(InputError, match=r"input 'slots': values must lie in 0..0, got 0..1"):
            counted(program, [0, 1])


def test_slots_are_checked(artifact: Path) -> None:
    with load_program(artifact, sessions=5) as program:
        for slots in ([4, 5], [-1, 0]):
            with pytest.raises(InputError, match=r"input 'slots': values must lie in 0..4"):
                counted(program, slots)
        assert program.mutable_buffers["count"].tolist() == [100] * 5


def test_fewer_pages_than_all_sessions_could_have(artifact: Path) -> None:
    with load_program(artifact, sessions=4, kv_tokens=6 * PAGE - 1) as program:
        assert program.capacity.group("global").pages == 6
        counted(program, [0, 1])
        # Pages are dealt out in order, as long as there are any.
        assert program.mutable_buffers["table"].tolist() == [[0, 1, 2], [3, 4, 5], [-1] * 3, [-1] * 3]


def test_more_pages_than_all_sessions_could_have(artifact: Path) -> None:
    """No session owns the extra pages: they are for snapshots."""
    with load_program(artifact, sessions=2, kv_tokens=8 * PAGE) as program:
        assert program.capacity.group("global").pages == 8
        counted(program, [0, 1])
        assert program.mutable_buffers["table"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_rows_for_snapshots(artifact: Path) -> None:
    """They lie behind the slots. No method takes their numbers, and they have no pages."""
    with load_program(artifact, sessions=2, snapshots=3) as program:
        assert (program.capacity.slots, program.capacity.snapshots, program.capacity.rows) == (2, 3, 5)
        assert counted(program, [1, 0]) == [101, 101]
        buffers = program.mutable_buffers
        assert buffers["count"].tolist() == [101, 101, 100, 100, 100]
        assert buffers["table"].tolist() == [[0, 1, 2], [3, 4, 5], *[[-1] * PAGES] * 3]
        assert len(buffers["written"]) == 2 * PAGES
        with pytest.raises(InputError, match=r"input 'slots': values must lie in 0..1, got 0..2"):
            counted(program, [2, 0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sessions": 0}, "sessions must be an integer of 1 or more, got 0"),
        ({"sessions": 2.5}, "sessions must be an integer of 1 or more, got 2.5"),
        ({"kv_tokens": -4}, "kv_tokens must be an integer of 1 or more, got -4"),
        ({"snapshots": -1}, "snapshots must be an integer of 0 or more, got -1"),
        ({"snapshots": True}, "snapshots must be an integer of 0 or more, got True"),
        ({"gpu_memory_fraction": 1.5}, "gpu_memory_fraction must be more than 0 and at most 1, got 1.5"),
        (
            {"gpu_memory_fraction": 0.9},
            "gpu_memory_fraction is for programs on a GPU; on a CPU give sessions and kv_tokens",
        ),
        (
            {"sessions": 5, "kv_tokens": 16},
            "5 sessions need a page of 4 positions each, 20 in all: kv_tokens=16 is not enough; a session takes 20 B, a page "
            "16 B",
        ),
    ],
)
def test_what_cannot_be(artifact: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        load_program(artifact, **options)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_a_program_whose_state_does_not_grow(recurrent_artifact: Path) -> None:
    with load_program(recurrent_artifact, sessions=1, snapshots=4) as program:
        assert program.capacity == Capacity()
    with pytest.raises(OptionError, match="the program's state has room for one session, got sessions=2"):
        load_program(recurrent_artifact, sessions=2)


def record(slot_floats: int, page_floats: int) -> MethodRecord:
    specs = {
        "state": BufferSpec((2, slot_floats), "float32", False, StateKind.RECURRENT, Growth.SLOTS),
        "cache": BufferSpec((4, page_floats), "float32", False, StateKind.KV_CACHE, Growth.PAGES),
        "table": BufferSpec((2, 10), "int32", False, StateKind.BLOCK_TABLE, Growth.SLOTS),
        "scratch": BufferSpec((99,), "float32", False, StateKind.OTHER),
    }
    return MethodRecord("step", (), (), (), (), buffer_specs=specs)


@pytest.mark.parametrize(
    ("free", "options", "slots", "pages"),
    [
        # A session takes 1,000 + 40 bytes and a page takes 100 bytes; one session may have 10 pages.
        (10_000, CapacityOptions(gpu_memory_fraction=0.9), 4, 40),
        (10_000_000, CapacityOptions(gpu_memory_fraction=0.9), 256, 2560),
        (10_000, CapacityOptions(sessions=5, gpu_memory_fraction=0.9), 5, 33),
        (10_000, CapacityOptions(kv_tokens=80, gpu_memory_fraction=0.9), 4, 5),
        # There is no room for all pages of one session.
        (1_800, CapacityOptions(gpu_memory_fraction=0.9), 1, 1),
    ],
)
def test_a_share_of_the_memory(
    monkeypatch: pytest.MonkeyPatch, free: int, options: CapacityOptions, slots: int, pages: int
) -> None:
    """Slots and pages take a fraction of the free memory, less 500 bytes for the weights."""
    monkeypatch.setattr("ostinato.delegate.capacity.free_device_memory", lambda device: free)
    found = choose_capacity([record(250, 25)], {"get_page_size": 16}, options, torch.device("cuda"), 500)
    (group,) = found.groups
    assert (found.slots, group.pages) == (slots, pages)
    assert found.slots * found.slot_bytes + group.pages * group.page_bytes <= 0.9 * (free - 500)


def test_no_room_for_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostinato.delegate.capacity.free_device_memory", lambda device: 1_000)
    with pytest.raises(
        OptionError, match=r"1 sessions need a page of 16 positions each, 16 in all: 450 B of memory is not"
    ):
        choose_capacity(
            [record(250, 25)],
            {"get_page_size": 16},
            CapacityOptions(gpu_memory_fraction=0.9),
            torch.device("cuda"),
            500,
        )


def test_a_first_table() -> None:
    spec = BufferSpec((2, 3), "int32", False, StateKind.BLOCK_TABLE, Growth.SLOTS)

    def first(pages: int, each: int = 3) -> Tensor:
        return first_block_table(spec, Capacity(2, 64, 0, (GroupCapacity("global", 0, pages, each, 1),)))

    assert first(4).tolist() == [[0, 1, 2], [3, -1, -1]]
    assert first(9).dtype == torch.int32
    # With a window, two pages of a session are enough.
    assert first(4, each=2).tolist() == [[0, 1, 0], [2, 3, 2]]


def windowed_record() -> MethodRecord:
    """A global group with pages of 300 bytes and a group of window 40 with pages of 500 bytes; up to 32 rows in a call."""
    window = PageGroup.of_window(40)
    slots = TensorSpec("slots", "int64", (Dim(2, 32, "T"),), (-1, -1), Growth.SLOTS)
    specs = {
        "state": BufferSpec((2, 230), "float32", False, StateKind.RECURRENT, Growth.SLOTS),
        "cache": BufferSpec((4, 75), "float32", False, StateKind.KV_CACHE, Growth.PAGES),
        "table": BufferSpec((2, 10), "int32", False, StateKind.BLOCK_TABLE, Growth.SLOTS),
        "window cache": BufferSpec((4, 125), "float32", False, StateKind.KV_CACHE, Growth.PAGES, window),
        "window table": BufferSpec((2, 10), "int32", False, StateKind.BLOCK_TABLE, Growth.SLOTS, window),
    }
    return MethodRecord("step", (slots,), (), (), (), buffer_specs=specs)


@pytest.mark.parametrize(
    ("free", "options", "slots", "pages", "snapshots"),
    [
        # A window of 40 positions and 31 more rows touch 6 pages of 16. So a session takes 1,000 + 3,000 + 3,000 bytes.
        (None, CapacityOptions(), 1, (10, 6), 0),
        (None, CapacityOptions(sessions=8, snapshots=5), 8, (80, 48), 5),
        (None, CapacityOptions(sessions=8, kv_tokens=16 * 12), 8, (12, 12), 0),
        (None, CapacityOptions(sessions=8, kv_tokens=16 * 50), 8, (50, 48), 0),
        # 7 pages more than all sessions need, for snapshots.
        (None, CapacityOptions(sessions=8, kv_tokens=16 * 87, snapshots=2), 8, (87, 55), 2),
        # A thirty-second of the memory has room for one slot.
        (40_000, CapacityOptions(gpu_memory_fraction=1.0), 5, (50, 30), 1),
        (40_000, CapacityOptions(gpu_memory_fraction=1.0, snapshots=5), 5, (50, 30), 5),
        (40_000, CapacityOptions(gpu_memory_fraction=1.0, snapshots=6), 4, (40, 24), 6),
        (40_000, CapacityOptions(sessions=2, gpu_memory_fraction=1.0), 2, (20, 12), 1),
        # 11,200 bytes are left for pages of 300 and 500 bytes.
        (21_200, CapacityOptions(sessions=10, gpu_memory_fraction=1.0), 10, (14, 14), 0),
        # 7,200 bytes.
        (21_200, CapacityOptions(sessions=10, gpu_memory_fraction=1.0, snapshots=3), 10, (10, 10), 3),
    ],
)
def test_groups_of_pages(
    monkeypatch: pytest.MonkeyPatch,
    free: int | None,
    options: CapacityOptions,
    slots: int,
    pages: tuple[int, int],
    snapshots: int,
) -> None:
    monkeypatch.setattr("ostinato.delegate.capacity.free_device_memory", lambda device: free)
    found = choose_capacity([windowed_record()], {"get_page_size": 16}, options, torch.device("cuda"), 0)
    assert found == Capacity(
        slots,
        16,
        1000,
        (GroupCapacity("global", 0, pages[0], 10, 300), GroupCapacity("window 40", 40, pages[1], 6, 500)),
        snapshots,
    )
    assert found.kv_tokens == 16 * pages[0]
    assert found.page_texts[1] == f"{pages[1]} pages of 16 positions (window 40), 500 B each"
