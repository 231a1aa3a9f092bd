"""Bodies of requests and of answers as OpenAI's interface has them, with vLLM's names for what that lacks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ostinato.delegate.sampling_params import MAX_BIAS, MAX_FLOAT32, MAX_LOGPROBS, MAX_PENALTY, MAX_TOP_K

# The most choices of one request, its prompts times `n`.
MAX_CHOICES = 1024
MAX_STOPS = 64
# Parameters of OpenAI's and of vLLM's interface that are not done here yet.
NOT_SUPPORTED = frozenset(
    (
        *("tools", "tool_choice", "functions", "function_call", "parallel_tool_calls", "response_format", "suffix"),
        *(
            "structured_outputs",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "modalities",
            "audio",
        ),
        *("prediction", "web_search_options", "use_beam_search", "best_of", "truncate_prompt_tokens", "prompt_embeds"),
        *(
            "continue_final_message",
            "add_generation_prompt",
            "add_special_tokens",
            "include_stop_str_in_output",
            "documents",
            "chat_template",
        ),
    )
)
# Values of these that ask for nothing.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none",),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "suffix": ("",),
    "best_of": (1,),
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "continue_final_message": (False,),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
}

# More parameters than there are, and more biases than a program takes: all that is wrong with a body is listed before the
# first of it is told, and 10 million wrong values take a minute in which nobody is answered. Lists end with the first one.
_MOST_PARAMETERS, _MOST_BIASES = 256, 1024
# Messages and parts of them: a check of one takes 4 us, in which nobody is answered.
_MOST_MESSAGES = 16_384

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
_Number = Annotated[float, Field(ge=-MAX_FLOAT32, le=MAX_FLOAT32)]
_Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]


def _few(biases: Any) -> Any:
    if isinstance(biases, dict) and len(biases) > _MOST_BIASES:
        raise PydanticCustomError("too_many", f"Input should have at most {_MOST_BIASES} items")
    return biases


_Biases = Annotated[dict[str, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]], BeforeValidator(_few)]


def _needs(name: str) -> AfterValidator:
    """The check of a parameter that means something only where another one, which is declared before it, is true."""

    def check(value: Any, info: ValidationInfo) -> Any:
        # If the other one is wrong, it is not in `data`, and has an error of its own.
        if info.data.get(name) is False:
            raise PydanticCustomError("needs", "it needs {name} to be true", {"name": name})
        return value

    return AfterValidator(check)


def _few_prompts(prompt: Any) -> Any:
    # Token ids are one prompt.
    if isinstance(prompt, list) and len(prompt) > MAX_CHOICES and not isinstance(prompt[0], int):
        raise PydanticCustomError("too_many", f"Input should have at most {MAX_CHOICES} prompts")
    return prompt


def _few_messages(messages: Any) -> Any:
    if isinstance(messages, list):
        count = len(messages)
        if count <= _MOST_MESSAGES:
            contents = (message.get("content") for message in messages if isinstance(message, dict))
            count += sum(len(content) for content in contents if isinstance(content, list))
        if count > _MOST_MESSAGES:
            raise PydanticCustomError(
                "too_many", f"Input should have at most {_MOST_MESSAGES} messages and parts of them"
            )
    return messages


class Body(BaseModel):
    """A request's body. Values are not converted from other types."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, body: Any) -> Any:
        """Drop parameters that ask for nothing: null, and values that mean what is done anyway."""
        if not isinstance(body, dict):
            return body
        if len(body) > _MOST_PARAMETERS:
            raise PydanticCustomError("too_many", "there are no such parameters")
        return {
            name: value
            for name, value in body.items()
            if value is not None and not any(value == one for one in _NOTHING.get(name, ()))
        }

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The document's schema: what may be left out may be null, and null asks for nothing, whatever its name."""
        found = handler.resolve_ref_schema(handler(schema))
        for name in found["properties"].keys() - found.get("required", ()):
            of_value = found["properties"][name]
            if not any(one == {"type": "null"} for one in of_value.get("anyOf", ())):
                described = {key: of_value.pop(key) for key in ("title", "description", "default") if key in of_value}
                found["properties"][name] = {"anyOf": [of_value, {"type": "null"}], **described}
        found["additionalProperties"] = {"type": "null"}
        return found


class StreamOptions(Body):
    """`include_usage`: a last event with the numbers of tokens. `continuous_usage_stats`: each event has those so far."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationBody(Body):
    """Parameters of chats and of completions. What is left out comes from the model's `generation_config.json`, else it has
    OpenAI's default."""

    model: str | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stream: bool = False
    stream_options: Annotated[StreamOptions | None, _needs("stream")] = None
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=_MOST_BIASES)] | None = None
    ignore_eos: bool = False
    temperature: float | None = Field(None, ge=0, le=MAX_FLOAT32)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_TOP_K, description="-1 and 0: all")
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: float | None = Field(None, gt=0, le=MAX_FLOAT32)
    logit_bias: _Biases | None = None
    return_token_ids: bool = Field(False, description="give the token ids of prompt and answers, too")
    # They change nothing.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    verbosity: str | None = None


class ContentPart(Body):
    """A text among several that a message has."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """A message of a chat. The chat template gets all that it has."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str = Field(min_length=1)
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)]


_Chat = Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1), BeforeValidator(_few_messages)]


class ChatBody(GenerationBody):
    """POST /v1/chat/completions"""

    messages: _Chat
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool = False
    top_logprobs: Annotated[int | None, _needs("logprobs")] = Field(None, ge=0, le=MAX_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = Field(None, description="for the chat template; `none`: as enable_thinking false")
    session: str | None = Field(None, description="go on with this session: messages are those that come after it")


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    prompt: Annotated[
        str | Annotated[list[str], Field(fail_fast=True)] | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)],
        BeforeValidator(_few_prompts),
    ]
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)


class TokenizeBody(Body):
    """POST /tokenize: a text, or the messages of a chat, to which alone the chat template's values belong."""

    model: str | None = None
    prompt: str | None = None
    messages: _Chat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class NewSessionBody(Body):
    """POST /v1/sessions. `messages`: what was said before."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True), BeforeValidator(_few_messages)] = Field(
        default_factory=list
    )


class RewindBody(Body):
    """POST /v1/sessions/ID/rewind. `messages`: how many of the session's first messages to keep."""

    messages: int = Field(ge=0, lt=2**31)


class DetokenizeBody(Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: TokenIds


# --- answers


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(BaseModel):
    """Answer to a request that has failed."""

    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    """Numbers of tokens. `cached_tokens`: those of the prompt that were not computed for this request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    finish_reason: str
    logprobs: dict[str, Any] | None = None
    token_ids: list[int] | None = None


class ChatAnswer(BaseModel):
    """Answers to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None


class CompletionChoice(BaseModel):
    index: int
    text: str
    finish_reason: str
    logprobs: dict[str, Any] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionAnswer(BaseModel):
    """Texts that go on from prompts: `n` for each prompt, one prompt after the other."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ModelCard(BaseModel):
    """The model. `max_model_len`: the most tokens of prompt and answer together."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    vocab_size: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class TokenizeAnswer(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TokenizerInfo(BaseModel):
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None


class DetokenizeAnswer(BaseModel):
    prompt: str


class SessionCard(BaseModel):
    """A session. `messages`: how many it has. `tokens`: how many its last turn had, prompt and answer; a rewind leaves that.
    Times are seconds since 1970."""

    id: str
    object: Literal["session"]
    created: int
    last_used: int
    messages: int
    tokens: int


class SessionHistory(SessionCard):
    """A session with its messages."""

    history: list[dict[str, Any]]


class SessionList(BaseModel):
    object: Literal["list"]
    data: list[SessionCard]


class SessionDeleted(BaseModel):
    id: str
    object: Literal["session.deleted"]
    deleted: bool


class Health(BaseModel):
    status: Literal["ok"]


# --- statuses

_REFUSED = {
    400: "the request cannot be done as it is",
    401: "no key, or a wrong one",
    404: "there is no such model, session or path",
    409: "an answer goes on with the session",
    408: "the body did not come in time",
    413: "the body is too large",
    415: "the body is not JSON",
    429: "too many requests wait: try again",
    500: "the engine has failed with this request",
    503: "the engine is not there, or the server ends",
}
DOCUMENTED: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": text} for status, text in _REFUSED.items()
}
# Of answers that may come as events. As is usual before OpenAPI 3.2, the schema is that of each event.
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
WITH_EVENTS = DOCUMENTED | {200: {"content": {"text/event-stream": {"schema": _EVENT}}}}


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Some of these statuses, for a route's document."""
    return {status: DOCUMENTED[status] for status in statuses}
