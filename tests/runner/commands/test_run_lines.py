"""`ostinato run --prompts`: both forms of lines, options, and errors of single lines."""

from __future__ import annotations

import argparse
import codecs
import io
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ostinato.runner import Engine
from ostinato.runner.commands.run import FRACTION_FOR_LINES, add_arguments
from ostinato.runner.commands.run_lines import Progress, _capacity

from ...processes import PATIENCE
from .lines import CHAT, COMPLETION, COUNTRIES, Runs, batch, content, question, run

__all__ = ["run"]


@pytest.fixture(scope="module")
def engine(capitals_artifact: Path) -> Iterator[Engine]:
    with Engine.load(capitals_artifact, sessions=4) as loaded:
        yield loaded


def test_both_forms(run: Runs, engine: Engine) -> None:
    """Lines of both may be in one file; each is answered in its own."""
    turns = [{"role": "user", "content": question("Peru")}]
    parts = [{"role": "user", "content": [{"type": "text", "text": question("Peru")}]}]
    rendered = engine.tokenizer.render(turns)
    run.write(
        {"id": "prompt", "prompt": question("Peru")},
        {"id": 7, "messages": turns},
        {"prompt": rendered, "raw": True},
        "",
        batch("chat"),
        batch("parts", messages=parts, user="somebody", stream=False, stop=None),
        batch("completion", COMPLETION, prompt=rendered),
    )
    # As some editors write it.
    run.source.write_bytes(codecs.BOM_UTF8 + run.source.read_bytes().replace(b"\n", b"\r\n"))
    found = run()
    asked = engine.generate(turns)
    assert "".join(asked) == "Lima"
    usage = {
        "prompt_tokens": asked.result.prompt_tokens,
        "completion_tokens": len(asked.result.tokens),
        "total_tokens": asked.result.prompt_tokens + len(asked.result.tokens),
    }
    # The third line has no id.
    for name in ("prompt", 7, 3):
        assert found[name] == {
            "id": name,
            "text": "Lima",
            "tokens": asked.result.tokens,
            "finish_reason": "stop",
            "usage": usage,
        }
    for name, number in (("chat", 5), ("parts", 6)):
        line = found[name]
        assert 0 <= time.time() - line["response"]["body"].pop("created") < PATIENCE
        assert set(line["response"]["body"]["usage"].pop("prompt_tokens_details")) == {"cached_tokens"}
        message = {"role": "assistant", "content": "Lima"}
        assert line == {
            "id": f"batch_req_{number}",
            "custom_id": name,
            "response": {
                "status_code": 200,
                "request_id": f"req_{number}",
                "body": {
                    "id": f"chatcmpl-{number}",
                    "object": "chat.completion",
                    "model": "capitals",
                    "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
                    "usage": usage,
                },
            },
            "error": None,
        }
    body = found["completion"]["response"]["body"]
    assert 0 <= body["usage"].pop("prompt_tokens_details")["cached_tokens"] <= usage["prompt_tokens"]
    assert (body["object"], body["usage"]) == ("text_completion", usage)
    assert body["choices"] == [{"index": 0, "text": "Lima", "logprobs": None, "finish_reason": "stop"}]
    assert len(found) == 6 and run.err.splitlines()[-1].startswith(
        f"6 requests, {6 * usage['completion_tokens']} tokens"
    )


def test_tokens_that_were_reused(run: Runs) -> None:
    """A prompt that comes again, for one answer or for several, waits for the first: all but its last token is there then."""
    run.write(batch("first"), batch("again"), batch("several", n=2), batch("other", COMPLETION, prompt="Say it."))
    found = run("--sessions", 2, "--system", "Answer as a teacher of geography would. " * 4)
    usages = {name: line["response"]["body"]["usage"] for name, line in found.items()}
    cached = {name: usage["prompt_tokens_details"]["cached_tokens"] for name, usage in usages.items()}
    most = usages["first"]["prompt_tokens"] - 1
    assert most > 32 and cached == {"first": 0, "again": most, "several": most, "other": 0}


def test_options_of_lines_and_of_the_command_line(run: Runs, engine: Engine) -> None:
    """A line's own come first, in both forms."""
    ask = question("Japan")
    messages = [{"role": "user", "content": ask}]
    run.write(
        {"id": "default", "prompt": ask},
        {"id": "own", "prompt": ask, "max_tokens": 5, "ignore_eos": False},
        {"id": "stop", "prompt": ask, "stop": ["ky", "zzz"], "max_new_tokens": 20},
        {"id": "bias", "prompt": ask, "logit_bias": {str(engine.tokenizer.encode("Tokyo")[0]): -100}},
        {"id": "seed", "prompt": ask, "temperature": 3.0, "seed": 5, "max_tokens": 9},
        {"id": "told", "messages": [{"role": "system", "content": "x"}, *messages], "top_k": None},
        batch("length", messages=messages, max_completion_tokens=4),
        batch("default length", messages=messages),
        batch("stop string", messages=messages, stop="yo", max_tokens=20),
    )
    found = run("--ignore-eos", "--max-new-tokens", 3, "--system", "Be brief.")

    def expected(system: str | None, **options: Any) -> str:
        before = [] if system is None else [{"role": "system", "content": system}]
        return "".join(engine.generate([*before, *messages], **options))

    default = {"max_new_tokens": 3, "ignore_eos": True}
    assert found["default"]["text"] == expected("Be brief.", **default)
    assert (found["default"]["finish_reason"], len(found["default"]["tokens"])) == ("length", 3)
    assert found["own"]["text"] == expected("Be brief.", max_new_tokens=5)
    assert found["stop"]["text"] == expected("Be brief.", max_new_tokens=20, ignore_eos=True, stop=["ky", "zzz"])
    assert found["bias"]["text"] != found["default"]["text"]
    assert len(found["seed"]["tokens"]) == 9 and found["seed"]["text"] != found["default"]["text"]
    assert found["told"]["text"] == expected("x", **default)
    assert content(found["default length"]) == found["default"]["text"]
    for name, tokens in (("length", 4), ("default length", 3)):
        body = found[name]["response"]["body"]
        assert (body["choices"][0]["finish_reason"], body["usage"]["completion_tokens"]) == ("length", tokens)
    assert content(found["stop string"]) == expected("Be brief.", max_new_tokens=20, ignore_eos=True, stop="yo")
    assert found["stop string"]["response"]["body"]["choices"][0]["finish_reason"] == "stop"


def test_several_answers_and_logprobs(run: Runs, engine: Engine) -> None:
    """Those that a stop string ends, too: the others go on."""
    ask = question("Oman")
    sampled: dict[str, Any] = {"n": 3, "temperature": 20.0, "seed": 1, "max_tokens": 12}
    run.write(
        {"id": "n", "prompt": ask, **sampled},
        {"id": "n stop", "prompt": ask, **sampled, "stop": ["a", "e"]},
        {"id": "logprobs", "prompt": ask, "logprobs": 2, "prompt_logprobs": 0},
        batch("n chat", messages=[{"role": "user", "content": ask}], logprobs=True, top_logprobs=2, **sampled),
        batch(
            "n completion", COMPLETION, prompt=engine.tokenizer.render([{"role": "user", "content": ask}]), logprobs=1
        ),
    )
    found = run("--sessions", 4)
    choices = found["n"]["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len({choice["text"] for choice in choices}) > 1
    assert found["n"]["usage"]["completion_tokens"] == sum(len(choice["tokens"]) for choice in choices)
    for whole, cut in zip(choices, found["n stop"]["choices"], strict=True):
        places = [place for place in map(whole["text"].find, "ae") if place >= 0]
        assert cut["text"] == whole["text"][: min(places, default=None)]
    chat = found["n chat"]["response"]["body"]["choices"]
    assert [one["message"]["content"] for one in chat] == [choice["text"] for choice in choices]
    for one, choice in zip(chat, choices, strict=True):
        entries = one["logprobs"]["content"]
        assert [entry["token"] for entry in entries] == [engine.tokenizer.decode([token]) for token in choice["tokens"]]
        assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0 for entry in entries)
    line = found["logprobs"]
    assert [record["token"] for record in line["logprobs"]] == line["tokens"]
    assert len(line["prompt_logprobs"]) == line["usage"]["prompt_tokens"] and line["prompt_logprobs"][0] is None
    (choice,) = found["n completion"]["response"]["body"]["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"] == line["text"]
    assert logprobs["token_logprobs"] == [record["logprob"] for record in line["logprobs"]]
    assert logprobs["text_offset"] == [len("".join(logprobs["tokens"][:i])) for i in range(len(logprobs["tokens"]))]


# Line -> what its error says.
WRONG: dict[str, str] = {
    "{": "line 1 is not JSON",
    '"\\ud800"': "line 2 is not JSON",
    "[" * 100_000: "line 3 is not JSON",
    "[1]": "line 4 is not a JSON object",
    '{"prompt": NaN}': "line 5 is not JSON",
    json.dumps({}): "a line has either prompt or messages",
    json.dumps({"id": [1], "prompt": "x"}): "id must be a string or a whole number, got [1]",
    json.dumps({"id": True, "prompt": "x"}): "id must be a string or a whole number, got True",
    json.dumps({"id": 10**30, "prompt": "x"}): "id must be a string or a whole number",
    json.dumps({"prompt": "x", "messages": []}): "a line has either prompt or messages",
    json.dumps({"prompt": ["x"]}): "prompt must be a string",
    json.dumps({"prompt": " "}): "the prompt is empty",
    json.dumps({"prompt": "", "raw": True}): "the prompt is empty",
    json.dumps({"prompt": "a" * 2000}): "leaves no room for an answer",
    json.dumps({"messages": []}): "messages must be a list of messages",
    json.dumps({"messages": "x"}): "messages must be a list of messages",
    json.dumps({"messages": ["x"]}): "a message is an object with role and content",
    json.dumps({"messages": [{"role": "user", "content": 1}]}): "a message's content is text, got 1",
    json.dumps({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}): "a message's content is text",
    json.dumps({"messages": [{"role": "user", "content": "x"}], "raw": True}): "raw=True takes a string",
    json.dumps({"prompt": "x", "max_token": 3}): "unknown key 'max_token'",
    json.dumps({"prompt": "x", "session": "a"}): "unknown key 'session'",
    json.dumps({"prompt": "x", "max_tokens": 0}): "max_new_tokens must be 1 or more, got 0",
    json.dumps({"prompt": "x", "max_tokens": "3"}): "max_new_tokens must be 1 or more, got '3'",
    json.dumps({"prompt": "x", "max_tokens": 3, "max_new_tokens": 3}): "mean the same",
    json.dumps({"prompt": "x", "n": 0}): "n must be 1 or more, got 0",
    json.dumps({"prompt": "x", "n": 17}): "17 answers to one prompt need as many sessions",
    json.dumps({"prompt": "x", "n": True}): "n must be a whole number, got True",
    json.dumps({"prompt": "x", "stop": [""]}): "stop takes strings that are not empty",
    json.dumps({"prompt": "x", "stop": 5}): "stop must be a string or a list of strings, got 5",
    json.dumps({"prompt": "x", "ignore_eos": 1}): "ignore_eos must be true or false, got 1",
    json.dumps({"prompt": "x", "chat_template_kwargs": []}): "chat_template_kwargs must be an object",
    json.dumps({"prompt": "x", "chat_template_kwargs": {"messages": 1}}): "the chat template cannot be rendered",
    json.dumps({"prompt": "x", "temperature": "hot"}): "temperature must be a number, got 'hot'",
    json.dumps({"prompt": "x", "temperature": True}): "temperature must be a number, got True",
    json.dumps({"prompt": "x", "temperature": 10**400}): "temperature must be a number that float32 holds",
    json.dumps({"prompt": "x", "repetition_penalty": 10**400}): "repetition_penalty must be a number that float32",
    json.dumps({"prompt": "x", "logit_bias": {"1": 10**400}}): "logit_bias must map token ids to numbers",
    json.dumps({"prompt": "x", "logit_bias": {"999999": 1}}): "logit_bias and stop_token_ids take tokens of 0 to",
    json.dumps({"prompt": "x", "min_tokens": 2, "stop_token_ids": [999999]}): "take tokens of 0 to",
    json.dumps({"url": CHAT, "body": {}}): "messages must be a list of messages",
    json.dumps(batch(None, max_tokens=0)): "custom_id must be a string or a whole number, got None",
    json.dumps(batch("zero", max_tokens=0)): "max_new_tokens must be 1 or more",
    json.dumps(batch("key", temprature=1)): "unknown key 'temprature'",
    json.dumps(batch("raw", raw=False)): "unknown key 'raw'",
    json.dumps(batch("stream", stream=True)): "stream must be False here, got True",
    json.dumps(batch("format", response_format={"type": "json_object"})): "response_format must be",
    json.dumps(batch("logprobs", logprobs=5)): "logprobs of a chat must be true or false",
    json.dumps(batch("top", top_logprobs=5)): "top_logprobs needs logprobs to be true",
    json.dumps(batch("many", COMPLETION, prompt=["a", "b"])): "prompt must be a string, one for each line",
    json.dumps(batch("empty", COMPLETION, prompt="")): "the prompt is empty",
    json.dumps(batch("url", "/v1/embeddings", input="x")): "url must be /v1/chat/completions or /v1/completions",
    json.dumps({**batch("get"), "method": "GET"}): "method must be POST, got 'GET'",
    json.dumps({**batch("body"), "body": 5}): "body must be an object, got 5",
    json.dumps({**batch("more"), "priority": 5}): "unknown key 'priority'",
}


def test_errors_of_single_lines(run: Runs) -> None:
    """Each has its own, and the others are answered. They are not asked again."""
    right = {"id": "right", "prompt": question("Peru"), "min_tokens": 10**30, "stop_token_ids": [5], "max_tokens": 4}
    run.write(*WRONG, right, batch("right too"))
    assert b"\\ud800" in run.source.read_bytes()
    found = run(status=1)
    assert len(found["right"]["tokens"]) == 4 and content(found["right too"]) == "Lima"
    for number, (text, message) in enumerate(WRONG.items(), 1):
        data = json.loads(text) if text.startswith("{") and text.endswith("}") else {}
        name = data.get("custom_id") or number
        line = found.pop(name)
        if "response" not in line:
            assert "url" not in data, text
            assert line == {"id": name, "status_code": 400, "error": line["error"]}
        else:
            assert "url" in data, text
            response, error = line["response"], line["error"]
            assert response["status_code"] == 400
            assert response["body"]["error"]["message"] == error["message"]
        assert message in line["error"]["message"], text
        assert line["error"]["code"] in ("InputError", "OptionError", "CapacityError")
    assert len(found) == 2
    assert run.err.splitlines()[-1].endswith(f"| {len(WRONG)} lines have an error")
    before = run.output.read_bytes()
    run(status=1)
    assert run.output.read_bytes() == before
    assert run.err.startswith(f"0 requests, 0 tokens in 0.0 s, 0.0 tokens/s | {len(WRONG) + 2} were answered before")


def test_many_lines_in_any_order(run: Runs, engine: Engine) -> None:
    """300 with 8 sessions: all as if they were alone, whatever stands beside them."""
    names = [f"{country} {i}" for i in range(50) for country in COUNTRIES]
    lines = [{"id": name, "prompt": question(name.split()[0]), "max_tokens": 6 + i % 9} for i, name in enumerate(names)]
    run.write(*lines)
    found = run("--sessions", 8)
    assert len(found) == 300
    for name, line in found.items():
        assert line["text"] == COUNTRIES[name.split()[0]]
    first = sorted(run.output.read_text().splitlines())
    run.output.unlink()
    run.write(*lines[::-1])
    run("--sessions", 3)
    assert sorted(run.output.read_text().splitlines()) == first


def test_answers_that_are_cut(run: Runs) -> None:
    """max_seq_len and the pages end an answer as its length does, which OpenAI calls the same."""
    run.write({"id": "own", "prompt": question("Peru")}, batch("chat"))
    for words, reason in ((["--kv-tokens", 64], "kv_tokens"), ([], "max_seq_len")):
        found = run("--sessions", 1, "--ignore-eos", "--max-new-tokens", 1000, *words)
        assert found["own"]["finish_reason"] == reason
        assert found["chat"]["response"]["body"]["choices"][0]["finish_reason"] == "length"
        assert content(found["chat"]) == found["own"]["text"]
        run.output.unlink()


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        with Progress(total=3, before=1) as progress:
            progress.ended(5)
            progress.ended(7)
        shown = stream.getvalue()
        assert ("1/3" in shown) == stream.isatty() == bool(shown)
        assert progress.summary(0).startswith("2 requests, 12 tokens in ")
        assert progress.summary(1).endswith(" tokens/s | 1 were answered before | 1 lines have an error")


@pytest.mark.gpu
def test_on_a_gpu(run: Runs, capitals_cuda: Path) -> None:
    """With graphs of steps that prompts ride in, captured before the first line."""
    run.artifact = capitals_cuda
    run.write(*({"id": f"{country} {i}", "prompt": question(country)} for i in range(20) for country in COUNTRIES))
    found = run("--cuda_graph", "--gpu-memory-fraction", 0.05)
    assert {name: line["text"] for name, line in found.items()} == {
        f"{country} {i}": city for i in range(20) for country, city in COUNTRIES.items()
    }
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    chosen = _capacity(parser.parse_args([str(capitals_cuda)]))
    assert (chosen.sessions, chosen.gpu_memory_fraction) == (None, FRACTION_FOR_LINES)
