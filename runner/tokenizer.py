"""Text <-> tokens, from the tokenizer files of a Hugging Face folder."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..delegate.errors import ArtifactError, InputError

Message = dict[str, str]

_REPLACEMENT = "�"


class Tokenizer:
    """Encodes prompts and renders chats.

    Args:
        folder: holds `tokenizer.json`, and for chats `tokenizer_config.json` or `chat_template.jinja`.

    Raises:
        ArtifactError: no `tokenizer.json`, or one that cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ArtifactError(f"{folder} has no tokenizer.json: text needs one; use the Python API with token ids")
        with _no_stderr():
            from pytorch_tokenizers.hf_tokenizer import HuggingFaceTokenizer
        try:
            self._tokenizer = HuggingFaceTokenizer(str(path))
        except Exception as error:  # The library raises bare Exception for a broken file.
            raise ArtifactError(f"{path} cannot be read: {error}") from error
        self._config = _read_json(folder / "tokenizer_config.json")
        self._template = _chat_template(folder, self._config)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens written out in it count as such, and none is added."""
        return list(self._tokenizer.encode(text, bos=False, eos=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens` without special tokens; bytes that are no whole character come out as U+FFFD."""
        return self._tokenizer.decode(list(tokens))

    def render(self, messages: Sequence[Message]) -> str:
        """The chat template applied to `messages` ({"role", "content"}), open for the assistant's answer."""
        if self._template is None:
            raise InputError("the artifact has no chat template: pass --raw (raw=True) to give the prompt as it is")
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        # The same environment as transformers' apply_chat_template, so that the same templates render the same text.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **kw: json.dumps(value, ensure_ascii=False, **kw)
        environment.globals["raise_exception"] = _raise
        try:
            return environment.from_string(self._template).render(
                messages=list(messages), add_generation_prompt=True, **_special_tokens(self._config)
            )
        except TemplateError as error:
            raise InputError(f"the chat template cannot be rendered: {error}") from error


class TextStream:
    """Turns a stream of tokens into pieces of text that never split a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._context = 0
        self._emitted = 0

    def push(self, token: int) -> str:
        """The text that `token` completes, "" while a character is unfinished."""
        self._tokens.append(token)
        piece = self._pending()
        if not piece or piece.endswith(_REPLACEMENT):
            return ""
        self._advance()
        return piece

    def flush(self) -> str:
        """What is left at the end, an unfinished character as U+FFFD."""
        piece = self._pending()
        self._advance()
        return piece

    def _pending(self) -> str:
        # Decoded together with the tokens before: some tokenizers treat the start of a text specially.
        before = self._tokenizer.decode(self._tokens[self._context : self._emitted])
        return self._tokenizer.decode(self._tokens[self._context :])[len(before) :]

    def _advance(self) -> None:
        self._context = self._emitted
        self._emitted = len(self._tokens)


def _raise(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text()
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((item["template"] for item in template if item.get("name") == "default"), None)
    return template


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ArtifactError(f"{path} cannot be read: {error}") from error


@contextmanager
def _no_stderr() -> Iterator[None]:
    """pytorch_tokenizers' C++ part logs a line to stderr when it is imported."""
    sys.stderr.flush()
    saved = os.dup(2)
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
