"""The order in which pytest-xdist's processes take the tests: long exports first, so that all processes are busy to the
end."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

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
# Files whose tests go to several processes, by the text in brackets: each parameter has an export, or a group of kernels to
# compile, of its own.
BY_PARAMETER = frozenset(
    {"tests/export/test_model.py", "tests/export/kernels/test_compiled.py", "tests/test_gpu_int4.py"}
)


def rank(nodeid: str) -> int:
    file = nodeid.partition("::")[0]
    return LONGEST.index(file) if file in LONGEST else len(LONGEST)


def unit(nodeid: str) -> str:
    """Return the group of a test. All tests of a group go to one process."""
    file = nodeid.partition("::")[0]
    return f"{file}[{nodeid.rpartition('[')[2]}" if file in BY_PARAMETER else file


class Schedule(LoadFileScheduling):
    """Gives each process one file at a time, because a file's fixtures are made once. The order is that of the collection."""

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)
