"""What becomes of an engine and its callers when its process ends, or they do."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ostinato.delegate import ArtifactError, ClosedError
from ostinato.delegate.errors import OptionError, OstinatoError
from ostinato.runner import AsyncEngine, EngineProcessError, Request, Result, SamplingParams
from ostinato.runner.engine_channel import LENGTH_BYTES, EngineChannel, frame
from ostinato.runner.engine_process import EngineProcess
from ostinato.runner.scheduler.messages import Cancel, Output, decode_from_engine

from ...processes import PATIENCE
from .conftest import Run

SESSIONS = 4
QUESTION = "What is the capital of France?"


def test_a_process_that_is_killed(run: Run, capitals_artifact: Path) -> None:
    async def killed() -> None:
        async with AsyncEngine(capitals_artifact, sessions=2) as engine:
            assert (await engine.answer(QUESTION)).text == "Paris"
            # So that it answers nothing before it ends.
            os.kill(engine.pid, signal.SIGSTOP)
            waiting = [asyncio.create_task(engine.answer(QUESTION)) for _ in range(3)]
            waiting.append(asyncio.create_task(engine.describe()))  # type: ignore[arg-type]
            await asyncio.sleep(0)
            os.kill(engine.pid, signal.SIGKILL)
            text = "the engine's process has ended: killed by SIGKILL"
            for error in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(error, EngineProcessError) and str(error).startswith(text)
            for use in (engine.answer(QUESTION), engine.describe(), engine.close_session("a")):
                with pytest.raises(EngineProcessError, match=text):
                    await use

    run(killed())


def test_no_memory(run: Run, capitals_artifact: Path) -> None:
    """A request for which there is no memory has an error, and whoever comes when there is some again is served; or the
    process has ended, and all are told."""

    async def starved() -> None:
        async with AsyncEngine(capitals_artifact, sessions=SESSIONS) as engine:
            assert (await engine.answer(QUESTION)).text == "Paris"
            before = resource.prlimit(engine.pid, resource.RLIMIT_AS)
            status = Path(f"/proc/{engine.pid}/statm").read_text().split()
            used = int(status[0]) * resource.getpagesize()
            resource.prlimit(engine.pid, resource.RLIMIT_AS, (used, before[1]))
            requests = [
                engine.answer(
                    QUESTION, max_new_tokens=20, sampling_params=SamplingParams(prompt_logprobs=20, logprobs=20)
                )
                for _ in range(SESSIONS)
            ]
            found = await asyncio.gather(*requests, return_exceptions=True)
            for one in found:
                assert isinstance(one, OstinatoError) or (isinstance(one, Result) and one.text == "Paris")
            resource.prlimit(engine.pid, resource.RLIMIT_AS, before)
            with suppress(EngineProcessError):
                assert (await engine.answer(QUESTION)).text == "Paris"

    run(starved())


def test_closed_with_requests(run: Run, capitals_artifact: Path) -> None:
    async def closed() -> int:
        async with AsyncEngine(capitals_artifact) as engine:
            tasks = [
                asyncio.create_task(engine.answer(QUESTION, max_new_tokens=200, ignore_eos=True)) for _ in range(3)
            ]
            await asyncio.sleep(0)
        for one in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(one, ClosedError) and str(one) == "the engine is closed"
        with pytest.raises(ClosedError):
            await engine.describe()
        await engine.close()
        return engine.pid

    assert not Path(f"/proc/{run(closed())}").exists()


def test_cancelled_while_a_swap_waits(run: Run, capitals_artifact: Path) -> None:
    """A request that the swap waits for, and one behind the swap. The others behind it are for the new one."""

    async def reason(engine: AsyncEngine, request: Request) -> str | None:
        return [output.finish_reason async for output in engine.outputs(request)][-1]

    async def cancelled() -> None:
        async with AsyncEngine(capitals_artifact, sessions=SESSIONS) as engine:
            # So that it reads all of this at once.
            os.kill(engine.pid, signal.SIGSTOP)
            requests = [Request(id=name, tokens=[1, 2], max_tokens=200, ignore_eos=True) for name in "ab"]
            before = asyncio.create_task(reason(engine, requests[0]))
            await asyncio.sleep(0)
            swap = asyncio.create_task(engine.swap(capitals_artifact, sessions=SESSIONS))
            await asyncio.sleep(0)
            behind = asyncio.create_task(reason(engine, requests[1]))
            last = asyncio.create_task(engine.answer(QUESTION))
            await asyncio.sleep(0)
            for request in requests:
                engine._send(Cancel(engine._inner_ids[request.id]))
            os.kill(engine.pid, signal.SIGCONT)
            await swap
            assert (await before, await behind) == ("cancelled", "cancelled")
            assert (await last).text == "Paris"

    run(cancelled())


class Steps:
    """Stands for an engine, its driver and its scheduler: steps that give large outputs, which the owner must have read."""

    failure: str | None = None
    files = SimpleNamespace(busy=False, finish=lambda: None)

    def __init__(self, channel: EngineChannel, count: int) -> None:
        self.driver = self.scheduler = self
        self._channel, self.left = channel, count

    @property
    def busy(self) -> bool:
        return self.left > 0

    def step(self) -> list[Output]:
        assert not self._channel.is_full
        self.left -= 1
        return [Output("1", 0, [self.left] * 100_000)]


def test_an_owner_that_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps pause when much waits for it, and go on when it reads. Messages are answered meanwhile."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = EngineChannel(theirs)
        process = EngineProcess(channel)
        steps: Any = Steps(channel, 100)
        process._engine = steps
        answered = threading.Event()
        monkeypatch.setattr(process, "_answer", lambda message: answered.set() if channel.is_full else None)
        thread = threading.Thread(target=process.run)
        thread.start()
        ours.settimeout(PATIENCE)
        while not answered.wait(0.01):
            assert steps.busy and thread.is_alive()
            ours.sendall(frame(Cancel("1")))
        left = steps.left
        with ours.makefile("rb") as file:
            for number in reversed(range(100)):
                length = int.from_bytes(file.read(LENGTH_BYTES), "little")
                (output,) = decode_from_engine(file.read(length))  # type: ignore[misc]
                assert output.tokens[0] == number
        ours.shutdown(socket.SHUT_WR)
        thread.join(PATIENCE)
        assert left > 0 and not thread.is_alive()


def test_no_artifact(run: Run, capitals_artifact: Path, tmp_path: Path) -> None:
    """A folder that is none begins no process. What only the process finds comes from it, by name."""

    async def enter(path: Path, **options: Any) -> None:
        async with AsyncEngine(path, **options):
            pass

    with pytest.raises(ArtifactError):
        run(enter(tmp_path / "nowhere"))
    damaged = tmp_path / "damaged"
    shutil.copytree(capitals_artifact, damaged)
    program = max(damaged.glob("*.pte"), key=lambda path: path.stat().st_size)
    program.write_bytes(program.read_bytes()[:1000])
    with pytest.raises(ArtifactError):
        run(enter(damaged))
    with pytest.raises(OptionError, match="a row bucket is a number of sessions"):
        run(enter(capitals_artifact, sessions=2, cuda_graph=True, row_buckets=[9999]))


OWNER = """
import asyncio, os, signal, sys
from ostinato.runner import AsyncEngine

interrupts = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: interrupts.append(1))

async def main():
    async with AsyncEngine(sys.argv[1]) as engine:
        print(engine.pid, flush=True)
        stream = engine.stream("What is the capital of France?", max_new_tokens=200, ignore_eos=True)
        await anext(stream)
        while sys.argv[2] == "wait":
            await asyncio.sleep(0.01)
        while not interrupts:
            await asyncio.sleep(0.01)
        await stream.aclose()
        print((await engine.answer("What is the capital of France?")).text, flush=True)

asyncio.run(main())
"""


def owner(path: Path, what: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", OWNER, str(path), what]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def gone(pid: int) -> bool:
    """Whether the process has ended; init may not have taken note of it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_for_end(pid: int) -> None:
    end = time.monotonic() + PATIENCE
    while not gone(pid):
        assert time.monotonic() < end, f"process {pid} goes on"
        time.sleep(0.01)


def test_an_owner_that_is_killed(capitals_artifact: Path) -> None:
    """The engine's process ends, also in the middle of an answer."""
    with owner(capitals_artifact, "wait") as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    wait_for_end(pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_the_owners(capitals_artifact: Path, number: signal.Signals) -> None:
    """They go to both processes, as from a terminal or a service manager. The engine leaves them to its owner, who still gets
    answers."""
    with owner(capitals_artifact, "interrupts") as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        os.killpg(process.pid, number)
        assert process.stdout.readline() == "Paris\n"
        assert process.wait(PATIENCE) == 0
    wait_for_end(pid)


def test_a_service_managers_signal_ends_the_loading(run: Run, capitals_artifact: Path) -> None:
    """It may come when there is no answer yet that the owner awaits, and loading may take long."""

    async def signalled() -> None:
        engine = AsyncEngine(capitals_artifact)
        loading = asyncio.create_task(engine.__aenter__())
        while not loading.done():
            with suppress(ClosedError):
                os.kill(engine.pid, signal.SIGTERM)
                break
            await asyncio.sleep(0.001)
        with pytest.raises(EngineProcessError):
            await loading

    run(signalled())
