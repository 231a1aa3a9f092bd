"""Calls in forked processes: results, failures, and that nothing is left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from unittest import mock

import pytest
import torch

from ostinato.export.compile.processes import call_in_processes


def test_results_come_with_their_numbers() -> None:
    offset = 100

    def work(number: int) -> tuple[int, int]:
        return number + offset, os.getpid()

    found = {number: result for number, result, _ in call_in_processes(work, range(9), 3)}
    assert {number: result and result[0] for number, result in found.items()} == {n: n + 100 for n in range(9)}
    processes = {result[1] for result in found.values() if result}
    assert os.getpid() not in processes and 1 <= len(processes) <= 3
    assert multiprocessing.active_children() == []
    assert list(call_in_processes(work, [], 3)) == []


def test_calls_run_beside_each_other() -> None:
    """Each of two calls waits for the other one."""
    ours, theirs = multiprocessing.get_context("fork").Pipe()

    def work(number: int) -> str:
        here = (ours, theirs)[number]
        here.send(f"from {number}")
        return str(here.recv())

    assert {number: result for number, result, _ in call_in_processes(work, range(2), 2)} == {0: "from 1", 1: "from 0"}


@pytest.mark.parametrize("dies", [False, True], ids=["raises", "dies"])
def test_failure_is_none(dies: bool) -> None:
    """A call that fails gives None, and no call begins after it."""

    def work(number: int) -> int:
        if number == 0 and dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 0:
            raise ValueError("no")
        return number

    found = [(number, result) for number, result, _ in call_in_processes(work, range(5), 1)]
    assert found == [(0, None)]
    assert [result for _, result, _ in call_in_processes(work, range(1, 5), 1)] == [1, 2, 3, 4]


def called() -> tuple[list[tuple[int, int | None, float]], int]:
    forked: list[bool] = []
    return list(call_in_processes(abs, (-1, -2), 1, lambda: forked.append(True))), len(forked)


def test_in_a_pool() -> None:
    """A process of a pool may fork none, so nothing is called."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(called) == ([(-1, None, 0.0)], 1)
    assert called() == ([(-1, 1, mock.ANY), (-2, 2, mock.ANY)], 1)


def test_processes_end_with_the_generator() -> None:
    def work(number: int) -> int:
        if number:
            time.sleep(600)
        return number

    results = call_in_processes(work, range(3), 3)
    assert next(results)[0] == 0
    assert len(multiprocessing.active_children()) == 3
    results.close()
    assert multiprocessing.active_children() == []


def test_parallel_torch_does_not_hang() -> None:
    """OpenMP's threads of this process are not in a forked one."""
    size = 1 << 20
    expected = float(torch.ones(size).add_(1).sum())
    results = call_in_processes(lambda number: float(torch.ones(size).add_(number).sum()), [1, 1], 2)
    assert [result for _, result, _ in results] == [expected, expected]
