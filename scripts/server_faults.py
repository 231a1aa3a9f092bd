#!/usr/bin/env python3
"""Load `ostinato serve` with callers of whom many do wrong, then with fuzzed bodies, then end it in all ways that there are.

    python scripts/server_faults.py ARTIFACT [--requests 10000] [--concurrency 64] [--fuzzed 1000] [--byte-seconds 1]
                                    [--seed 0]

ARTIFACT is the model that scripts/train_capitals.py trains, on the CPU: what it answers is known. Of the requests 20 % go
away in mid-answer and 5 % are malformed. Beside them some send the end of their body a byte at a time, with --byte-seconds
between two, and some do not read what comes. All others must get the right answer, and all that is theirs must be free at
the end. Everything is on the loopback interface. The servers' logs are in a temporary folder, which is kept if something has
failed.

Exit status: 0 all held, 1 something did not, 2 an error.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from check_speed import Finding
from server_bodies import Fuzz, chat, large_in_chunks, malformed
from server_client import PATIENCE, HungError, Reply, Server, ask, leave, memory_of, request, serving

from ostinato.delegate.artifact.paths import artifact_paths
from ostinato.delegate.errors import OstinatoError
from ostinato.runner.bench.tables import Side, table

SCRIPTS = Path(__file__).resolve().parent
with (SCRIPTS / "capitals.csv").open(encoding="utf-8", newline="") as file:
    CAPITALS = [(row["country"], row["capital"]) for row in csv.DictReader(file)]
SESSIONS = 8
GONE, MALFORMED = 0.20, 0.05
# Bytes that come one by one: with a second between two, less than the minute that a server waits.
SLOW_BYTES, TARDY_BYTES, BODY_SECONDS = 45, 75, 60
HEALTH_MS = 100
# Bytes that a process may have more at the end than after the warm-up, or in the middle. The allocator keeps some.
GROWTH = 16 << 20
DRAIN_SECONDS = 20
# Tokens of an answer that is not done in a moment.
LONG = 200
# Statuses that a fuzzed body may have: an answer, or what is wrong with the body.
FUZZED = (200, 400, 404, 413, 429)

Pairs = list[tuple[str, str]]
Work = Callable[[], Awaitable[None]]


class Load:
    """Requests of all kinds, and what came of them.

    Attributes:
        found: kind -> number of requests that got what they should.
        wrong: what the others got.
    """

    def __init__(self, server: Server, capitals: Pairs, seed: int) -> None:
        self._server, self._capitals = server, capitals
        self._random = random.Random(seed)
        self._malformed = sorted(malformed(server.max_seq_len).items())
        self.found: Counter[str] = Counter()
        self.wrong: list[str] = []

    def works(self, count: int) -> list[Work]:
        """So many requests, in an order of their own."""
        gone, bad = round(GONE * count), round(MALFORMED * count)
        kinds: list[Work] = []
        for work, number in ((self.goes_away, gone), (self.is_refused, bad), (self.is_answered, count - gone - bad)):
            kinds += [work] * number
        self._random.shuffle(kinds)
        return kinds

    async def is_answered(self, byte_seconds: float = 0.0) -> None:
        country, capital = self._random.choice(self._capitals)
        data = chat(f"What is the capital of {country}?", stream=self._random.random() < 0.5)
        reply = await ask(self._server.port, data, SLOW_BYTES if byte_seconds else 0, byte_seconds)
        self._take("slow" if byte_seconds else "answered", reply.text == capital, f"{country}: {_shown(reply)}")

    async def is_tardy(self, byte_seconds: float) -> None:
        data = chat("What is the capital of France?")
        reply = await ask(self._server.port, data, TARDY_BYTES, byte_seconds)
        self._take("tardy", reply.status == 408, f"a body that takes too long: {_shown(reply)}")

    async def is_refused(self) -> None:
        name, (data, status) = self._random.choice(self._malformed)
        reply = await ask(self._server.port, data)
        right = reply.status == status and reply.complete
        self._take("malformed", right, f"{name}: {_shown(reply)}, wanted {status}")

    async def goes_away(self) -> None:
        country, _ = self._random.choice(self._capitals)
        stream, reset = self._random.random() < 0.7, self._random.random() < 0.5
        data = _long(f"What is the capital of {country}?", stream=stream)
        begun = await leave(self._server.port, data, None if stream else self._random.uniform(0, 0.1), reset)
        self._take("gone", begun or not stream, "a stream ended before its first event")

    async def reads_late(self, seconds: float) -> None:
        count = 2
        data = _long("What is the capital of France?", stream=True, n=count, logprobs=True, top_logprobs=20)
        reply = await ask(self._server.port, data, late_seconds=seconds)
        records = [one["logprobs"] for event in reply.events for one in event["choices"]] if reply.complete else []
        tokens = sum(len(one["content"]) for one in records if one is not None)
        self._take("late", reply.error is None and tokens == count * LONG, f"a late reader got {tokens} tokens")

    def _take(self, kind: str, right: bool, what: str) -> None:
        self.found[kind] += right
        if not right:
            self.wrong.append(what)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("artifact", type=Path, metavar="ARTIFACT")
    add("--requests", type=int, default=10_000, metavar="N", help="default: %(default)s")
    add("--concurrency", type=int, default=64, metavar="N", help="default: %(default)s")
    add("--fuzzed", type=int, default=1000, metavar="N", help="number of fuzzed bodies (default: %(default)s)")
    add("--byte-seconds", type=float, default=1.0, metavar="S", help="between the bytes of slow ones (%(default)g)")
    add("--seed", type=int, default=0, metavar="N", help="of everything that is random (default: %(default)s)")
    arguments = parser.parse_args(words)
    begin, logs = time.monotonic(), Path(tempfile.mkdtemp(prefix="server-faults-"))
    try:
        artifact_paths(arguments.artifact)
        found = [*under_load(arguments, logs), *ends(arguments.artifact, logs)]
    except (OstinatoError, HungError) as error:
        print(f"error: {error}\nlogs: {logs}", file=sys.stderr)
        return 2
    columns: dict[str, Side] = {"what": "left", "found": "left", "held": "left", "wanted": "left"}
    print(table(columns, [(one.what, one.found, "yes" if one.held else "NO", one.wanted) for one in found]))
    held = all(one.held for one in found)
    print(f"{time.monotonic() - begin:.0f} s" + ("" if held else f", logs: {logs}"))
    if held:
        shutil.rmtree(logs)
    return 0 if held else 1


def under_load(arguments: argparse.Namespace, logs: Path) -> list[Finding]:
    """Requests of all kinds, and fuzzed bodies, on one server."""
    with serving(arguments.artifact, logs / "load.log", ["--sessions", SESSIONS]) as server:
        found = asyncio.run(_load(server, arguments)) + asyncio.run(_fuzzed(server, arguments))
        server.process.terminate()
        found.append(_same("exit status", server.wait(), 0))
        found.append(_none("errors in the log", server.log.read_bytes().count(b"Traceback")))
    return found


async def _load(server: Server, arguments: argparse.Namespace) -> list[Finding]:
    capitals = await _known(server)
    load = Load(server, capitals, arguments.seed)
    callers = arguments.concurrency
    # The largest body, too: the allocator keeps some of what it took.
    await _each([*load.works(arguments.requests // 10), lambda: _too_large(server, load)], callers)
    before = _memory(server)
    load.found.clear()
    # These are beside the callers, so that they hold up none of them.
    some, byte_seconds = max(2, arguments.requests // 500), arguments.byte_seconds
    apart: list[Coroutine[Any, Any, None]] = [load.is_answered(byte_seconds) for _ in range(some)]
    apart += [load.reads_late(5 * byte_seconds * (1 + number)) for number in range(4)]
    if tardy := TARDY_BYTES * byte_seconds > BODY_SECONDS:
        apart.append(load.is_tardy(byte_seconds))
    tasks = [asyncio.create_task(one) for one in apart]
    works = load.works(arguments.requests)
    half = len(works) // 2
    with _probing(server) as health:
        begin = time.monotonic()
        await _each(works[:half], callers)
        middle = _memory(server)
        await _each([*works[half:], lambda: _too_large(server, load)], callers)
        seconds = time.monotonic() - begin
    await asyncio.gather(*tasks)
    for what in load.wrong[:20]:
        print(what, file=sys.stderr)
    kinds = Counter(work.__name__ for work in works)
    free = await _when_idle(server)
    end = _memory(server)
    filled = await _fill(server)
    return [
        _same("capitals, each alone", len(capitals), len(CAPITALS)),
        _same("right answers", load.found["answered"], kinds["is_answered"]),
        _same("malformed: right status", load.found["malformed"], kinds["is_refused"]),
        _same("gone in mid-answer", load.found["gone"], kinds["goes_away"]),
        _same("slow bodies: right answers", load.found["slow"], some),
        _same("late readers: whole answers", load.found["late"], 4),
        *([_same("body of over a minute: 408", load.found["tardy"], 1)] if tardy else []),
        _same("body over the limit, in chunks: 413", load.found["large"], 1),
        Finding("requests/s", f"{arguments.requests / seconds:,.0f}", True, ""),
        *_healthy(health),
        _same("free sessions at the end", free, server.sessions),
        filled,
        _flat("memory: server", before[0], middle[0], end[0]),
        _flat("memory: engine", before[1], middle[1], end[1]),
    ]


@contextmanager
def _probing(server: Server) -> Iterator[dict[str, Any]]:
    """Ask for the server's health all the while. What is yielded has scripts/server_probe.py's output behind the context."""
    command = [sys.executable, str(SCRIPTS / "server_probe.py"), str(server.port)]
    probe = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    found: dict[str, Any] = {}
    try:
        yield found
        found |= json.loads(probe.communicate(timeout=PATIENCE)[0])
    finally:
        probe.kill()
        probe.wait()


def _healthy(health: Mapping[str, Any]) -> list[Finding]:
    times = sorted(health["ms"])
    p99 = times[int(0.99 * len(times))]
    shown = f"{p99:.1f} ms, worst {times[-1]:.0f}"
    return [
        Finding(f"health: p99 of {len(times)}", shown, p99 < HEALTH_MS, f"under {HEALTH_MS} ms"),
        _none("health: not 200", health["wrong"]),
    ]


async def _known(server: Server) -> Pairs:
    """The capitals that the model says right if nobody else asks."""
    found = []
    for country, capital in CAPITALS:
        reply = await ask(server.port, chat(f"What is the capital of {country}?"))
        if reply.text == capital:
            found.append((country, capital))
    return found


async def _too_large(server: Server, load: Load) -> None:
    reply = await ask(server.port, large_in_chunks())
    # The server may have closed the connection before all was written.
    load.found["large"] += reply.status in (413, 0)


async def _fill(server: Server) -> Finding:
    """Answers that need every page, at once: if any page were lost, one of them would have lost its place."""
    before = await _metric(server, "vllm:num_preemptions_total")
    replies = await asyncio.gather(
        *(
            ask(server.port, chat(f"{number} What is the capital of France?", ignore_eos=True))
            for number in range(server.sessions)
        )
    )
    totals = Counter(reply.json["usage"]["total_tokens"] if reply.status == 200 else 0 for reply in replies)
    put_back = await _metric(server, "vllm:num_preemptions_total") - before
    whole = sum(count for tokens, count in totals.items() if tokens >= server.max_seq_len)
    return Finding(
        "all pages in use at once",
        f"{whole} answers to the last position, {put_back:.0f} put back",
        whole == server.sessions and not put_back,
        f"{server.sessions}, 0",
    )


async def _fuzzed(server: Server, arguments: argparse.Namespace) -> list[Finding]:
    schema = (await ask(server.port, request("/openapi.json", method="GET"))).json
    statuses: Counter[int] = Counter()
    bad: list[str] = []

    async def send(data: bytes) -> None:
        reply = await ask(server.port, data)
        statuses[reply.status] += 1
        if reply.status not in FUZZED or not reply.complete:
            bad.append(f"{data!r:.500}: {_shown(reply)}")

    def work(data: bytes) -> Work:
        return lambda: send(data)

    await _each(map(work, Fuzz(schema, arguments.seed).requests(arguments.fuzzed)), SESSIONS)
    for what in bad[:20]:
        print(what, file=sys.stderr)
    capitals = await _known(server)
    found = ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items()))
    return [
        Finding("fuzzed bodies", found, not bad, " or ".join(map(str, FUZZED))),
        _same("capitals after them", len(capitals), len(CAPITALS)),
        _same("free sessions after them", await _when_idle(server), server.sessions),
    ]


# --- the ends of a server


def ends(artifact: Path, logs: Path) -> list[Finding]:
    """SIGTERM and SIGKILL under load, and the end of the engine's process."""
    found = []
    words = ["--sessions", SESSIONS, "--drain-seconds", DRAIN_SECONDS]
    with serving(artifact, logs / "sigterm.log", words) as server:
        found += asyncio.run(_sigterm(server))
    with serving(artifact, logs / "sigkill.log", words) as server:
        asyncio.run(_with_load(server, lambda: server.process.send_signal(signal.SIGKILL)))
        server.wait()
        found.append(Finding("SIGKILL: the engine ends", *_yes(server.engine_is_gone())))
        port = server.port
    with serving(artifact, logs / "again.log", words, port) as server:
        found.append(_same("SIGKILL: right answers on the same port", len(asyncio.run(_known(server))), len(CAPITALS)))
        found += asyncio.run(_engine_killed(server))
    return found


async def _with_load(server: Server, act: Callable[[], None]) -> list[asyncio.Task[Reply]]:
    """Have twice as many long answers on their way as there are sessions, and do something."""
    tasks = [
        asyncio.create_task(ask(server.port, _long(f"{number} What is the capital of France?", stream=number % 4 != 0)))
        for number in range(2 * server.sessions)
    ]
    while not await _metric(server, "vllm:num_requests_running"):
        await asyncio.sleep(0.01)
    act()
    return tasks


async def _sigterm(server: Server) -> list[Finding]:
    begin = time.monotonic()
    tasks = await _with_load(server, server.process.terminate)
    await asyncio.sleep(0.1)
    late = await _status(server, chat("What is the capital of France?"))
    replies = await asyncio.gather(*tasks)
    status = await asyncio.to_thread(server.wait)
    seconds = time.monotonic() - begin
    return [
        _same("SIGTERM: whole answers", sum(reply.text is not None for reply in replies), len(replies)),
        Finding("SIGTERM: a new request", str(late or "refused"), late in (503, 0), "503 or refused"),
        _same("SIGTERM: exit status", status, 0),
        Finding("SIGTERM: seconds", f"{seconds:.1f}", seconds < DRAIN_SECONDS + 5, f"{DRAIN_SECONDS} and a few"),
        Finding("SIGTERM: the engine ends", *_yes(server.engine_is_gone())),
    ]


async def _engine_killed(server: Server) -> list[Finding]:
    tasks = await _with_load(server, lambda: os.kill(server.engine, signal.SIGKILL))
    begin = time.monotonic()
    replies = await asyncio.gather(*tasks)
    seconds = time.monotonic() - begin
    told = [reply for reply in replies if reply.error and "killed by SIGKILL" in reply.error]
    statuses = Counter(reply.status for reply in told)
    health = await _status(server, request("/health", method="GET"))
    status = await asyncio.to_thread(server.wait)
    return [
        _same("engine killed: requests that are told", len(told), len(replies)),
        Finding("engine killed: their statuses", str(dict(statuses)), statuses.keys() <= {200, 503}, "200 or 503"),
        Finding("engine killed: until all are told", f"{seconds:.1f} s", seconds < 5, "under 5 s"),
        _same("engine killed: /health", health, 503),
        _same("engine killed: exit status", status, 1),
    ]


# --- helpers


def _long(question: str, **options: Any) -> bytes:
    return chat(question, ignore_eos=True, max_tokens=LONG, **options)


async def _each(works: Iterable[Work], callers: int) -> None:
    """Do everything, so many at a time."""
    left = iter(works)

    async def caller() -> None:
        for work in left:
            await work()

    await asyncio.gather(*(caller() for _ in range(callers)))


async def _status(server: Server, data: bytes) -> int:
    """Status of a response; 0: the connection was refused, or has ended before there was one."""
    try:
        return (await ask(server.port, data)).status
    except ConnectionError:
        return 0


async def _metric(server: Server, name: str) -> float:
    text = (await ask(server.port, request("/metrics", method="GET"))).body.decode()
    found = re.search(rf"^{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
    if found is None:
        raise HungError(f"/metrics has no {name}")
    return float(found[1])


async def _when_idle(server: Server) -> int:
    """Number of free sessions when nothing is being answered any more, or after 10 s."""
    for _ in range(100):
        if await _metric(server, "ostinato:free_sessions") == server.sessions:
            break
        await asyncio.sleep(0.1)
    return int(await _metric(server, "ostinato:free_sessions"))


def _memory(server: Server) -> tuple[int, int]:
    return memory_of(server.process.pid), memory_of(server.engine)


def _flat(what: str, *sizes: int) -> Finding:
    shown = " -> ".join(f"{size / (1 << 20):.0f}" for size in sizes) + " MiB"
    return Finding(what, shown, sizes[-1] - max(sizes[:-1]) < GROWTH, f"last +{GROWTH >> 20} at most")


def _shown(reply: Reply) -> str:
    return f"status {reply.status}, {'complete' if reply.complete else 'not complete'}: {reply.body[-300:]!r}"


def _same(what: str, found: int, wanted: int) -> Finding:
    return Finding(what, str(found), found == wanted, str(wanted))


def _none(what: str, found: int) -> Finding:
    return _same(what, found, 0)


def _yes(held: bool) -> tuple[str, bool, str]:
    return "yes" if held else "no", held, "yes"


if __name__ == "__main__":
    sys.exit(main())
