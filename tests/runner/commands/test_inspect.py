"""`ostinato inspect`: what it says of an artifact, for people and as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from ostinato.delegate import load_program
from ostinato.delegate.artifact.names import META_MUTABLE_BUFFERS
from ostinato.delegate.artifact.target import host_target
from ostinato.delegate.memory import size_text

from ...conftest import CAPITALS_LENGTH
from ...modules import MAX_SEQ_LEN, VOCAB, WIDTH
from ...processes import PATIENCE
from ..conftest import run_here


def test_inspect(capsys: pytest.CaptureFixture[str], recurrent_artifact: Path) -> None:
    text = run_here(capsys, "inspect", recurrent_artifact)
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert rows[0] == f"compiled for {host_target('cpu')}"
    for row in (
        f"prefill input tokens [1, T=2..{MAX_SEQ_LEN - 1}] int64 0..{VOCAB - 1}",
        f"decode output logits [1, {VOCAB}] float32",
        f"get_max_seq_len {MAX_SEQ_LEN}",
        f"3 constants, {2 * VOCAB * WIDTH * 4 + 8} B",
        f"embed [{VOCAB}, {WIDTH}] float32 {VOCAB * WIDTH * 4} B",
        f"cache other [{MAX_SEQ_LEN}, {WIDTH}] float32 {MAX_SEQ_LEN * WIDTH * 4} B",
    ):
        assert row in rows
    for begin in ("model.pte ", "model.ptd ", "decode 1 ", "prefill 1 "):
        assert any(row.startswith(begin) for row in rows)
    assert "and 2 more (--top N)" in run_here(capsys, "inspect", recurrent_artifact, "--top", 1)
    assert "and 3 more (--top N)" in run_here(capsys, "inspect", recurrent_artifact, "--top", 0)


def test_inspect_json(capsys: pytest.CaptureFixture[str], recurrent_artifact: Path) -> None:
    out = run_here(capsys, "inspect", recurrent_artifact, "--json")
    assert out.count("\n") == 1
    data = json.loads(out)
    assert set(data["methods"]) == {"prefill", "decode"}
    decode = data["methods"]["decode"]
    assert decode["inputs"][0] == {
        "name": "tokens",
        "shape": [1, 1],
        "dtype": "int64",
        "value_range": [0, VOCAB - 1],
    }
    assert (decode["constants"], decode["mutable_buffers"]) == (2, 3)
    assert decode["code_bytes"] > 1000
    sizes = {item["name"]: item["bytes"] for item in data["constants"]}
    assert sizes == {"embed": VOCAB * WIDTH * 4, "head": VOCAB * WIDTH * 4, "steps": 8}
    assert {item["name"]: item["kind"] for item in data["mutable_buffers"]} == {
        "cache": "other",
        "total": "other",
        "steps": "other",
    }
    assert {item["growth"] for item in data["mutable_buffers"]} == {"fixed"}
    assert (data["capacity"]["slots"], data["capacity"]["slot_bytes"], data["capacity"]["groups"]) == (1, 0, [])
    assert data["metadata"]["get_vocab_size"] == VOCAB
    assert data["files"] == {path.name: path.stat().st_size for path in recurrent_artifact.iterdir()}
    assert data["target"]["device"] == "cpu"


def test_inspect_of_a_language_model(capsys: pytest.CaptureFixture[str], capitals_artifact: Path) -> None:
    data = json.loads(run_here(capsys, "inspect", capitals_artifact, "--json"))
    assert data["metadata"]["get_max_seq_len"] == CAPITALS_LENGTH
    names = {item["name"] for item in data["constants"]}
    assert "lm_head.weight" in names
    assert "lm_head.weight" in run_here(capsys, "inspect", capitals_artifact, "--top", 1000)
    kinds = {item["kind"] for item in data["mutable_buffers"]}
    assert {"kv_cache", "block_table", "convolution", "recurrent", "sampling"} <= kinds


def test_inspect_says_what_a_session_takes(capsys: pytest.CaptureFixture[str], capitals_artifact: Path) -> None:
    """Buffers that grow are shown as they are loaded by default, for one session, and not at their sizes in the export."""
    data = json.loads(run_here(capsys, "inspect", capitals_artifact, "--json"))
    with load_program(capitals_artifact) as program:
        assert data["capacity"] == json.loads(json.dumps(asdict(program.capacity)))
        for name, method in data["methods"].items():
            program.load_method(name)
            ranges = [spec.value_range and list(spec.value_range) for spec in program.method_inputs(name)]
            assert [item["value_range"] for item in method["inputs"]] == ranges
        found = {item["name"]: (item["shape"], item["bytes"]) for item in data["mutable_buffers"]}
        assert found == {name: (list(one.shape), one.nbytes) for name, one in program.mutable_buffers.items()}
    growths = {item["kind"]: item["growth"] for item in data["mutable_buffers"]}
    assert growths.pop("kv_cache") == "pages" and set(growths.values()) == {"slots"}
    capacity = data["capacity"]
    (group,) = capacity["groups"]
    pages = -(-CAPITALS_LENGTH // 64)
    assert (capacity["slots"], group["pages"], group["pages_per_session"], capacity["page_size"]) == (
        1,
        pages,
        pages,
        64,
    )
    said = (
        f"loaded for one session; each snapshot takes {size_text(capacity['slot_bytes'])}, each further session as much, and "
        f"up to {pages} pages of 64 "
        f"positions, {size_text(group['page_bytes'])} each"
    )
    assert said in run_here(capsys, "inspect", capitals_artifact).splitlines()


def test_inspect_cuts_no_value_short(capsys: pytest.CaptureFixture[str], capitals_artifact: Path) -> None:
    name = META_MUTABLE_BUFFERS
    value = json.loads(run_here(capsys, "inspect", capitals_artifact, "--json"))["metadata"][name]
    assert json.loads(value)["mutable_buffers"]
    text = run_here(capsys, "inspect", capitals_artifact)
    assert f"{name} ({len(value)} characters: --json)" in [" ".join(line.split()) for line in text.splitlines()]
    assert "..." not in text


def test_reader_of_inspect_goes_away(recurrent_artifact: Path) -> None:
    command = f"{sys.executable} -m ostinato.runner.cli inspect {recurrent_artifact} | head -c 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=PATIENCE)
    assert (len(done.stdout), done.stderr) == (1, "")
