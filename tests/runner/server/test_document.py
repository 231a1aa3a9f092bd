"""The server against its own /openapi.json, with bodies that schemathesis makes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, assume, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core import NOT_SET
from schemathesis.specs.openapi import checks

from ...processes import PATIENCE
from .conftest import QUESTION, Server, serving

# Parameters whose values must go with others, or are names of what is there.
THAT_MEET = ("top_logprobs", "stream_options", "max_completion_tokens", "min_tokens", "model", "session")
VOCABULARY = 1536
CHECKS: Any = (
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
)
OPERATIONS = (
    *("POST /v1/chat/completions", "POST /v1/completions", "POST /tokenize", "POST /detokenize"),
    *("GET /v1/models", "GET /v1/models/{model}", "GET /tokenizer_info", "GET /metrics", "GET /health"),
    *("GET /v1/sessions", "POST /v1/sessions", "GET /v1/sessions/{name}", "DELETE /v1/sessions/{name}"),
    *("POST /v1/sessions/{name}/rewind", "POST /v1/sessions/{name}/{action}"),
)


@pytest.fixture(scope="module")
def asked(capitals_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("sessions")
    with serving(
        capitals_artifact, "--sessions", 8, "--served-model-name", "capitals", "--session-dir", folder
    ) as found:
        yield found
        assert found.end() == 0
        assert "Traceback" not in found.log


@pytest.fixture(scope="module")
def operations(asked: Server) -> dict[str, Any]:
    schema: Any = schemathesis.openapi.from_url(f"{asked.url}/openapi.json")
    return {found.ok().label: found.ok() for found in schema.get_all_operations()}


def test_all_operations_are_asked(operations: dict[str, Any]) -> None:
    assert sorted(operations) == sorted(OPERATIONS)


@pytest.mark.parametrize("label", OPERATIONS)
def test_answers_are_as_documented(label: str, asked: Server, operations: dict[str, Any]) -> None:
    statuses: Counter[int] = Counter()

    @settings(max_examples=50, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(operations[label].as_strategy())
    def ask(case: Any) -> None:
        fit(case, asked)
        statuses[send(case, CHECKS)] += 1

    ask()
    assert statuses[200] > sum(statuses.values()) // 2, statuses


@pytest.mark.parametrize("label", [one for one in OPERATIONS if one.startswith("POST ") and "{" not in one])
def test_bodies_that_do_not_fit(label: str, operations: dict[str, Any]) -> None:
    """None is taken as something that it is not."""

    @settings(max_examples=40, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(operations[label].as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE))
    def ask(case: Any) -> None:
        # A session may be made without a body.
        assume(label != "POST /v1/sessions" or case.body is not NOT_SET)
        assert 400 <= send(case, (*CHECKS, checks.negative_data_rejection)) < 500

    ask()


@pytest.mark.parametrize("path", ["/v1/sessions", "/v1/sessions/x", "/v1/chat/completions", "/v1/models"])
def test_a_method_that_is_not_there(path: str, asked: Server, operations: dict[str, Any]) -> None:
    refused = requests.patch(f"{asked.url}{path}", timeout=PATIENCE)
    there = [label.split()[0] for label, one in operations.items() if one.path == path.replace("/x", "/{name}")]
    there += ["HEAD"] if "GET" in there else []
    assert refused.status_code == 405
    assert sorted(refused.headers["Allow"].split(", ")) == sorted(there)


@pytest.mark.parametrize(
    ("method", "path", "status", "says"),
    [
        ("GET", "/docs", 404, "there is no '/docs' here: /openapi.json lists what there is"),
        ("POST", "/v1/responses", 404, "there is no '/v1/responses' here: /openapi.json lists what there is"),
        (
            "POST",
            "/v1/sessions/x/keep",
            404,
            "there is no '/v1/sessions/x/keep' here: /openapi.json lists what there is",
        ),
        ("GET", "/v1/chat/completions", 405, "'/v1/chat/completions' takes POST, got GET"),
        ("POST", "/v1/models", 405, "'/v1/models' takes GET, HEAD, got POST"),
    ],
)
def test_what_is_not_there(asked: Server, method: str, path: str, status: int, says: str) -> None:
    answer = requests.request(method, asked.url + path, timeout=PATIENCE)
    assert (answer.status_code, answer.json()["error"]["message"]) == (status, says)


def send(case: Any, which: Any) -> int:
    """The status of the answer, which the checks let pass."""
    answer = case.call(timeout=PATIENCE)
    case.validate_response(answer, checks=list(which))
    status: int = answer.status_code
    return status


def fit(case: Any, server: Server) -> None:
    """Have a body ask for what can be done here in a moment. A schema cannot say which parameters go together."""
    if "name" in case.path_parameters:
        made = requests.post(f"{server.url}/v1/sessions", json={"messages": QUESTION}, timeout=PATIENCE)
        case.path_parameters["name"] = made.json()["id"]
    if "model" in case.path_parameters:
        case.path_parameters["model"] = "capitals"
    if not isinstance(case.body, dict):
        return
    body = case.body = {name: of_the_model(value) for name, value in case.body.items() if name not in THAT_MEET}
    for name in body.keys() & {"prompt", "tokens", "messages"}:
        if body[name] in ([], [[]]):
            body[name] = QUESTION if name == "messages" else [5]
    if case.path.endswith("completions"):
        body |= {"max_tokens": (body.get("max_tokens") or 0) % 4 + 1, "n": (body.get("n") or 0) % 3 + 1}
        body["logit_bias"] = {str(i): bias for i, bias in enumerate((body.get("logit_bias") or {}).values())}
    if case.path.endswith("rewind"):
        body["messages"] %= 2
    if case.path == "/tokenize" and (body.get("messages") is None) == (body.get("prompt") is None):
        body |= {"messages": None, "prompt": "x"}
    if case.path == "/tokenize" and body.get("messages") is None:
        body |= {"chat_template_kwargs": None, "add_generation_prompt": None}


def of_the_model(value: Any) -> Any:
    """The same with token ids that the model has, short, and no empty prompt. 1.0 is an integer to JSON, not here."""
    if isinstance(value, list):
        return [of_the_model(one) for one in value[:8]]
    if isinstance(value, dict):
        return {name: of_the_model(one) for name, one in list(value.items())[:8]}
    if isinstance(value, str):
        return value[:8] or "x"
    if (isinstance(value, float) and not value.is_integer()) or value is None or isinstance(value, bool):
        return value
    return int(value) % VOCABULARY if value > 0 else int(value)
