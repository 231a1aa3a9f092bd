"""Conversations: only what is new is prefilled, and each answer is the one that is computed anew from all messages."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
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
from ostinato.runner.sessions.sessions import Sessions

from ..conftest import CAPITALS_LENGTH
from ..export.memory import MIB

FRANCE, PERU, CHAD = (f"What is the capital of {country}?" for country in ("France", "Peru", "Chad"))
# Answers of a dozen tokens and more, which do not stand in the checkpoint's training data.
HOT = SamplingParams(temperature=1.5, seed=3, min_tokens=12)
# Texts of answers -> the tokens that were sampled for them, which are not always those that the tokenizer gives.
SAMPLED: dict[str, list[int]] = {}
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


@pytest.fixture
def anew(load: Callable[..., Engine]) -> Callable[..., list[int]]:
    """`anew(conversation, params, count)`: tokens of the last answer, `count` at most, computed from all messages before it
    by an engine without a prefix cache. Where the template keeps earlier answers, these have the tokens that `tell` took."""
    engines: dict[Path, Engine] = {}

    def anew(conversation: Conversation, params: SamplingParams | None = None, count: int = 256) -> list[int]:
        *messages, last = conversation.messages
        assert last["role"] == "assistant"
        artifact = Path(conversation._engine._path)
        if artifact not in engines:
            engines[artifact] = load(artifact, prefix_caching=False)
        engine = engines[artifact]
        rest, tokens = engine.tokenizer.render(messages), []
        for message in messages:
            if message["role"] == "assistant" and message["content"] in rest:
                before, _, rest = rest.partition(message["content"])
                tokens += [*engine.tokenizer.encode(before), *SAMPLED[message["content"]]]
        tokens += engine.tokenizer.encode(rest)
        stream = engine.generate_tokens(tokens, max_new_tokens=count, sampling_params=params)
        assert last["content"] == engine.tokenizer.decode([*stream])
        assert stream.result.reused_tokens == 0
        return stream.result.tokens

    return anew


def tell(answer: Stream[str]) -> Result:
    """Take all pieces; return the result."""
    pieces = list(answer)
    result = answer.result
    assert "".join(pieces) == result.text
    SAMPLED[result.text] = result.tokens[: -1 if result.finish_reason == "stop" else None]
    return result


def test_only_the_new_turn_is_prefilled(load: Callable[..., Engine], anew: Callable[..., list[int]]) -> None:
    engine = load()
    conversation = Conversation(engine)
    first = tell(conversation.ask(FRANCE))
    assert (first.text, first.reused_tokens, first.finish_reason) == ("Paris", 0, "stop")
    before = conversation.position
    second = tell(conversation.ask(PERU))
    # The model has not run the token that ended the answer.
    assert (second.text, second.reused_tokens) == ("Lima", before - 1)
    assert second.tokens == anew(conversation)
    assert second.prompt_tokens == len(engine.encode_prompt(conversation.messages[:-1]))
    assert second.prefilled_tokens == second.prompt_tokens - before + 1 > 0
    assert [message["content"] for message in conversation.messages] == [FRANCE, "Paris", PERU, "Lima"]
    assert conversation.turns == 2 and conversation.position == second.prompt_tokens + len(second.tokens)
    assert second.prefill_seconds > 0 and second.decode_seconds > 0


@pytest.mark.parametrize("params", [None, HOT], ids=["greedy", "sampled"])
@pytest.mark.parametrize("snapshots", [4, 1, 0])
def test_undo_retry_and_fork_are_as_computed_anew(
    load: Callable[..., Engine], anew: Callable[..., list[int]], params: SamplingParams | None, snapshots: int
) -> None:
    engine = load(snapshots=snapshots)
    conversation = Conversation(engine, sampling_params=params)
    assert tell(conversation.ask(FRANCE)).tokens == anew(conversation, params)
    position = conversation.position
    assert tell(conversation.ask(PERU)).tokens == anew(conversation, params)
    again = tell(conversation.retry())
    assert again.tokens == anew(conversation, params)
    if snapshots == 4:
        # From behind the question: what begins an answer is all that is prefilled.
        assert 0 < again.prefilled_tokens <= 5
    assert conversation.undo() == PERU and conversation.turns == 1
    other = tell(conversation.ask(CHAD))
    assert other.tokens == anew(conversation, params)
    if snapshots == 4:
        # From before the question at least; also from where both questions part, as that prompt has been seen.
        assert other.reused_tokens >= position - 1
    fork = conversation.fork()
    assert fork.messages == conversation.messages
    for one, question in ((fork, PERU), (conversation, FRANCE), (fork, FRANCE), (conversation, PERU)):
        assert tell(one.ask(question)).tokens == anew(one, params)
    assert [one.turns for one in (fork, conversation)] == [4, 4]


def test_a_fork_takes_no_room(load: Callable[..., Engine]) -> None:
    """Conversations that wait have no slot."""
    engine = load(sessions=1)
    first = Conversation(engine)
    tell(first.ask(FRANCE))
    forks = [first]
    for _ in range(3):
        forks.append(forks[-1].fork())
        assert tell(forks[-1].ask(PERU)).reused_tokens > 0
    assert tell(first.fork().ask(CHAD)).text == "N'Djamena"
    with engine.open_session(), pytest.raises(CapacityError, match="all 1 sessions are open"):
        tell(first.ask(PERU))
    assert first.turns == 1 and tell(first.ask(PERU)).text == "Lima"


def test_a_template_that_drops_what_was_said(
    load: Callable[..., Engine], anew: Callable[..., list[int]], capitals_artifact: Path, tmp_path: Path
) -> None:
    """A turn goes on from behind the last question, where the rendered turns are still the same."""
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
        assert second.tokens == anew(conversation, HOT)


def test_answers_keep_the_tokens_that_were_sampled(load: Callable[..., Engine], anew: Callable[..., list[int]]) -> None:
    """The text of an answer has other tokens when it is encoded again. The next turn goes on behind those that it had."""
    engine = load(snapshots=8)
    conversation = Conversation(engine, sampling_params=HOT)
    first = tell(conversation.ask(FRANCE))
    assert engine.tokenizer.encode(first.text) != SAMPLED[first.text]
    before = conversation.position
    for question in (PERU, CHAD):
        position = conversation.position
        assert tell(conversation.ask(question)).reused_tokens == position - 1
    conversation.undo()
    conversation.undo()
    again = tell(conversation.ask(CHAD))
    assert again.reused_tokens >= before - 1 and again.tokens == anew(conversation, HOT)
    # A message that was changed is encoded again.
    conversation.messages[1]["content"] = "Rome"
    SAMPLED["Rome"] = engine.tokenizer.encode("Rome")
    assert tell(conversation.retry()).tokens == anew(conversation, HOT)


def test_an_answer_that_is_closed(load: Callable[..., Engine], anew: Callable[..., list[int]]) -> None:
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
    SAMPLED[answer.result.text] = answer.result.tokens
    tell(conversation.ask(PERU))
    assert tell(conversation.retry()).tokens == anew(conversation, HOT)


def test_a_prompt_can_be_closed_between_its_parts(load: Callable[..., Engine]) -> None:
    engine = load()
    conversation = Conversation(engine)
    answer = conversation.ask(FRANCE)
    # The first part ends behind the question.
    assert next(answer) == ""
    answer.close()
    assert conversation.messages == [] and answer.result.tokens == []
    assert engine.sessions.free == 2
    # What was computed is not computed again.
    again = tell(conversation.ask(FRANCE))
    assert again.text == "Paris" and 0 < again.prefilled_tokens <= 5


def test_system_message_and_reset(
    load: Callable[..., Engine], anew: Callable[..., list[int]], capitals_artifact: Path, tmp_path: Path
) -> None:
    engine = load()
    conversation = Conversation(engine)
    tell(conversation.ask(FRANCE))
    conversation.set_system("Be brief.")
    assert [message["role"] for message in conversation.messages] == ["system", "user", "assistant"]
    assert tell(conversation.ask(PERU)).tokens == anew(conversation)
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


def test_what_was_kept_gives_way_when_pages_run_out(
    load: Callable[..., Engine], anew: Callable[..., list[int]]
) -> None:
    """The prefix cache holds pages; an answer may have all of them."""
    engine = load(sessions=1, kv_tokens=192)
    conversation = Conversation(engine, max_new_tokens=60, sampling_params=SamplingParams(min_tokens=60))
    assert [tell(conversation.ask(FRANCE)).finish_reason for _ in range(2)] == ["length"] * 2
    full = tell(conversation.ask(FRANCE))
    assert full.finish_reason == "kv_tokens" and full.prompt_tokens + len(full.tokens) == 193
    with pytest.raises(CapacityError, match="needs 4 pages of 64 positions, there are 3"):
        tell(conversation.ask(FRANCE))
    assert conversation.turns == 3
    conversation.undo()
    tokens = tell(conversation.ask(PERU)).tokens
    assert tokens == anew(conversation, SamplingParams(min_tokens=60), len(tokens))


def test_a_step_that_fails(
    load: Callable[..., Engine], anew: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was answered stays; its state may be broken, so it is computed again."""
    engine = load()
    conversation = Conversation(engine, sampling_params=HOT)
    answer = conversation.ask(FRANCE)
    first = answer.result.prompt_tokens
    while len(answer.result.tokens) < 3:
        next(answer)
    step = Sessions.step

    def fail(*_: object, **__: object) -> None:
        raise StepError("injected")

    monkeypatch.setattr(Sessions, "step", fail)
    with pytest.raises(StepError, match="injected"):
        list(answer)
    monkeypatch.setattr(Sessions, "step", step)
    assert answer.result.finish_reason == "error" and answer.result.error == "injected"
    assert conversation.messages[-1] == {"role": "assistant", "content": answer.result.text}
    SAMPLED[answer.result.text] = answer.result.tokens
    second = tell(conversation.ask(PERU))
    assert second.reused_tokens < first
    assert second.tokens == anew(conversation, HOT)


def test_save_and_load(load: Callable[..., Engine], anew: Callable[..., list[int]], tmp_path: Path) -> None:
    engine = load()
    conversation, file = Conversation(engine), tmp_path / "talk.json"
    conversation.set_system("Be brief.")
    conversation.save(file)
    assert [path.name for path in tmp_path.iterdir()] == ["talk.json"]
    tell(conversation.ask(FRANCE))
    position = conversation.position
    conversation.save(file)
    conversation.close()
    other = Conversation(load())
    assert other.load(file) is None
    assert (other.messages, other.position) == (conversation.messages, position)
    second = tell(other.ask(PERU))
    assert second.reused_tokens == position - 1
    assert second.tokens == anew(other)
    # Without its session, and with one that is broken, a conversation goes on from its messages.
    session = tmp_path / "talk.json.session"
    session.write_bytes(session.read_bytes()[:-1])
    assert "cut short" in str(other.load(file))
    assert tell(other.ask(PERU)).tokens == second.tokens
    session.unlink()
    other._engine.reset_prefix_cache()
    assert "cannot be read: No such file" in str(other.load(file))
    assert tell(other.ask(PERU)).reused_tokens == 0


def test_a_saved_session_has_the_sampled_tokens(
    load: Callable[..., Engine], anew: Callable[..., list[int]], tmp_path: Path
) -> None:
    conversation, file = Conversation(load(), sampling_params=HOT), tmp_path / "talk.json"
    for question in (FRANCE, PERU):
        tell(conversation.ask(question))
    # What the cache has lost is computed again for the file.
    conversation._engine.reset_prefix_cache()
    conversation.save(file)
    engine = load()
    other = Conversation(engine, sampling_params=HOT)
    assert other.load(file) is None and other.position == conversation.position
    assert tell(other.ask(CHAD)).reused_tokens == conversation.position - 1
    assert anew(other, HOT) == tell(conversation.ask(CHAD)).tokens
    # Tokens of what was taken back are kept, but not taken for those of what is left.
    other.undo()
    other.save(file)
    expected = tell(other.fork().ask(CHAD)).tokens
    assert other.load(file) is None and tell(other.ask(CHAD)).tokens == expected == anew(other, HOT)
    # Nor are those of another tokenizer.
    changed = json.loads(file.read_text())
    changed["told"][0][1][-1] += 1
    file.write_text(json.dumps(changed))
    alone = Conversation(load(prefix_caching=False), sampling_params=HOT, messages=changed["messages"])
    assert "of another conversation" in str(other.load(file))
    assert tell(other.ask(CHAD)).tokens == tell(alone.ask(CHAD)).tokens
    with engine.open_session(), engine.open_session(), pytest.raises(CapacityError, match="all 2 sessions are open"):
        other.save(tmp_path / "none")
    assert not list(tmp_path.glob("*none*"))
    assert "no room for it" in str(Conversation(load(snapshots=0)).load(file))


def test_a_hundred_conversations_through_a_restart(load: Callable[..., Engine], tmp_path: Path) -> None:
    """With room for few of them on the device, each goes on with the tokens that it had gone on with, and only its new turn
    is computed."""
    before = load()
    conversations = []
    for number in range(100):
        conversation = Conversation(before, max_new_tokens=16, sampling_params=replace(HOT, seed=number))
        conversation.set_system("Answer as a teacher of geography would. " * 4)
        for question in (f"{number} + {number}?", FRANCE)[number % 2 :]:
            tell(conversation.ask(question))
        conversation.save(tmp_path / str(number))
        conversations.append(conversation)
    positions = [conversation.position for conversation in conversations]
    expected = [tell(conversation.ask(PERU)).tokens for conversation in conversations]
    assert len({tuple(tokens) for tokens in expected}) > 90
    before.close()

    engine = load(kv_tokens=12 * 64, host_cache_bytes=64 * MIB)
    again = [
        Conversation(engine, max_new_tokens=16, sampling_params=replace(HOT, seed=number)) for number in range(100)
    ]
    for number, conversation in enumerate(again):
        assert conversation.load(tmp_path / str(number)) is None
    kept = engine.describe()["prefix_cache"]
    assert kept["prefixes"] <= 4 and kept["prefixes"] + kept["host_prefixes"] == 100
    for number in Random(0).sample(range(100), 100):
        result = tell(again[number].ask(PERU))
        assert (result.tokens, result.reused_tokens) == (expected[number], positions[number] - 1)


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
