"""What pytest-xdist's processes take at a time, and in which order: long exports first, so that all are busy to the end."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

# Files that take longest, in this order; the other ones follow as they are. Two files that need one artifact stand apart:
# the second process would wait for the first one's export.
LONGEST: tuple[str, ...] = (
    "tests/export/test_model.py",
    "tests/export/test_cpu_moe.py",
    "tests/runner/test_cpu_moe.py",
    "tests/runner/test_int4.py",
    "tests/export/kernels/test_attention_prefill.py",
    "tests/export/compile/test_native.py",
    "tests/export/kernels/test_experts_step.py",
    "tests/export/kernels/test_delta_rule_rows.py",
    "tests/export/kernels/test_experts_rows.py",
    "tests/export/kernels/test_linear_step.py",
    "tests/test_bench_hybrid.py",
    "tests/export/test_program.py",
    "tests/export/kernels/test_linear_rows.py",
    "tests/test_bad_checkpoints.py",
)
# Their tests go to several processes, by what stands in brackets: each has an export of its own.
BY_PARAMETER = frozenset({"tests/export/test_model.py"})


def rank(nodeid: str) -> int:
    file = nodeid.partition("::")[0]
    return LONGEST.index(file) if file in LONGEST else len(LONGEST)


def unit(nodeid: str) -> str:
    """What goes to one process together."""
    file = nodeid.partition("::")[0]
    return f"{file}[{nodeid.rpartition('[')[2]}" if file in BY_PARAMETER else file


class Schedule(LoadFileScheduling):
    """A file at a time to a process, for what its fixtures make is made once; in the order of the collection."""

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)
