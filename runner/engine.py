"""`Engine`: a loaded artifact that answers prompts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any

from ostinato.delegate import Program, load_program
from ostinato.delegate.errors import InputError, OptionError, OstinatoError
from ostinato.delegate.sampling_params import SamplingParams

from .answer_reader import AnswerReader
from .description import description
from .model.model import DEFAULT_WARMUP_STEPS, Model, token_ids
from .scheduler.local_driver import LocalDriver
from .scheduler.messages import Output, Request
from .scheduler.options import DEFAULT_MAX_WAITING, check_options
from .scheduler.scheduler import Scheduler
from .scheduler.step_times import StepTimes
from .sessions.session import Session
from .sessions.sessions import Sessions
from .sessions.warm_up import WarmUp, warm_up
from .stream import DEFAULT_MAX_NEW_TOKENS, Result, Stream
from .text.prompts import check_prompt, encode_prompt
from .text.tokenizer import Message, Tokenizer
from .text_request import TextRequest, answer_readers, explains_options

# Rows for snapshots, if the caller does not say how many: one to go back to, and one more.
DEFAULT_SNAPSHOTS = 2


class Engine:
    """A loaded artifact that answers prompts. Made by `Engine.load`, or from a loaded program.

    It is a context manager that frees the program on exit. Several threads may use it: their steps take turns, and each
    answer has a session of its own.

    Attributes:
        model: the program's methods as one model.
        sessions: the conversations with this model.
        driver: runs the scheduler's steps for those who wait for answers.

    >>> with Engine.load("artifact/", cuda_graph=True) as engine:
    ...     answer = engine.generate("What is the capital of France?")
    ...     for text in answer:
    ...         print(text, end="", flush=True)
    ...     print(answer.result.decode_tokens_per_second)
    """

    def __init__(
        self,
        program: Program,
        path: str | PathLike[str],
        cuda_graph: bool,
        warmup_steps: int = DEFAULT_WARMUP_STEPS,
        prefill_buckets: Sequence[int] | None = None,
        row_buckets: Sequence[int] | None = None,
        max_step_ms: float | None = None,
        max_waiting: int = DEFAULT_MAX_WAITING,
        host_cache_bytes: int = 0,
        prefix_caching: bool = True,
        digest: str | None = None,
    ) -> None:
        check_options(max_step_ms, max_waiting, host_cache_bytes)
        self.model = Model(program, cuda_graph, warmup_steps, prefill_buckets, row_buckets)
        self.sessions = Sessions(self.model)
        clock = time.perf_counter
        step_times = partial(StepTimes.measured, self.sessions, self.model, clock, max_step_ms)
        options = max_waiting, host_cache_bytes, prefix_caching
        self.driver = LocalDriver(Scheduler(self.sessions, self.model, step_times, clock, *options))
        self._path, self._digest = path, digest
        self._tokenizer: Tokenizer | None = None

    @classmethod
    def load(
        cls,
        path: str | PathLike[str],
        *,
        cuda_graph: bool = False,
        warmup_steps: int = DEFAULT_WARMUP_STEPS,
        prefill_buckets: Sequence[int] | None = None,
        row_buckets: Sequence[int] | None = None,
        sessions: int | None = None,
        kv_tokens: int | None = None,
        gpu_memory_fraction: float | None = None,
        snapshots: int | None = None,
        max_step_ms: float | None = None,
        max_waiting: int = DEFAULT_MAX_WAITING,
        host_cache_bytes: int = 0,
        prefix_caching: bool = True,
        prefault: bool = False,
        digest: str | None = None,
        on_load: Callable[[int], None] | None = None,
        on_total: Callable[[int], None] | None = None,
    ) -> Engine:
        """Load an artifact.

        Args:
            path: the artifact folder.
            cuda_graph: whether decode, and prompts by bucket, go through warmup -> capture -> replay.
            warmup_steps: number of calls before the capture, for decode and for each bucket.
            prefill_buckets: lengths of prompts that have a graph; shorter prompts are padded. None: 16 to 512 on a GPU, 16
                and 32 with experts on the host, none on a CPU. (): none.
            row_buckets: numbers of sessions whose step has a graph; smaller numbers are padded. None: 2, 4, 8, 16, 24, 32,
                then every 16 to 128, every 32 to 256, 384 and 512, as far as there are sessions; up to 47 with experts on the
                host; none on a CPU. (): none.
            sessions, kv_tokens, gpu_memory_fraction, snapshots: capacity, see `load_program`. By default there is room for
                one session with max_seq_len positions, and for 2 snapshots, or with `gpu_memory_fraction` for as many as
                `load_program` says.
            max_step_ms: the most milliseconds that a step should take in which prompts ride beside other answers. None: 16 on
                a GPU, 100 on a CPU, 250 with experts on the host.
            max_waiting: the most requests that wait for room. One more is refused with QueueFullError.
            host_cache_bytes: the most bytes of the host's memory for beginnings of prompts that leave the device.
            prefix_caching: whether prompts go on from what is known of their beginnings, see runner/sessions/README.md.
            prefault: whether to read all weights that stay in the mapped file once, before anything runs.
            digest: the digest that the artifact must have, see `load_program`. `tokenizer` is of the same artifact, too.
            on_load: function that gets the size in bytes of each loaded constant, for progress displays.
            on_total: function that gets the sum of these sizes before loading. `LoadBar` provides both functions.

        Raises:
            ArtifactError, TargetError: see `load_program`.
            OptionError: a bucket that this program or `cuda_graph` does not allow, `max_step_ms` not above 0, `max_waiting`
                below 1, `host_cache_bytes` below 0; see also `load_program`.
            DeviceMemoryError: see `Program.load_method`.
        """
        if snapshots is None and gpu_memory_fraction is None:
            snapshots = DEFAULT_SNAPSHOTS
        program = load_program(
            path,
            on_load=on_load,
            digest=digest,
            sessions=sessions,
            kv_tokens=kv_tokens,
            gpu_memory_fraction=gpu_memory_fraction,
            snapshots=snapshots,
        )
        try:
            if on_total is not None:
                on_total(program.bytes_to_load())
            engine = cls(
                program,
                path,
                cuda_graph,
                warmup_steps,
                prefill_buckets,
                row_buckets,
                max_step_ms=max_step_ms,
                max_waiting=max_waiting,
                host_cache_bytes=host_cache_bytes,
                prefix_caching=prefix_caching,
                digest=digest,
            )
            if prefault:
                program.prefault()
            return engine
        except BaseException:
            program.close()
            raise

    @property
    def program(self) -> Program:
        return self.model.program

    @property
    def max_seq_len(self) -> int:
        return self.model.max_seq_len

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids of the tokens that end an answer."""
        return self.model.eos_ids

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the artifact's folder, loaded when it is first needed, or one that was set."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.of_artifact(self._path, self._digest)
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def describe(self) -> dict[str, Any]:
        """Describe what is loaded and what is captured, in JSON's types.

        Keys: `target`, `device`, `max_seq_len`, `prefill_buckets`, `row_buckets`, `capacity` (`Capacity`, with the numbers of
        free slots, of free snapshots, and of free pages in each page group), `prefix_cache` (`PrefixCacheStats`),
        `state_files` (`StateFileStats`), `scheduler` (`SchedulerStats`, `host_seconds`, `wait_seconds` of `Sessions`),
        `program` (`ProgramStats`), `methods` (`MethodStats` with its plans, by method).
        """
        return description(self)

    def warm_up(self, buckets: Sequence[int] | None = None, beside_sessions: bool = False) -> WarmUp:
        """Capture all graphs now, not at their first use: prompts of these buckets, decode, and steps of several sessions.

        Then prompts are timed, so that the scheduler knows how many of their tokens fit in a step.

        Without `cuda_graph`, or on a second call, there is nothing left to capture. The warm-up opens sessions of its own,
        one at a time.

        Args:
            buckets: some of the model's `prefill_buckets`; None: all of them.
            beside_sessions: whether steps of prompts and sessions together are captured too, as a server has them.

        Raises:
            InputError: an unknown bucket.
            CapacityError: all sessions are open, or too few pages are free for a prompt of the longest bucket.
        """
        done = warm_up(self.model, self.sessions, buckets, beside_sessions)
        self.driver.scheduler.budget.measure()
        return done

    def open_session(self, sampling_params: SamplingParams | None = None) -> Session:
        """Open a new conversation. `generate` opens its own.

        Args:
            sampling_params: parameters for sampling the session's tokens; None: the most likely tokens.

        Raises:
            CapacityError: all sessions that the engine was loaded for are open.
        """
        return self.sessions.open(sampling_params)

    def load_session(self, path: str | PathLike[str]) -> Session:
        """Open the session that `Session.save` wrote to a file. It goes on as the saved one.

        The engine must have the same artifact; it may have room for other numbers of sessions and positions.

        Raises:
            SessionFileError: the file is no session, is damaged, or was saved with another artifact.
            CapacityError: all sessions are open, or too few pages are free.
        """
        return self.sessions.tier.load(self.sessions, Path(path))

    def reset_prefix_cache(self) -> None:
        """Forget all beginnings of prompts, on the device and on the host."""
        with self.driver.lock:
            self.driver.scheduler.prefixes.reset()

    def step(
        self, sessions: Sequence[Session], more: bool = False, prefill: Mapping[Session, Sequence[int]] | None = None
    ) -> list[int]:
        """Return the next token of each session, all from one step of the model. See `Sessions.step`."""
        return self.sessions.step(sessions, more, prefill)

    def encode_prompt(
        self,
        prompt: str | Sequence[Message],
        raw: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a question or a whole chat, with the chat template applied. With `raw`: of the text as it is.

        `chat_template_kwargs` are values for the chat template, such as `{"enable_thinking": False}`.

        Raises:
            InputError: an empty prompt, or no chat template.
        """
        check_prompt(prompt, raw)
        return encode_prompt(self.tokenizer, prompt, raw, chat_template_kwargs).tokens

    @explains_options
    def generate(
        self,
        prompt: str | Sequence[Message],
        *,
        raw: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        sampling_params: SamplingParams | None = None,
        ignore_eos: bool = False,
        stop: str | Sequence[str] = (),
    ) -> Stream[str]:
        """Return the answer's text as it is generated. A character is never split.

        The arguments are checked at once; the request begins when the first piece is taken, and ends when the stream is
        closed. Answers that are taken at the same time, also by several threads, step together; one waits while there is no
        room for it.

        Args:
            prompt, raw, chat_template_kwargs, max_new_tokens, sampling_params, ignore_eos, stop: see `TextRequest`.

        Raises:
            InputError: an empty prompt, or one that leaves no room in max_seq_len.
            OptionError: `max_new_tokens` below 1, or the name of a sampling parameter.
            CapacityError: the prompt needs more pages than there are; or, when a piece is taken, sessions that others opened
                have all of them.
        """
        asked = TextRequest(
            prompt=prompt,
            raw=raw,
            chat_template_kwargs=chat_template_kwargs,
            max_new_tokens=max_new_tokens,
            sampling_params=sampling_params,
            ignore_eos=ignore_eos,
            stop=stop,
        )
        answer = self.answer(asked)
        return Stream((text for text in answer if text), answer.result, answer)

    def answer(self, asked: TextRequest) -> Stream[str]:
        """Return the answer to a request with `n=1`, as `generate` does. After a step that completes no text, as one with a
        part of the prompt, there is an empty piece: the stream can be closed there."""
        request = asked.for_scheduler(self.driver.new_id(), self.tokenizer)
        self.driver.check(request)
        (reader,) = answer_readers(asked, request, self.tokenizer)
        outputs = self._read(request, reader)
        return Stream((text for text, _ in outputs), reader.result, outputs)

    @explains_options
    def generate_tokens(
        self,
        tokens: Sequence[int],
        *,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        sampling_params: SamplingParams | None = None,
        ignore_eos: bool = False,
    ) -> Stream[int]:
        """Return the token ids after the prompt `tokens`, as `generate` does its text.

        An end-of-sequence id, or one of `stop_token_ids`, ends the answer, and is in the result's `tokens` alone.
        """
        asked = TextRequest(
            prompt="", max_new_tokens=max_new_tokens, sampling_params=sampling_params, ignore_eos=ignore_eos
        )
        request = asked.with_tokens(self.driver.new_id(), token_ids(tokens))
        self.driver.check(request)
        reader = AnswerReader(len(request.tokens))
        outputs = self._read(request, reader)
        pieces = (output.tokens[0] for _, output in outputs if output.tokens and output.finish_reason != "stop")
        return Stream(pieces, reader.result, outputs)

    @explains_options
    def generate_all(self, prompts: Iterable[str | Sequence[Message]], **options: Any) -> list[Result]:
        """Answer all prompts, with as many sessions at a time as there is room for, and return the results in their order.

        Args:
            options: the other attributes of `TextRequest` but `n`, for all of them.

        A prompt that `generate` does not take is no error: its result's `finish_reason` is "error", and `error` says why.

        Raises:
            InputError: one string in the place of a list.
            OptionError: an option that `generate` does not take.
        """
        if isinstance(prompts, str):
            raise InputError("generate_all takes a list of prompts, got one string: put it into a list")
        asked = [TextRequest(prompt=prompt, n=1, **options) for prompt in prompts]
        found = {number: result for number, _, result in self.generate_each(asked)}
        for result in found.values():
            if result.error_type == OptionError.__name__:
                raise OptionError(result.error)
        return [found[number] for number in range(len(asked))]

    def generate_each(self, requests: Iterable[TextRequest]) -> Iterator[tuple[int, int, Result]]:
        """Answer requests, and yield each answer when it has ended: the request's number, the answer's, and the result.

        Requests are taken from the iterator as there is room for them. One that `generate` does not take has one result,
        whose `finish_reason` is "error".
        """
        tokenizer = self.tokenizer
        readers: dict[str, tuple[int, dict[int, AnswerReader]]] = {}
        refused = deque[tuple[int, int, Result]]()

        def prepared() -> Iterator[Request]:
            for number, asked in enumerate(requests):
                try:
                    request = asked.for_scheduler(self.driver.new_id(), tokenizer)
                    self.driver.check(request)
                except OstinatoError as error:
                    result = Result(finish_reason="error", error=str(error), error_type=type(error).__name__)
                    refused.append((number, 0, result))
                    continue
                readers[request.id] = number, dict(enumerate(answer_readers(asked, request, tokenizer)))
                yield request

        # Closed with this generator: not every interpreter drops what a closed one reads.
        with closing(self.driver.outputs_of_all(prepared())) as outputs:
            for output in outputs:
                number, answers = readers[output.id]
                reader = answers[output.index]
                if output.finish_reason is not None:
                    # The scheduler's last word on this answer.
                    del answers[output.index]
                    if not answers:
                        del readers[output.id]
                if reader.ended:
                    continue
                # The result has the error.
                with suppress(OstinatoError):
                    reader.read(output)
                while refused:
                    yield refused.popleft()
                if reader.ended:
                    if output.finish_reason is None:
                        # A stop string has ended it.
                        self.driver.cancel(output.id, output.index)
                    yield number, output.index, reader.result
        yield from refused

    def swap(self, path: str | PathLike[str], **options: Any) -> None:
        """Load another artifact in the place of this one, when all requests have ended. Its sessions are closed.

        The memory of the old one is free before the new one is loaded.

        Args:
            path, options: as `load` takes them.

        Raises:
            ArtifactError and others: see `load`. The engine is closed then, until another `swap` has succeeded.
        """
        self.driver.finish()
        self.close()
        self.__dict__ = Engine.load(path, **options).__dict__

    def close(self) -> None:
        self.driver.scheduler.kept.forget_states()
        self.driver.scheduler.files.close()
        self.reset_prefix_cache()
        self.program.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, request: Request, reader: AnswerReader) -> Generator[tuple[str, Output], None, None]:
        """Yield the text of each output, and the output. The result is complete at the end, also of a closed generator."""
        result = reader.result
        try:
            yield from reader.read_all(self.driver.outputs(request))
        finally:
            result.methods = self.model.method_stats
            stats = self.program.stats
            result.constants = {"count": stats.constants, "shared": stats.shared, "bytes_saved": stats.bytes_saved}
