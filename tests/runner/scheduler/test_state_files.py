"""State files: the prefix cache writes what it has no more room for; it comes back, nothing waits, and errors are told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ostinato.delegate.errors import SessionFileError
from ostinato.runner import Engine
from ostinato.runner.sessions import state_files
from ostinato.runner.sessions.offloaded import OnHost
from ostinato.runner.sessions.saved_state import SavedState

from ...processes import PATIENCE
from .driving import CPU_MODES, GPU_MODES, PAGE, Driven, alone, loaded
from .test_prefix_reuse import Tokens, dense, fresh

__all__ = ["dense"]


@pytest.fixture(scope="module", params=[*CPU_MODES, *GPU_MODES])
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, mode: str) -> Iterator[Engine]:
    with loaded(request, mode, sessions=2, kv_tokens=16 * PAGE, snapshots=3) as engine:
        yield engine


@contextmanager
def driving(engine: Engine, mode: str = "in turn", **options: Any) -> Iterator[Driven]:
    driven = Driven(engine, mode, rows=64, prefix_caching=True, **options)
    try:
        yield driven
    finally:
        driven.scheduler.files.close()
        driven.close()


def turn(driven: Driven, file: Path, told: Tokens, asked: Tokens, stands: bool = True) -> tuple[Tokens, int]:
    """A conversation with one more turn, and how many of its tokens were not computed. The answer is that of a session
    alone."""
    before = driven.scheduler.stats.reused_tokens
    request = driven.add([*told, *asked], 5, ignore_eos=True, state_file=str(file))
    driven.run()
    answer = driven.of(request).tokens
    assert answer == alone(driven.reference, request)[0]
    told = [*told, *asked, *answer]
    if stands:
        driven.scheduler.prefixes.stand(file, told, len(told))
    return told, driven.scheduler.stats.reused_tokens - before


def forget(driven: Driven) -> None:
    """Have all state leave the device."""
    while driven.scheduler.prefixes.make_room():
        pass
    driven.engine.sessions.tier.settle(wait=True)


@pytest.mark.parametrize("host_cache_bytes", (0, 400_000), ids=("device", "host"))
def test_conversations_that_go_on(engine: Engine, mode: str, tmp_path: Path, host_cache_bytes: int) -> None:
    """All of them go on behind their last answer. They share pages, of which there is one copy on the host."""
    with driving(engine, mode, host_cache_bytes=host_cache_bytes) as driven:
        system = fresh(1, PAGE + 40)
        told = {tmp_path / str(number): system for number in range(8)}
        for number in range(3):
            for place, file in enumerate(told):
                last = told[file]
                told[file], reused = turn(driven, file, last, fresh(100 * number + place, 34))
                assert not number or reused >= len(last) - 1
        stats = driven.scheduler.files.stats
        assert stats.read > 8 and stats.written > 8 and stats.given_up == 0
        # Each file is that of a session.
        driven.scheduler.files.finish()
        for file in tmp_path.iterdir():
            with engine.load_session(file) as session:
                assert session.tokens == told[file][: session.position] and session.seen == session.position


def test_models_of_keys_and_values(dense: Path, tmp_path: Path) -> None:
    """A file has nothing that a window has left behind. Without one, histories that part go on from where they do."""
    with Engine.load(dense, sessions=2, kv_tokens=24 * PAGE) as engine, Engine.load(dense) as reference:
        windows = any(group.window for group in engine.program.capacity.groups)
        with driving(engine) as driven:
            driven.reference = reference
            file = tmp_path / "a"
            told, _ = turn(driven, file, [], fresh(1, 400))
            forget(driven)
            assert driven.scheduler.prefixes.stats.prefixes == 0
            more, reused = turn(driven, file, told, fresh(2, 40))
            assert reused == len(told) - 1
            forget(driven)
            _, reused = turn(driven, file, more[:300], fresh(3, 40))
            assert reused == (0 if windows else 300)


def test_state_that_is_still_being_written(
    engine: Engine, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not waited for, by those that step or by the one that goes on from it. What is too much is not written."""
    gate, write = threading.Event(), SavedState.write

    def waits(saved: SavedState, path: Path, given: OnHost) -> None:
        assert gate.wait(PATIENCE)
        write(saved, path, given)

    monkeypatch.setattr(SavedState, "write", waits)
    with driving(engine, mode) as driven:
        try:
            one, two = tmp_path / "one", tmp_path / "two"
            told, _ = turn(driven, one, [], fresh(1, 90))
            forget(driven)
            assert driven.scheduler.files.busy
            monkeypatch.setattr(state_files, "MAX_WAITING_BYTES", 1)
            turn(driven, two, [], fresh(2, 90))
            forget(driven)
            assert driven.scheduler.files.stats.given_up == 1
            assert turn(driven, one, told, fresh(3, 40))[1] == len(told) - 1
            assert not one.exists() and not two.exists()
        finally:
            gate.set()
        driven.scheduler.files.finish()
        assert one.exists() and not two.exists()


def test_a_file_has_as_much_or_more(engine: Engine, mode: str, tmp_path: Path) -> None:
    """It is not written again, and not replaced by the beginning that another conversation has left in the cache."""
    with driving(engine, mode) as driven:
        file, files = tmp_path / "a", driven.scheduler.files
        system = fresh(1, 70)
        told, _ = turn(driven, file, system, fresh(2, 40))
        forget(driven)
        files.finish()
        written = file.stat().st_ino
        turn(driven, tmp_path / "b", [], system, stands=False)
        files.save(file, told, len(told)).result(PATIENCE)
        assert file.stat().st_ino == written
        more, reused = turn(driven, file, told, fresh(3, 40))
        assert reused == len(told) - 1
        other, _ = turn(driven, file, system, fresh(4, 40))
        # A later turn is written, and so is another history.
        for later in (more, other):
            files.save(file, later, len(later)).result(PATIENCE)
            assert engine.sessions.tier.saved.tokens_of(file) == later[:-1]


def test_nothing_is_written_to_a_file_that_was_left(engine: Engine, mode: str, tmp_path: Path) -> None:
    with driving(engine, mode) as driven:
        for name in ("a", "b"):
            turn(driven, tmp_path / name, [], fresh(1, 90))
        driven.scheduler.files.leave(tmp_path / "a").result(PATIENCE)
        forget(driven)
        driven.scheduler.files.finish()
        assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_files_that_cannot_be_used(engine: Engine, mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A conversation whose state cannot be written, or read, is computed."""
    with driving(engine, mode) as driven:
        files, lost, file = driven.scheduler.files, tmp_path / "no" / "folder", tmp_path / "a"
        told, _ = turn(driven, lost, [], fresh(1, 90))
        with pytest.raises(SessionFileError, match="cannot be written"):
            files.save(lost, told, len(told)).result(PATIENCE)
        driven.scheduler.prefixes.stand(lost, told, len(told))
        forget(driven)
        files.finish()
        assert files.stats.given_up == 2 and caplog.text.count("is computed again: ") == 1
        assert turn(driven, lost, told, fresh(2, 40), stands=False)[1] == 0
        with pytest.raises(SessionFileError, match="nothing is known of these tokens"):
            files.save(file, fresh(5, 9), 9)
        told, _ = turn(driven, file, [], fresh(3, 90))
        forget(driven)
        files.finish()
        data = bytearray(file.read_bytes())
        data[-9] ^= 1
        file.write_bytes(data)
        assert turn(driven, file, told, fresh(4, 40), stands=False)[1] == 0
        assert files.stats.read == 0


def test_a_cancelled_answer(engine: Engine, mode: str, tmp_path: Path) -> None:
    """While its state is read."""
    with driving(engine, mode) as driven:
        file = tmp_path / "a"
        told, _ = turn(driven, file, [], fresh(1, 90))
        forget(driven)
        driven.scheduler.files.finish()
        request = driven.add([*told, *fresh(2, 40)], 5, state_file=str(file))
        driven.scheduler._admit()
        driven.scheduler.cancel(request.id)
        driven.run()
        assert driven.of(request).reason == "cancelled"
        assert turn(driven, file, told, fresh(3, 40))[1] == len(told) - 1
