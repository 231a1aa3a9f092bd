"""`/v1/sessions`: conversations by id, through forks, rewinds, idle times and restarts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ...processes import PATIENCE
from .conftest import Server, serving
from .test_reasoning_and_defaults import DROPPED, THINKING, change

COUNTRIES = ("France", "Peru", "Chad", "Japan", "Italy", "Spain", "Egypt", "Kenya", "Cuba", "Chile", "Ghana", "Norway")
KEYS = ("first-key", "second-key")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("\n".join(KEYS))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sessions") / "here"


@pytest.fixture(scope="module")
def kept(capitals_artifact: Path, keys: Path, folder: Path) -> Iterator[Server]:
    with serving(capitals_artifact, "--sessions", 2, "--api-key-file", keys, "--session-dir", folder) as found:
        yield found
        assert found.end() == 0


def call(server: Server, method: str, path: str, body: Any = None, key: str = KEYS[0]) -> Any:
    """The answer's body. Raises HTTPError."""
    request = urllib.request.Request(
        f"{server.url}{path}",
        None if body is None else json.dumps(body).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
        method=method,
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.load(answer)


def ask(server: Server, session: str, question: str, **more: Any) -> Any:
    body = {"messages": [{"role": "user", "content": question}], "session": session, "temperature": 0, **more}
    return call(server, "POST", "/v1/chat/completions", body)


def status(*arguments: Any, **more: Any) -> int:
    with pytest.raises(urllib.error.HTTPError) as refused:
        call(*arguments, **more)
    assert json.load(refused.value)["error"]["message"]
    return refused.value.code


def refusal(server: Server, name: str, action: str) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as refused:
        call(server, "POST", f"/v1/sessions/{name}/{action}", {})
    return refused.value.code, json.load(refused.value)["error"]["message"]


def text(answer: Any) -> str:
    found: str = answer["choices"][0]["message"]["content"]
    return found


def test_a_session_goes_on(kept: Server) -> None:
    name = call(kept, "POST", "/v1/sessions", {})["id"]
    first = ask(kept, name, "What is the capital of France?")
    second = ask(kept, name, "What is the capital of Peru?")
    assert (text(first), text(second)) == ("Paris", "Lima")
    history = call(kept, "GET", f"/v1/sessions/{name}")["history"]
    assert [one["content"] for one in history[1::2]] == ["Paris", "Lima"]
    # The same as with all messages, and what was said before was not computed again.
    body = {"messages": [*history[:3]], "temperature": 0}
    whole = call(kept, "POST", "/v1/chat/completions", body)
    assert text(whole) == "Lima" and whole["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"]


def test_fork_and_rewind(kept: Server) -> None:
    assert call(kept, "POST", "/v1/sessions")["messages"] == 0
    name = call(kept, "POST", "/v1/sessions", {"messages": [{"role": "user", "content": "x"}] * 2})["id"]
    call(kept, "POST", f"/v1/sessions/{name}/rewind", {"messages": 0})
    ask(kept, name, "What is the capital of France?")
    other = call(kept, "POST", f"/v1/sessions/{name}/fork", {})
    assert other["messages"] == 2 and other["id"] != name
    ask(kept, other["id"], "What is the capital of Chad?")
    call(kept, "POST", f"/v1/sessions/{other['id']}/rewind", {"messages": 2})
    assert text(ask(kept, other["id"], "What is the capital of Japan?")) == "Tokyo"
    assert call(kept, "GET", f"/v1/sessions/{name}")["messages"] == 2
    assert status(kept, "POST", f"/v1/sessions/{name}/rewind", {"messages": 3}) == 400
    assert {name, other["id"]} <= {one["id"] for one in call(kept, "GET", "/v1/sessions")["data"]}


def test_events_of_a_session(kept: Server) -> None:
    name = call(kept, "POST", "/v1/sessions", {})["id"]
    client = kept.client(KEYS[0])
    for country, capital in (("France", "Paris"), ("Peru", "Lima")):
        question: Any = [{"role": "user", "content": f"What is the capital of {country}?"}]
        options: Any = {"model": kept_name(kept), "messages": question, "temperature": 0, "stream": True}
        events = list(client.chat.completions.create(**options, extra_body={"session": name}))
        assert "".join(event.choices[0].delta.content or "" for event in events) == capital
    assert call(kept, "GET", f"/v1/sessions/{name}")["messages"] == 4


def kept_name(server: Server) -> str:
    name: str = call(server, "GET", "/v1/models")["data"][0]["id"]
    return name


def test_a_key_sees_its_own(kept: Server) -> None:
    name = call(kept, "POST", "/v1/sessions", {})["id"]
    assert status(kept, "GET", f"/v1/sessions/{name}", key=KEYS[1]) == 404
    assert status(kept, "DELETE", f"/v1/sessions/{name}", key=KEYS[1]) == 404
    assert name not in {one["id"] for one in call(kept, "GET", "/v1/sessions", key=KEYS[1])["data"]}
    body = {"messages": [{"role": "user", "content": "x"}], "session": name}
    assert status(kept, "POST", "/v1/chat/completions", body, key=KEYS[1]) == 404
    assert status(kept, "GET", "/v1/sessions", key="another") == 401
    assert status(kept, "GET", "/v1/sessions/..%2F..%2Fetc") == 404
    assert call(kept, "DELETE", f"/v1/sessions/{name}")["deleted"] is True
    assert status(kept, "GET", f"/v1/sessions/{name}") == 404


def test_what_is_refused(kept: Server, server: Server, folder: Path) -> None:
    name = call(kept, "POST", "/v1/sessions", {})["id"]
    body = {"messages": [{"role": "user", "content": "x"}], "session": name}
    assert status(kept, "POST", "/v1/chat/completions", {**body, "n": 2}) == 400
    assert call(kept, "GET", f"/v1/sessions/{name}")["messages"] == 0
    assert text(ask(kept, name, "What is the capital of France?")) == "Paris"
    # It says nothing of the server's folders.
    assert refusal(kept, name, "load") == (400, f"{name}.session cannot be read: No such file or directory")
    (folder / f"{name}.session").mkdir()
    assert refusal(kept, name, "save") == (400, f"{name}.session cannot be written: Is a directory")
    (folder / f"{name}.session").rmdir()
    # A server without --session-dir has none.
    assert status(server, "POST", "/v1/sessions", {}) == 404


def test_through_a_restart(capitals_artifact: Path, keys: Path, tmp_path: Path) -> None:
    options = "--sessions", 2, "--api-key-file", keys, "--session-dir", tmp_path / "here"
    with serving(capitals_artifact, *options) as before:
        name = call(before, "POST", "/v1/sessions", {})["id"]
        ask(before, name, "What is the capital of France?")
        first = ask(before, name, "What is the capital of Chad?")
        saved = call(before, "POST", f"/v1/sessions/{name}/save", {})
        assert saved["tokens"] > 0
        assert before.end() == 0
    with serving(capitals_artifact, *options) as after:
        second = ask(after, name, "What is the capital of Peru?")
        assert text(second) == "Lima"
        # It was not computed again.
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"]
        assert after.end() == 0
    # Without its state the session goes on all the same.
    (tmp_path / "here" / f"{name}.session").unlink()
    with serving(capitals_artifact, *options) as again:
        third = ask(again, name, "What is the capital of Japan?")
        assert text(third) == "Tokyo" and third["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_idle_sessions_leave(capitals_artifact: Path, tmp_path: Path) -> None:
    with serving(capitals_artifact, "--sessions", 2, "--session-dir", tmp_path, "--session-ttl", 0.5) as server:
        name = call(server, "POST", "/v1/sessions", {})["id"]
        ask(server, name, "What is the capital of France?")
        end = time.monotonic() + PATIENCE
        while call(server, "GET", "/v1/sessions")["data"]:
            assert time.monotonic() < end
            time.sleep(0.1)
        assert (tmp_path / f"{name}.session").exists()
        assert text(ask(server, name, "What is the capital of Peru?")) == "Lima"
        assert call(server, "GET", f"/v1/sessions/{name}")["messages"] == 4


def cached(answer: Any) -> int:
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def count(server: Server, name: str) -> int:
    """A number of `/metrics`."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=PATIENCE) as answer:
        found = re.search(rf"^ostinato:state_files_{name}_total\S* (\S+)$", answer.read().decode(), re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


def begun(server: Server, number: int) -> str:
    """A session with two turns. There are 32 tokens to save in each that comes later."""
    name: str = call(server, "POST", "/v1/sessions", {})["id"]
    for turn in range(2):
        country = COUNTRIES[(number + turn) % len(COUNTRIES)]
        ask(server, name, f"What is the capital of {country}?")
    return name


@pytest.mark.parametrize("host_cache_bytes", (0, 300_000), ids=("device", "host"))
def test_what_the_cache_has_no_room_for(capitals_artifact: Path, tmp_path: Path, host_cache_bytes: int) -> None:
    """It comes back from files, turn after turn, and nothing of it is computed again."""
    options = "--sessions", 2, "--snapshots", 4, "--session-dir", tmp_path, "--host-cache-bytes", host_cache_bytes
    with serving(capitals_artifact, *options) as server:
        names = [begun(server, number) for number in range(len(COUNTRIES))]
        for turn in range(2, 5):
            for number, name in enumerate(names):
                before = call(server, "GET", f"/v1/sessions/{name}")["tokens"]
                answer = ask(server, name, f"What is the capital of {COUNTRIES[(number + turn) % len(COUNTRIES)]}?")
                # The model has not seen the answer's last token.
                assert cached(answer) >= before - 1
                assert len(text(answer)) > 2
        assert count(server, "read") >= len(names) and count(server, "written") >= len(names)
        assert count(server, "given_up") == 0
        assert server.end() == 0
        # However often they were written.
        names_and_ends = {(path.stem, path.suffix) for path in tmp_path.iterdir()}
        assert names_and_ends == {(name, end) for name in names for end in (".json", ".session")}


def test_files_go_with_their_sessions(capitals_artifact: Path, tmp_path: Path) -> None:
    """Whether the state was written before, or is forgotten later."""
    with serving(capitals_artifact, "--sessions", 2, "--snapshots", 4, "--session-dir", tmp_path) as server:
        names = [begun(server, number) for number in range(8)]
        first = tmp_path / f"{names[0]}.session"
        end = time.monotonic() + PATIENCE
        while not first.exists():
            assert time.monotonic() < end
            time.sleep(0.05)
        for name in (names[0], names[-1]):
            assert call(server, "DELETE", f"/v1/sessions/{name}")["deleted"] is True
        others = [begun(server, number) for number in range(8)]
        assert server.end() == 0
        assert {path.stem for path in tmp_path.iterdir()} == {*names[1:-1], *others}


def test_forks_and_rewinds_of_what_was_forgotten(capitals_artifact: Path, tmp_path: Path) -> None:
    with serving(capitals_artifact, "--sessions", 2, "--snapshots", 4, "--session-dir", tmp_path) as server:
        name = begun(server, 0)
        tokens = call(server, "GET", f"/v1/sessions/{name}")["tokens"]
        end = time.monotonic() + PATIENCE
        while not (tmp_path / f"{name}.session").exists():
            assert time.monotonic() < end
            begun(server, 1)
        fork = call(server, "POST", f"/v1/sessions/{name}/fork", {})["id"]
        assert call(server, "DELETE", f"/v1/sessions/{name}")["deleted"] is True
        answer = ask(server, fork, "What is the capital of Japan?")
        assert text(answer) == "Tokyo" and cached(answer) >= tokens - 1
        # What its file has is of another history.
        call(server, "POST", f"/v1/sessions/{fork}/rewind", {"messages": 2})
        assert text(ask(server, fork, "What is the capital of Chad?")) == "N'Djamena"
        assert server.end() == 0


def test_an_answer_that_history_shows_otherwise(capitals_artifact: Path, tmp_path: Path) -> None:
    """The state from which the next turn goes on is saved, not that behind the answer."""
    folder = Path(shutil.copytree(capitals_artifact, tmp_path / "capitals"))
    change(folder / "tokenizer_config.json", chat_template=THINKING)
    change(folder / "tokenizer.json", normalizer=DROPPED)
    options = "--sessions", 2, "--session-dir", tmp_path / "here"
    with serving(folder, *options) as server:
        name = begun(server, 0)
        again = ask(server, name, "What is the capital of Japan?")
        call(server, "POST", f"/v1/sessions/{name}/save", {})
        assert server.end() == 0
    with serving(folder, *options) as server:
        assert cached(ask(server, name, "What is the capital of Italy?")) > cached(again)
        assert server.end() == 0


def test_a_folder_that_cannot_be_used(capitals_artifact: Path, tmp_path: Path) -> None:
    """It is said before the model is loaded, which may take long."""
    path = tmp_path / "file"
    path.touch()
    command = [sys.executable, "-m", "ostinato.runner.cli", "serve", str(capitals_artifact), "--port", "0"]
    found = subprocess.run([*command, "--session-dir", str(path)], capture_output=True, text=True, timeout=PATIENCE)
    assert (found.returncode, found.stdout) == (2, "")
    assert f"--session-dir: {path} cannot be used: File exists" in found.stderr
    assert "loading" not in found.stderr
