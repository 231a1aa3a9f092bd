"""The order in which pytest-xdist's processes take the tests: long exports first, so that all processes are busy to the
end, and last those that must be alone on a GPU."""

from __future__ import annotations

from xdist.scheduler import WorkStealingScheduling
from xdist.scheduler.worksteal import MIN_PENDING

# The files that take longest, in this order; the others follow in their own order. Two files that need one artifact stand
# apart: the second process would wait for the first one's export.
LONGEST: tuple[str, ...] = (
    "tests/test_gpu_int4.py",
    "tests/export/test_model.py",
    "tests/export/test_cpu_moe.py",
    "tests/runner/sessions/test_soak.py",
    "tests/runner/test_cpu_moe.py",
    "tests/runner/test_int4.py",
    "tests/export/kernels/test_attention.py",
    "tests/export/compile/test_native.py",
    "tests/export/kernels/test_sampling.py",
    "tests/export/kernels/test_delta_rule.py",
    "tests/test_bench_hybrid.py",
    "tests/export/test_program.py",
    "tests/export/kernels/test_compiled.py",
    "tests/export/kernels/test_experts.py",
    "tests/export/kernels/test_experts_triton.py",
    "tests/test_readme.py",
    "tests/test_bad_checkpoints.py",
    "tests/delegate/test_closing.py",
    "tests/test_bucket_logits.py",
    "tests/runner/sessions/test_sessions.py",
    "tests/test_gpu.py",
)
# Files whose tests begin in several processes, by the text in brackets: each parameter has an export, or a group of kernels
# to compile, of its own.
BY_PARAMETER = frozenset(
    {"tests/export/test_model.py", "tests/export/kernels/test_compiled.py", "tests/test_gpu_int4.py"}
)
# What tests begin with that fill a GPU's memory, or measure what all processes take of it.
ALONE: tuple[str, ...] = (
    "tests/delegate/constants/test_full_gpu.py::",
    "tests/runner/sessions/test_soak.py::test_the_gpus_memory",
)


def rank(nodeid: str) -> int:
    file = nodeid.partition("::")[0]
    return LONGEST.index(file) if file in LONGEST else len(LONGEST)


def alone(nodeid: str) -> bool:
    return nodeid.startswith(ALONE)


def group(nodeid: str) -> str:
    """Return the name of a test's group. The tests of a group begin in one process, and mostly stay there."""
    file = nodeid.partition("::")[0]
    return f"{file}[{nodeid.rpartition('[')[2]}" if file in BY_PARAMETER else file


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
        """Give each group, in the collection's order, to the process with the fewest tests."""
        self.held = []
        groups: dict[str, list[int]] = {}
        for index in self.pending:
            some = self.held if alone(tests[index]) else groups.setdefault(group(tests[index]), [])
            some.append(index)
        parts: list[list[int]] = [[] for _ in self.nodes]
        for indices in groups.values():
            min(parts, key=len).extend(indices)
        for node, part in zip(self.nodes, parts, strict=True):
            self.pending[:] = part
            self._send_tests(node, len(part))

    def _nothing_to_steal(self) -> bool:
        """Whether some process would be told now that there are no more tests."""
        queues = [len(queue) for node, queue in self.node2pending.items() if not node.shutting_down]
        busy = self.pending or self.steal_requested_from_node is not None
        return not busy and min(queues, default=MIN_PENDING) < MIN_PENDING and max(queues) <= MIN_PENDING
