#!/usr/bin/env python3
"""Run kernels, exports and exported models under CUDA's compute-sanitizer, and print what it finds.

    python scripts/sanitize.py [--processes N] [--only NAME,NAME] [--logs DIR] [--config DIR] [--sanitizer FILE]

Each allocation of torch is one of CUDA's, so that a read or write outside is seen. The jobs are
  - kernels: every case of kernel_cases.py, in int4 and in bfloat16 at the shapes of --config, under memcheck with 1 to 128
    rows, and under initcheck, synccheck and racecheck; then the other number formats in small shapes, under all four,
  - exports of a model with a few layers, in int4 and in bfloat16, under memcheck,
  - steps: each of these artifacts with prompts of 1 to 300 tokens, single steps and batches of 8, under memcheck.
Several run at a time. A table has a line for each job, then every finding and how often it was seen, and why an accepted one
is accepted. Logs of the sanitizer and of the jobs stay in the folder --logs.

Exit status: 0 nothing but accepted findings, 1 other findings or a job that failed, 2 an error.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from kernel_arguments import RandomTensors, Shapes, add_format_options, format_of
from kernel_case import Case
from kernel_cases import decode_cases, prompt_case
from torch.nn import functional

from ostinato.delegate.errors import OptionError, OstinatoError
from ostinato.export.formats.format import Format
from ostinato.runner.bench.tables import table

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_CONFIG = ROOT / "tests" / "assets" / "configs" / "Qwen3.5-35B-A3B"
LAYERS, MAX_SEQ_LEN, GROUP_SIZE = 4, 1024, 128
# Name of a format -> options of an export and of kernels.
FORMATS = {"int4": ("--quant", "int4", "--group-size", str(GROUP_SIZE)), "bfloat16": ()}
# The other formats, for kernels in SMALL shapes.
SMALL_FORMATS = {
    "int4-32": ("--quant", "int4", "--group-size", "32"),
    "int4-64": ("--quant", "int4", "--group-size", "64", "--scale-dtype", "float16"),
    "int4_min": ("--quant", "int4_min", "--scale-dtype", "float16"),
    "int8": ("--quant", "int8"),
    "int8-128": ("--quant", "int8", "--group-size", "128"),
}
# Numbers of rows for all tools, and for memcheck alone: the others are slower, and see what does not depend on the number.
ROWS, MORE_ROWS = (64, 8, 1), (128, 16, 2)
SMALL_ROWS = (1, 2, 7, 17, 45, 100)
# Shapes that divide into groups of 128 and into nothing longer, with outputs that fill no tile: of a model with a delta-net,
# gated attention and experts, and of a dense one whose projections have biases.
SMALL: dict[str, dict[str, Any]] = {
    "experts": {
        "model_type": "qwen3_5_moe_text",
        "vocab_size": 331,
        "hidden_size": 384,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 3,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 12,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "dtype": "bfloat16",
    },
    "dense": {
        "model_type": "llama",
        "vocab_size": 331,
        "hidden_size": 384,
        "num_hidden_layers": 1,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 640,
        "attention_bias": True,
        "dtype": "bfloat16",
    },
}
# Kernels that a tool does not check, by a part of their names: they read what other kernels of cuBLAS wrote by the tensor
# memory accelerator, which initcheck does not see.
UNCHECKED = {"initcheck": "cublasLt"}
# Cores of an export. It starts a process for each core, and under the sanitizer such a process takes 3 GB of the GPU.
EXPORT_CORES = 5
# Seconds after which a job is ended.
PATIENCE = 540


@dataclass(frozen=True)
class Accepted:
    """A finding that is no fault of this project: the tool, a pattern in its text, and why it is accepted."""

    tool: str
    pattern: str
    why: str


ACCEPTED = (
    Accepted("racecheck", r"\bnvjet_", "within a kernel of cuBLAS"),
    Accepted(
        "memcheck", r" API call to cuGetProcAddress", "cuda-bindings asks the driver for functions of later drivers"
    ),
    # See `load_pieces` in export/kernels/linear/rows_grouped_triton.py.
    Accepted("initcheck", r"memory read .*\bgrouped_rows_early", "inputs of columns past the last row, never written"),
)


@dataclass(frozen=True)
class Job:
    """A command to run under one of the sanitizer's tools.

    Attributes:
        name: unique name, which `--only` chooses by its beginning.
        tool: the sanitizer's tool.
        words: the command.
        after: name of the job whose artifact it needs.
    """

    name: str
    tool: str
    words: tuple[str, ...]
    after: str | None = None


@dataclass(frozen=True)
class Outcome:
    """Result of a job: its seconds, its exit status, and its findings with their numbers."""

    job: Job
    seconds: float
    status: int
    findings: Counter[str]

    @property
    def refused(self) -> Counter[str]:
        """The findings that are not accepted."""
        return Counter({text: count for text, count in self.findings.items() if not why_accepted(self.job.tool, text)})

    @property
    def held(self) -> bool:
        return self.status == 0 and not self.refused


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(words)
    if arguments.what == "kernels":
        return run_kernels(arguments.configs, format_of(arguments), arguments.rows, arguments.tool)
    if arguments.what == "steps":
        return run_steps(arguments.artifact)
    try:
        sanitizer = find_sanitizer(arguments.sanitizer)
        logs = arguments.logs or Path(tempfile.mkdtemp(prefix="ostinato-sanitize-"))
        logs.mkdir(parents=True, exist_ok=True)
        jobs = chosen(all_jobs(arguments.config, logs), arguments.only)
    except OstinatoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    begin = time.perf_counter()
    outcomes = run_all(jobs, lambda job: run_job(sanitizer, job, logs), arguments.processes)
    print(report(outcomes))
    print(f"\n{len(jobs)} jobs in {time.perf_counter() - begin:.0f} s; logs in {logs}")
    return 0 if all(outcome.held for outcome in outcomes) else 1


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--processes", type=int, default=8, metavar="N", help="jobs at a time (default: %(default)s)")
    add("--only", metavar="NAME,NAME", help="only jobs whose names begin so, such as export or kernels-int4")
    add("--logs", type=Path, metavar="DIR", help="folder for logs and artifacts (default: a new temporary one)")
    add("--config", type=Path, default=DEFAULT_CONFIG, metavar="DIR", help="folder with a config.json")
    add("--sanitizer", metavar="FILE", help="compute-sanitizer (default: that on PATH, or of the CUDA toolkit)")
    parser.set_defaults(what=None)
    # What a job runs under the sanitizer.
    parts = parser.add_subparsers(metavar="")
    kernels = parts.add_parser("kernels")
    kernels.set_defaults(what="kernels")
    kernels.add_argument("configs", type=Path, nargs="+")
    kernels.add_argument("--rows", type=int, nargs="+", required=True)
    kernels.add_argument("--tool", required=True)
    add_format_options(kernels, default="none")
    steps = parts.add_parser("steps")
    steps.set_defaults(what="steps")
    steps.add_argument("artifact", type=Path)
    return parser.parse_args(words)


def find_sanitizer(given: str | None) -> str:
    """Return the path of compute-sanitizer. Raises OptionError: there is none."""
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    usual = ["compute-sanitizer", *[f"{home}/bin/compute-sanitizer" for home in homes if home]]
    for name in [given] if given else usual:
        if (found := shutil.which(name)) is not None:
            return found
    raise OptionError(f"no {given or 'compute-sanitizer'} found: install the CUDA toolkit, or give --sanitizer FILE")


def all_jobs(config: Path, logs: Path) -> list[Job]:
    """All jobs. Exports come first, then what compiles kernels for those that follow, then what takes longest."""
    model, script = few_layers(config, LAYERS, logs / "model"), str(Path(__file__).resolve())
    small = [write_config(settings, logs / name) for name, settings in SMALL.items()]
    command = ("-m", "ostinato.runner.cli", "export", "--device", "cuda", "--load-format", "dummy")
    export = (*command, "--model", str(model), "--max-seq-len", str(MAX_SEQ_LEN))

    def kernels(tool: str, configs: Iterable[Path], rows: Iterable[int], options: Iterable[str]) -> tuple[str, ...]:
        return (script, "kernels", *map(str, configs), "--rows", *map(str, rows), "--tool", tool, *options)

    def large(tool: str, several: Iterable[int]) -> list[Job]:
        return [
            Job(f"kernels-{form}-{rows}-{tool}", tool, kernels(tool, [config], [rows], options))
            for rows in several
            for form, options in FORMATS.items()
        ]

    exports = [
        Job(f"export-{form}", "memcheck", (*export, *options, "--output", str(logs / form)))
        for form, options in FORMATS.items()
    ]
    steps = [
        Job(f"steps-{form}", "memcheck", (script, "steps", str(logs / form)), f"export-{form}") for form in FORMATS
    ]
    return [
        *exports,
        *large("memcheck", ROWS),
        *large("racecheck", ROWS),
        # A job that waits for its artifact takes the place of another; by now there is little to wait for.
        *steps,
        *large("memcheck", MORE_ROWS),
        *large("synccheck", ROWS),
        *large("initcheck", ROWS),
        *[
            Job(f"small-{form}-{tool}", tool, kernels(tool, small, SMALL_ROWS, options))
            for tool in ("memcheck", "racecheck", "synccheck", "initcheck")
            for form, options in SMALL_FORMATS.items()
        ],
    ]


def few_layers(config: Path, layers: int, folder: Path) -> Path:
    """Write the config with fewer layers into `folder`, which is returned. Raises OptionError: there is no config."""
    try:
        read = json.loads((config / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise OptionError(f"--config: {error}") from error
    text = read.get("text_config", read)
    text["num_hidden_layers"] = layers
    text.pop("layer_types", None)
    return write_config(read, folder)


def write_config(settings: dict[str, Any], folder: Path) -> Path:
    """Write a config.json into `folder`, which is returned."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def chosen(jobs: Sequence[Job], only: str | None) -> list[Job]:
    """The jobs that `only` chooses, and those that they need. Raises OptionError: there is none."""
    if only is None:
        return list(jobs)
    picked = [job for job in jobs if job.name.startswith(tuple(only.split(",")))]
    if not picked:
        raise OptionError(f"--only: no job begins with {only}; there are: {', '.join(job.name for job in jobs)}")
    needed = {job.after for job in picked}
    return [job for job in jobs if job in picked or job.name in needed]


def run_all(jobs: Sequence[Job], run: Callable[[Job], Outcome], processes: int) -> list[Outcome]:
    """Run the jobs, so many at a time, each after the one that it needs. Returns the outcomes in the jobs' order."""
    begun: dict[str, Future[Outcome]] = {}

    def run_after(job: Job) -> Outcome:
        if job.after in begun and begun[job.after].result().status != 0:
            return Outcome(job, 0.0, 1, Counter({f"it needs {job.after}, which failed": 1}))
        outcome = run(job)
        print(f"{job.name}: {verdict(outcome)}, {outcome.seconds:.0f} s", file=sys.stderr, flush=True)
        return outcome

    # What a job waits for has begun before it.
    with ThreadPoolExecutor(processes) as pool:
        for job in jobs:
            begun[job.name] = pool.submit(run_after, job)
    return [future.result() for future in begun.values()]


def run_job(sanitizer: str, job: Job, logs: Path) -> Outcome:
    """Run a job's command under the sanitizer, which follows the processes that it starts."""
    command = [
        sanitizer,
        "--tool",
        job.tool,
        "--target-processes",
        "all",
        "--log-file",
        str(logs / f"{job.name}.%p.log"),
    ]
    if job.tool in UNCHECKED:
        command += ["--kernel-name-exclude", f"kernel_substring={UNCHECKED[job.tool]}"]
    # Code that an earlier export has kept would not be generated again.
    environment = {
        **os.environ,
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(logs / f"{job.name}.inductor"),
    }
    begin = time.perf_counter()
    with open(logs / f"{job.name}.output", "w") as output, cores_for(job):
        try:
            status = subprocess.run(
                [*command, sys.executable, *job.words],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=PATIENCE,
            ).returncode
        except subprocess.TimeoutExpired:
            status = 124
    seconds = time.perf_counter() - begin
    texts = [path.read_text(errors="replace") for path in sorted(logs.glob(f"{job.name}.*.log"))]
    return Outcome(job, seconds, status, sum(map(findings, texts), Counter()))


@contextmanager
def cores_for(job: Job) -> Iterator[None]:
    """Inside this context, commands that this thread starts have the cores that the job may use."""
    cores = os.sched_getaffinity(0)
    if "export" in job.words:
        os.sched_setaffinity(0, random.sample(sorted(cores), min(EXPORT_CORES, len(cores))))
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def findings(log: str) -> Counter[str]:
    """Count the findings in a log of the sanitizer: the first line of each, and the kernel, without numbers."""
    found: Counter[str] = Counter()
    for block in re.split(r"^=+ *$", log, flags=re.MULTILINE):
        lines = [line.lstrip("=")[1:] for line in block.splitlines() if line.startswith("=========")]
        title = next((line for line in lines if line[:1].strip() and not re.match(_NO_FINDING, line)), None)
        if title is not None:
            kernel = next((line for line in lines if re.match(r" +(by|at) ", line) or " access at " in line), "")
            found[re.sub(r"0x[0-9a-f]+|\b\d+\b", "N", f"{title} {kernel.strip()}").strip()] += 1
    return found


_NO_FINDING = r"COMPUTE-SANITIZER|.* SUMMARY: |Saved host backtrace|Host Frame|Target application returned"


def why_accepted(tool: str, text: str) -> str | None:
    """Return why a finding is accepted; None if it is not."""
    return next((one.why for one in ACCEPTED if one.tool == tool and re.search(one.pattern, text)), None)


def verdict(outcome: Outcome) -> str:
    if outcome.status:
        return {124: "took too long"}.get(outcome.status, f"failed with status {outcome.status}")
    refused, accepted = outcome.refused.total(), outcome.findings.total() - outcome.refused.total()
    return f"{refused} findings" + (f", {accepted} accepted" if accepted else "")


def report(outcomes: Iterable[Outcome]) -> str:
    """Return the table of jobs, and then the findings of each tool."""
    outcomes = list(outcomes)
    rows = [(one.job.name, one.job.tool, f"{one.seconds:.0f}", verdict(one)) for one in outcomes]
    lines = [table({"job": "left", "tool": "left", "seconds": "right", "result": "left"}, rows)]
    for tool in dict.fromkeys(one.job.tool for one in outcomes):
        found = sum((one.findings for one in outcomes if one.job.tool == tool), Counter[str]())
        for text, count in found.most_common():
            why = why_accepted(tool, text)
            lines.append(f"{tool}, {count} times: {text}" + (f" (accepted: {why})" if why else ""))
    return "\n".join(lines)


def run_kernels(configs: Iterable[Path], form: Format | None, numbers: Sequence[int], tool: str) -> int:
    """Run every case with these numbers of rows once, at the shapes of each config."""
    torch.manual_seed(0)
    with torch.inference_mode(), products_into_zeros() if tool == "initcheck" else nullcontext():
        for shapes in [Shapes.of_folder(config, form, MAX_SEQ_LEN) for config in configs]:
            for rows in numbers:
                for case in [*decode_cases(shapes, (0, MAX_SEQ_LEN - 24), rows), prompt_case(shapes, rows)]:
                    run_case(case, shapes)
    return 0


def run_case(case: Case, shapes: Shapes) -> None:
    if case.missing is None:
        case.kernel(*case.arguments(RandomTensors(shapes, "cuda")).values())
        torch.cuda.synchronize()
    print(f"{case.name}, {case.rows} rows" + (f": {case.missing}" if case.missing else ""), flush=True)


@contextmanager
def products_into_zeros() -> Iterator[None]:
    """Inside this context, matrix products of torch are written over zeros.

    initcheck takes what cuBLAS writes by the tensor memory accelerator as never written: on an H100 a product alone,
    [8, 2048] x [2048, 64] in bfloat16, has 512 findings, and none over zeros.
    """

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        product = torch.mm(x, weight.t(), out=x.new_zeros(x.shape[0], weight.shape[0]))
        return product if bias is None else product + bias

    with mock.patch.object(functional, "linear", linear):
        yield


def run_steps(artifact: Path) -> int:
    """Run prompts of 1 to 300 tokens, single steps after each, then batches of 8 sessions with prompts of other lengths."""
    from check_artifact import random_tokens

    from ostinato.runner import Engine

    with Engine.load(artifact, sessions=8) as engine:
        tokens = random_tokens(engine.program, 300)
        for length in (*range(1, 20), *range(20, 300, 31), 255, 256, 257, 300):
            list(engine.generate_tokens(tokens[:length], max_new_tokens=3, ignore_eos=True))
        sessions = [engine.open_session() for _ in range(8)]
        for number, session in enumerate(sessions):
            session.prefill(tokens[: 1 + 40 * number])
        for count in (8, 8, 3, 5, 2, 8):
            engine.step(sessions[:count])
    return 0


if __name__ == "__main__":
    sys.exit(main())
