"""The order in which pytest-xdist's processes take the tests: long exports first, so that all processes are busy to the
end, and last those that must be alone on a GPU."""

from __future__ import annotations

from xdist.scheduler import WorkStealingScheduling
from xdist.scheduler.worksteal import MIN_PENDING

# What the names of the longest tests begin with, and the seconds that each group of them takes: on a GPU (an H100, six
# processes) if they have tests for one. Their groups are dealt out first, in this order.
LONGEST: dict[str, int] = {
    "tests/export/test_cpu_moe.py::test_many_steps[cuda-5": 280,
    # The second part needs the artifact that the first one has made by then.
    "tests/runner/sessions/test_soak.py::test_batches_that_change_in_every_step[cuda-first": 360,
    "tests/export/test_cpu_moe.py": 90,
    "tests/test_gpu_int4.py::test_a_dense_model": 80,
    "tests/test_gpu_int4.py": 160,
    "tests/runner/sessions/test_soak.py": 240,
    "tests/export/test_model.py": 60,
    "tests/test_gpu.py": 110,
    "tests/delegate/test_closing.py::test_random_closings": 95,
    "tests/test_bucket_logits.py": 40,
    "tests/test_bench_kernels.py": 80,
    "tests/test_kernel_cases.py": 60,
    "tests/runner/test_cpu_moe.py": 60,
    "tests/runner/test_int4.py": 60,
    "tests/export/kernels/test_attention.py": 60,
    "tests/export/compile/test_native.py": 60,
    "tests/export/kernels/test_sampling.py": 60,
    "tests/export/kernels/test_sampling_processing.py": 40,
    "tests/export/kernels/test_delta_rule.py": 60,
    "tests/test_bench_hybrid.py": 60,
    "tests/export/test_program.py": 60,
    "tests/runner/sessions/test_sessions.py": 50,
    "tests/delegate/test_closing.py": 40,
    "tests/export/kernels/test_compiled.py": 30,
    "tests/export/kernels/test_experts.py": 30,
    "tests/export/kernels/test_experts_triton.py": 30,
    "tests/test_readme.py": 30,
    "tests/test_bad_checkpoints.py": 30,
}
# Seconds of the groups of other files.
OTHERS = 10
# Those whose tests begin in several processes, by the text in brackets: each parameter has an export, a group of kernels to
# compile, or a process of its own.
BY_PARAMETER = frozenset(
    {
        "tests/export/test_model.py",
        "tests/export/kernels/test_compiled.py",
        "tests/test_gpu_int4.py::test_a_dense_model",
        "tests/test_gpu_int4.py",
        "tests/test_bucket_logits.py",
        "tests/test_bench_kernels.py",
        "tests/runner/sessions/test_soak.py",
        "tests/delegate/test_closing.py::test_random_closings",
    }
)
# What tests begin with that fill a GPU's memory, or measure what all processes take of it.
ALONE: tuple[str, ...] = (
    "tests/delegate/constants/test_full_gpu.py::",
    "tests/runner/sessions/test_soak.py::test_the_gpus_memory",
)


def rank(nodeid: str) -> int:
    return next((place for place, begin in enumerate(LONGEST) if nodeid.startswith(begin)), len(LONGEST))


def alone(nodeid: str) -> bool:
    return nodeid.startswith(ALONE)


def group(nodeid: str) -> tuple[str, int]:
    """Return the name of a test's group, and the seconds that the group takes. The tests of a group begin in one process, and
    mostly stay there."""
    begin = next((begin for begin in LONGEST if nodeid.startswith(begin)), nodeid.partition("::")[0])
    parameter = nodeid.partition("[")[2] if begin in BY_PARAMETER else ""
    return f"{begin}[{parameter}", LONGEST.get(begin, OTHERS)


class Schedule(WorkStealingScheduling):
    """Gives each process groups of tests, which share artifacts and engines, and then what is left of another process's. The
    tests that must be alone are dealt out when nothing else is left: each of them waits for all others."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        # Indices of tests that are not dealt out yet; None before the collection is known.
        self.held: list[int] | None = None

    @property
    def tests_finished(self) -> bool:
        return not self.held and super().tests_finished

    def check_schedule(self) -> None:
        if self.held is None and self.collection is not None:
            self._deal(self.collection)
        if self.held and self._nothing_to_steal():
            self.pending += self.held
            self.held = []
        super().check_schedule()

    def _deal(self, tests: list[str]) -> None:
        """Give each group, in the collection's order, to the process that has the least to do."""
        self.held = []
        groups: dict[tuple[str, int], list[int]] = {}
        for index in self.pending:
            some = self.held if alone(tests[index]) else groups.setdefault(group(tests[index]), [])
            some.append(index)
        parts: list[list[int]] = [[] for _ in self.nodes]
        busy = [0] * len(parts)
        for (_, seconds), indices in groups.items():
            first = busy.index(min(busy))
            parts[first] += indices
            busy[first] += seconds
        for node, part in zip(self.nodes, parts, strict=True):
            self.pending[:] = part
            self._send_tests(node, len(part))

    def _nothing_to_steal(self) -> bool:
        """Whether some process would be told now that there are no more tests."""
        queues = [len(queue) for node, queue in self.node2pending.items() if not node.shutting_down]
        busy = self.pending or self.steal_requested_from_node is not None
        return not busy and min(queues, default=MIN_PENDING) < MIN_PENDING and max(queues) <= MIN_PENDING
