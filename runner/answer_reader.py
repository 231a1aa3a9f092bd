"""Turns a scheduler's outputs into an answer's result, and its tokens into text."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence

from .scheduler.messages import Output
from .stream import Result
from .text.stop_strings import StopStrings
from .text.tokenizer import TextStream, Tokenizer


class AnswerReader:
    """Reads the outputs of one answer.

    Args:
        prompt_tokens: number of tokens of the prompt.
        tokenizer: gives the answer's text; None: there is none.
        stop: strings that end the answer.

    Attributes:
        result: the answer so far.
        ended: whether the answer has ended, by its last output or by a stop string. Later outputs are to be dropped.
    """

    def __init__(self, prompt_tokens: int, tokenizer: Tokenizer | None = None, stop: Sequence[str] = ()) -> None:
        self.result = Result(prompt_tokens=prompt_tokens)
        self.ended = False
        self._text = None if tokenizer is None else TextStream(tokenizer)
        self._stop = StopStrings(stop) if stop else None

    def read(self, output: Output) -> str:
        """Add an output to the result, and return the text that it completes.

        Raises:
            OstinatoError: the error that the answer has ended with.
        """
        result = self.result
        if output.prompt_logprobs is not None:
            result.prompt_logprobs = list(output.prompt_logprobs)
        result.logprobs += output.logprobs
        result.reused_tokens += output.reused_tokens
        result.queue_seconds += output.queue_seconds or 0.0
        text = ""
        for token in output.tokens:
            result.tokens.append(token)
            if self._text is not None and (output.finish_reason != "stop" or token != output.tokens[-1]):
                text += self._passed(self._text.push(token))
        if output.finish_reason is not None and not self.ended:
            self.ended, result.finish_reason = True, output.finish_reason
            if self._text is not None:
                text += self._passed(self._text.flush())
                text += self._stop.flush() if self._stop and not self._stop.found else ""
        result.text += text
        if output.error is not None:
            error = output.error.error()
            result.error, result.error_type = str(error), type(error).__name__
            raise error
        return text

    def read_all(self, outputs: Generator[Output, None, None]) -> Generator[tuple[str, Output], None, None]:
        """Read an answer's outputs until it ends, time the waits for them, and yield the text of each, and the output.

        Raises:
            OstinatoError: the error that the answer has ended with.
        """
        result = self.result
        begin = time.perf_counter()
        try:
            for output in outputs:
                # Only the wait is timed: the caller's own work on a token does not count as decode.
                seconds = time.perf_counter() - begin
                if result.tokens:
                    result.decode_seconds += seconds
                else:
                    result.prefill_seconds += seconds
                yield self.read(output), output
                if self.ended:
                    return
                begin = time.perf_counter()
        finally:
            outputs.close()

    def _passed(self, text: str) -> str:
        if self._stop is None or not text:
            return text
        if self._stop.found:
            return ""
        text = self._stop.push(text)
        if self._stop.found:
            self.ended, self.result.finish_reason = True, "stop"
        return text
