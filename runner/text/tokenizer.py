"""Text <-> tokens, from the tokenizer files of a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ostinato.delegate.artifact.digest import check_digest, read_copied_files
from ostinato.delegate.artifact.flatbuffer import map_file
from ostinato.delegate.artifact.json_files import parse_json
from ostinato.delegate.artifact.names import (
    GENERATION_CONFIG_FILE,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
)
from ostinato.delegate.artifact.paths import Source, artifact_paths
from ostinato.delegate.artifact.seal import Seal
from ostinato.delegate.errors import ArtifactError, InputError, first_line

from .common_prefix import common_length
from .reasoning import END_OF_REASONING

if TYPE_CHECKING:
    import jinja2

Message = dict[str, str]


class Piece(NamedTuple):
    """Text, and token ids of it: those that the tokenizer gives, or others that were sampled."""

    text: str
    tokens: list[int]


# Characters in which the last special token of a text is looked for: a turn's, in front of an answer.
_FAR = 4096
_MANY_TOKENS = 10_000
# Values for the chat template that are remembered: characters of the longest, and how many.
_LONGEST_KEY, _MOST_KEYS = 1000, 1000
# Characters of a token, in nearly all texts of any length.
_CHARACTERS_EACH = 8
# More tokens than a text's beginning has because it was cut. With published vocabularies it was 2 (BPE), with others 3 (a
# unigram model, BPE over whole texts) and 99 (WordPiece, to which a word of over 100 characters is one token).
_AT_A_CUT = 256
_REPLACEMENT = "�"


class Tokenizer:
    """Encodes prompts and renders chats. The work is done by Hugging Face's `tokenizers` and by Jinja2.

    Args:
        folder: folder with `tokenizer.json`, and for chats `tokenizer_config.json` or `chat_template.jinja`.
        files: contents of these files by name, to use in the place of those in `folder`.

    Attributes:
        generation_config: how the model's authors sample, `generation_config.json`; empty if there is none.

    Raises:
        ArtifactError: no `tokenizer.json`, or a file that cannot be read.
    """

    def __init__(self, folder: Path, files: Mapping[str, bytes] | None = None) -> None:
        files = read_copied_files(folder) if files is None else files
        if TOKENIZER_FILE not in files:
            raise ArtifactError(f"{folder} has no {TOKENIZER_FILE}: text needs one; use the Python API with token ids")
        # Imported here: a program that gets token ids does not need it.
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(files[TOKENIZER_FILE])
        except Exception as error:  # The library raises bare Exception for a broken file.
            raise ArtifactError(f"{folder / TOKENIZER_FILE} cannot be read: {error}") from error
        # The file may hold settings of the training; a prompt is neither truncated nor padded.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._config = _read_object(folder, files, TOKENIZER_CONFIG_FILE)
        self.generation_config = _read_object(folder, files, GENERATION_CONFIG_FILE)
        self._template = _chat_template(folder, files, self._config)
        # Values for the chat template, as JSON -> whether it keeps answers.
        self._keeps_answers: dict[str, bool] = {}

    @classmethod
    def of_artifact(cls, source: Source, digest: str | None = None) -> Tokenizer:
        """Return the tokenizer of an artifact. With `digest`, of exactly the files that the digest is of.

        Raises:
            ArtifactError: see `Tokenizer`; no artifact; or one with another digest.
            OptionError: `digest` is no digest.
        """
        program_path = artifact_paths(source)[0]
        files = read_copied_files(program_path.parent)
        if digest is not None:
            check_digest(program_path, Seal.split(map_file(program_path))[1], files, digest)
        return cls(program_path.parent, files)

    @property
    def has_template(self) -> bool:
        """Whether `render` has a chat template."""
        return self._template is not None

    @property
    def described(self) -> dict[str, Any]:
        """The chat template, None where there is none, and the special tokens' texts by what they are for."""
        return {"chat_template": self._template, **_special_tokens(self._config)}

    @property
    def may_reason(self) -> bool:
        """Whether the chat template knows of reasoning in answers, between `<think>` and `</think>`."""
        return self._template is not None and END_OF_REASONING in self._template

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Special tokens that are written out in the text are recognised, and no others are added.

        Raises:
            InputError: the text is not valid Unicode, or has characters that the tokenizer has no token for.
        """
        try:
            text.encode()
            # Its `encode` holds Python's lock all the while, 0.4 us a character; this one takes as long, and does not.
            ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except UnicodeEncodeError as error:
            raise InputError("the text is not valid Unicode: it holds bytes that are not UTF-8") from error
        except Exception as error:  # The library raises bare Exception.
            raise InputError(f"the text cannot be encoded: {error}") from error
        except BaseException as error:
            # A panic of the library is no Exception. Its regular expressions end so in 10 million blanks in a row.
            if type(error).__name__ != "PanicException":
                raise
            raise InputError(f"the text cannot be encoded: {error}") from error
        return ids

    def exceeds(self, text: str, limit: int) -> bool:
        """Whether the beginning of a text alone shows that the text has more than `limit` tokens.

        False says nothing. A text that is far too long is known as such by what the model could take, and not encoded whole:
        30 MB take 20 s of a thread, and 4 GB of memory.
        """
        characters = _CHARACTERS_EACH * limit + 1000
        # Twice as much each time: a token may be a hundred blanks.
        while characters < len(text):
            try:
                if len(self.encode(text[:characters])) > limit + _AT_A_CUT:
                    return True
            except InputError:
                # The cut may have made a word that there is not. If not, encoding the whole text says what is wrong.
                return False
            characters *= 2
        return False

    def pieces(self, text: str, told: Sequence[Piece] = ()) -> list[Piece]:
        """The text in pieces: those of `told` that it begins with, and the rest, which is encoded.

        A piece ends where a special token begins, so that the rest has the tokens that it has in the whole text.
        """
        found, begin = [], 0
        for piece in told:
            end = begin + len(piece.text)
            if not text.startswith(piece.text, begin) or not text.startswith(self._special, end):
                break
            found.append(piece)
            begin = end
        return [*found, Piece(text[begin:], self.encode(text[begin:]))]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens` without special tokens. Bytes that do not form a whole character become U+FFFD."""
        if len(tokens) > _MANY_TOKENS:
            # Its `decode` holds Python's lock all the while, 0.1 us a token; this one does not, and takes longer for few.
            found: list[str] = self._tokenizer.decode_batch([list(tokens)], skip_special_tokens=True)
            return found[0]
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def render(
        self,
        messages: Sequence[Message],
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Apply the chat template to `messages` ({"role", "content"}), up to the beginning of the assistant's answer.

        Without `add_generation_prompt`, it ends with the last message.

        `chat_template_kwargs` are values for the template, as transformers' `apply_chat_template` takes them. Many published
        templates read `enable_thinking`. A template ignores those that it does not know.

        Raises:
            InputError: there is no chat template, or it cannot be rendered.
        """
        if self._template is None:
            raise InputError("the artifact has no chat template: pass --raw (raw=True) to give the prompt as it is")
        try:
            values = {**_special_tokens(self._config), **(chat_template_kwargs or {})}
            return self._compiled.render(messages=list(messages), add_generation_prompt=add_generation_prompt, **values)
        except Exception as error:  # A template is a program, and can fail in any way.
            raise InputError(f"the chat template cannot be rendered: {first_line(error)}") from error

    def common_tokens(self, text: str, tokens: list[int], other: str) -> int:
        """Number of tokens with which the encodings of two texts begin. `tokens` are those of `text`.

        Only what comes behind the last special token that both have is encoded.
        """
        common = common_length(text, other)
        found = ((text.rfind(special, max(0, common - _FAR), common), len(special)) for special in self._special)
        begin = max((place + length for place, length in found if place >= 0), default=0)
        mine, others = self.encode(text[begin:]), self.encode(other[begin:])
        return len(tokens) - len(mine) + common_length(mine, others)

    def keeps_answers(self, chat_template_kwargs: Mapping[str, Any] | None = None) -> bool:
        """Whether the chat template renders a turn and its answer in history as the model saw them: it drops no thinking, and
        begins an answer in history as it has the model begin."""
        key = json.dumps(chat_template_kwargs, sort_keys=True, default=repr)
        found = self._keeps_answers.get(key)
        if found is None:
            answer = "<think>\nx\n</think>\n\ny"
            asked: list[Message] = [{"role": "user", "content": "x"}]
            try:
                before = self.render(asked, chat_template_kwargs)
                told = [*asked, {"role": "assistant", "content": answer}, {"role": "user", "content": "z"}]
                after = self.render(told, chat_template_kwargs)
                found = after.startswith(before + answer)
            except InputError:
                found = False
            # A server's clients give any values, of any length.
            if len(key) <= _LONGEST_KEY and len(self._keeps_answers) < _MOST_KEYS:
                self._keeps_answers[key] = found
        return found

    @cached_property
    def _special(self) -> tuple[str, ...]:
        """The special tokens' texts."""
        return tuple(one.content for one in self._tokenizer.get_added_tokens_decoder().values() if one.special)

    @cached_property
    def _compiled(self) -> jinja2.Template:
        """The chat template, compiled once: that of Qwen3 takes 20 ms."""
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        # The same environment as transformers' apply_chat_template, so that the same templates render the same text.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **kw: json.dumps(value, ensure_ascii=False, **kw)
        environment.globals["raise_exception"] = _raise
        # Llama 3.2's template, among others, says today's date.
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        assert self._template is not None
        return environment.from_string(self._template)


class TextStream:
    """Turns a stream of tokens into a stream of text, and never splits a character.

    Why not `tokenizers.decoders.DecodeStream` (0.23): it cannot be ended, so an unfinished character would be lost. And with
    tokenizers that have a token per byte it raises when bytes that arrived one by one are not UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Tokens of the last returned text, and the tokens after them. Both are decoded together, because some tokenizers
        # treat the start of a text specially.
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """Return the text that `token` completes, "" while a character is unfinished."""
        self._held.append(token)
        text = self._pending()
        return "" if text.endswith(_REPLACEMENT) else self._emit(text)

    def flush(self) -> str:
        """Return the rest of the text, with an unfinished character as U+FFFD."""
        return self._emit(self._pending())

    def _pending(self) -> str:
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._held)[len(before) :]

    def _emit(self, text: str) -> str:
        if text:
            self._context, self._held = self._held, []
        return text


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


def _chat_template(folder: Path, files: Mapping[str, bytes], config: dict[str, Any]) -> str | None:
    if TEMPLATE_FILE in files:
        try:
            return files[TEMPLATE_FILE].decode()
        except UnicodeDecodeError as error:
            raise ArtifactError(f"{folder / TEMPLATE_FILE} cannot be read: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        named = (item for item in template if isinstance(item, dict))
        template = next((item.get("template") for item in named if item.get("name") == "default"), None)
    if template is not None and not isinstance(template, str):
        raise ArtifactError(
            f"{folder / TOKENIZER_CONFIG_FILE}: chat_template must be text, or a list of named texts, got "
            f"{type(template).__name__}"
        )
    return template


def _read_object(folder: Path, files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if there is no such file."""
    found = parse_json(files.get(name, b"{}"), str(folder / name), ArtifactError)
    if not isinstance(found, dict):
        raise ArtifactError(f"{folder / name} cannot be read: expected an object, got {type(found).__name__}")
    return found
