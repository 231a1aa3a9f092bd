"""Requests that no server should get: malformed ones with the status that each must have, and fuzzed ones."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from server_client import request

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
_MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
_TOO_LARGE = (32 << 20) + 1


def chat(question: str, **options: Any) -> bytes:
    """A request for the answer to a question, the most likely one."""
    return request(CHAT, {"messages": [{"role": "user", "content": question}], "temperature": 0, **options})


def malformed(max_seq_len: int) -> dict[str, tuple[bytes, int]]:
    """What is wrong -> a request, and the status of its response."""

    def wrong(**changed: Any) -> bytes:
        return request(CHAT, {"messages": _MESSAGES, **changed})

    long = "word " * max_seq_len
    return {
        "not JSON": (request(CHAT, b'{"messages": ['), 400),
        "no JSON object": (request(CHAT, [_MESSAGES]), 400),
        "not UTF-8": (request(CHAT, b'{"messages": "\xff"}'), 400),
        "deep JSON": (request(CHAT, b"[" * 50_000), 400),
        "no body": (request(CHAT), 400),
        "a text for a number": (wrong(temperature="1"), 400),
        "a number for a text": (wrong(stop=3), 400),
        "out of range": (wrong(top_p=1.5), 400),
        "an unknown parameter": (wrong(colour="red"), 400),
        "a parameter that is not supported": (wrong(guided_json={"type": "object"}), 400),
        "no messages": (wrong(messages=[]), 400),
        "a message without content": (wrong(messages=[{"role": "user"}]), 400),
        "a token that there is not": (request(COMPLETION, {"prompt": [1, 2**31 - 1]}), 400),
        "a bias for such a token": (wrong(logit_bias={str(10**30): 1}), 400),
        "a long prompt": (wrong(messages=[{"role": "user", "content": long}]), 400),
        "a long prompt, as events": (wrong(messages=[{"role": "user", "content": long}], stream=True), 400),
        "a long prompt of tokens": (request(COMPLETION, {"prompt": [1] * (max_seq_len + 1)}), 400),
        "another model": (wrong(model="another"), 404),
        "another path": (request("/v1/chat", {"messages": _MESSAGES}), 404),
        "another method": (request(CHAT, method="GET"), 405),
        "another content type": (request(CHAT, {"messages": _MESSAGES}, kind="text/plain"), 415),
        "no content type": (request(CHAT, {"messages": _MESSAGES}, kind=None), 415),
        "a large body": (request(CHAT, b"{", length=_TOO_LARGE), 413),
        "no HTTP": (b"what is the capital of France?\r\n\r\n", 400),
        "a negative length": (request(CHAT, b"{}", length=-2), 400),
    }


def large_in_chunks() -> bytes:
    """A body over the limit whose length is not said."""
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + b" " * (1 << 16) + b"\r\n"
    return head.encode() + chunk * (_TOO_LARGE // (1 << 16) + 1) + b"0\r\n\r\n"


# --- fuzzed

_TEXTS: tuple[Any, ...] = (
    "",
    " ",
    "x",
    "\0",
    "\ud800",
    "é\u202e😀",
    "<|im_end|>",
    "none",
    "x" * 100_000,
    "٣",
    "{{ 7 * 7 }}",
)
_NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 20, 21, 100.5, -0.0, 1e-320, 1e-40, 1e38, 1e308, float("inf"), float("-inf"), float("nan")),
    *(2**31 - 1, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400),
)
# Names that a template, or Python, uses itself.
_SHADOWING = (
    "messages",
    "add_generation_prompt",
    "self",
    "loop",
    "raise_exception",
    "range",
    "bos_token",
    "tools",
    "enable_thinking",
)
_ROLES = ("system", "assistant", "tool", "developer", "function", "user", "User", "<|im_start|>", "nobody")


class Fuzz:
    """Bodies by the schemas of a server's /openapi.json, with values that are wrong, odd, or fit.

    Args:
        schema: the document.
        seed: the same seed makes the same bodies.
    """

    def __init__(self, schema: Mapping[str, Any], seed: int) -> None:
        self._schemas = schema["components"]["schemas"]
        self._random = random.Random(seed)
        self._paths = {
            path: found["post"]["requestBody"]["content"]["application/json"]["schema"]
            for path, found in schema["paths"].items()
            if "post" in found and "requestBody" in found["post"]
        }

    def requests(self, count: int) -> Iterator[bytes]:
        paths = sorted(path for path in self._paths if "{" not in path)
        # Most of the work is done for these.
        paths += [CHAT] * 4 + [COMPLETION] * 2
        for _ in range(count):
            path = self._random.choice(paths)
            yield request(path, self._spoiled(self._body(self._paths[path])))

    def _body(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """A body that fits, but for one to four of its parameters."""
        random = self._random
        # One that may be left out may be null, too.
        properties = self._resolved(schema.get("anyOf", [schema])[0])["properties"]
        body: dict[str, Any] = {"temperature": 0, "max_tokens": random.randint(1, 8)} if "n" in properties else {}
        body |= {"messages": _MESSAGES} if "messages" in properties else {"prompt": "The capital of Peru is"}
        if "tokens" in properties:
            body = {"tokens": [5, 6, 7]}
        for name in random.sample(sorted(properties), random.randint(1, min(4, len(properties)))):
            body[name] = self._value(name, properties[name])
        if random.random() < 0.1:
            body[random.choice(_TEXTS)] = self._anything(2)
        if random.random() < 0.1:
            del body[random.choice(sorted(body))]
        return body

    def _value(self, name: str, schema: Mapping[str, Any]) -> Any:
        random = self._random
        special: dict[str, Callable[[], Any]] = {
            "logit_bias": lambda: {
                self._key(): random.choice((1, -100, 100, 1e9, None, "x", float("nan"))) for _ in range(3)
            },
            "chat_template_kwargs": lambda: {random.choice(_SHADOWING): self._anything(2) for _ in range(2)},
            "messages": lambda: [self._message() for _ in range(random.randint(1, 3))],
        }
        if name in special and random.random() < 0.7:
            return special[name]()
        return self._fitting(schema, 3) if random.random() < 0.5 else self._anything(3)

    def _key(self) -> str:
        return self._random.choice(
            ("5", "05", " 5 ", "-1", "1535", "1e3", "٣", "x", "", "\ud800", str(2**64), "9" * 5000, "0x5")
        )

    def _message(self) -> dict[str, Any]:
        random = self._random
        content: Any = random.choice(_TEXTS)
        if random.random() < 0.3:
            content = random.choice((None, 3, [], [content], {"type": "text"}, [{"type": "text", "text": content}]))
        message = {"role": random.choice(_ROLES), "content": content}
        if random.random() < 0.2:
            message[random.choice(_TEXTS)] = self._anything(3)
        return message

    def _fitting(self, schema: Mapping[str, Any], depth: int) -> Any:
        """A value of the schema's type, in range or just out of it."""
        random, schema = self._random, self._resolved(schema)
        if "anyOf" in schema:
            return self._fitting(random.choice(schema["anyOf"]), depth)
        if "const" in schema:
            return schema["const"]
        match schema.get("type"):
            case "integer" | "number":
                ends = [value for key, value in schema.items() if key.endswith(("inimum", "aximum"))]
                return random.choice((*ends, *(end + 1 for end in ends), *(end - 1 for end in ends), 0, 1, 0.5, 7))
            case "boolean":
                return random.random() < 0.5
            case "string":
                return random.choice(_TEXTS)
            case "array":
                count = random.choice((0, 1, 2, 3, 65, 2000)) if depth > 1 else random.choice((0, 1, 2))
                return [self._fitting(schema["items"], depth - 1) for _ in range(count)]
            case "object" if "properties" in schema:
                return {name: self._fitting(one, depth - 1) for name, one in schema["properties"].items()}
            case "object":
                return {random.choice(_TEXTS): self._anything(depth - 1)}
        return None

    def _anything(self, depth: int) -> Any:
        random = self._random
        kind = random.randrange(8 if depth else 4)
        if kind == 0:
            return random.choice((None, True, False))
        if kind < 3:
            return random.choice(_NUMBERS)
        if kind == 3:
            return random.choice(_TEXTS)
        if kind == 4:
            return _Nested(random.choice((50, 300, 900, 3000)))
        if kind == 5:
            return {random.choice(_TEXTS): self._anything(depth - 1) for _ in range(2)}
        return [self._anything(depth - 1) for _ in range(random.randint(0, 3))]

    def _resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        return schema

    def _spoiled(self, body: dict[str, Any]) -> bytes:
        """A body as bytes. In some, a name stands twice, or a byte is another one, or the end is missing."""
        random = self._random
        text = _text(body).encode()
        if random.random() < 0.1:
            text = text[:-1] + b"," + text[1:]
        if random.random() < 0.05:
            place = random.randrange(len(text))
            text = text[:place] + random.randbytes(1) + text[place + 1 :]
        if random.random() < 0.03:
            text = text[: random.randrange(len(text))]
        return text


class _Nested:
    """So many lists in each other: json goes no deeper than Python may call itself."""

    def __init__(self, depth: int) -> None:
        self.depth = depth


def _text(value: Any) -> str:
    """JSON text, with numbers and characters that JSON does not have."""
    if isinstance(value, _Nested):
        return "[" * value.depth + "]" * value.depth
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{_text(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_text, value)) + "]"
    return json.dumps(value)
