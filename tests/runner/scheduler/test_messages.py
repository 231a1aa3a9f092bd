"""What goes between two processes comes out as it went in, and errors keep their class."""

from __future__ import annotations

import socket
from typing import Any

import msgspec
import pytest

from ostinato.delegate import errors
from ostinato.delegate.errors import OptionError, OstinatoError, StepError
from ostinato.delegate.sampling_params import SamplingParams, TokenLogprobs
from ostinato.runner.engine_channel import LENGTH_BYTES, EngineChannel, frame
from ostinato.runner.scheduler.messages import (
    Cancel,
    CancelledError,
    Close,
    Describe,
    Ended,
    Load,
    Loading,
    Output,
    QueueFullError,
    Reply,
    Request,
    Rewind,
    Save,
    Start,
    Swap,
    decode_from_engine,
    decode_to_engine,
    encode,
)

PARAMS = SamplingParams(
    temperature=0.7,
    top_k=5,
    top_p=0.9,
    seed=2**64 - 1,
    min_p=0.1,
    repetition_penalty=1.1,
    presence_penalty=-2.0,
    frequency_penalty=2.0,
    logit_bias={1: -100.0, 1535: 0.5},
    min_tokens=3,
    stop_token_ids=[7, 9],
    logprobs=0,
    prompt_logprobs=20,
)
RECORD = TokenLogprobs(5, -0.25, 1, [(5, -0.25), (7, -3.5)])
TO_ENGINE = (
    Request(id="1", tokens=[1, 2, 3], max_tokens=1),
    Request(id="ä", tokens=[], max_tokens=2**31, sampling_params=PARAMS, ignore_eos=True, n=4, session="a", keep="b"),
    Cancel("1"),
    Cancel("1", 0),
    Rewind("2", "a", 0),
    Save("3", "a", "/tmp/x y"),
    Load("4", "a", "/tmp/ü"),
    Close("5", "a"),
    Describe("6"),
    Start("7", "/a", {"sessions": 4, "cuda_graph": True, "row_buckets": [2, 4], "max_step_ms": 1.5}),
    Swap("8", "/b", {}),
)
FROM_ENGINE: tuple[Any, ...] = (
    [Output("1", 0, (5,))],
    [
        Output("1", 3, (5, 6), (RECORD, RECORD), "stop", None, [None, RECORD]),
        Output("2", 0, (), (), "error", Ended("InputError", "no")),
        Output("3", 0, finish_reason="cancelled", prompt_logprobs=[]),
    ],
    [],
    Reply("1"),
    Reply("1", {"max_seq_len": 251, "eos_ids": [1, 2]}),
    Reply("1", error=Ended("CapacityError", "full")),
    Loading(0, 2**40),
)


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda message: type(message).__name__)
def test_to_the_engine(message: Any) -> None:
    found = decode_to_engine(encode(message))
    assert type(found) is type(message) and found == message
    if isinstance(message, Request):
        assert found.sampling_params == message.sampling_params
        assert type(found.sampling_params) is SamplingParams
        assert found.sampling_params.logit_bias == message.sampling_params.logit_bias


@pytest.mark.parametrize("message", FROM_ENGINE)
def test_from_the_engine(message: Any) -> None:
    found = decode_from_engine(encode(message))
    assert type(found) is type(message)
    if not isinstance(message, list):
        assert found == message
        return
    for one, other in zip(found, message, strict=True):
        for name in ("id", "index", "finish_reason", "error"):
            assert getattr(one, name) == getattr(other, name)
        assert [*one.tokens] == [*other.tokens] and [*one.logprobs] == [*other.logprobs]
        assert all(type(record) is TokenLogprobs for record in one.logprobs)
        assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)
        assert [*(one.prompt_logprobs or ())] == [*(other.prompt_logprobs or ())]


def test_a_token_has_few_bytes() -> None:
    """An output of each of 256 sessions has to be encoded and sent in each step."""
    assert len(encode([Output("123", 0, (15000,))])) <= 24


ERRORS = [
    *(kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, OstinatoError)),
    QueueFullError,
    CancelledError,
]


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_keep_their_class(kind: type[OstinatoError]) -> None:
    (output,) = decode_from_engine(encode([Output("1", 0, error=Ended.of(kind("what and why\nand how")))]))  # type: ignore[misc]
    found = output.error.error()
    assert type(found) is kind and str(found) == "what and why\nand how"


def test_other_errors_are_of_the_step() -> None:
    for error, text in (
        (ZeroDivisionError("division by zero\nsecond line"), "ZeroDivisionError: division by zero"),
        (MemoryError(), "MemoryError"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ):
        found = Ended.of(error).error()
        assert type(found) is StepError and str(found) == text
    assert type(Ended("NewerError", "x").error()) is StepError


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8", None])
@pytest.mark.parametrize("name", ["max_tokens", "n"])
def test_values_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=rf"{name} must be 1 or more, got {value!r}"):
        Request(**{"id": "1", "tokens": [1], "max_tokens": 1, name: value})


def test_what_is_no_message() -> None:
    """Nothing else is taken for a message, on either side."""
    for data in (b"", b"\xc1", encode({"type": "Nobody"}), encode(Loading(1, 2)), encode(Cancel("1"))[:-1]):
        with pytest.raises(msgspec.MsgspecError):
            decode_to_engine(data)
    with pytest.raises(msgspec.MsgspecError):
        decode_from_engine(encode(Cancel("1")))


def test_frames_in_any_pieces() -> None:
    """Messages arrive whole, in their order, however the socket cuts them; and what the owner does not read waits."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = EngineChannel(theirs)
        data = b"".join(map(frame, TO_ENGINE))
        found: list[Any] = []
        for begin in range(0, len(data), 7):
            ours.sendall(data[begin : begin + 7])
            found += channel.receive(None)
        assert found == list(TO_ENGINE)
        large = [Output("1", 0, list(range(300_000)))]
        for _ in range(3):
            channel.send(large)
        assert list(channel.receive(0)) == []
        ours.settimeout(30)
        for _ in range(3):
            length = int.from_bytes(_read(ours, LENGTH_BYTES, channel), "little")
            (output,) = decode_from_engine(_read(ours, length, channel))  # type: ignore[misc]
            assert output.tokens == large[0].tokens
        channel.drain()
        ours.sendall(frame(TO_ENGINE[0]) + b"\1")
        ours.close()
        # What came before the end is still a message.
        assert list(channel.receive(None)) == [TO_ENGINE[0]] and not channel.is_open
        channel.send(large)
        channel.drain()


def _read(connection: socket.socket, count: int, channel: EngineChannel) -> bytes:
    data = b""
    while len(data) < count:
        assert list(channel.receive(0)) == []
        data += connection.recv(count - len(data))
    return data
