"""Tokenizers in GGUF files. Published vocabularies are others' work: OSTINATO_VOCABULARIES names a folder that has them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ostinato.delegate.errors import CheckpointError
from ostinato.export.models.gguf_tokenizer import write_tokenizer
from ostinato.export.weights.sources.gguf import GgufFile
from ostinato.runner.text.tokenizer import Tokenizer

FOLDER = os.environ.get("OSTINATO_VOCABULARIES")
published = pytest.mark.skipif(FOLDER is None, reason="OSTINATO_VOCABULARIES names no folder of vocabularies")
BYTES = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
# Two letters, their merge, a digit, and tokens that are no text.
SMALL: dict[str, Any] = {
    **BYTES,
    "tokenizer.ggml.tokens": ["<unk>", "a", "b", "ab", "1", "<|end|>"],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.token_type": [2, 1, 1, 1, 1, 3],
    "tokenizer.ggml.eos_token_id": 5,
    "tokenizer.chat_template": "{{ messages[0]['content'] }}<|end|>",
}


@published
@pytest.mark.parametrize("name", ("llama-bpe", "llama-spm", "qwen2", "qwen35"))
def test_published_vocabularies(tmp_path: Path, name: str) -> None:
    path = Path(str(FOLDER), f"ggml-vocab-{name}.gguf")
    assert write_tokenizer(GgufFile(path).metadata, tmp_path)
    tokenizer = Tokenizer(tmp_path)
    texts = Path(f"{path}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = Path(f"{path}.out").read_text().split("\n")
    for text, line in zip(texts, lines, strict=True):
        assert tokenizer.encode(text) == [int(index) for index in line.split()], text


def test_files_of_a_small_one(tmp_path: Path) -> None:
    assert write_tokenizer(SMALL, tmp_path)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("abba11<|end|>") == [3, 2, 1, 4, 4, 5]
    assert tokenizer.decode([3, 5, 2]) == "abb"
    assert tokenizer.render([{"role": "user", "content": "ab"}]) == "ab<|end|>"


def test_no_tokenizer(tmp_path: Path) -> None:
    assert not write_tokenizer({"tokenizer.ggml.model": "none"}, tmp_path) and not write_tokenizer({}, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, "unsupported tokenizer.ggml.model 'rwkv'; supported are: 'gpt2', 'llama'"),
        ({"tokenizer.ggml.pre": "tekken"}, "unsupported tokenizer.ggml.pre 'tekken'; supported are: llama-bpe, "),
        ({"tokenizer.ggml.merges": ["a c"]}, "the tokenizer in the GGUF file cannot be read"),
        ({"tokenizer.ggml.merges": [7]}, "the tokenizer in the GGUF file cannot be read"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "the tokenizer in the GGUF file cannot be read"),
        ({"tokenizer.ggml.model": "llama"}, "the tokenizer in the GGUF file cannot be read"),
    ],
)
def test_refusals(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        write_tokenizer({**SMALL, **changes}, tmp_path)
