"""Prompts that go on from the prefix cache: what is reused, and that the tokens are those of a session alone."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato.delegate.errors import CapacityError
from ostinato.export import export_model
from ostinato.runner import Engine, Request

from ...conftest import export_on_a_gpu
from ...export.memory import MIB
from ...export.models import dense_references
from ...export.models.dense_references import CASES, make_dense
from .driving import CPU_MODES, GPU_MODES, PAGE, Driven, alone, bytes_on_host, loaded

# Models of keys and values alone: with a window in all layers, in some, and in none.
DENSE = ("mistral-window", "qwen2-mixed", "llama")
MAX_SEQ_LEN, VOCAB = 1024, 90
SESSIONS, PAGES = 4, 40

Tokens = list[int]


def fresh(seed: int, count: int) -> Tokens:
    """Tokens that others hardly have."""
    random = Random(seed)
    return [random.randrange(VOCAB) for _ in range(count)]


@pytest.fixture(scope="module", params=[*CPU_MODES, *GPU_MODES])
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, mode: str) -> Iterator[Engine]:
    with loaded(request, mode, sessions=SESSIONS, kv_tokens=PAGES * PAGE, snapshots=8) as engine:
        yield engine


@pytest.fixture
def driven(engine: Engine, mode: str) -> Iterator[Driven]:
    driven = Driven(engine, mode, rows=64, prefix_caching=True)
    yield driven
    driven.close()


def ask(driven: Driven, tokens: Tokens, **options: Any) -> tuple[Tokens, int]:
    """The answer's tokens, which are those of a session alone, and how many tokens of the prompt were reused."""
    before = driven.scheduler.stats.reused_tokens
    request = driven.add(tokens, options.pop("max_tokens", 5), ignore_eos=True, **options)
    driven.run()
    for index in range(request.n):
        assert driven.of(request, index).tokens == alone(driven.reference, request, index)[0]
    return driven.of(request).tokens, driven.scheduler.stats.reused_tokens - before


def test_the_first_repetition_hits(driven: Driven) -> None:
    tokens = fresh(1, 150)
    assert ask(driven, tokens)[1] == 0
    assert ask(driven, tokens)[1] == 150
    # Nothing was computed for it.
    assert driven.scheduler.stats.prompt_tokens == 150


def test_the_next_turn_goes_on_behind_the_answer(driven: Driven) -> None:
    tokens = fresh(2, 100)
    answer, _ = ask(driven, tokens)
    # The model has not seen the answer's last token.
    assert ask(driven, [*tokens, *answer, *fresh(3, 20)])[1] >= 104


def test_a_turn_that_history_renders_otherwise(driven: Driven) -> None:
    """What begins an answer, and the answer, are not in the next prompt: it goes on from the state before them."""
    turn = fresh(4, 90)
    ask(driven, [*turn, *fresh(5, 6)], shared=[90], goes_on=False)
    assert ask(driven, [*turn, *fresh(6, 40)], shared=[130], goes_on=False)[1] == 90


def test_prompts_that_part_within_a_page(driven: Driven) -> None:
    """Where two were seen to part, the third goes on: with state of fixed size. Keys and values need no third."""
    same = fresh(7, PAGE + 20)
    found = [ask(driven, [*same, *fresh(seed, 50)], goes_on=False)[1] for seed in (8, 9, 10)]
    assert found == [0, 0, len(same)]


def test_an_unrelated_prompt_in_between(driven: Driven) -> None:
    tokens, other = fresh(11, 130), fresh(12, 130)
    first = ask(driven, tokens)[0]
    assert ask(driven, other)[1] == 0
    assert ask(driven, tokens) == (first, 130)


def test_one_prefix_asked_for_by_many_at_once(driven: Driven) -> None:
    """It is computed once, however many wait."""
    same = fresh(13, 200)
    requests = [driven.add([*same, *fresh(20 + number, 30)], 5, ignore_eos=True) for number in range(9)]
    driven.run()
    for request in requests:
        assert driven.of(request).tokens == alone(driven.reference, request)[0]
    assert driven.scheduler.stats.prompt_tokens == 200 + 9 * 30


def test_several_answers_cost_one_prompt(driven: Driven) -> None:
    ask(driven, fresh(14, 120), n=4)
    assert driven.scheduler.stats.prompt_tokens == 120


def test_whoever_computes_it_is_cancelled(driven: Driven) -> None:
    same = fresh(15, 200)
    first = driven.add([*same, *fresh(30, 5)], 5)
    second = driven.add([*same, *fresh(31, 5)], 5)
    driven.step()
    driven.scheduler.cancel(first.id)
    driven.run()
    assert driven.of(first).reason == "cancelled"
    assert driven.of(second).tokens == alone(driven.reference, second)[0]


def test_prompt_logprobs_reuse_nothing(driven: Driven) -> None:
    from ostinato.runner import SamplingParams

    tokens = fresh(16, 100)
    ask(driven, tokens)
    assert ask(driven, tokens, sampling_params=SamplingParams(prompt_logprobs=0))[1] == 0


def test_without_a_row_for_a_snapshot(request: pytest.FixtureRequest, mode: str) -> None:
    """The oldest state gives its row to the next one; a session's snapshot takes one, too."""
    with loaded(request, mode, sessions=2, kv_tokens=16 * PAGE, snapshots=1) as engine:
        driven = Driven(engine, mode, rows=64, prefix_caching=True)
        one, two = fresh(17, 80), fresh(18, 80)
        assert [ask(driven, tokens, goes_on=False)[1] for tokens in (one, one, two, one)] == [0, 80, 0, 0]
        with engine.open_session() as session:
            session.prefill(one)
            snapshot = session.snapshot()
            assert engine.sessions.free_snapshots == 0
            assert ask(driven, one, goes_on=False)[1] == 0
            snapshot.close()
        driven.close()


def test_what_leaves_for_the_host_comes_back(request: pytest.FixtureRequest, mode: str) -> None:
    with loaded(request, mode, sessions=2, kv_tokens=16 * PAGE, snapshots=1) as engine:
        driven = Driven(engine, mode, rows=64, prefix_caching=True, host_cache_bytes=64 * MIB)
        prompts = [fresh(40 + number, 80) for number in range(6)]
        for tokens in prompts:
            ask(driven, tokens, goes_on=False)
        assert driven.scheduler.prefixes.stats.host_prefixes == 5
        assert driven.scheduler.prefixes.stats.host_bytes > 0
        assert [ask(driven, tokens, goes_on=False)[1] for tokens in prompts] == [80] * 6
        driven.close()


def test_pages_that_prefixes_share_have_one_copy(request: pytest.FixtureRequest, mode: str) -> None:
    """They come back once, too: later ones find them on the device."""
    with loaded(request, mode, sessions=2, kv_tokens=16 * PAGE, snapshots=1) as engine:
        driven = Driven(engine, mode, rows=64, prefix_caching=True, host_cache_bytes=64 * MIB)
        same, sizes = fresh(46, 3 * PAGE), [0]
        ask(driven, same, goes_on=False)
        prompts = [[*same, *fresh(50 + number, 20)] for number in range(5)]
        for tokens in prompts:
            # The prefix before it leaves.
            assert ask(driven, tokens, goes_on=False)[1] == len(same)
            sizes.append(driven.scheduler.prefixes.stats.host_bytes)
        (group,) = engine.program.capacity.groups
        # That of `same` has no page of its own, that of a prompt has one.
        first, *others = (after - before for before, after in itertools.pairwise(sizes))
        assert set(others) == {first - 2 * group.page_bytes}
        assert [ask(driven, tokens, goes_on=False)[1] for tokens in prompts] == [len(tokens) for tokens in prompts]
        prefixes, pages = driven.scheduler.prefixes, []
        with contextlib.ExitStack() as sessions:
            for tokens in prompts[:2]:
                session = prefixes.open_longest(tokens)
                assert session is not None
                sessions.enter_context(session)
                pages.append(session._open.pages[0].numbers)
        assert pages[0][:3] == pages[1][:3] and pages[0][3] != pages[1][3]
        driven.close()


@pytest.mark.parametrize("host_cache_bytes", (2 * MIB, 64 * MIB))
def test_sequences_that_part_anywhere_and_leave(
    request: pytest.FixtureRequest, mode: str, host_cache_bytes: int
) -> None:
    """With room for few of them, on the device and, with fewer bytes, on the host."""
    random = Random(host_cache_bytes)
    with loaded(request, mode, sessions=3, kv_tokens=14 * PAGE, snapshots=3) as engine:
        driven = Driven(engine, mode, rows=64, prefix_caching=True, host_cache_bytes=host_cache_bytes)
        told: list[Tokens] = [[]]
        for number in range(60):
            before = random.choice(told)
            cut = random.choice((random.randrange(len(before) + 1), len(before)))
            tokens = [*before[: min(cut, 200)], *fresh(number, 30)]
            answer, _ = ask(driven, tokens)
            told.append([*tokens, *answer])
            stats = driven.scheduler.prefixes.stats
            assert stats.host_bytes == bytes_on_host(driven.scheduler.prefixes) <= host_cache_bytes
        assert driven.scheduler.stats.reused_tokens > 900
        assert driven.scheduler.stats.reused_tokens > 900
        driven.close()


def test_another_thread_takes_the_room(request: pytest.FixtureRequest, mode: str) -> None:
    """Sessions that a caller opens have prefixes leave at any moment of a step. Answers stay right."""
    with loaded(request, mode, sessions=4, kv_tokens=14 * PAGE, snapshots=3) as engine:
        driven = Driven(engine, mode, rows=64, prefix_caching=True, host_cache_bytes=MIB)
        ended = threading.Event()

        def take() -> int:
            taken = 0
            while not ended.is_set():
                with suppress(CapacityError), engine.open_session() as session:
                    session.prefill(fresh(taken, 150))
                    session.snapshot().close()
                    taken += 1
            return taken

        with ThreadPoolExecutor(1) as beside:
            taken = beside.submit(take)
            try:
                expected: dict[tuple[int, int], Tokens] = {}
                for number in range(40):
                    requests = [
                        driven.add(fresh(number // 8, 70 + 9 * place), 4, ignore_eos=True) for place in range(3)
                    ]
                    driven.run()
                    assert all(driven.of(one).reason in ("length", "kv_tokens", "error") for one in requests)
                    for one in requests:
                        if driven.of(one).reason == "length":
                            key = (number // 8, len(one.tokens))
                            assert driven.of(one).tokens == expected.setdefault(key, driven.of(one).tokens)
            finally:
                ended.set()
            assert taken.result() > 0
        driven.close()


@pytest.fixture(
    scope="module",
    params=[
        *(("cpu", name) for name in DENSE),
        *(pytest.param(("cuda", name), marks=pytest.mark.gpu) for name in DENSE),
    ],
    ids=str,
)
def dense(
    request: pytest.FixtureRequest, exported: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    device, name = request.param
    reference = make_dense(tmp_path_factory.mktemp(name), CASES[name])

    def build(path: Path) -> None:
        options: dict[str, Any] = {"max_seq_len": MAX_SEQ_LEN, "prefill_chunk": 100}
        (export_on_a_gpu if device == "cuda" else export_model)(reference.folder, path, **options)

    extra = repr(MAX_SEQ_LEN) + Path(dense_references.__file__).read_text()
    return exported(f"reuse-{name}-{device}", build, extra)


def test_keys_and_values_are_taken_up_to_any_token(dense: Path) -> None:
    """Sequences that begin with any part of an earlier one, with room for few of them, here and on the host."""
    with Engine.load(dense, sessions=3, kv_tokens=24 * PAGE) as engine, Engine.load(dense) as reference:

        @settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
        @given(
            st.lists(st.tuples(st.integers(0, 50), st.floats(0, 1), st.integers(1, 150)), min_size=2, max_size=12),
            st.sampled_from((0, MIB)),
        )
        def check(parts: list[tuple[int, float, int]], host_cache_bytes: int) -> None:
            driven = Driven(engine, rows=64, prefix_caching=True, host_cache_bytes=host_cache_bytes)
            driven.reference = reference
            told: list[Tokens] = [[]]
            requests: list[Request] = []
            for number, (which, share, count) in enumerate(parts):
                before = told[which % len(told)]
                tokens = [*before[: int(share * len(before))], *fresh(number, count)][-700:]
                requests.append(driven.add(tokens, 6, ignore_eos=True))
                if number % 3:
                    driven.run()
                found = driven.of(requests[-1])
                told.append([*tokens, *found.tokens])
            driven.run()
            for request in requests:
                assert driven.of(request).tokens == alone(reference, request)[0]
            driven.close()

        check()


@pytest.mark.parametrize("host_cache_bytes", (0, 64 * MIB), ids=("device", "host"))
def test_any_token_is_one_to_go_on_from(dense: Path, host_cache_bytes: int) -> None:
    with Engine.load(dense, sessions=2, kv_tokens=24 * PAGE) as engine:
        driven = Driven(engine, rows=64, prefix_caching=True, host_cache_bytes=host_cache_bytes)
        tokens = fresh(60, 400)
        ask(driven, tokens)
        while host_cache_bytes and driven.scheduler.prefixes.make_room():
            pass
        known = [len(group.name) for group in engine.program.capacity.groups if group.window]
        reused = ask(driven, [*tokens[:333], *fresh(61, 20)])[1]
        # A window has left the pages before the prompt's end behind.
        assert reused == (0 if known else 333)
        assert ask(driven, [*tokens, *fresh(62, 20)])[1] == 400
        driven.close()
