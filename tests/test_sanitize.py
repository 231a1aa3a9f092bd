"""scripts/sanitize.py: how it reads the sanitizer's logs, and how it runs jobs. A script stands in for the sanitizer."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from .conftest import ROOT

sys.path.append(str(ROOT / "scripts"))

import sanitize
from kernel_arguments import Shapes
from kernel_case import CONV_ROWS
from kernel_cases import decode_cases
from sanitize import DEFAULT_CONFIG, Job, Outcome, all_jobs, findings, main, why_accepted

from ostinato.export.formats.quantization import FORMATS
from ostinato.export.kernels import Kernels

MEMCHECK = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
=========     at void at::native::vectorized_elementwise_kernel<(int)4>(int, T2, T3)+0x1c0
=========     by thread (32,0,0) in block (0,0,0)
=========     Access at 0x7f6510c00200 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f6510c00000 of size 512 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========     Host Frame: cuLaunchKernel [0x2f0]
=========
========= Invalid __global__ read of size 16 bytes
=========     at void at::native::vectorized_elementwise_kernel<(int)4>(int, T2, T3)+0x1d0
=========     by thread (33,0,0) in block (1,0,0)
=========     Access at 0x7f6510c00210 is out of bounds
=========
========= Target application returned an error
========= ERROR SUMMARY: 2 errors
"""
RACECHECK = """\
========= COMPUTE-SANITIZER
========= Warning: Race reported between Read access at nvjet_tst_64x8_64x16_4x1_v_bz_TNT+0x1a40
=========     and Write access at nvjet_tst_64x8_64x16_4x1_v_bz_TNT+0x1b70 [128 hazards]
=========
========= Error: Race reported between Write access at sparse_moe_rows+0x70 in rows_triton.py:10
=========     and Read access at sparse_moe_rows+0x90 in rows_triton.py:11 [4 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
# The sanitizer's own words, of a machine whose driver is older than its cuda-bindings.
DRIVER = """\
========= COMPUTE-SANITIZER
========= Program hit CUDA_ERROR_INVALID_VALUE (error 1) due to "invalid argument" on CUDA API call to cuGetProcAddress_v2.
=========     Saved host backtrace up to driver entry point at error
=========         Host Frame:  [0xd4a2] in cydriver.cpython-312-x86_64-linux-gnu.so
=========         Host Frame: call_driver in cuda_driver.py:39
=========
========= ERROR SUMMARY: 1 errors
"""
CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
OUTSIDE = (
    "Invalid __global__ read of size N bytes at void at::native::vectorized_elementwise_kernel<(int)N>(int, T2, T3)+N"
)


def test_findings() -> None:
    assert findings(MEMCHECK) == Counter({OUTSIDE: 2})
    assert findings(CLEAN) == findings("") == Counter()
    first, second = findings(RACECHECK)
    assert first.startswith("Warning: Race") and why_accepted("racecheck", first) == "within a kernel of cuBLAS"
    assert second.startswith("Error: Race") and why_accepted("racecheck", second) is None
    assert why_accepted("memcheck", first) is None
    (driver,) = findings(DRIVER)
    assert (why_accepted("memcheck", driver) or "").startswith("cuda-bindings asks the driver")


def test_products_over_zeros_are_the_same() -> None:
    x, weight, bias = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5)
    expected = F.linear(x, weight), F.linear(x, weight, bias)
    with sanitize.products_into_zeros():
        found = F.linear(x, weight), F.linear(x, weight, bias)
    torch.testing.assert_close(found, expected)


def test_jobs(tmp_path: Path) -> None:
    jobs = all_jobs(DEFAULT_CONFIG, tmp_path)
    assert len({job.name for job in jobs}) == len(jobs) == 2 + 2 + 2 * (6 + 3 + 3 + 3) + 5 * 4
    names = [job.name for job in jobs]
    assert all(job.after is None or names.index(job.after) < names.index(job.name) for job in jobs)
    steps = sanitize.chosen(jobs, "steps-int4,kernels-int4-128")
    assert [job.name for job in steps] == ["export-int4", "steps-int4", "kernels-int4-128-memcheck"]


def small_jobs(folder: Path) -> list[Job]:
    return [job for job in all_jobs(DEFAULT_CONFIG, folder) if job.name.startswith("small-")]


def test_small_jobs_take_every_format_and_kind_of_layer(tmp_path: Path) -> None:
    seen: dict[str, set[str]] = {}
    for job in small_jobs(tmp_path):
        arguments = sanitize.parse_arguments(job.words[1:])
        form = sanitize.format_of(arguments)
        assert form is not None and arguments.tool == job.tool
        for config in arguments.configs:
            shapes = Shapes.of_folder(config, form, sanitize.MAX_SEQ_LEN)
            cases = [case for rows in arguments.rows for case in decode_cases(shapes, (0,), rows)]
            seen.setdefault(form.name, set()).update(case.function for case in cases)
    step = {name for name, function in vars(Kernels).items() if isinstance(function, staticmethod)}
    prompt = {"linear", "route", "experts", "convolve", "gated_delta_rule", "attend"}
    assert seen.keys() == FORMATS.keys()
    assert all(functions == (step - prompt) | {CONV_ROWS} for functions in seen.values())


@pytest.mark.gpu
def test_kernels_in_small_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (job,) = [job for job in small_jobs(tmp_path) if job.name == "small-int8-memcheck"]
    assert main(job.words[1:]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"norm_swiglu, 17 rows", "linear_add/delta_net, 1 rows", "linear/qkv, 45 rows"} <= set(lines)


@pytest.fixture
def sanitizer(tmp_path: Path) -> Path:
    """Runs the command, and writes the finding MEMCHECK where the command is the steps of the bfloat16 artifact."""
    (tmp_path / "finding.log").write_text(MEMCHECK)
    (tmp_path / "clean.log").write_text(CLEAN)
    path = tmp_path / "sanitizer"
    path.write_text(
        f"""#!/usr/bin/env bash
log="${{6/\\%p/$$}}"
case "$*" in *steps*bfloat16*) kind=finding ;; *) kind=clean ;; esac
cp {tmp_path}/$kind.log "$log"
[ "$PYTORCH_NO_CUDA_MEMORY_CACHING" = 1 ] || exit 3
case "$*" in *"export"*int4*) echo "no room" && exit 9 ;; esac
"""
    )
    path.chmod(0o755)
    return path


def test_run(sanitizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job that fails keeps those that need it from running, and its output is kept."""
    logs = tmp_path / "logs"
    words = ["--sanitizer", str(sanitizer), "--logs", str(logs), "--only", "export,steps,kernels-int4-8-"]
    assert main(words) == 1
    lines = capsys.readouterr().out.splitlines()
    results = {
        line.split()[0]: line.split(maxsplit=3)[3] for line in lines if line.startswith(("export", "steps", "ker"))
    }
    assert results == {
        "export-int4": "failed with status 9",
        "export-bfloat16": "0 findings",
        "steps-int4": "failed with status 1",
        "steps-bfloat16": "2 findings",
        **{f"kernels-int4-8-{tool}": "0 findings" for tool in ("memcheck", "initcheck", "synccheck", "racecheck")},
    }
    assert f"memcheck, 2 times: {OUTSIDE}" in lines
    assert "memcheck, 1 times: it needs export-int4, which failed" in lines
    assert (logs / "export-int4.output").read_text() == "no room\n"
    assert main([*words[:-1], "export-bfloat16,kernels"]) == 0


def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert main(["--sanitizer", "nowhere"]) == 2
    logs = ["--logs", str(tmp_path / "logs")]
    assert main(["--sanitizer", sys.executable, "--config", str(tmp_path), *logs]) == 2
    assert main(["--sanitizer", sys.executable, "--only", "prefill", *logs]) == 2
    first, second, third = capsys.readouterr().err.splitlines()
    assert first == "error: no nowhere found: install the CUDA toolkit, or give --sanitizer FILE"
    assert second.startswith("error: --config: [Errno 2] No such file or directory")
    assert third.startswith(
        "error: --only: no job begins with prefill; there are: export-int4, export-bfloat16, kernels-"
    )


def test_a_finding_is_not_held() -> None:
    job = Job("one", "racecheck", ())
    assert Outcome(job, 1.0, 0, Counter()).held
    assert Outcome(job, 1.0, 0, Counter({"Warning: Race between nvjet_tst": 3})).held
    assert not Outcome(job, 1.0, 0, Counter({"Error: Race between ours": 1})).held
    assert not Outcome(job, 1.0, 1, Counter()).held
