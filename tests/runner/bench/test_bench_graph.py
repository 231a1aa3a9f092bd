"""The report of `ostinato bench` on a captured step: its kernels, and the time that Python takes per token."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ostinato.delegate.graphs.nodes import GraphNodes
from ostinato.delegate.graphs.recorders import Graph, HostGraphRecorder
from ostinato.runner.bench.bench import Case, Measurement, ModeResult
from ostinato.runner.bench.report import host_text

from ..conftest import SMALL, Bench, records


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        (
            GraphNodes({"kernel": 1243, "memcpy": 2}, 240),
            "--cuda_graph: 1,243 kernels per token, 240 of them start before the one ahead has ended",
        ),
        (
            GraphNodes({"kernel": 9}, 0, "DriverError: no"),
            "--cuda_graph: 9 kernels per token, none of them start before the one ahead has ended: DriverError: no",
        ),
        (GraphNodes(note="DriverError: no"), "--cuda_graph: its kernels were not counted: DriverError: no"),
    ],
)
def test_kernels_of_the_graph_are_said(
    bench: Bench, recurrent_artifact: Path, monkeypatch: pytest.MonkeyPatch, nodes: GraphNodes, said: str
) -> None:
    """The output has the kernel counts, which the test supplies: a machine without a GPU has none."""
    record = HostGraphRecorder.record

    def record_with_counts(*arguments: Any) -> Graph:
        graph = record(*arguments)
        graph.nodes = nodes
        return graph

    monkeypatch.setattr(HostGraphRecorder, "record", record_with_counts)
    lines = bench(recurrent_artifact, *SMALL).splitlines()
    assert said in lines
    (plan,) = [line for line in lines if "recorded in" in line]
    assert re.fullmatch(
        r"--cuda_graph: 1 graph per token, recorded in [\d.]+ ms, made executable in 0.0 ms, "
        "for which the pool grew by 0 B",
        plan,
    )
    assert f"- {said}" in bench(recurrent_artifact, *SMALL, "-o", "md").splitlines()
    for row in records(bench, recurrent_artifact, *SMALL):
        counted = row["cuda_graph"] and row["n_gen"] > 0
        expected = (nodes.kernels, None if nodes.by_type is None else nodes.early) if counted else (None, None)
        assert (row["kernels_per_token"], row["early_kernels_per_token"]) == expected
        plans = row["methods"]["decode"]["plans"]
        assert [plan["graph_nodes"] for plan in plans] == ([nodes.by_type] if row["cuda_graph"] else [])


def test_without_a_cuda_graph_no_kernels_are_said(bench: Bench, recurrent_artifact: Path) -> None:
    assert "kernels" not in bench(recurrent_artifact, *SMALL)
    for row in records(bench, recurrent_artifact, *SMALL):
        assert (row["kernels_per_token"], row["early_kernels_per_token"]) == (None, None)


def test_a_failed_capture_of_any_method_that_takes_prompts_is_said() -> None:
    well, failed = ({"fallbacks": count, "fallback_reason": f"reason {count}"} for count in (0, 1))
    for methods, reasons in (
        ({"prefill": well, "rows": failed, "decode_sample": well}, ("reason 1", None)),
        ({"prefill": well, "rows": well, "decode_sample": failed}, (None, "reason 1")),
        ({"forward": failed}, ("reason 1", "reason 1")),
        ({}, (None, None)),
    ):
        mode = ModeResult(True, methods=methods)
        assert (mode.fallback_reason("pp"), mode.fallback_reason("tg")) == reasons


def test_what_python_takes() -> None:
    times = (None, 12.34, 9.0)
    mode = ModeResult(True, [Measurement(Case("tg", 4, depth), True, (1,), us) for depth, us in enumerate(times)])
    assert mode.host_us == 12.34
    assert host_text(mode) == "Python takes 12.3 us per token on the host (median), not counting waits for the GPU"


def test_without_a_gpu_there_is_nothing_to_tell_apart(bench: Bench, capitals_artifact: Path) -> None:
    few = ["-p", "0", "-n", "4", "-d", "0", "-r", "1"]
    assert "Python takes" not in bench(capitals_artifact, *few)
    assert all(row["host_us_per_token"] is None for row in records(bench, capitals_artifact, *few))
