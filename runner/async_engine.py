"""`AsyncEngine`: an engine in a process of its own, for any number of asyncio callers."""

from __future__ import annotations

import asyncio
import copy
import os
import socket
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
from msgspec import structs

from ostinato.delegate.artifact.paths import artifact_paths
from ostinato.delegate.errors import ClosedError, InputError, OptionError, OstinatoError, first_line

from .answer_reader import AnswerReader
from .engine_channel import LENGTH_BYTES, frame
from .process_status import end_text, is_stopped
from .scheduler.messages import (
    Cancel,
    Close,
    Command,
    Describe,
    KeepState,
    LeaveState,
    Load,
    Loading,
    LoadState,
    Output,
    Reply,
    Request,
    ResetPrefixCache,
    Rewind,
    Save,
    SaveState,
    Start,
    Swap,
    ToEngine,
    decode_from_engine,
    decode_to_engine,
)
from .stream import AsyncStream, Result
from .text.tokenizer import Message, Tokenizer
from .text_request import TextRequest, answer_readers, explains_options

# How often the process is looked at while somebody waits for it.
_LOOK_SECONDS = 1.0


class EngineProcessError(OstinatoError, RuntimeError):
    """The engine's process has ended, or is stopped."""


@dataclass(frozen=True)
class EngineLimits:
    """Limits of a loaded engine.

    Attributes:
        max_seq_len: the most tokens of prompt and answer together.
        vocab: size of the vocabulary.
        eos_ids: tokens that end an answer.
        sessions: number of answers that can have a session at a time.
    """

    max_seq_len: int
    vocab: int
    eos_ids: list[int]
    sessions: int


class AsyncEngine:
    """An engine in a process of its own. An async context manager: the process begins and ends with it.

    Text is handled in this process: templates, tokens to text, stop strings.

    Args:
        path: the artifact folder.
        on_load: function that gets the bytes of constants that are loaded, and of all of them.
        options: those of `Engine.load`.

    Attributes:
        limits: what the engine says of itself.
        tokenizer: the tokenizer of the artifact's folder.

    Raises:
        OstinatoError: on entering, what `Engine.load` raises.

    >>> async with AsyncEngine("artifact/", sessions=64, cuda_graph=True) as engine:
    ...     async for piece in engine.stream("What is the capital of France?"):
    ...         print(piece, end="", flush=True)
    """

    def __init__(
        self, path: str | os.PathLike[str], *, on_load: Callable[[int, int], None] | None = None, **options: Any
    ) -> None:
        self._path, self._options, self._on_load = path, options, on_load
        # A request's id -> its id in the process, which no other one ever has: outputs may come when it has been left.
        self._inner_ids: dict[str, str] = {}
        self._waiting: dict[str, asyncio.Queue[Output | OstinatoError]] = {}
        self._replies: dict[str, asyncio.Future[Any]] = {}
        self._count = 0
        self._ended: OstinatoError | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._tokenizer: Tokenizer | None = None

    async def __aenter__(self) -> AsyncEngine:
        artifact_paths(self._path)
        ours, theirs = socket.socketpair()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "ostinato.runner.engine_process", str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._tasks = [asyncio.create_task(self._read(reader)), asyncio.create_task(self._look())]
        try:
            await self._take_limits(Start(self.new_id(), str(self._path), self._options))
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def pid(self) -> int:
        """Number of the engine's process. Raises ClosedError: there is none yet."""
        if self._process is None:
            self._check()
        assert self._process is not None
        return self._process.pid

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.of_artifact(self._path, self._options.get("digest"))
        return self._tokenizer

    @explains_options
    def stream(self, prompt: str | Sequence[Message], **options: Any) -> AsyncStream:
        """Return the answer's text as it comes. A character is never split.

        Args:
            prompt, options: the attributes of `TextRequest`, with one answer.

        Raises:
            InputError, OptionError, CapacityError: the prompt or an option does not fit; the last, and what only the engine
                knows, when the first piece is taken.
            QueueFullError: too many requests wait.
            EngineProcessError: the engine's process has ended, or is stopped.
        """
        asked = TextRequest(prompt=prompt, n=1, **options)
        request = asked.for_scheduler(self.new_id(), self.tokenizer)
        reader = answer_readers(asked, request, self.tokenizer)[0]
        return AsyncStream(self._texts(request, [reader]), reader.result)

    async def answer(self, prompt: str | Sequence[Message], **options: Any) -> Result:
        """Return the whole answer. See `stream`."""
        stream = self.stream(prompt, **options)
        async for _ in stream:
            pass
        return stream.result

    @explains_options
    async def answers(self, prompt: str | Sequence[Message], n: int, **options: Any) -> list[Result]:
        """Return `n` answers to one prompt, whose beginning is computed once. See `stream`."""
        asked = TextRequest(prompt=prompt, n=n, **options)
        request = asked.for_scheduler(self.new_id(), self.tokenizer)
        readers = answer_readers(asked, request, self.tokenizer)
        async for _ in self._texts(request, readers):
            pass
        return [reader.result for reader in readers]

    async def outputs(self, request: Request) -> AsyncGenerator[Output, None]:
        """Yield what the scheduler gives a request, token ids. If the iterator is closed before the end, it is cancelled.

        Raises:
            InputError: a request with this id has not ended.
            OptionError: an attribute has a value of another type.
            EngineProcessError: the engine's process has ended, or is stopped.
        """
        async with aclosing(self.arrivals([request])) as arrivals:
            async for arrived in arrivals:
                for output in arrived:
                    yield output

    async def arrivals(self, requests: Sequence[Request]) -> AsyncGenerator[list[Output], None]:
        """Yield the outputs of several requests: all that have come since the ones before. See `outputs`."""
        self._check()
        names: set[str] = set()
        for request in requests:
            if request.id in self._inner_ids or request.id in names:
                raise InputError(f"a request with the id {request.id!r} has not ended yet")
            names.add(request.id)
        arrived: asyncio.Queue[Output | OstinatoError] = asyncio.Queue()
        # Inner id -> the request's id. Inner id -> the number of its answers, as long as one has not ended.
        outer_ids: dict[str, str] = {}
        going_on: dict[str, int] = {}
        try:
            for request in requests:
                inner_id = self._inner_ids[request.id] = self.new_id()
                outer_ids[inner_id], going_on[inner_id] = request.id, request.n
                self._waiting[inner_id] = arrived
                self._send(structs.replace(request, id=inner_id))
            while going_on:
                outputs = [await arrived.get()]
                while not arrived.empty():
                    outputs.append(arrived.get_nowait())
                ready = []
                for output in outputs:
                    if isinstance(output, OstinatoError):
                        raise output
                    if output.finish_reason is not None:
                        going_on[output.id] -= 1
                        if not going_on[output.id]:
                            del going_on[output.id]
                    output.id = outer_ids[output.id]
                    ready.append(output)
                yield ready
        finally:
            for request in requests:
                self._waiting.pop(self._inner_ids.pop(request.id, ""), None)
            if self._ended is None:
                for inner_id in going_on:
                    self._send(Cancel(inner_id))

    def cancel(self, request: Request, index: int | None = None) -> None:
        """End the answers to a request whose outputs are awaited, or one of them. They end with "cancelled"."""
        if request.id in self._inner_ids and self._ended is None:
            self._send(Cancel(self._inner_ids[request.id], index))

    @property
    def failure(self) -> OstinatoError | None:
        """Why the engine answers nothing any more; None: it does."""
        return self._ended

    def new_id(self) -> str:
        """Name for a `Request` that no other one of this engine has."""
        self._count += 1
        return str(self._count)

    async def rewind(self, session: str, position: int) -> None:
        """Take a kept session back to its first `position` tokens."""
        await self._ask(Rewind(self.new_id(), session, position))

    async def save_session(self, session: str, path: str | os.PathLike[str]) -> None:
        """Write a kept session to a file."""
        await self._ask(Save(self.new_id(), session, str(Path(path).absolute())))

    async def load_session(self, session: str, path: str | os.PathLike[str]) -> int:
        """Keep the session in a file under this name, and return its number of tokens."""
        tokens: int = await self._ask(Load(self.new_id(), session, str(Path(path).absolute())))
        return tokens

    async def close_session(self, session: str) -> None:
        """Close a kept session."""
        await self._ask(Close(self.new_id(), session))

    async def save_state(self, path: Path, tokens: list[int], lasting: int) -> None:
        """See `StateFiles.save`."""
        await self._ask(SaveState(self.new_id(), str(path.absolute()), tokens, lasting))

    def keep_state(self, path: Path, tokens: list[int], lasting: int) -> None:
        """See `PrefixCache.stand`. It holds for all that is asked of this engine later."""
        if self._ended is None:
            self._send(KeepState(self.new_id(), str(path.absolute()), tokens, lasting))

    async def leave_state(self, path: Path) -> None:
        """See `StateFiles.leave`."""
        await self._ask(LeaveState(self.new_id(), str(path.absolute())))

    async def load_state(self, path: Path) -> None:
        """See `PrefixCache.load`."""
        await self._ask(LoadState(self.new_id(), str(path.absolute())))

    async def describe(self) -> dict[str, Any]:
        """See `Engine.describe`."""
        found: dict[str, Any] = await self._ask(Describe(self.new_id()))
        return found

    async def reset_prefix_cache(self) -> None:
        """See `Engine.reset_prefix_cache`."""
        await self._ask(ResetPrefixCache(self.new_id()))

    async def swap(self, path: str | os.PathLike[str], **options: Any) -> None:
        """Load another artifact in the place of this one, when all requests that came before have ended.

        Options that are not given have `Engine.load`'s defaults, not what the artifact before had.

        Raises:
            OstinatoError: what `Engine.load` raises. Requests end with ClosedError then, until another `swap` has succeeded.
        """
        artifact_paths(path)
        before = self._path, self._options, self._tokenizer
        # Requests that are sent from now on are for the new one.
        self._path, self._options, self._tokenizer = path, options, None
        try:
            await self._take_limits(Swap(self.new_id(), str(path), options))
        except OptionError:
            # An unknown option leaves the old one loaded, and its token ids are not those of the new one.
            self._path, self._options, self._tokenizer = before
            raise

    async def close(self) -> None:
        """End the engine's process. Requests that go on end with ClosedError."""
        self._fail(ClosedError("the engine is closed"))
        for task in self._tasks:
            task.cancel()
        if self._process is not None:
            self._writer.close()
            try:
                # It ends when it reads that we are gone: between two steps.
                await asyncio.wait_for(self._process.wait(), 10)
            except asyncio.TimeoutError:
                self._process.kill()
                await self._process.wait()

    async def _texts(self, request: Request, readers: Sequence[AnswerReader]) -> AsyncIterator[str]:
        begin = time.perf_counter()
        # Closed at once, and not when the event loop finds it: what the caller sends next may need the session.
        async with aclosing(self.outputs(request)) as outputs:
            async for output in outputs:
                reader = readers[output.index]
                if reader.ended:
                    continue
                # With the time in the queue, and in the company of others.
                seconds, result = time.perf_counter() - begin, reader.result
                if result.tokens:
                    result.decode_seconds = seconds - result.prefill_seconds
                else:
                    result.prefill_seconds = seconds
                if text := reader.read(output):
                    yield text
                if reader.ended and output.finish_reason is None:
                    # A stop string has ended it.
                    self.cancel(request, output.index)
                if all(one.ended for one in readers):
                    return

    async def _take_limits(self, command: Start | Swap) -> None:
        self.limits = EngineLimits(**await self._ask(command))

    async def _ask(self, command: Start | Command) -> Any:
        self._check()
        reply = self._replies[command.id] = asyncio.get_running_loop().create_future()
        try:
            self._send(command)
            return await reply
        finally:
            del self._replies[command.id]

    def _check(self) -> None:
        if self._ended is not None:
            # A copy: each raise would make the traceback of one error longer, and keep its callers' frames.
            raise copy.copy(self._ended)
        if self._process is None:
            raise ClosedError("the engine has no process yet: use it in `async with AsyncEngine(...) as engine`")

    def _send(self, message: ToEngine) -> None:
        """Raises OptionError: a value has another type than the engine's process takes."""
        try:
            data = frame(message)
            decode_to_engine(data[LENGTH_BYTES:])
        except (msgspec.ValidationError, OverflowError) as error:
            # MessagePack's integers have 64 bits.
            raise OptionError(f"{type(message).__name__} cannot be sent: {error}") from error
        self._writer.write(data)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Hand on the engine's messages, until its process ends."""
        try:
            while True:
                length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")
                self._take(decode_from_engine(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            assert self._process is not None
            self._fail(EngineProcessError(f"the engine's process has ended: {end_text(await self._process.wait())}"))
        except Exception as error:
            # `on_load` is the caller's.
            self._fail(EngineProcessError(f"a message of the engine's process cannot be taken: {first_line(error)}"))

    def _take(self, message: list[Output] | Reply | Loading) -> None:
        if isinstance(message, Loading):
            if self._on_load is not None:
                self._on_load(message.done, message.total)
        elif isinstance(message, Reply):
            reply = self._replies.get(message.id)
            if reply is None or reply.done():
                return
            if message.error is None:
                reply.set_result(message.value)
            else:
                reply.set_exception(message.error.error())
        else:
            for output in message:
                arrived = self._waiting.get(output.id)
                if arrived is not None:
                    arrived.put_nowait(output)

    async def _look(self) -> None:
        """Tell those who wait if the process is stopped: it would never answer, and nothing else says so."""
        before = False
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            stopped = is_stopped(self.pid)
            if stopped and before:
                self._tell(
                    EngineProcessError(f"the engine's process {self.pid} is stopped (SIGSTOP): SIGCONT continues it")
                )
            before = stopped

    def _fail(self, error: OstinatoError) -> None:
        if self._ended is None:
            self._ended = error
            self._tell(error)

    def _tell(self, error: OstinatoError) -> None:
        for arrived in self._waiting.values():
            arrived.put_nowait(copy.copy(error))
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(copy.copy(error))
