"""A GGUF file's tokenizer as the files of a Hugging Face folder: tokenizer.json and tokenizer_config.json.

Two kinds are read: byte-level BPE (`tokenizer.ggml.model` is "gpt2"), where `tokenizer.ggml.pre` names how text is split
before it, and SentencePiece's BPE ("llama"). What the names mean is what llama.cpp does with them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ostinato.delegate.errors import CheckpointError, first_line

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# `tokenizer.ggml.pre` -> pattern that text is split by; None: GPT-2's own pattern.
_PATTERNS: dict[str, str | None] = {
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3"),
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}",
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"),
    "qwen35": (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    **dict.fromkeys(("gpt-2", "smollm", "default"), None),
}
# Those that split numbers into their digits first.
_DIGITS = frozenset({"smollm"})
# Those that take a whole word that is a token, whatever its merges are.
_WHOLE_WORDS = frozenset({"llama-bpe", "llama3", "llama-v3"})
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "▁"


def write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> bool:
    """Write the tokenizer's files into `folder`. Returns False, and writes nothing, if the file has no tokenizer.

    Raises:
        CheckpointError: a kind of tokenizer that is not read, or one that is damaged.
    """
    model = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if model in (None, "none") or tokens is None:
        return False
    if model not in ("gpt2", "llama"):
        raise CheckpointError(f"unsupported tokenizer.ggml.model {str(model)[:80]!r}; supported are: 'gpt2', 'llama'")
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    if model == "gpt2" and pre not in _PATTERNS:
        known = ", ".join(_PATTERNS)
        raise CheckpointError(f"unsupported tokenizer.ggml.pre {pre[:80]!r}; supported are: {known}")
    try:
        made = _byte_level(metadata, tokens, pre) if model == "gpt2" else _sentencepiece(metadata, tokens)
        _add_special(made, metadata, tokens)
    except Exception as error:  # tokenizers raises bare Exception, and a list may hold anything.
        raise CheckpointError(f"the tokenizer in the GGUF file cannot be read: {first_line(error)}") from error
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(_config(metadata, tokens), ensure_ascii=False))
    return True


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], pre: str) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in _WHOLE_WORDS))
    pattern = _PATTERNS[pre]
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre in _DIGITS else []
    if pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.decoder = decoders.ByteLevel()
    return made


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = {token: index for index, token in enumerate(tokens)}
    scores = metadata["tokenizer.ggml.scores"]
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    made = Tokenizer(models.BPE(vocab, _merges(vocab, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    made.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend(_SPACE)] if prefix else []), normalizers.Replace(" ", _SPACE)]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefix else []),
        ]
    )
    return made


def _merges(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges of a vocabulary that has scores instead: every way to make a token of two others, the best tokens first."""
    found = []
    for token, index in vocab.items():
        for cut in range(1, len(token)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[index], left, right, token[:cut], token[cut:]))
    return [(left, right) for *_, left, right in sorted(found)]


def _add_special(made: Any, metadata: Mapping[str, Any], tokens: Sequence[str]) -> None:
    from tokenizers import AddedToken

    kinds = metadata.get("tokenizer.ggml.token_type", [])
    for token, kind in zip(tokens, kinds, strict=False):
        if kind in (_UNKNOWN, _CONTROL):
            made.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == _USER_DEFINED:
            made.add_tokens([AddedToken(token, normalized=False, special=False)])


def _config(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if isinstance(index, int) and 0 <= index < len(tokens):
            found[f"{ours}_token"] = tokens[index]
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        found["chat_template"] = template
    return found
