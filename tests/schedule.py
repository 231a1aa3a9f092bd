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
)
# What tests begin with that fill a GPU's memory, or measure what all processes take of it.
ALONE: tuple[str, ...] = (
    "tests/delegate/constants/test_full_gpu.py::",
    "tests/runner/sessions/test_soak.py::test_batches_that_change_in_every_step[cuda]",
)


def rank(nodeid: str) -> int:
    file = nodeid.partition("::")[0]
    return LONGEST.index(file) if file in LONGEST else len(LONGEST) + alone(nodeid)


def alone(nodeid: str) -> bool:
    return nodeid.startswith(ALONE)


class Schedule(WorkStealingScheduling):
    """Gives each process a part of the list, and what is left of another's part when it has done its own. Neighbouring tests,
    which share artifacts and engines, mostly stay in one process. The tests that must be alone are dealt out when nothing
    else is left: each of them waits for all others."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        # Indices of tests that are not dealt out yet; None before the collection is known.
        self.held: list[int] | None = None

    @property
    def tests_finished(self) -> bool:
        return not self.held and super().tests_finished

    def check_schedule(self) -> None:
        if self.held is None and self.collection is not None:
            self.held = [index for index in self.pending if alone(self.collection[index])]
            self.pending[:] = [index for index in self.pending if index not in self.held]
        if self.held and self._nothing_to_steal():
            self.pending += self.held
            self.held = []
        super().check_schedule()

    def _nothing_to_steal(self) -> bool:
        """Whether some process would be told now that there are no more tests."""
        queues = [len(queue) for node, queue in self.node2pending.items() if not node.shutting_down]
        busy = self.pending or self.steal_requested_from_node is not None
        return not busy and min(queues, default=MIN_PENDING) < MIN_PENDING and max(queues) <= MIN_PENDING
