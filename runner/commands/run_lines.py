"""`ostinato run --prompts FILE`: answers a file of prompts, with all sessions busy."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ostinato.delegate.artifact.files import open_artifact
from ostinato.delegate.artifact.paths import artifact_paths
from ostinato.delegate.artifact.records import Growth
from ostinato.delegate.errors import CapacityError, ClosedError, InputError, OptionError, OstinatoError
from ostinato.delegate.sampling_params import SamplingParams
from ostinato.runner.answers_file import AnswersFile
from ostinato.runner.prompt_lines import Defaults, PromptLine, checked_ids, lines_of
from ostinato.runner.stream import Result
from ostinato.runner.text_request import TextRequest

from .options import capacity_of, load_engine, say
from .run import FRACTION_FOR_LINES, SESSIONS_FOR_LINES, SNAPSHOTS_FOR_LINES

if TYPE_CHECKING:
    from tqdm import tqdm

    from ostinato.delegate.capacity import CapacityOptions
    from ostinato.runner.engine import Engine

# A line that raises one of these would do so again. All others are of the machine, and a later run asks again.
_OF_THE_LINE = {kind.__name__ for kind in (InputError, OptionError, CapacityError)}
# Seconds between two pictures of the bar.
_INTERVAL = 0.1


def run_lines(arguments: argparse.Namespace, params: SamplingParams) -> int:
    """Answer the lines that have no answer yet. Returns the exit status: 1 if a line has an error, or no answer.

    Raises:
        OptionError: a file that cannot be read or written, or an option that is not for this.
        InputError: two lines with one id; an output that has other lines than answers.
        ClosedError: the program can run nothing more. The same command goes on.
    """
    source, output = arguments.prompt_lines, arguments.output
    ids = checked_ids(source)
    if output is not None and output.exists() and output.samefile(source):
        raise OptionError(f"--output {output}: that is the file of --prompts")
    options = TextRequest(
        prompt="",
        raw=arguments.raw,
        chat_template_kwargs=arguments.chat_template_kwargs,
        max_new_tokens=arguments.max_new_tokens,
        sampling_params=params,
        ignore_eos=arguments.ignore_eos,
    )
    with AnswersFile(output) as answers:
        left = sum(one not in answers.answered for one in ids)
        progress = Progress(len(ids), len(ids) - left)
        del ids
        if left:
            with load_engine(arguments, _capacity, SNAPSHOTS_FOR_LINES, prefill_buckets=None) as engine:
                if arguments.cuda_graph:
                    engine.warm_up(beside_sessions=True)
                model = artifact_paths(arguments.artifact)[0].resolve().parent.name
                lines = (line for line in lines_of(source) if line.id not in answers.answered)
                with progress:
                    _answer(engine, model, lines, Defaults(options, arguments.system), answers, progress)
        say(progress.summary(answers.failed))
        return int(answers.failed > 0 or progress.unanswered > 0)


def _capacity(arguments: argparse.Namespace) -> CapacityOptions:
    """Return what to make room for: what the user says, or what keeps the device busy."""

    asked = capacity_of(arguments)
    if asked.sessions is not None or asked.gpu_memory_fraction is not None:
        return asked
    methods = open_artifact(*artifact_paths(arguments.artifact), verify=False)[0].methods.values()
    if any(method.target.device == "cuda" for method in methods):
        return replace(asked, gpu_memory_fraction=FRACTION_FOR_LINES)
    specs = [spec for method in methods for spec in method.record.buffer_specs.values()]
    grows = any(spec.growth is not Growth.FIXED for spec in specs)
    return replace(asked, sessions=SESSIONS_FOR_LINES) if grows else asked


@dataclass
class _Asked:
    """A line whose request is being answered, with the answers that have ended, by number."""

    line: PromptLine
    request: TextRequest
    results: dict[int, Result] = field(default_factory=dict)


def _answer(
    engine: Engine,
    model: str,
    lines: Iterator[PromptLine],
    defaults: Defaults,
    answers: AnswersFile,
    progress: Progress,
) -> None:
    asked: dict[int, _Asked] = {}

    def requests() -> Iterator[TextRequest]:
        number = 0
        for line in lines:
            try:
                request = line.request(defaults)
            except OstinatoError as error:
                answers.write(line.failure(type(error).__name__, str(error)))
                progress.ended(0)
                continue
            asked[number] = _Asked(line, request)
            number += 1
            yield request

    for number, index, result in engine.generate_each(requests()):
        one = asked.get(number)
        if one is None:
            # Another answer to its request has failed.
            continue
        one.results[index] = result
        if result.error is None and len(one.results) < one.request.n:
            continue
        del asked[number]
        tokens = sum(len(other.tokens) for other in one.results.values())
        if result.error is None:
            results = [one.results[index] for index in range(one.request.n)]
            answers.write(one.line.answer(results, engine.tokenizer, model))
        elif result.error_type in _OF_THE_LINE:
            answers.write(one.line.failure(str(result.error_type), result.error))
        elif result.error_type == ClosedError.__name__:
            raise ClosedError(result.error)
        else:
            progress.unanswered += 1
            progress.last_error = result.error
        progress.ended(tokens)


class Progress:
    """Progress display of the answers: on a terminal a bar of tqdm, and everywhere one line at the end.

    Args:
        total: number of lines.
        before: number of those that were answered before.

    Attributes:
        unanswered: number of lines that got no answer, for a reason that is not theirs.
        last_error: the last such reason.
    """

    def __init__(self, total: int, before: int) -> None:
        self.unanswered, self.last_error = 0, ""
        self._total, self._before = total, before
        self._ended = self._tokens = 0
        self._begun = time.perf_counter()
        self._seconds = 0.0
        self._bar: tqdm[Any] | None = None

    def __enter__(self) -> Progress:
        self._begun = time.perf_counter()
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=self._total, initial=self._before, unit="req", mininterval=_INTERVAL, file=sys.stderr, leave=False
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._seconds = time.perf_counter() - self._begun
        if self._bar is not None:
            self._bar.close()

    def ended(self, tokens: int) -> None:
        """Note that a line has its answers, with so many tokens together."""
        self._ended += 1
        self._tokens += tokens
        if self._bar is not None:
            speed = self._tokens / (time.perf_counter() - self._begun)
            self._bar.set_postfix_str(f"{speed:.1f} tokens/s", refresh=False)
            self._bar.update()

    def summary(self, failed: int) -> str:
        """One line: what was done, and how many lines of the output have an error."""
        speed = self._tokens / self._seconds if self._seconds else 0.0
        text = f"{self._ended} requests, {self._tokens} tokens in {self._seconds:.1f} s, {speed:.1f} tokens/s"
        if self._before:
            text += f" | {self._before} were answered before"
        if failed:
            text += f" | {failed} lines have an error"
        if self.unanswered:
            text += f" | {self.unanswered} have no answer, run the same command again: {self.last_error}"
        return text
