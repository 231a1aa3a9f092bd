"""Sessions on the host and in files: they go on as if they had never left."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.delegate import CapacityError, ClosedError, Growth, InputError, SessionFileError
from ostinato.runner import Engine, SamplingParams
from ostinato.runner.model.steps import _HostTokens
from ostinato.runner.sessions import session_file
from ostinato.runner.sessions.session import Session

from .conversations import settle

GPU = pytest.mark.gpu
HOT = SamplingParams(temperature=1.5, top_k=40, top_p=0.95, seed=11)
LONG = [(7 * place + 3) % 1500 for place in range(130)]
COUNT = 12


def load(artifact: Path, mode: str, **options: Any) -> Engine:
    engine = Engine.load(artifact, cuda_graph="graph" in mode and "no" not in mode, warmup_steps=1, **options)
    if mode == "ahead":
        steps: Any = engine.sessions.steps
        steps.goes_ahead, steps._pending = True, _HostTokens
    return engine


@pytest.fixture(
    scope="module", params=["graph", "ahead", *(pytest.param(f"GPU, {m}", marks=GPU) for m in ("no graph", "graph"))]
)
def mode(request: pytest.FixtureRequest) -> str:
    """How engines run. "ahead" begins a step before the tokens of the last one are taken, as a GPU does."""
    return str(request.param)


@pytest.fixture(scope="module")
def artifact(mode: str, request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue("capitals_cuda" if mode.startswith("GPU") else "capitals_artifact")
    return found


@pytest.fixture(scope="module")
def engine(artifact: Path, mode: str) -> Iterator[Engine]:
    with load(artifact, mode, sessions=2, kv_tokens=6 * 64) as loaded:
        yield loaded
        settle(loaded)
        assert (loaded.sessions.free, loaded.sessions.free_pages) == (2, 6)


@pytest.fixture(scope="module")
def smaller(artifact: Path, mode: str) -> Iterator[Engine]:
    """Room for one session, of three pages."""
    with load(artifact, mode, kv_tokens=3 * 64) as loaded:
        yield loaded


def prompted(session: Session) -> None:
    session.prefill(LONG[:70])


def stepped(session: Session) -> None:
    prompted(session)
    for _ in range(5):
        session._owner.step([session])


def ahead(session: Session) -> None:
    """The next step has begun, where steps go ahead."""
    prompted(session)
    for _ in range(3):
        session._owner.step([session], more=True)


def given(session: Session) -> None:
    stepped(session)
    session.prefill([8])
    session.append(9)


STANDS: dict[str, Callable[[Session], None]] = {
    "prompted": prompted,
    "stepped": stepped,
    "ahead": ahead,
    "given": given,
}


@pytest.fixture(params=list(STANDS))
def stand(request: pytest.FixtureRequest) -> Callable[[Session], None]:
    """Where a session stands when it leaves."""
    return STANDS[request.param]


@pytest.fixture(params=[SamplingParams(), HOT], ids=["greedy", "seed"])
def params(request: pytest.FixtureRequest) -> SamplingParams:
    found: SamplingParams = request.param
    return found


def follows(session: Session) -> list[int]:
    return list(session.generate(COUNT, eos_ids=()))


@pytest.fixture
def expected(engine: Engine, stand: Callable[[Session], None], params: SamplingParams) -> list[int]:
    """All tokens of a session that never leaves."""
    with engine.open_session(params) as session:
        stand(session)
        follows(session)
        return list(session.tokens)


def spoil(engine: Engine) -> None:
    """Use all slots and pages: nothing of a session that has left stays on the device."""
    for growth in (Growth.SLOTS, Growth.PAGES):
        for buffer in engine.program.buffers_that_grow(growth).values():
            if buffer.is_floating_point():
                buffer.fill_(torch.nan)


def test_a_session_comes_back(
    engine: Engine, stand: Callable[[Session], None], params: SamplingParams, expected: list[int]
) -> None:
    with engine.open_session(params) as session:
        stand(session)
        slot, tokens = session.slot, list(session.tokens)
        session.offload()
        session.offload()
        assert session.is_offloaded and (session.tokens, session.position) == (tokens, len(tokens))
        settle(engine)
        assert (engine.sessions.free, engine.sessions.free_pages) == (2, 6)
        spoil(engine)
        # Another session takes its place.
        with engine.open_session() as other:
            assert other.slot == slot
            other.prefill(LONG)
            session.onload()
            session.onload()
            assert not session.is_offloaded and session.slot != slot
            engine.step([other])
            follows(session)
        assert session.tokens == expected


@pytest.mark.parametrize("offloaded", [False, True], ids=["device", "host"])
def test_a_session_is_loaded(
    engine: Engine,
    smaller: Engine,
    stand: Callable[[Session], None],
    params: SamplingParams,
    expected: list[int],
    offloaded: bool,
    tmp_path: Path,
) -> None:
    """In an engine with other room, beside the session that was saved and goes on."""
    path = tmp_path / "kept.session"
    with engine.open_session(params) as session:
        stand(session)
        if offloaded:
            session.offload()
        session.save(path)
        assert [file.name for file in tmp_path.iterdir()] == [path.name]
        if offloaded:
            session.onload()
        spoil(smaller)
        for owner in (smaller, engine):
            with owner.load_session(str(path)) as other:
                assert other.sampling_params == params
                follows(other)
                assert other.tokens == expected
        follows(session)
        assert session.tokens == expected


def test_logprobs_are_saved(engine: Engine, smaller: Engine, tmp_path: Path) -> None:
    """A file has those of the last token, and of a token that a step with `more=True` has begun."""
    with engine.open_session(SamplingParams(logprobs=2)) as session:
        session.prefill(LONG[:5])
        engine.step([session], more=True)
        session.save(tmp_path / "kept")
        with smaller.load_session(tmp_path / "kept") as other:
            for more in (True, False):
                assert session.logprobs is not None and session.logprobs.token == session.tokens[-1]
                assert other.logprobs == session.logprobs
                assert smaller.step([other], more) == engine.step([session], more)


def test_steps_go_on_beside(engine: Engine) -> None:
    """One session steps all the time. The other one goes and comes back between its own steps."""

    def alone(first: int) -> list[int]:
        with engine.open_session(HOT) as session:
            session.prefill(LONG[first : first + 60])
            return list(session.generate(30, eos_ids=()))

    expected = [alone(0), alone(5)]
    stays, goes = (engine.open_session(HOT) for _ in range(2))
    stays.prefill(LONG[:60])
    goes.prefill(LONG[5:65])
    for count in range(30):
        goes.offload()
        engine.step([stays], more=count < 29)
        goes.onload()
        engine.step([goes], more=count < 29)
    assert [stays.tokens[60:], goes.tokens[60:]] == expected
    goes.close()
    stays.close()


def test_a_session_without_tokens(engine: Engine, tmp_path: Path) -> None:
    with engine.open_session(HOT) as session:
        session.save(tmp_path / "empty")
        session.offload()
        session.onload()
        with engine.load_session(tmp_path / "empty") as other:
            assert (other.tokens, other.sampling_params) == ([], HOT)
            for one in (session, other):
                one.prefill(LONG[:9])
            assert follows(other) == follows(session)


def test_others_in_the_slot_sample_as_they_say(engine: Engine) -> None:
    """What a session's parameters ask of steps goes with it, and comes back with it."""
    steps: Any = engine.sessions.steps
    with engine.open_session(SamplingParams(logprobs=1)) as session, engine.open_session() as other:
        stepped(session)
        stepped(other)
        assert set(steps._special) == {session.slot}
        session.offload()
        assert not steps._special
        engine.step([other])
        session.onload()
        assert len(follows(session)) == COUNT and session.logprobs is not None
        assert set(steps._special) == {session.slot}


def test_what_a_session_on_the_host_refuses(engine: Engine) -> None:
    session = engine.open_session()
    prompted(session)
    kept = session.snapshot()
    session.offload()
    uses: list[Callable[[], object]] = [
        lambda: engine.step([session]),
        lambda: engine.step([], prefill={session: [1]}),
        lambda: session.prefill([1]),
        lambda: session.append(1),
        lambda: session.logits,
        lambda: session.hidden_states([1]),
        lambda: session.restore(kept),
        lambda: setattr(session, "sampling_params", HOT),
        session.fork,
        session.snapshot,
    ]
    for use in uses:
        with pytest.raises(InputError, match="the session is on the host: onload it first"):
            use()
    assert session.tokens == LONG[:70]
    kept.close()
    session.close()
    session.close()
    for use in (session.offload, session.onload, lambda: session.save("x")):
        with pytest.raises(ClosedError, match="the session is closed"):
            use()


def test_no_room_to_come_back(engine: Engine, tmp_path: Path) -> None:
    session = engine.open_session()
    session.prefill(LONG)
    session.save(tmp_path / "kept")
    session.offload()
    settle(engine)
    others = [engine.open_session() for _ in range(2)]
    for come in (session.onload, lambda: engine.load_session(tmp_path / "kept")):
        with pytest.raises(CapacityError, match="all 2 sessions are open"):
            come()
    others.pop().close()
    others[0].prefill((LONG + LONG)[:250])
    for come in (session.onload, lambda: engine.load_session(tmp_path / "kept")):
        with pytest.raises(CapacityError, match="need 3 more pages of 64 positions, 2 of 6 are free"):
            come()
    assert session.is_offloaded and (engine.sessions.free, engine.sessions.free_pages) == (1, 2)
    others.pop().close()
    session.onload()
    assert follows(session)
    session.close()


def test_steps_wait_for_those_that_leave(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slot and pages are dealt out when the copy is done; where there is no room before that, it is waited for."""
    done = threading.Event()
    with engine.open_session() as session, engine.open_session() as other:
        session.prefill(LONG)
        other.prefill(LONG[:120])
        marks: list[Any] = []

        class Slow:
            is_done = property(lambda mark: done.is_set())

            def wait(self) -> None:
                marks.append(self)
                done.set()

        slot, to_host = session.slot, engine.program.row_transfers.to_host

        def slow(chosen: Any) -> Any:
            rows = to_host(chosen)
            rows.mark.wait()
            rows.mark = Slow()  # type: ignore[assignment]
            return rows

        monkeypatch.setattr(engine.program.row_transfers, "to_host", slow)
        session.offload()
        assert engine.sessions.free == 0 and engine.sessions.free_pages == 6 - 5
        other.prefill(LONG[:60])
        assert not marks and not done.is_set()
        with engine.open_session() as third:
            assert marks and third.slot == slot
        assert engine.sessions.free_pages == 6 - 3


@pytest.fixture
def saved(engine: Engine, tmp_path: Path) -> Path:
    with engine.open_session(HOT) as session:
        stepped(session)
        session.save(tmp_path / "kept")
    return tmp_path / "kept"


def test_every_damaged_byte_is_refused(engine: Engine, saved: Path) -> None:
    good = saved.read_bytes()
    begin = 56 + int.from_bytes(good[16:24], "little")
    places = [*range(0, begin, 7), *range(begin, len(good), 9_973), len(good) - 1]
    for place in places:
        bad = bytearray(good)
        bad[place] ^= 0x10
        saved.write_bytes(bad)
        with pytest.raises(SessionFileError) as caught:
            engine.load_session(saved)
        assert str(caught.value).startswith(str(saved)) and "\n" not in str(caught.value)
    for size in (0, 3, 16, 55, 56, 300, begin, len(good) - 1):
        saved.write_bytes(good[:size])
        with pytest.raises(SessionFileError, match=r"is no saved session|is cut short|is damaged"):
            engine.load_session(saved)
    saved.write_bytes(good + b"x")
    with pytest.raises(SessionFileError, match="cut short or too long: it has"):
        engine.load_session(saved)
    saved.write_bytes(good)
    engine.load_session(saved).close()


def test_files_that_do_not_fit(
    engine: Engine, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recurrent_artifact: Path
) -> None:
    with (
        Engine.load(recurrent_artifact) as other,
        pytest.raises(SessionFileError, match="was saved with another artifact"),
    ):
        other.load_session(saved)
    for path, message in (
        (tmp_path / "none", "none cannot be read: No such file"),
        (tmp_path, "cannot be read: Is a dir"),
    ):
        with pytest.raises(SessionFileError, match=message):
            engine.load_session(path)
    with engine.open_session() as session:
        for path in (tmp_path / "no" / "folder", tmp_path):
            with pytest.raises(SessionFileError, match="cannot be written: "):
                session.save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["kept"]
    # Headers that are whole, and wrong.
    header = json.loads(saved.read_bytes()[56 : 56 + int.from_bytes(saved.read_bytes()[16:24], "little")])
    for change, message in (
        ({"version": 99}, "has version 99, this runtime reads version 2"),
        ({"seen": -1}, "is damaged: its header cannot be read"),
        ({"tokens": None}, "is damaged: its header cannot be read"),
        ({"logprobs": [1, 0.5]}, "is damaged: its header cannot be read"),
        ({"sampling_params": {"heat": 3}}, "is damaged: its header cannot be read"),
        ({"pages": {"global": [0, 1]}}, "is damaged: its header cannot be read"),
        ({"rows": {}}, "has other state than the program"),
    ):
        text = json.dumps({**header, **change}).encode()
        prefix = session_file._PREFIX.pack(session_file.MAGIC, len(text), hashlib.sha256(text).digest())
        saved.write_bytes(prefix + text + bytes(header["bytes"]))
        with pytest.raises(SessionFileError, match=message):
            engine.load_session(saved)


def test_a_closed_program(artifact: Path, saved: Path) -> None:
    with Engine.load(artifact, sessions=2) as engine:
        session, away = engine.open_session(), engine.open_session()
        prompted(session)
        prompted(away)
        away.offload()
    for use in (
        session.offload,
        away.onload,
        lambda: session.save(saved),
        lambda: away.save(saved),
        lambda: engine.load_session(saved),
    ):
        with pytest.raises(ClosedError, match="the program is closed"):
            use()
    away.close()


def test_a_failed_transfer_keeps_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    session = engine.open_session()
    prompted(session)
    with monkeypatch.context() as patched:
        patched.setattr(engine.program.row_transfers, "to_host", lambda chosen: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            session.offload()
    session.offload()
    with monkeypatch.context() as patched:
        patched.setattr(engine.program.row_transfers, "to_device", lambda host, chosen: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            session.onload()
    settle(engine)
    assert (engine.sessions.free, engine.sessions.free_pages) == (2, 6)
    session.onload()
    assert len(follows(session)) == COUNT
    session.close()


def test_a_program_whose_state_does_not_grow(recurrent_artifact: Path, tmp_path: Path) -> None:
    """Its one slot is all its mutable buffers."""
    with Engine.load(recurrent_artifact) as engine:
        with engine.open_session() as session:
            session.prefill([5, 6, 7])
            expected = follows(session)
        with engine.open_session() as session:
            session.prefill([5, 6, 7])
            session.save(tmp_path / "kept")
            session.offload()
            with engine.open_session() as other:
                other.prefill([1])
            session.onload()
            assert follows(session) == expected
        with engine.load_session(tmp_path / "kept") as loaded:
            assert follows(loaded) == expected
