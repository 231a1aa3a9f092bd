"""`TextRequest`: a prompt and its options, as a caller gives them, on their way to a scheduler's `Request`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from ostinato.delegate.errors import OptionError
from ostinato.delegate.sampling_params import SamplingParams

from .answer_reader import AnswerReader
from .scheduler.messages import Request
from .sessions.session import check_max_new_tokens, checked_params
from .stream import DEFAULT_MAX_NEW_TOKENS
from .text.prompts import Prompt, encode_prompt
from .text.stop_strings import checked_stop
from .text.tokenizer import Message, Tokenizer

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")

_SAMPLING = frozenset(item.name for item in fields(SamplingParams))


@dataclass(frozen=True, kw_only=True)
class TextRequest:
    """A prompt, and how to answer it.

    Attributes:
        prompt: a question, or the turns of a chat. The chat template is applied. A `Prompt` is one that is encoded.
        raw: no chat template: go on with the text as it is.
        chat_template_kwargs: values for the chat template, such as `{"enable_thinking": False}`.
        max_new_tokens: the most tokens of an answer.
        sampling_params: how to sample; None: the most likely tokens. With a seed, answer i has the seed + i.
        ignore_eos: whether to go on past the model's end-of-sequence tokens.
        stop: strings that end an answer, and are not part of it.
        n: number of answers.
        session: a kept session, whose history the prompt follows; None: a new one. The template renders the prompt as the
            begin of a chat, system prompt included: where it has one, give the rest of the chat as text, with `raw`.
        keep: name under which the session of the first answer is kept, see `Request.keep`.
    """

    prompt: str | Sequence[Message] | Prompt
    raw: bool = False
    chat_template_kwargs: Mapping[str, Any] | None = None
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    sampling_params: SamplingParams | None = None
    ignore_eos: bool = False
    stop: str | Sequence[str] = field(default=())
    n: int = 1
    session: str | None = None
    keep: str | None = None

    def for_scheduler(self, name: str, tokenizer: Tokenizer) -> Request:
        """Return the same with token ids.

        Raises:
            InputError: an empty prompt, or one that cannot be encoded.
            OptionError: a value out of range.
        """
        checked_stop(self.stop)
        prompt = self.prompt
        if not isinstance(prompt, Prompt):
            prompt = encode_prompt(tokenizer, prompt, self.raw, self.chat_template_kwargs)
        request = self.with_tokens(name, prompt.tokens)
        request.shared, request.goes_on = prompt.shared, prompt.goes_on
        return request

    def with_tokens(self, name: str, tokens: list[int]) -> Request:
        """Return the same with these token ids in the place of the prompt. Raises OptionError: a value out of range."""
        check_max_new_tokens(self.max_new_tokens)
        return Request(
            id=name,
            tokens=tokens,
            max_tokens=self.max_new_tokens,
            sampling_params=checked_params(self.sampling_params),
            ignore_eos=self.ignore_eos,
            n=self.n,
            session=self.session,
            keep=self.keep,
        )


def answer_readers(asked: TextRequest, request: Request, tokenizer: Tokenizer) -> list[AnswerReader]:
    """Return a reader for each answer to what was asked."""
    return [AnswerReader(len(request.tokens), tokenizer, checked_stop(asked.stop)) for _ in range(asked.n)]


def explains_options(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Have a function that takes attributes of a `TextRequest` say what to write for those that have another place here."""

    @wraps(function)
    def run(*arguments: Parameters.args, **options: Parameters.kwargs) -> Returned:
        for name, value in options.items():
            if name == "max_tokens":
                instead = f"max_new_tokens={value!r}"
            elif name in _SAMPLING:
                instead = f"sampling_params=SamplingParams({name}={value!r})"
            else:
                continue
            raise OptionError(f"{function.__name__} takes no {name}: write {instead}")
        return function(*arguments, **options)

    return run
