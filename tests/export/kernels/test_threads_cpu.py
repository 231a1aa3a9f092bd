"""The threads of the C++ kernels: how many there are, and that nothing waits for one that the system has set aside."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from ostinato.export.kernels import Kernels
from ostinato.export.kernels.operators_cpu import LIBRARY

from .linear_cases import Shape, make
from .runs import SLOT, Run
from .weights import F32

# In a fresh process, since a pool is made once: its threads beside those that there were before. It takes torch's library
# alone, which is there in a tenth of the time that `import torch` takes.
TORCH = Path(str(torch.__file__)).parent / "lib" / "libtorch_cpu.so"
COUNT = """
import ctypes, os, sys
ctypes.CDLL(sys.argv[3], ctypes.RTLD_GLOBAL)
os.sched_setaffinity(0, [int(cpu) for cpu in sys.argv[2].split(",")])
library = ctypes.CDLL(sys.argv[1])
before = len(os.listdir("/proc/self/task"))
count = getattr(library, "_ZN8ostinato12thread_countEv")
print(count(), len(os.listdir("/proc/self/task")) - before)
"""


def threads(library: Path, cpus: list[int], wanted: str | None) -> list[int]:
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    if wanted is not None:
        environment["OMP_NUM_THREADS"] = wanted
    command = (sys.executable, "-c", COUNT, str(library), ",".join(map(str, cpus)), str(TORCH))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return [int(number) for number in done.stdout.split()]


@pytest.fixture(scope="module")
def library(cpu_kernels: type[Kernels], pytestconfig: pytest.Config) -> Path:
    cache = getattr(pytestconfig, "cache", None)
    if cache is None:
        pytest.skip("without a cache nothing is known of the library's place")
    return Path(cache.mkdir("native")) / LIBRARY.build().library


def siblings(cpu: int) -> str:
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return path.read_text() if path.exists() else str(cpu)


def test_one_per_physical_core_that_the_process_may_use(library: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.exists() and not quota.read_text().startswith("max"):
        pytest.skip("this container has a quota")
    for chosen in (cpus, cpus[:1]):
        count = len({siblings(cpu) for cpu in chosen})
        assert threads(library, chosen, None) == [count, count - 1]


@pytest.mark.parametrize(("wanted", "count"), [("1", 1), ("5", 5), ("3,2", 3)])
def test_what_the_environment_says(library: Path, wanted: str, count: int) -> None:
    assert threads(library, sorted(os.sched_getaffinity(0)), wanted) == [count, count - 1]


@pytest.mark.parametrize("text", ("0", "", "many", "-2"))
def test_what_is_no_number_says_nothing(library: Path, text: str) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    assert threads(library, cpus, text) == threads(library, cpus, None)


def test_several_callers(cpu_kernels: type[Kernels]) -> None:
    """Programs of several Python threads: one at a time has the pool, the others work alone, and all are right."""
    case = make(Shape(320, 256, 32), [Run(SLOT, 0, 9)], F32, device="cpu", panels=True)
    expected = case.run(cpu_kernels, "norm_linear")["out"]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(200):
            if not torch.equal(case.run(cpu_kernels, "norm_linear")["out"], expected):
                wrong.append(number)

    callers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_a_forked_process_works_alone(cpu_kernels: type[Kernels]) -> None:
    """It has none of the pool's threads, and waits for none."""
    case = make(Shape(320, 256, 32), [Run(SLOT, 0)], F32, device="cpu", panels=True)
    expected = case.run(cpu_kernels, "norm_linear")["out"]
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(case.run(cpu_kernels, "norm_linear")["out"], expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
