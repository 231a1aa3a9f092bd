"""scripts/check_speed.py over made-up measurements."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import ROOT

sys.path.append(str(ROOT / "scripts"))

import check_speed


def record(
    kind: str,
    depth: int,
    speed: float,
    cuda_graph: bool = True,
    kernels: int | None = 255,
    host: float | None = 38.0,
) -> dict[str, Any]:
    return {
        "n_prompt": 512 if kind == "pp" else 0,
        "n_gen": 128 if kind == "tg" else 0,
        "n_depth": depth,
        "cuda_graph": cuda_graph,
        "median_ts": speed,
        "fallback_reason": None if kernels else "capture failed",
        "kernels_per_token": kernels if kind == "tg" and cuda_graph else None,
        "host_us_per_token": host if kind == "tg" else None,
    }


def run(folder: Path, records: Any, *words: str) -> int:
    path = folder / "bench.json"
    path.write_text(json.dumps(records))
    return check_speed.main([str(path), "--decode", "500", "--prefill", "9000", *words])


# Decode without a graph is slow, which does not count. For the prefill the faster mode counts.
GOOD = [
    record("pp", 0, 9100.0, False),
    record("pp", 0, 8900.0),
    record("tg", 0, 100.0, False),
    record("tg", 0, 510.0),
    record("pp", 4000, 1.0),
    record("tg", 4000, 490.0),
]


def test_all_held(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, GOOD) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "decode at depth 0       510.0 tokens/s  yes     500 or more",
        "decode at depth 4000    490.0 tokens/s  yes     at most 5% below depth 0 (it is 3.9% below)",
        "kernels per token                  255  yes     255 or fewer",
        "prefill of 512        9,100.0 tokens/s  yes     9,000 or more",
        "Python per token               38.0 us  yes     40 us or less",
    ]


@pytest.mark.parametrize(("seconds", "status"), [("90", 0), ("91", 1)])
def test_the_time_of_the_export(tmp_path: Path, capsys: pytest.CaptureFixture[str], seconds: str, status: int) -> None:
    assert run(tmp_path, GOOD, "--export-seconds", seconds) == status
    assert capsys.readouterr().out.splitlines()[-1].split() == [
        *("export", seconds, "s"),
        *("NO" if status else "yes", "90", "s", "or", "less"),
    ]


def test_the_defaults_are_what_the_figures_state(tmp_path: Path) -> None:
    """The default goals are 95 % of what FIGURES.md states: 96 % passes, 94 % does not."""
    readme = (ROOT / "scripts" / "FIGURES.md").read_text()
    (decode,) = re.findall(r"^\| decode with a CUDA graph, at depth 0 / 4,000 \| ([\d,]+) /", readme, re.MULTILINE)
    (prefill,) = re.findall(
        r"^\| prefill of 512 with a CUDA graph, at depth 0 / 4,000 \| ([\d,]+) /", readme, re.MULTILINE
    )
    for share, status in ((0.96, 0), (0.94, 1)):
        for one, other in ((share, 1.0), (1.0, share)):
            speeds = (float(decode.replace(",", "")) * one, float(prefill.replace(",", "")) * other)
            records = [record("tg", 0, speeds[0]), record("tg", 4000, speeds[0]), record("pp", 0, speeds[1])]
            path = tmp_path / "bench.json"
            path.write_text(json.dumps(records))
            assert check_speed.main([str(path)]) == status


@pytest.mark.parametrize(
    ("number", "changed", "complaint"),
    [
        (3, record("tg", 0, 499.0), "decode at depth 0 "),
        (5, record("tg", 4000, 484.0), "decode at depth 4000 "),
        (0, record("pp", 0, 8999.0, False), "prefill of 512 "),
        (3, record("tg", 0, 510.0, kernels=331), "kernels per token "),
        (3, record("tg", 0, 510.0, kernels=None), "kernels per token "),
        (5, record("tg", 4000, 490.0, host=41.0), "Python per token "),
        (3, record("tg", 0, 510.0, host=None), "Python per token "),
    ],
)
def test_one_did_not_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int, changed: dict[str, Any], complaint: str
) -> None:
    records = [changed if i == number else one for i, one in enumerate(GOOD)]
    assert run(tmp_path, records) == 1
    missed = [line for line in capsys.readouterr().out.splitlines() if " NO " in line]
    assert len(missed) == 1 and missed[0].startswith(complaint)


def test_faster_further_on_is_no_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, [*GOOD[:5], record("tg", 4000, 600.0)]) == 0
    assert "(it is 17.6% above)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("records", "complaint"),
    [
        ({"a": 1}, "is not what `ostinato bench --save` writes"),
        ([{"n_gen": 1}], "is not what `ostinato bench --save` writes"),
        (GOOD[:5], "no decode with --cuda_graph at depth 0 and another one"),
        ([GOOD[3], GOOD[5]], "no prefill at depth 0"),
    ],
)
def test_what_cannot_be_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], records: Any, complaint: str
) -> None:
    assert run(tmp_path, records) == 2
    assert complaint in capsys.readouterr().err


def test_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_speed.main([str(tmp_path / "none.json")]) == 2
    assert "none.json cannot be read: No such file" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[" * 100_000], ids=["cut short", "no UTF-8", "deep"])
def test_a_file_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes) -> None:
    path = tmp_path / "bench.json"
    path.write_bytes(content)
    assert check_speed.main([str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {path} cannot be read: ")
