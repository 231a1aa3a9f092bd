"""Sessions: the tokens of one session do not depend on the others, whichever of them join, leave, fork or go back."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from torch import Tensor

from ostinato.delegate import CapacityError, ClosedError, InputError, OptionError, StateKind
from ostinato.delegate.artifact.records import Growth
from ostinato.runner import Engine, SamplingParams
from ostinato.runner.model.batch import Outputs, Run
from ostinato.runner.model.steps import _HostTokens
from ostinato.runner.sessions.session import Session

from ...conftest import CAPITALS, CAPITALS_LENGTH
from .conversations import KV_TOKENS, SESSIONS, SNAPSHOTS, Conversations, Logits, close, settle

HOT = SamplingParams(temperature=1.5, top_k=40, top_p=0.95, seed=11)
BUCKETS = (2, 4)
GPU = pytest.mark.gpu
LONG = [(7 * place + 3) % 1500 for place in range(130)]


@pytest.fixture(scope="module")
def logits() -> Logits:
    """A function that returns transformers' logits [vocab] after a sequence, and keeps its answers."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(CAPITALS, dtype=torch.float32).eval()
    known: dict[tuple[int, ...], Tensor] = {}

    def after(tokens: list[int]) -> Tensor:
        key = tuple(tokens)
        if key not in known:
            with torch.no_grad():
                found = model(torch.tensor([tokens]), use_cache=False).logits[0]
            # Keep the logits after all shorter sequences too: they may be asked for later. A view would keep all rows.
            new = [place for place in range(len(key)) if key[: place + 1] not in known]
            known.update({key[: place + 1]: found[place].clone() for place in new})
        return known[key]

    return after


@pytest.fixture(scope="module")
def greedy(logits: Logits) -> Callable[[list[int]], int]:
    """A function that returns transformers' most likely token after a sequence."""
    return lambda tokens: int(logits(tokens).argmax())


@pytest.fixture(
    scope="module",
    params=["no graph", "graph", "ahead", *(pytest.param(f"GPU, {mode}", marks=GPU) for mode in ("no graph", "graph"))],
)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine in several modes. With a graph, numbers of rows are padded. "ahead" begins a step before the tokens of the
    last one are taken, as a GPU does."""
    on_gpu, mode = request.param.startswith("GPU"), request.param.removeprefix("GPU, ")
    with Engine.load(
        request.getfixturevalue("capitals_cuda" if on_gpu else "capitals_artifact"),
        cuda_graph=mode == "graph",
        warmup_steps=1,
        sessions=SESSIONS,
        kv_tokens=KV_TOKENS,
        snapshots=SNAPSHOTS,
        prefill_buckets=(8, 32) if mode == "graph" else None,
        row_buckets=BUCKETS if mode == "graph" else None,
    ) as loaded:
        if mode == "ahead":
            steps: Any = loaded.sessions.steps
            steps.goes_ahead, steps._pending = True, _HostTokens
        yield loaded
        assert all(stats["fallbacks"] == 0 for stats in loaded.model.method_stats.values())


@pytest.fixture(autouse=True)
def nothing_is_kept(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test all slots and pages are free."""
    yield
    if "engine" in request.fixturenames:
        gc.collect()
        engine = request.getfixturevalue("engine")
        settle(engine)
        assert (engine.sessions.free, engine.sessions.free_snapshots) == (SESSIONS, SNAPSHOTS)
        assert engine.sessions.pages.free == KV_TOKENS // 64


def opened(engine: Engine, *prompts: list[int], sampling_params: SamplingParams | None = None) -> list[Session]:
    sessions = []
    for prompt in prompts:
        sessions.append(engine.open_session(sampling_params))
        sessions[-1].prefill(prompt)
    return sessions


def test_in_any_company(engine: Engine, logits: Logits) -> None:
    machine = type("Machine", (Conversations,), {"engine": engine, "logits": staticmethod(logits)})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=15, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_a_step_of_many_rows(engine: Engine, greedy: Callable[[list[int]], int]) -> None:
    """A session's row and three prompts have 331 rows, more than a CPU's program takes at once; then all step together."""
    prompts = [LONG[:5], LONG[:120], LONG[5:115], LONG[20:120]]
    (first,), others = opened(engine, prompts[0]), [engine.open_session() for _ in prompts[1:]]
    sessions, given = [first, *others], dict(zip(others, prompts[1:], strict=True))
    engine.step([first])
    known = [[*prompts[0], greedy(prompts[0])], *prompts[1:]]
    for turn in range(3):
        found = engine.step(sessions, prefill=None if turn else given)
        assert found == [greedy(tokens) for tokens in known]
        known = [[*tokens, token] for tokens, token in zip(known, found, strict=True)]
    if engine.program.device.type == "cuda":
        assert engine.model.max_rows >= 331
    close(*sessions)


def test_prompts_ride_in_steps_that_go_ahead(
    engine: Engine, greedy: Callable[[list[int]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of a prompt go in while others step, in one step of the model for each call; then all step together."""
    if not engine.sessions.steps.goes_ahead:
        pytest.skip("a CPU does not step ahead")
    rows: list[int] = []
    step = engine.model.step

    def counted(runs: Sequence[Run]) -> Outputs:
        rows.append(sum(run.rows for run in runs))
        return step(runs)

    two, prompt = opened(engine, LONG[:5], LONG[7:20]), LONG[3:33]
    known = [LONG[:5], LONG[7:20]]
    other = engine.open_session()
    monkeypatch.setattr(engine.model, "step", counted)

    def stepped(sessions: list[Session], part: list[int]) -> list[int]:
        rows.clear()
        found = engine.step(sessions, more=True, prefill={other: part} if part else None)
        assert found == [greedy(tokens) for tokens in known]
        for tokens, token in zip(known, found, strict=True):
            tokens.append(token)
        return list(rows)

    assert stepped(two, []) == [2]
    assert [stepped(two, prompt[at : at + 10]) for at in (0, 10, 20)] == [[12]] * 3
    known.append(list(prompt))
    assert [stepped([*two, other], []) for _ in range(3)] == [[3]] * 3
    close(*two, other)


def walk(engine: Engine, garbage: float | None) -> tuple[list[list[int]], dict[str, Tensor]]:
    """Two sessions step, fork and step. Before each step, `garbage` fills every slot, page and position that belongs to no
    session.

    Returns:
        the sessions' tokens, and all state that belongs to the sessions.
    """

    def fill(*sessions: Session) -> None:
        if garbage is None:
            return
        program, pages = engine.program, {page for session in sessions for page in session._open.pages[0].numbers}
        slots = {session.slot for session in sessions}
        for growth, mine in ((Growth.SLOTS, slots), (Growth.PAGES, pages)):
            for key, buffer in program.buffers_that_grow(growth).items():
                if key in program.buffers_of(StateKind.BLOCK_TABLE):
                    continue
                others = [row for row in range(buffer.shape[0]) if row not in mine]
                buffer[others] = garbage if buffer.is_floating_point() else 1499
        for session in sessions:
            seen = session._open.seen
            for cache in program.buffers_of(StateKind.KV_CACHE).values():
                if seen % 64:
                    cache[session._open.pages[0].numbers[seen // 64], :, seen % 64 :] = garbage

    fill()
    # The tokens of `second` also say whether its counts and biases were left alone.
    params = SamplingParams(seed=1, frequency_penalty=1.0, repetition_penalty=1.3, logit_bias={5: 2.0})
    first, second = engine.open_session(HOT), engine.open_session(params)
    fill()
    first.prefill(LONG[:70])
    fill(first)
    second.prefill(LONG[5:11])
    for _ in range(3):
        fill(first, second)
        engine.step([first, second])
    third = first.fork()
    for sessions in ([third], [first, second, third], [second], [first, second, third], [third, first]):
        fill(first, second, third)
        engine.step(sessions)
    everybody = (first, second, third)
    state: dict[str, Tensor] = {}
    for key, buffer in engine.program.buffers_that_grow(Growth.SLOTS).items():
        if key not in engine.program.buffers_of(StateKind.BLOCK_TABLE) | engine.program.buffers_of(
            StateKind.LOGITS_PROCESSING
        ):
            state |= {f"{key} {place}": buffer[one.slot].clone() for place, one in enumerate(everybody)}
    for key, cache in engine.program.buffers_of(StateKind.KV_CACHE).items():
        for place, one in enumerate(everybody):
            kept = torch.cat([cache[page] for page in one._open.pages[0].numbers], dim=1)
            state[f"{key} {place}"] = kept[:, : one._open.seen].clone()
    tokens = [one.tokens for one in everybody]
    close(*everybody)
    return tokens, state


def test_nothing_bleeds(engine: Engine) -> None:
    """Tokens and state are equal bit by bit, whatever stands in slots, pages and positions of others."""
    walk(engine, None)
    tokens, state = walk(engine, None)
    for garbage in (float("nan"), 1e30):
        other_tokens, other_state = walk(engine, garbage)
        assert other_tokens == tokens
        assert other_state.keys() == state.keys()
        for key, tensor in state.items():
            assert torch.equal(tensor, other_state[key]), key


def test_each_samples_as_it_says(engine: Engine) -> None:
    """In a batch, each session samples the tokens that it samples alone."""
    options = [
        HOT,
        SamplingParams(),
        SamplingParams(3.0, top_k=5, seed=4),
        SamplingParams(2.0, min_p=0.2, seed=2**64 - 1),
    ]
    alone = []
    for sampling in options:
        (session,) = opened(engine, LONG[:9], sampling_params=sampling)
        alone.append(list(session.generate(12, eos_ids=())))
        close(session)
    sessions = [opened(engine, LONG[:9], sampling_params=sampling)[0] for sampling in options]
    found = [engine.step(sessions, more=True) for _ in range(12)]
    assert [list(column) for column in zip(*found, strict=True)] == alone
    close(*sessions)


def test_a_fork_samples_by_itself(engine: Engine) -> None:
    """Forks of one prompt sample by their own seeds. Without a seed, each fork samples other tokens."""
    (session,) = opened(engine, LONG[:9], sampling_params=SamplingParams(2.0, seed=1))
    others = [session.fork() for _ in range(2)]
    others[0].sampling_params = SamplingParams(2.0, seed=2)
    found = [engine.step([session, *others]) for _ in range(12)]
    columns = [list(column) for column in zip(*found, strict=True)]
    assert columns[0] == columns[2] != columns[1]
    close(session, *others)
    (session,) = opened(engine, LONG[:9], sampling_params=SamplingParams(3.0))
    other = session.fork()
    found = [engine.step([session, other]) for _ in range(12)]
    assert len({tuple(column) for column in zip(*found, strict=True)}) == 2
    close(session, other)


def test_pages_are_shared_until_written(engine: Engine) -> None:
    pages = engine.sessions.pages
    (session,) = opened(engine, LONG)
    assert pages.free == 6
    forks = [session.fork() for _ in range(3)]
    assert pages.free == 6
    engine.step([session, *forks])
    # These tokens come from the prompt's logits. The next step writes to the third page, which all sessions share.
    assert pages.free == 6
    engine.step([forks[0]])
    assert pages.free == 5
    engine.step([session, *forks[1:]])
    assert pages.free == 3
    close(*forks)
    assert pages.free == 6
    snapshot = session.snapshot()
    close(session)
    assert pages.free == 6
    close(snapshot)
    assert pages.free == 9


def test_a_session_goes_on_after_its_answer(engine: Engine, greedy: Callable[[list[int]], int]) -> None:
    (session,) = opened(engine, LONG[:5])
    answer = list(session.generate(4, eos_ids=()))
    session.prefill(LONG[20:30])
    answer = list(session.generate(3, eos_ids=()))
    assert session.tokens[-3:] == answer
    for place in range(19, 22):
        assert session.tokens[place] == greedy(session.tokens[:place])
    assert session.position == 22
    # The caller gives a token in place of a sampled one.
    session.prefill([8])
    with pytest.raises(InputError, match=r"'tokens': values must lie in 0\.\.1535, got 1536"):
        session.append(1536)
    session.append(9)
    (token,) = engine.step([session])
    assert token == greedy(session.tokens[:-1]) and session.tokens[-3:] == [8, 9, token]
    close(session)


def test_what_there_is_no_room_for(engine: Engine) -> None:
    sessions = opened(engine, LONG, LONG, LONG)
    assert engine.sessions.pages.free == 0
    last = engine.open_session()
    with pytest.raises(CapacityError, match=r"need 1 more page of 64 positions, 0 of 9 are free: close a session"):
        last.prefill([1])
    assert last.tokens == [] and sessions[0].position == 130
    with pytest.raises(InputError, match=r"the session would have 261 tokens, max_seq_len is 251"):
        sessions[0].prefill([*LONG, 1])
    assert sessions[0].tokens == LONG
    with pytest.raises(InputError, match="a session stands in the step twice"):
        engine.step([sessions[0], sessions[0]])
    close(*sessions, last)


def test_pages_run_out_within_an_answer(engine: Engine, greedy: Callable[[list[int]], int]) -> None:
    """A session gets all tokens for which there are pages, whether or not the next step has begun. It goes on when others
    leave."""
    first, second, other = opened(engine, LONG + LONG[:70], LONG[:120] + LONG[:80], LONG[:63])
    assert engine.sessions.pages.free == 0
    tokens = [engine.step([other], more=True)[0] for _ in range(2)]
    for _ in range(2):
        with pytest.raises(CapacityError, match="need 1 more page of 64 positions, 0 of 9 are free"):
            engine.step([other], more=True)
        assert other.tokens == LONG[:63] + tokens
    close(second)
    tokens += [engine.step([other], more=True)[0] for _ in range(2)]
    assert [greedy(LONG[:63] + tokens[:place]) for place in range(4)] == tokens
    close(first, other)


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Python goes to another thread every 10 us."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("hasty_threads")
def test_threads_take_turns(engine: Engine) -> None:
    """Each thread gets the tokens of its own sessions. Snapshots are dropped beside it, without being closed."""
    prompts = [LONG[place : place + 5 + place] for place in range(12)]

    def answer(prompt: list[int]) -> list[int]:
        with engine.open_session(HOT) as session:
            session.prefill(prompt)
            snapshot = session.snapshot()
            first = list(session.generate(12, eos_ids=()))
            session.restore(snapshot)
            again = [*session.generate(6, eos_ids=()), *session.generate(6, eos_ids=())]
        assert again == first
        return first

    alone = [answer(prompt) for prompt in prompts]
    with ThreadPoolExecutor(SESSIONS // 2) as pool:
        for _ in range(3):
            assert list(pool.map(answer, prompts)) == alone


def test_what_is_no_session(engine: Engine) -> None:
    with engine.open_session() as session:
        for sessions in (session, "ab", [session, None], [3]):
            with pytest.raises(InputError, match="a step takes a list of sessions of this engine"):
                engine.step(sessions)  # type: ignore[arg-type]
        with pytest.raises(ClosedError, match="restore takes a snapshot of this engine"):
            session.restore(None)  # type: ignore[arg-type]
        for count in (0, 2.5, "5", True):
            with pytest.raises(OptionError, match="max_new_tokens must be 1 or more, got "):
                session.generate(count)  # type: ignore[arg-type]


def test_a_session_of_another_engine(engine: Engine, capitals_artifact: Path) -> None:
    with Engine.load(capitals_artifact) as foreign, foreign.open_session() as session:
        session.prefill([1, 2])
        with pytest.raises(InputError, match="a step takes a list of sessions of this engine"):
            engine.step([session])
        with engine.open_session() as mine, pytest.raises(ClosedError, match="restore takes a snapshot of this engine"):
            mine.restore(session.snapshot())


def test_a_closed_session(engine: Engine) -> None:
    with engine.open_session() as session:
        with pytest.raises(InputError, match="the session has no token: prefill first"):
            engine.step([session])
        with pytest.raises(InputError, match="there is no token to prefill"):
            session.prefill([])
        with pytest.raises(OptionError, match="max_new_tokens must be 1 or more, got 0"):
            session.generate(0)
        snapshot = session.snapshot()
    session.close()
    for use in (lambda: session.prefill([1]), lambda: engine.step([session]), session.fork, session.snapshot):
        with pytest.raises(ClosedError, match="the session is closed"):
            use()
    snapshot.close()
    with (
        engine.open_session() as other,
        pytest.raises(ClosedError, match="restore takes a snapshot of this engine that is not closed"),
    ):
        other.restore(snapshot)


def test_a_session_fills_its_length(engine: Engine) -> None:
    with engine.open_session() as session:
        session.prefill((LONG + LONG)[: CAPITALS_LENGTH - 2])
        assert len(list(session.generate(eos_ids=()))) == 2
        assert session.position == CAPITALS_LENGTH
        # The token behind the last position can still be sampled, but has no position of its own.
        engine.step([session])
        with pytest.raises(InputError, match="the session has 251 tokens, max_seq_len is 251"):
            engine.step([session])
