"""Conversations: only what is new is prefilled, and each answer is the one that is computed anew from all messages."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ostinato.runner import (
    CapacityError,
    Conversation,
    Engine,
    InputError,
    Result,
    SamplingParams,
    SessionFileError,
    StepError,
    Stream,
)
from ostinato.runner import conversation as conversation_module

from ..conftest import CAPITALS_LENGTH

FRANCE, PERU, CHAD = (f"What is the capital of {country}?" for country in ("France", "Peru", "Chad"))
# Answers of a dozen tokens and more, which do not stand in the checkpoint's training data.
HOT = SamplingParams(temperature=1.5, seed=3, min_tokens=12)
# Drops all but the first three characters of an earlier answer, and what stands before an answer while it is generated.
SHORTENING = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content[:3] if message.role == "assistant" else message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
Hm, {% endif %}"""


@pytest.fixture
def load(capitals_artifact: Path) -> Iterator[Callable[..., Engine]]:
    """`load(**options)`: an engine with the shipped checkpoint; all are closed at the end."""
    engines = []

    def load(artifact: Path = capitals_artifact, **options: Any) -> Engine:
        engines.append(Engine.load(artifact, **{"sessions": 2, "snapshots": 4, **options}))
        return engines[-1]

    yield load
    for engine in engines:
        engine.close()


def tell(answer: Stream[str]) -> Result:
    """Take all pieces; return the result."""
    pieces = list(answer)
    assert "".join(pieces) == answer.result.text
    return answer.result


def anew(engine: Engine, conversation: Conversation, params: SamplingParams | None = None) -> list[int]:
    """Tokens of the last answer, computed in a session of their own from all messages before it."""
    assert conversation.messages[-1]["role"] == "assistant"
    stream = engine.generate(conversation.messages[:-1], sampling_params=params)
    assert conversation.messages[-1]["content"] == "".join(stream)
    return stream.result.tokens


def test_only_the_new_turn_is_prefilled(load: Callable[..., Engine]) -> None:
    engine = load()
    conversation = Conversation(engine)
    first = tell(conversation.ask(FRANCE))
    assert (first.text, first.reused_tokens, first.finish_reason) == ("Paris", 0, "stop")
    before = conversation.position
    second = tell(conversation.ask(PERU))
    assert (second.text, second.reused_tokens) == ("Lima", before)
    assert second.tokens == anew(engine, conversation)
    assert second.prompt_tokens == len(engine.encode_prompt(conversation.messages[:-1]))
    assert second.prefilled_tokens == second.prompt_tokens - before > 0
    assert [message["content"] for message in conversation.messages] == [FRANCE, "Paris", PERU, "Lima"]
    assert conversation.turns == 2 and conversation.position == second.prompt_tokens + len(second.tokens)
    assert second.prefill_seconds > 0 and second.decode_seconds > 0


@pytest.mark.parametrize("params", [None, HOT], ids=["greedy", "sampled"])
@pytest.mark.parametrize("snapshots", [4, 1, 0])
def test_undo_retry_and_fork_are_as_computed_anew(
    load: Callable[..., Engine], params: SamplingParams | None, snapshots: int
) -> None:
    engine = load(snapshots=snapshots)
    conversation = Conversation(engine, sampling_params=params)
    assert tell(conversation.ask(FRANCE)).tokens == anew(engine, conversation, params)
    position = conversation.position
    assert tell(conversation.ask(PERU)).tokens == anew(engine, conversation, params)
    again = tell(conversation.retry())
    assert again.tokens == anew(engine, conversation, params)
    # From behind the question: what begins an answer is all that is prefilled.
    assert 0 < again.prefilled_tokens <= 5 if snapshots else again.reused_tokens == 0
    assert conversation.undo() == PERU and conversation.turns == 1
    other = tell(conversation.ask(CHAD))
    assert other.tokens == anew(engine, conversation, params)
    if snapshots == 4 and params is None:
        # From before the question; its first tokens, which are the same, are prefilled again.
        assert other.reused_tokens == position
    fork = conversation.fork()
    assert fork.messages == conversation.messages
    for one, question in ((fork, PERU), (conversation, FRANCE), (fork, FRANCE), (conversation, PERU)):
        (fork if one is conversation else conversation).put_aside()
        assert tell(one.ask(question)).tokens == anew(engine, one, params)
    assert [one.turns for one in (fork, conversation)] == [4, 4]


def test_a_fork_takes_no_room(load: Callable[..., Engine]) -> None:
    """The session that goes on has the only slot; the other one waits on the host, and has lost nothing."""
    engine = load(sessions=1)
    first = Conversation(engine)
    tell(first.ask(FRANCE))
    forks = [first]
    for _ in range(3):
        forks.append(forks[-1].fork())
        assert tell(forks[-1].ask(PERU)).reused_tokens > 0
    forks[-1].put_aside()
    assert tell(first.fork().ask(CHAD)).text == "N'Djamena"
    # The last fork has the slot.
    with pytest.raises(CapacityError, match="all 1 sessions are open"):
        tell(Conversation(engine).ask(FRANCE))


def test_a_template_that_drops_what_was_said(
    load: Callable[..., Engine], capitals_artifact: Path, tmp_path: Path
) -> None:
    """The session goes back behind the question, where the rendered turns are still the same."""
    shortening = Path(shutil.copytree(capitals_artifact, tmp_path / "shortening"))
    (shortening / "chat_template.jinja").write_text(SHORTENING)
    engine = load(shortening)
    conversation = Conversation(engine, sampling_params=HOT)
    tell(conversation.ask(FRANCE))
    for question in (PERU, CHAD):
        stable = len(
            engine.tokenizer.encode(engine.tokenizer.render(conversation.messages[:-1], add_generation_prompt=False))
        )
        assert stable < conversation.position
        second = tell(conversation.ask(question))
        assert second.reused_tokens == stable
        assert second.tokens == anew(engine, conversation, HOT)


def test_an_answer_that_is_closed(load: Callable[..., Engine]) -> None:
    engine = load()
    conversation = Conversation(engine, sampling_params=HOT)
    answer = conversation.ask(FRANCE)
    answer.close()
    assert conversation.messages == [] and conversation.position == 0
    answer = conversation.ask(FRANCE)
    while len(answer.result.tokens) < 5:
        next(answer)
    answer.close()
    assert answer.result.finish_reason == "interrupted" and len(answer.result.tokens) == 5
    assert conversation.messages[1:] == [{"role": "assistant", "content": answer.result.text}]
    tell(conversation.ask(PERU))
    assert tell(conversation.retry()).tokens == anew(engine, conversation, HOT)


def test_a_prompt_can_be_closed_between_its_parts(load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation_module, "PREFILL_PART", 4)
    engine = load()
    conversation = Conversation(engine)
    answer = conversation.ask(FRANCE)
    assert [next(answer), next(answer)] == ["", ""] and conversation.position == 8
    answer.close()
    assert conversation.messages == [] and answer.result.tokens == []
    # What it has is not computed again.
    again = tell(conversation.ask(FRANCE))
    assert (again.text, again.reused_tokens) == ("Paris", 8)


def test_system_message_and_reset(load: Callable[..., Engine], capitals_artifact: Path, tmp_path: Path) -> None:
    engine = load()
    conversation = Conversation(engine)
    tell(conversation.ask(FRANCE))
    conversation.set_system("Be brief.")
    assert [message["role"] for message in conversation.messages] == ["system", "user", "assistant"]
    assert tell(conversation.ask(PERU)).tokens == anew(engine, conversation)
    conversation.set_system("Be long.")
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "Be long."}] and conversation.position == 0
    conversation.set_system("")
    assert conversation.messages == []
    assert tell(conversation.ask(FRANCE)).text == "Paris"
    strict = Path(shutil.copytree(capitals_artifact, tmp_path / "strict"))
    (strict / "chat_template.jinja").write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{% endif %}" + SHORTENING
    )
    conversation = Conversation(load(strict))
    with pytest.raises(InputError, match="no system message"):
        conversation.set_system("Be brief.")
    assert conversation.messages == []


def test_the_end_of_max_seq_len(load: Callable[..., Engine]) -> None:
    engine = load()
    conversation = Conversation(engine, max_new_tokens=10_000, sampling_params=SamplingParams(min_tokens=10_000))
    full = tell(conversation.ask(FRANCE))
    assert full.finish_reason == "max_seq_len" and full.prompt_tokens + len(full.tokens) == CAPITALS_LENGTH
    messages = list(conversation.messages)
    with pytest.raises(InputError, match=f"leaves no room for an answer: max_seq_len is {CAPITALS_LENGTH}"):
        conversation.ask(PERU)
    assert conversation.messages == messages
    assert tell(conversation.retry()).tokens == full.tokens
    conversation.undo()
    assert tell(conversation.ask(PERU)).text.startswith("Lima")


def test_points_give_way_when_pages_run_out(load: Callable[..., Engine]) -> None:
    """Snapshots hold pages; an answer may have all of them."""
    engine = load(sessions=1, kv_tokens=192)
    conversation = Conversation(engine, max_new_tokens=60, sampling_params=SamplingParams(min_tokens=60))
    assert [tell(conversation.ask(FRANCE)).finish_reason for _ in range(2)] == ["length"] * 2
    full = tell(conversation.ask(FRANCE))
    assert full.finish_reason == "kv_tokens" and full.prompt_tokens + len(full.tokens) == 193
    with pytest.raises(CapacityError, match="1 more page"):
        tell(conversation.ask(FRANCE))
    assert conversation.turns == 3
    conversation.undo()
    other = load()
    tokens = tell(conversation.ask(PERU)).tokens
    conversation.close()
    params = SamplingParams(min_tokens=60)
    assert (
        tokens
        == list(
            other.generate_tokens(
                other.encode_prompt(conversation.messages[:-1]), max_new_tokens=60, sampling_params=params
            )
        )[: len(tokens)]
    )


def test_a_step_that_fails(load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was answered stays; the state may be broken, so it is computed again."""
    engine = load()
    conversation = Conversation(engine, sampling_params=HOT)
    answer = conversation.ask(FRANCE)
    while len(answer.result.tokens) < 3:
        next(answer)
    step = Engine.step

    def fail(*_: object, **__: object) -> None:
        raise StepError("injected")

    monkeypatch.setattr(Engine, "step", fail)
    with pytest.raises(StepError, match="injected"):
        list(answer)
    monkeypatch.setattr(Engine, "step", step)
    assert answer.result.finish_reason == "error" and answer.result.error == "injected"
    assert conversation.messages[-1] == {"role": "assistant", "content": answer.result.text}
    second = tell(conversation.ask(PERU))
    assert second.reused_tokens == 0
    assert second.tokens == anew(engine, conversation, HOT)


def test_save_and_load(load: Callable[..., Engine], tmp_path: Path) -> None:
    engine = load()
    conversation, file = Conversation(engine), tmp_path / "talk.json"
    conversation.set_system("Be brief.")
    conversation.save(file)
    assert [path.name for path in tmp_path.iterdir()] == ["talk.json"]
    tell(conversation.ask(FRANCE))
    position = conversation.position
    conversation.save(file)
    conversation.close()
    other = Conversation(engine)
    assert other.load(file) is None
    assert (other.messages, other.position) == (conversation.messages, position)
    second = tell(other.ask(PERU))
    assert second.reused_tokens == position
    assert second.tokens == anew(engine, other)
    # Without its session, and with one that is broken, a conversation goes on from its messages.
    session = tmp_path / "talk.json.session"
    session.write_bytes(session.read_bytes()[:-1])
    assert "cut short" in str(other.load(file))
    assert tell(other.ask(PERU)).tokens == second.tokens
    session.unlink()
    assert "cannot be read: No such file" in str(other.load(file))
    assert tell(other.ask(PERU)).reused_tokens == 0


def test_files_that_are_no_conversation(load: Callable[..., Engine], tmp_path: Path) -> None:
    conversation, file = Conversation(load()), tmp_path / "talk.json"
    tell(conversation.ask(FRANCE))
    messages, position = list(conversation.messages), conversation.position
    broken = [b"", b"\xff", b"[]", b"{}", b'{"messages": [1]}', b'{"messages": [{"role": "user"}]}', b"[" * 100_000]
    for data in (*broken, json.dumps({"messages": [{"role": "user", "content": 1}]}).encode()):
        file.write_bytes(data)
        with pytest.raises(SessionFileError, match="is no saved conversation"):
            conversation.load(file)
    with pytest.raises(SessionFileError, match="cannot be read: Is a directory"):
        conversation.load(tmp_path)
    for path in (tmp_path, tmp_path / "none" / "talk.json"):
        with pytest.raises(SessionFileError, match="cannot be written: "):
            conversation.save(path)
    assert (conversation.messages, conversation.position) == (messages, position)
    assert {path.name for path in tmp_path.iterdir()} == {"talk.json"}


def test_what_cannot_be_asked(load: Callable[..., Engine]) -> None:
    conversation = Conversation(load())
    with pytest.raises(InputError, match="the prompt is empty"):
        conversation.ask(" \n")
    for operation in (conversation.undo, conversation.retry):
        with pytest.raises(InputError, match="there is no turn yet"):
            operation()
