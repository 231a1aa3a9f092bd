"""Chat templates as published render as in transformers. They are others' work: OSTINATO_TEMPLATES names a folder."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ostinato.runner.text.tokenizer import Tokenizer

from ...conftest import CAPITALS

FOLDER = os.environ.get("OSTINATO_TEMPLATES")
TEMPLATES = sorted(Path(FOLDER).glob("*.jinja")) if FOLDER else []
TURNS = [
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris"},
    {"role": "user", "content": " And of  <b>Peru</b>?\n"},
]


@pytest.mark.skipif(FOLDER is None, reason="OSTINATO_TEMPLATES names no folder of chat templates")
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_as_transformers(path: Path, tmp_path: Path) -> None:
    rendering = pytest.importorskip("transformers.utils.chat_template_utils")
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    shutil.copy(CAPITALS / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(special))
    shutil.copy(path, tmp_path / "chat_template.jinja")
    ours = Tokenizer(tmp_path)
    for turns in (TURNS[1:2], TURNS[1:], TURNS):
        for settings in ({}, {"enable_thinking": False}):
            given: dict[str, Any] = {**special, **settings}
            try:
                (expected,), _ = rendering.render_jinja_template(
                    [turns], chat_template=path.read_text(), add_generation_prompt=True, **given
                )
            except Exception:
                # Some take no system prompt; one of them iterates over transformers' None for tools.
                continue
            assert ours.render(turns, settings) == expected
