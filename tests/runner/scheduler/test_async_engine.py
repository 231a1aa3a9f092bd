"""`AsyncEngine`: any number of callers over an engine's process, and what becomes of them when either process ends."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from ostinato.delegate import ArtifactError, CapacityError, ClosedError, InputError
from ostinato.delegate.errors import OptionError, SessionFileError
from ostinato.runner import AsyncEngine, Engine, EngineProcessError, QueueFullError, Request, SamplingParams
from ostinato.runner.engine_channel import frame
from ostinato.runner.scheduler.messages import Loading

from ...processes import PATIENCE
from .conftest import Run
from .driving import SEEDED

SESSIONS = 4
QUESTION = "What is the capital of France?"
COUNTRIES = ("France", "Japan", "Andorra", "Norway", "Kenya", "Peru", "Italy", "Egypt")


@pytest.fixture(scope="module")
def local(capitals_artifact: Path) -> Iterator[Engine]:
    with Engine.load(capitals_artifact, sessions=SESSIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def shared(run: Run, capitals_artifact: Path) -> Iterator[AsyncEngine]:
    loads: list[tuple[int, int]] = []
    engine = AsyncEngine(capitals_artifact, sessions=SESSIONS, on_load=lambda done, total: loads.append((done, total)))
    run(engine.__aenter__())
    yield engine
    run(engine.close())
    assert loads[0][0] == 0 and loads[-1][0] == loads[-1][1] > 0 and loads == sorted(loads)


@pytest.fixture
def engine(shared: AsyncEngine, run: Run) -> Iterator[AsyncEngine]:
    """The engine that these tests share. At the end nobody has a slot or a page."""
    yield shared
    run(idle(shared))


async def idle(engine: AsyncEngine) -> None:
    """Wait until nobody is served, and see that all is free."""
    end = time.monotonic() + PATIENCE
    while True:
        await engine.reset_prefix_cache()
        described = await engine.describe()
        stats, capacity = described["scheduler"], described["capacity"]
        if not stats["waiting"] + stats["prefilling"] + stats["decoding"]:
            break
        assert time.monotonic() < end, stats
        await asyncio.sleep(0.01)
    assert stats["kept_sessions"] == 0
    assert (capacity["free_slots"], capacity["free_snapshots"]) == (capacity["slots"], capacity["snapshots"])
    assert all(group["free_pages"] == group["pages"] for group in capacity["groups"])


def question(country: str) -> str:
    return f"Could you tell me which city is the capital of {country}?"


# --- answers


def test_many_callers(engine: AsyncEngine, local: Engine, run: Run) -> None:
    """All get their own answers, whole and in pieces."""

    async def pieces(country: str) -> tuple[str, Any]:
        stream = engine.stream(question(country))
        return "".join([piece async for piece in stream]), stream.result

    async def all_of_them() -> list[tuple[str, Any]]:
        return await asyncio.gather(*(pieces(country) for country in COUNTRIES * 5))

    found = run(all_of_them())
    for country, (text, result) in zip(COUNTRIES * 5, found, strict=True):
        expected = local.generate(question(country))
        assert "".join(expected) == text == result.text
        assert (result.tokens, result.finish_reason) == (expected.result.tokens, "stop")
        assert result.prompt_tokens == expected.result.prompt_tokens
    assert found[0][0] == "Paris"


def test_times_and_names(engine: AsyncEngine, run: Run, capitals_artifact: Path) -> None:
    """Results have times; a name is of one request at a time; an engine that was not entered says so."""
    result = run(engine.answer(QUESTION, max_new_tokens=8, ignore_eos=True))
    assert result.prefill_seconds > 0 and result.decode_tokens_per_second > 0

    async def twice() -> None:
        request = Request(id="one", tokens=[1, 2], max_tokens=50, ignore_eos=True)
        first = engine.outputs(request)
        await anext(first)
        with pytest.raises(InputError, match="a request with the id 'one' has not ended yet"):
            await anext(engine.outputs(request))
        await first.aclose()  # type: ignore[attr-defined]
        await anext(engine.outputs(request))

    run(twice())
    with pytest.raises(ClosedError, match="async with AsyncEngine"):
        run(AsyncEngine(capitals_artifact).answer(QUESTION))
    with pytest.raises(OptionError, match="unknown option 'sesions': the options are cuda_graph"):
        run(AsyncEngine(capitals_artifact, sesions=3).__aenter__())
    with pytest.raises(ClosedError, match="async with AsyncEngine"):
        print(AsyncEngine(capitals_artifact).pid)


def test_an_id_that_is_used_again(engine: AsyncEngine, local: Engine, run: Run) -> None:
    """Outputs of the request that had it before, which are on their way, are not the new one's."""

    async def again() -> list[int]:
        first = engine.outputs(Request(id="one", tokens=[1, 2], max_tokens=200, ignore_eos=True))
        await anext(first)
        # The event loop stands still until there is one.
        select.select([engine._writer.get_extra_info("socket")], [], [])
        await first.aclose()
        second = engine.outputs(Request(id="one", tokens=[5, 6, 7], max_tokens=3, ignore_eos=True))
        found = [output async for output in second]
        assert {output.id for output in found} == {"one"}
        return [token for output in found for token in output.tokens]

    assert run(again()) == list(local.generate_tokens([5, 6, 7], max_new_tokens=3, ignore_eos=True))


def test_several_answers(engine: AsyncEngine, local: Engine, run: Run) -> None:
    params = SamplingParams(2.0, seed=5, logprobs=1)
    found = run(engine.answers(QUESTION, 3, sampling_params=params, max_new_tokens=12, ignore_eos=True))
    for index, result in enumerate(found):
        params = SamplingParams(2.0, seed=5 + index, logprobs=1)
        stream = local.generate(QUESTION, sampling_params=params, max_new_tokens=12, ignore_eos=True)
        text = "".join(stream)
        assert (result.text, result.tokens) == (text, stream.result.tokens)
        assert [one.token for one in result.logprobs] == result.tokens
    assert len({tuple(result.tokens) for result in found}) == 3


def stop_across_tokens(engine: Engine, tokens: list[int]) -> str:
    """The end of one token's text and the beginning of the next one's, which stand so together only once."""
    texts = [engine.tokenizer.decode([token]) for token in tokens]
    whole = "".join(texts)
    for place in range(5, len(texts) - 1):
        stop = texts[place][-2:] + texts[place + 1][:2]
        begin = sum(map(len, texts[:place])) + len(texts[place]) - 2
        if len(stop) == 4 and whole.find(stop) == begin:
            return stop
    raise AssertionError("no such text")


def test_a_stop_string(engine: AsyncEngine, local: Engine, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text ends before it, wherever its tokens begin, and the scheduler is told at once."""
    options: dict[str, Any] = {"max_new_tokens": 200, "ignore_eos": True, "sampling_params": SEEDED}
    stream = local.generate(QUESTION, **options)
    whole = "".join(stream)
    stop = stop_across_tokens(local, stream.result.tokens)
    sent: list[Any] = []
    send = engine._send

    def noted(message: Any) -> None:
        sent.append(message)
        send(message)

    monkeypatch.setattr(engine, "_send", noted)
    result = run(engine.answer(QUESTION, stop=stop, **options))
    assert result.text == whole[: whole.index(stop)] and result.finish_reason == "stop"
    request, cancel = sent[:2]
    assert (cancel.id, cancel.index) == (request.id, 0)
    # One of three ends there, and the others where they do.
    answers = run(engine.answers(QUESTION, 3, stop=stop, **options))
    assert answers[0].text == result.text
    assert all(stop not in one.text for one in answers)


def test_a_stop_string_here(local: Engine) -> None:
    """In one process the answer ends where the text does: a step ahead of it at most."""
    options: dict[str, Any] = {"max_new_tokens": 200, "ignore_eos": True, "sampling_params": SEEDED}
    stream = local.generate(QUESTION, **options)
    whole = "".join(stream)
    stop = stop_across_tokens(local, stream.result.tokens)
    for answer in (
        lambda: list(local.generate(QUESTION, stop=stop, **options)),
        lambda: local.generate_all([QUESTION], stop=stop, **options),
    ):
        before = local.driver.scheduler.stats.output_tokens
        answer()
        count = local.driver.scheduler.stats.output_tokens - before
        text = local.tokenizer.decode(stream.result.tokens[:count])
        assert stop in text and stop not in local.tokenizer.decode(stream.result.tokens[: count - 3])
        assert local.sessions.free == SESSIONS
    result = local.generate_all([QUESTION], stop=stop, **options)[0]
    assert (result.text, result.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_leaving_an_answer(engine: AsyncEngine, run: Run) -> None:
    """Whoever takes no more pieces, or is cancelled, gives its slot back."""

    async def leave() -> int:
        count = 0
        async for _ in engine.stream(QUESTION, max_new_tokens=200, ignore_eos=True):
            count += 1
            if count == 3:
                break
        return count

    async def close_it() -> None:
        stream = engine.stream(QUESTION, max_new_tokens=200, ignore_eos=True)
        await anext(stream)
        await stream.aclose()
        assert stream.result.finish_reason == "interrupted"

    async def cancelled() -> None:
        # So that none of them comes to its end before.
        os.kill(engine.pid, signal.SIGSTOP)
        tasks = [asyncio.create_task(engine.answer(QUESTION, max_new_tokens=220)) for _ in range(40)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        os.kill(engine.pid, signal.SIGCONT)
        assert all(isinstance(one, asyncio.CancelledError) for one in ended)

    async def go_on() -> None:
        # What comes next finds the session as it is left.
        stream = engine.stream(QUESTION, max_new_tokens=200, ignore_eos=True, keep="a")
        await anext(stream)
        await stream.aclose()
        assert (await engine.answer(question("Japan"), session="a", keep="a")).finish_reason == "stop"
        await engine.close_session("a")

    for way in (leave, close_it, cancelled, go_on):
        run(way())
        run(idle(engine))


def test_values_of_other_types(engine: AsyncEngine, run: Run) -> None:
    """They are refused here: the process is that of all callers."""

    async def ask(**changed: Any) -> None:
        request = Request(id=engine.new_id(), tokens=[1], max_tokens=3)
        async for _ in engine.outputs(structs.replace(request, **changed)):
            pass

    for changed in ({"tokens": ["a"]}, {"tokens": [1.5]}, {"keep": 5}, {"ignore_eos": None}):
        with pytest.raises(OptionError, match=f"Request cannot be sent: .*{next(iter(changed))}"):
            run(ask(**changed))
    with pytest.raises(OptionError, match="Rewind cannot be sent"):
        run(engine.rewind("a", "all"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'n'"):
        engine.stream(QUESTION, n=2)
    with pytest.raises(OptionError, match="stream takes no max_tokens: write max_new_tokens=5"):
        run(engine.answer(QUESTION, max_tokens=5))
    with pytest.raises(OptionError, match=r"answers takes no seed: write sampling_params=SamplingParams\(seed=1\)"):
        run(engine.answers(QUESTION, 2, seed=1))
    run(ask())


def test_a_progress_display_that_raises(run: Run, tmp_path: Path) -> None:
    """Who waits for the engine is told."""

    async def read() -> None:
        engine = AsyncEngine(tmp_path, on_load=lambda done, total: 1 / 0)  # type: ignore[arg-type, return-value]
        reply = engine._replies["1"] = asyncio.get_running_loop().create_future()
        reader = asyncio.StreamReader()
        reader.feed_data(frame(Loading(1, 2)))
        await engine._read(reader)
        await reply

    with pytest.raises(EngineProcessError, match="cannot be taken: ZeroDivisionError"):
        run(read())


def test_errors_are_of_one_request(engine: AsyncEngine, local: Engine, run: Run) -> None:
    async def errors() -> list[Any]:
        return await asyncio.gather(
            engine.answer(QUESTION),
            engine.answer("long " * 300),
            engine.answers(QUESTION, 5),
            engine.answer(QUESTION, session="nobody"),
            engine.answer(""),
            engine.answer(QUESTION, max_new_tokens=0),
            engine.answer("Japan's capital?"),
            engine.rewind("nobody", 0),
            return_exceptions=True,
        )

    found = run(errors())
    assert found[0].text == "Paris" and found[6].text == "".join(local.generate("Japan's capital?"))
    kinds = [InputError, CapacityError, InputError, InputError, OptionError, InputError]
    errors_found = [*found[1:6], found[7]]
    assert [type(one) for one in errors_found] == kinds
    for one, text in zip(
        errors_found,
        (
            "no room for an answer",
            "5 answers to one prompt",
            "no session is kept as",
            "empty",
            "1 or more",
            "no session is",
        ),
        strict=True,
    ):
        assert text in str(one)


# --- kept sessions, and the other commands


def test_kept_sessions(engine: AsyncEngine, local: Engine, run: Run, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True}
    first = run(engine.answer(QUESTION, keep="a", **options))
    path = tmp_path / "session"
    run(engine.save_session("a", path))
    history = [*local.encode_prompt(QUESTION), *first.tokens]
    assert run(engine.load_session("b", path)) == len(history)
    following = " And of Japan?"
    expected = list(
        local.generate_tokens([*history, *local.encode_prompt(following, raw=True)], max_new_tokens=8, ignore_eos=True)
    )
    for name in "ab":
        assert run(engine.answer(following, raw=True, session=name, keep=name, **options)).tokens == expected
    run(engine.rewind("a", len(history)))
    assert run(engine.answer(following, raw=True, session="a", **options)).tokens == expected
    assert run(engine.describe())["scheduler"]["kept_sessions"] == 2
    for command, kind, text in (
        (lambda: engine.load_session("a", path), InputError, "kept as 'a' already"),
        (lambda: engine.load_session("c", tmp_path / "missing"), SessionFileError, "missing"),
        (lambda: engine.rewind("a", 999), InputError, "rewind takes 0 to that, got 999"),
        (lambda: engine.save_session("a", tmp_path / "no" / "folder"), SessionFileError, "folder"),
        (lambda: engine.close_session("c"), InputError, "no session is kept as 'c'"),
    ):
        with pytest.raises(kind, match=text):
            run(command())
    for name in "ab":
        run(engine.close_session(name))


def test_a_refused_swap(engine: AsyncEngine, run: Run, capitals_artifact: Path, tmp_path: Path) -> None:
    """An unknown option, one of the scheduler out of range, or no digest, leaves the old artifact loaded, with its own
    tokenizer."""
    for path in capitals_artifact.glob("model.*"):
        (tmp_path / path.name).symlink_to(path)
    with pytest.raises(OptionError, match="unknown option 'sesions'"):
        run(engine.swap(tmp_path, sesions=3))
    with pytest.raises(OptionError, match="max_waiting must be 1 or more"):
        run(engine.swap(tmp_path, max_waiting=-1))
    with pytest.raises(OptionError, match="a digest is sha256: and 64 hexadecimal digits"):
        run(engine.swap(tmp_path, digest="abc"))
    # The other folder has no tokenizer.
    assert run(engine.answer(QUESTION)).text == "Paris"


def test_errors_of_a_closed_engine(run: Run, capitals_artifact: Path) -> None:
    """Each caller gets an exception of its own: its traceback does not grow with the number of calls."""
    engine = AsyncEngine(capitals_artifact)
    run(engine.close())
    depths = []
    for _ in range(3):
        with pytest.raises(ClosedError, match="the engine is closed") as raised:
            run(engine.answer(QUESTION))
        depths.append(len(raised.traceback))
    assert len(set(depths)) == 1


def test_swap(engine: AsyncEngine, local: Engine, run: Run, capitals_artifact: Path) -> None:
    """Requests that came before end first. The other one has its own limits; then the first comes back."""

    async def swapped() -> tuple[Any, Any]:
        before = asyncio.create_task(engine.answer(QUESTION, max_new_tokens=100, ignore_eos=True))
        await asyncio.sleep(0)
        await engine.swap(capitals_artifact, sessions=1, max_waiting=1)
        assert engine.limits.sessions == 1 and engine.limits.max_seq_len == local.max_seq_len
        assert engine.limits.eos_ids == sorted(local.eos_ids)
        # One is served and one waits, of those that it reads at a time.
        os.kill(engine.pid, signal.SIGSTOP)
        tasks = [asyncio.create_task(engine.answer(QUESTION)) for _ in range(6)]
        await asyncio.sleep(0)
        os.kill(engine.pid, signal.SIGCONT)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        return await before, results

    before, results = run(swapped())
    stream = local.generate(QUESTION, max_new_tokens=100, ignore_eos=True)
    assert before.text == "".join(stream)
    refused = [one for one in results if isinstance(one, QueueFullError)]
    assert all("which is the most: ask again later" in str(one) for one in refused)
    assert len(refused) == 5
    assert all(one.text == "Paris" for one in results if not isinstance(one, Exception))
    run(idle(engine))
    with pytest.raises(ArtifactError):
        run(engine.swap(capitals_artifact / "nowhere"))
    assert run(engine.answer(QUESTION)).text == "Paris"
    with pytest.raises(OptionError, match="sessions must be"):
        run(engine.swap(capitals_artifact, sessions=-1))
    # The old one has left. Another one can still come.
    with pytest.raises(ClosedError, match="the program is closed"):
        run(engine.answer(QUESTION))
    run(engine.swap(capitals_artifact, sessions=SESSIONS))
    assert run(engine.answer(QUESTION)).text == "Paris" and engine.limits.sessions == SESSIONS


def test_a_process_that_is_stopped(engine: AsyncEngine, run: Run) -> None:
    """Who waits is told. When it goes on, so do requests, and those that were told have no slot any more."""

    async def told() -> None:
        before = (await engine.describe())["scheduler"]["output_tokens"]
        os.kill(engine.pid, signal.SIGSTOP)
        text = f"the engine's process {engine.pid} is stopped (SIGSTOP): SIGCONT continues it"
        requests = [engine.answer(QUESTION, max_new_tokens=200, ignore_eos=True) for _ in range(6)]
        for error in await asyncio.gather(*requests, engine.describe(), return_exceptions=True):
            assert isinstance(error, EngineProcessError) and str(error) == text
        os.kill(engine.pid, signal.SIGCONT)
        answer = await engine.answer(QUESTION)
        assert answer.text == "Paris"
        assert (await engine.describe())["scheduler"]["output_tokens"] - before == len(answer.tokens)

    try:
        run(told())
    finally:
        os.kill(engine.pid, signal.SIGCONT)
