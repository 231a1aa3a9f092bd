"""`Engine`: a loaded artifact that answers prompts. prefill, then decode_one_token until a reason to stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ..delegate import InputError, Method, Program, load_program
from ..delegate.artifact import DECODE, DECODE_SAMPLE, META_EOS_IDS, META_MAX_SEQ_LEN, PREFILL, SAMPLE
from ..delegate.errors import ArtifactError, OptionError
from .sampling import Sampling
from .stepping import DeviceSteps, HostSteps, Steps
from .tokenizer import Message, TextStream, Tokenizer

DEFAULT_MAX_NEW_TOKENS = 256
DEFAULT_WARMUP_STEPS = 3


@dataclass
class Result:
    """One finished answer.

    `finish_reason`: "stop" (end-of-sequence token), "length" (`max_new_tokens`), "max_seq_len" or "interrupted".
    `tokens` has the end-of-sequence token when there was one; `text` has not. Prefill includes the first token's sampling;
    decode is every token after it.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    finish_reason: str = "interrupted"
    methods: dict[str, dict[str, Any]] = field(default_factory=dict)
    constants: dict[str, int] = field(default_factory=dict)

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        steps = len(self.tokens) - 1
        return steps / self.decode_seconds if steps > 0 and self.decode_seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        data = asdict(self)
        data["prefill_tokens_per_second"] = self.prefill_tokens_per_second
        data["decode_tokens_per_second"] = self.decode_tokens_per_second
        return data


class Engine:
    """Made by `Engine.load`, or over a loaded program. One sequence at a time; a context manager that frees the program
    on exit.

    >>> with Engine.load("artifact/", cuda_graph=True) as engine:
    ...     for piece in engine.generate("What is the capital of France?"):
    ...         print(piece, end="", flush=True)
    ...     print(engine.last.decode_tokens_per_second)
    """

    def __init__(self, program: Program, folder: Path, cuda_graph: bool, warmup_steps: int) -> None:
        self.program = program
        self.last = Result()
        self._folder = folder
        self._tokenizer: Tokenizer | None = None
        self._load_methods(cuda_graph, warmup_steps)
        limit = program.metadata.get(META_MAX_SEQ_LEN)
        self.max_seq_len = int(limit) if limit is not None else _lengths(self._many)[1]
        eos = program.metadata.get(META_EOS_IDS, [])
        self.eos_ids = frozenset(eos if isinstance(eos, list) else [eos])

    @classmethod
    def load(
        cls,
        path: str | PathLike[str],
        *,
        cuda_graph: bool = False,
        warmup_steps: int = DEFAULT_WARMUP_STEPS,
        on_load: Callable[[int], None] | None = None,
        on_total: Callable[[int], None] | None = None,
    ) -> Engine:
        """Load an artifact.

        Args:
            path: the artifact folder.
            cuda_graph: take decode through warmup -> capture -> replay.
            warmup_steps: decode steps before the capture.
            on_load: called with the size of each constant loaded, for progress displays.
            on_total: called before with the sum of those sizes; `LoadBar` takes both.

        Raises:
            ArtifactError, TargetError: as `load_program`.
            DeviceMemoryError: as `Program.load_method`.
        """
        program = load_program(path, on_load=on_load)
        try:
            if on_total is not None:
                on_total(program.bytes_to_load())
            return cls(program, Path(path), cuda_graph, warmup_steps)
        except BaseException:
            program.close()
            raise

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self._folder)
        return self._tokenizer

    def encode_prompt(self, prompt: str | Sequence[Message], raw: bool = False) -> list[int]:
        """Token ids of a question in the chat template's dress, of a whole chat, or with `raw` of the text as it is.

        Raises:
            InputError: an empty prompt, or no chat template.
        """
        if not prompt or (isinstance(prompt, str) and not raw and not prompt.strip()):
            raise InputError("the prompt is empty")
        if raw:
            if not isinstance(prompt, str):
                raise InputError("raw=True takes a string, not a list of messages")
            tokens = self.tokenizer.encode(prompt)
        else:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            tokens = self.tokenizer.encode(self.tokenizer.render(messages))
        if not tokens:
            raise InputError("the prompt has no tokens")
        return tokens

    def generate(
        self,
        prompt: str | Sequence[Message],
        *,
        raw: bool = False,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        sampling: Sampling | None = None,
        ignore_eos: bool = False,
    ) -> Generator[str, None, None]:
        """Yield the answer piece by piece; pieces never split a character. Figures are in `last` afterwards.

        Raises:
            InputError: an empty prompt, or one that leaves no room in max_seq_len.
        """
        tokens = self.encode_prompt(prompt, raw)
        stream = TextStream(self.tokenizer)
        steps = self.generate_tokens(tokens, max_new_tokens=max_new_tokens, sampling=sampling, ignore_eos=ignore_eos)
        result = self.last

        def pieces() -> Iterator[str]:
            for token in steps:
                yield stream.push(token)
            yield stream.flush()

        try:
            for piece in pieces():
                if piece:
                    result.text += piece
                    yield piece
        finally:
            # Also when the caller stops early: the figures are settled when the steps are closed.
            steps.close()

    def generate_tokens(
        self,
        tokens: Sequence[int],
        *,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        sampling: Sampling | None = None,
        ignore_eos: bool = False,
    ) -> Generator[int, None, None]:
        """Yield token ids after the prompt `tokens`; an end-of-sequence id ends the answer and is not yielded.

        The checks are made at once, the work when the iterator is asked. Raises as `generate`.
        """
        if not tokens:
            raise InputError("the prompt is empty")
        if max_new_tokens < 1:
            raise OptionError(f"max_new_tokens must be 1 or more, got {max_new_tokens}")
        if len(tokens) >= self.max_seq_len:
            raise InputError(
                f"the prompt has {len(tokens)} tokens and leaves no room for an answer in max_seq_len {self.max_seq_len}: "
                "shorten it, or export with a larger --max-seq-len"
            )
        self.last = Result(prompt_tokens=len(tokens))
        eos_ids = frozenset() if ignore_eos else self.eos_ids
        return self._generate(list(tokens), max_new_tokens, sampling or Sampling(), eos_ids)

    @property
    def has_state(self) -> bool:
        """Whether the methods keep state; one that has none gets the whole sequence anew for each token."""
        return len(self._many.inputs) == 2

    @property
    def method_stats(self) -> dict[str, dict[str, Any]]:
        """Counts of calls by method, what decodes last."""
        return {method.name: asdict(method.stats) for method in (self._many, self._decoder, *self._samplers) if method}

    def prefill(self, tokens: Sequence[int], position: int = 0) -> torch.Tensor:
        """Logits [vocab] after `tokens`, the first of which stands at `position`; position 0 starts the state anew.

        They go in as chunks of the most that the prefill method takes at once; a rest that is shorter than its least
        (one token, in what `ostinato export` writes) goes through decode.

        Raises:
            InputError: no tokens, or a token or a position out of range.
        """
        if not tokens:
            raise InputError("there is no token to prefill")
        if not self.has_state:
            return self._step(self._many, tokens, position)
        low, high = _lengths(self._many)
        logits = torch.empty(0)
        done = 0
        while done < len(tokens):
            count = min(len(tokens) - done, high)
            # One token is decode's even where the other takes it too: decode may have its graph.
            method, count = (self._many, count) if count >= max(low, 2) else (self._decode(), 1)
            logits = self._step(method, tokens[done : done + count], position + done)
            done += count
        return logits

    def decode_one_token(self, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """Logits [vocab] after the last token of `answer`, the one that the state has not seen yet."""
        if not self.has_state:
            return self._step(self._many, [*prompt, *answer], 0)
        return self._step(self._decode(), answer[-1:], len(prompt) + len(answer) - 1)

    def close(self) -> None:
        self.program.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _generate(
        self, prompt: list[int], max_new_tokens: int, sampling: Sampling, eos_ids: frozenset[int]
    ) -> Generator[int, None, None]:
        result = self.last
        most = min(max_new_tokens, self.max_seq_len - len(prompt))
        begin = time.perf_counter()
        try:
            token = self.steps.begin(prompt, sampling)
            result.prefill_seconds = time.perf_counter() - begin
            while True:
                result.tokens.append(token)
                if token in eos_ids:
                    result.finish_reason = "stop"
                    return
                yield token
                if len(result.tokens) >= most:
                    result.finish_reason = "length" if most == max_new_tokens else "max_seq_len"
                    return
                # Around the step alone: the time that the caller keeps a token for is not decode's.
                begin = time.perf_counter()
                token = self.steps.next(more=len(result.tokens) + 1 < most)
                result.decode_seconds += time.perf_counter() - begin
        finally:
            result.methods = self.method_stats
            stats = self.program.stats
            result.constants = {
                "count": stats.constants,
                "shared": stats.shared,
                "bytes_saved": stats.bytes_saved,
            }

    def _step(self, method: Method, tokens: Sequence[int], position: int) -> torch.Tensor:
        inputs = [torch.tensor([list(tokens)], dtype=torch.int64)]
        if len(method.inputs) == 2:
            inputs.append(torch.arange(position, position + len(tokens)))
        logits = method.execute(inputs)[0]
        return logits.reshape(-1, logits.shape[-1])[-1]

    def _load_methods(self, cuda_graph: bool, warmup_steps: int) -> None:
        names = self.program.method_names
        if {PREFILL, DECODE} <= names:
            many, self._one = PREFILL, DECODE
        elif "forward" in names:
            many = self._one = "forward"
        else:
            raise ArtifactError(
                f"the runner needs the methods {PREFILL!r} and {DECODE!r}, or 'forward'; the program has: "
                f"{', '.join(sorted(names))}"
            )
        self._graph = {"cuda_graph_warmup_steps": warmup_steps} if cuda_graph else {}
        self._decoder: Method | None = None
        self._samplers: list[Method] = []
        # A lone `forward` is loaded twice when it is captured: its prefill has other shapes than its graph.
        self._many = self._load(many) if many != self._one or cuda_graph else self._decode()
        if many == PREFILL and {SAMPLE, DECODE_SAMPLE} <= names:
            sample, step = self._load(SAMPLE), self._load(DECODE_SAMPLE, **self._graph)
            self._samplers = [sample, step]
            self.steps: Steps = DeviceSteps(self, sample, step, self.program.mutable_buffers)
        else:
            self.steps = HostSteps(self, self.program.device)
            self._decode()
        for method in [self._many] if self._decoder is None else [self._many, self._decoder]:
            if len(method.inputs) not in (1, 2) or len(method.inputs[0].shape) != 2:
                raise ArtifactError(
                    f"the runner needs methods of (tokens [1, T], input_pos [T]) or (tokens [1, T]); {method.name!r} takes "
                    + ", ".join(f"{spec.name} {spec.shape_text}" for spec in method.inputs)
                )

    def _decode(self) -> Method:
        """What takes one token and gives logits. A program that samples seldom needs it, so it is loaded when it is."""
        if self._decoder is None:
            self._decoder = self._load(self._one, **self._graph)
        return self._decoder

    def _load(self, name: str, **graph: int) -> Method:
        options: dict[str, bool | int | str] = {"skip_copy_output_to_cpu_for_method": name}
        if graph:
            options |= {"enable_cuda_graph_for_method": name, **graph}
        return self.program.load_method(name, options)


def _lengths(method: Method) -> tuple[int, int]:
    """Shortest and longest run of tokens that the method takes."""
    dim = method.inputs[0].shape[1]
    return dim.min, dim.max
