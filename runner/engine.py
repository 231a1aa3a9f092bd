"""`Engine`: a loaded artifact that answers prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any

from ostinato.delegate import InputError, Program, load_program
from ostinato.delegate.artifact.paths import artifact_paths
from ostinato.delegate.sampling_params import SamplingParams

from .model.model import DEFAULT_WARMUP_STEPS, Model, token_ids
from .sessions.session import Session, check_max_new_tokens, checked_params
from .sessions.sessions import Sessions
from .sessions.warm_up import WarmUp, warm_up
from .stream import DEFAULT_MAX_NEW_TOKENS, Result, Stream
from .text.tokenizer import Message, TextStream, Tokenizer

# Rows for snapshots, if the caller does not say how many: one to go back to, and one more.
DEFAULT_SNAPSHOTS = 2


class Engine:
    """A loaded artifact that answers prompts. Made by `Engine.load`, or from a loaded program.

    It is a context manager that frees the program on exit. Several threads may use it: their steps take turns, and each
    answer has a session of its own.

    Attributes:
        model: the program's methods as one model.
        sessions: the conversations with this model.

    >>> with Engine.load("artifact/", cuda_graph=True) as engine:
    ...     answer = engine.generate("What is the capital of France?")
    ...     for text in answer:
    ...         print(text, end="", flush=True)
    ...     print(answer.result.decode_tokens_per_second)
    """

    def __init__(
        self,
        program: Program,
        folder: Path,
        cuda_graph: bool,
        warmup_steps: int = DEFAULT_WARMUP_STEPS,
        prefill_buckets: Sequence[int] | None = None,
        row_buckets: Sequence[int] | None = None,
    ) -> None:
        self.model = Model(program, cuda_graph, warmup_steps, prefill_buckets, row_buckets)
        self.sessions = Sessions(self.model)
        self._folder = folder
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
        prefault: bool = False,
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
                then every 16 to 128, every 32 to 256, 384 and 512, as far as there are sessions; none on a CPU. (): none.
            sessions, kv_tokens, gpu_memory_fraction, snapshots: capacity, see `load_program`. By default there is room for
                one session with max_seq_len positions, and for 2 snapshots, or with `gpu_memory_fraction` for as many as
                `load_program` says.
            prefault: whether to read all weights that stay in the mapped file once, before anything runs.
            on_load: function that gets the size in bytes of each loaded constant, for progress displays.
            on_total: function that gets the sum of these sizes before loading. `LoadBar` provides both functions.

        Raises:
            ArtifactError, TargetError: see `load_program`.
            OptionError: a bucket that this program or `cuda_graph` does not allow; see also `load_program`.
            DeviceMemoryError: see `Program.load_method`.
        """
        if snapshots is None and gpu_memory_fraction is None:
            snapshots = DEFAULT_SNAPSHOTS
        program = load_program(
            path,
            on_load=on_load,
            sessions=sessions,
            kv_tokens=kv_tokens,
            gpu_memory_fraction=gpu_memory_fraction,
            snapshots=snapshots,
        )
        try:
            if on_total is not None:
                on_total(program.bytes_to_load())
            engine = cls(
                program, artifact_paths(path)[0].parent, cuda_graph, warmup_steps, prefill_buckets, row_buckets
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
            self._tokenizer = Tokenizer(self._folder)
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def describe(self) -> dict[str, Any]:
        """Describe what is loaded and what is captured, in JSON's types.

        Keys: `target`, `device`, `max_seq_len`, `prefill_buckets`, `row_buckets`, `capacity` (`Capacity`, with the numbers of
        free slots, of free snapshots, and of free pages in each page group), `program` (`ProgramStats`), `methods`
        (`MethodStats` with its plans, by method).
        """
        capacity, free = self.program.capacity, self.sessions.free_pages_by_group
        return {
            "target": asdict(self.program.target),
            "device": str(self.program.device),
            "max_seq_len": self.max_seq_len,
            "prefill_buckets": list(self.model.prefill_buckets),
            "row_buckets": list(self.model.row_buckets),
            "capacity": {
                **asdict(capacity),
                "free_slots": self.sessions.free,
                "free_snapshots": self.sessions.free_snapshots,
                "groups": [{**asdict(group), "free_pages": free.get(group.name, 0)} for group in capacity.groups],
            },
            "program": asdict(self.program.stats),
            "methods": self.model.method_stats,
        }

    def warm_up(self, buckets: Sequence[int] | None = None) -> WarmUp:
        """Capture all graphs now, not at their first use: prompts of these buckets, decode, and steps of several sessions.

        Without `cuda_graph`, or on a second call, there is nothing left to capture. The warm-up opens sessions of its own,
        one at a time.

        Args:
            buckets: some of the model's `prefill_buckets`; None: all of them.

        Raises:
            InputError: an unknown bucket.
            CapacityError: all sessions are open, or too few pages are free for a prompt of the longest bucket.
        """
        return warm_up(self.model, self.sessions, buckets)

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
        if not prompt or (isinstance(prompt, str) and not raw and not prompt.strip()):
            raise InputError("the prompt is empty")
        if not isinstance(prompt, str) and not _is_chat(prompt):
            raise InputError(
                "a prompt is text, or a list of messages with role and content; generate_tokens takes token ids"
            )
        if raw:
            if not isinstance(prompt, str):
                raise InputError("raw=True takes a string, not a list of messages")
            tokens = self.tokenizer.encode(prompt)
        else:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            tokens = self.tokenizer.encode(self.tokenizer.render(messages, chat_template_kwargs))
        if not tokens:
            raise InputError("the prompt has no tokens")
        return tokens

    def generate(
        self,
        prompt: str | Sequence[Message],
        *,
        raw: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        sampling_params: SamplingParams | None = None,
        ignore_eos: bool = False,
    ) -> Stream[str]:
        """Return the answer's text as it is generated. A character is never split.

        The arguments are checked at once; each piece is computed when it is taken. The answer has a session of its own, which
        is open from the first piece to the last, or until the stream is closed.

        Raises:
            InputError: an empty prompt, or one that leaves no room in max_seq_len.
            OptionError: `max_new_tokens` below 1.
            CapacityError: all sessions are open, or there are no pages left: when a piece is taken.
        """
        tokens = self.encode_prompt(prompt, raw, chat_template_kwargs)
        steps = self.generate_tokens(
            tokens, max_new_tokens=max_new_tokens, sampling_params=sampling_params, ignore_eos=ignore_eos
        )
        return Stream(self._texts(steps), steps.result)

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
        prompt = token_ids(tokens)
        if not prompt:
            raise InputError("the prompt is empty")
        check_max_new_tokens(max_new_tokens)
        if len(prompt) >= self.max_seq_len:
            raise InputError(
                f"the prompt has {len(prompt)} tokens and leaves no room for an answer in max_seq_len {self.max_seq_len}: "
                "shorten it, or export with a larger --max-seq-len"
            )
        params = checked_params(sampling_params)
        result = Result(prompt_tokens=len(prompt))
        ends = params.ends(() if ignore_eos else self.eos_ids)
        return Stream(self._generate(result, prompt, max_new_tokens, params, ends), result)

    def close(self) -> None:
        self.program.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _texts(self, steps: Stream[int]) -> Generator[str, None, None]:
        """Yield the text of an answer's tokens, and add it to the result."""
        stream = TextStream(self.tokenizer)
        try:
            for token in steps:
                if text := stream.push(token):
                    steps.result.text += text
                    yield text
            if text := stream.flush():
                steps.result.text += text
                yield text
        finally:
            # Also when the caller stops early: closing the steps completes the figures.
            steps.close()

    def _generate(
        self,
        result: Result,
        prompt: list[int],
        max_new_tokens: int,
        sampling_params: SamplingParams,
        ends: frozenset[int],
    ) -> Generator[int, None, None]:
        room = min(max_new_tokens, self.max_seq_len - len(prompt))
        session = self.open_session(sampling_params)
        begin = time.perf_counter()
        try:
            if sampling_params.prompt_logprobs is None:
                session.prefill(prompt)
            else:
                result.prompt_logprobs = session.prompt_logprobs(prompt, sampling_params.prompt_logprobs)
            (token,) = self.step([session])
            result.prefill_seconds = time.perf_counter() - begin
            while True:
                result.tokens.append(token)
                if (logprobs := session.logprobs) is not None:
                    result.logprobs.append(logprobs)
                if token in ends:
                    result.finish_reason = "stop"
                    return
                yield token
                if len(result.tokens) >= room:
                    result.finish_reason = "length" if room == max_new_tokens else "max_seq_len"
                    return
                # Only the step is timed: the caller's own work on a token does not count as decode.
                begin = time.perf_counter()
                (token,) = self.step([session], more=len(result.tokens) + 1 < room)
                result.decode_seconds += time.perf_counter() - begin
        finally:
            session.close()
            result.methods = self.model.method_stats
            stats = self.program.stats
            result.constants = {
                "count": stats.constants,
                "shared": stats.shared,
                "bytes_saved": stats.bytes_saved,
            }


def _is_chat(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and all(isinstance(message, Mapping) for message in prompt)
