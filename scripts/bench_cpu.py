"""Measure a model on the CPU in several formats, beside llama.cpp. scripts/bench_cpu.sh says how to call it."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench_batch
from bench_batch import Row as BatchRow
from bench_commands import ROOT, SLOWER, fail, llama_command, numbers, ostinato, output_of, threads_of

from ostinato.delegate.errors import OptionError
from ostinato.runner.bench.batch_bench import BatchSpec
from ostinato.runner.bench.tables import Side, table

CONFIG = ROOT / "tests" / "assets" / "configs" / "Qwen3.5-0.8B"
# A first token needs a tokenizer, and a folder with only a config has none. The ids of this one are valid in any model with a
# larger vocabulary.
TOKENIZER = ROOT / "tests" / "assets" / "capitals"
FORMATS = ("int4", "bfloat16", "float32")
QUESTION = "What is the capital of France?"
STARTS = 5


@dataclass(frozen=True)
class Row:
    """Result of one test in one format: our test, and llama.cpp's tokens/s if it was measured."""

    format: str
    test: dict[str, Any]
    peer: float | None

    @property
    def ratio(self) -> float | None:
        return None if self.peer is None else self.test["median_ts"] / self.peer

    def cells(self) -> list[str]:
        share, rate = self.test["copy_share"], self.test["bytes_per_second"]
        return [
            self.format,
            name_of(self.test),
            f"{self.test['median_ts']:,.1f}",
            "" if self.peer is None else f"{self.peer:,.1f}",
            "" if self.ratio is None else f"{self.ratio:.2f}",
            "" if rate is None else f"{rate / 1e9:.1f}",
            "" if share is None else f"{share:.0%}",
        ]


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=CONFIG)
    parser.add_argument("--formats", type=lambda text: text.split(","), default=["int4", "bfloat16"])
    parser.add_argument("--group-size", default="32")
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir()) / "cpu")
    parser.add_argument("-p", "--n-prompt", default="64,512")
    parser.add_argument("-n", "--n-gen", default="32")
    parser.add_argument("-d", "--n-depth", default="0")
    parser.add_argument("-r", "--repetitions", default="3")
    parser.add_argument("--batch", type=numbers, default=[1, 2, 4, 8, 16])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--llama-bench", type=Path)
    parser.add_argument("--llama-batched-bench", type=Path)
    parser.add_argument("--gguf", action="append", default=[])
    arguments = parser.parse_args(words)
    unknown = [name for name in arguments.formats if name not in FORMATS]
    if unknown:
        parser.error(f"unknown formats {', '.join(unknown)}; the formats are: {', '.join(FORMATS)}")
    if bool(arguments.gguf) != bool(arguments.llama_bench or arguments.llama_batched_bench):
        parser.error("--llama-bench or --llama-batched-bench, and --gguf, go together")
    return arguments


def main() -> int:
    arguments = parse()
    try:
        spec = batch_spec(arguments)
    except OptionError as error:
        fail(str(error))
    models = dict(pair.partition("=")[::2] for pair in arguments.gguf)
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.threads:
        os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    artifacts = {name: export(name, arguments) for name in arguments.formats}
    rows = []
    for name, artifact in artifacts.items():
        tests = bench(artifact, arguments)
        peers = llama(models[name], arguments) if name in models and arguments.llama_bench else {}
        rows += [Row(name, test, peers.get(name_of(test))) for test in tests]
    batches = {}
    if spec:
        batches = {name: bench_batches(path, models.get(name), spec, arguments) for name, path in artifacts.items()}
    starts = {name: seconds_to_first_token(artifact) for name, artifact in artifacts.items()}
    imports = min(timed([sys.executable, "-c", "import torch"]) for _ in range(STARTS))
    report(rows, batches, starts, imports)
    ratios = [row.ratio for row in rows] + [row.ratio for together in batches.values() for row in together]
    return 1 if any(ratio is not None and ratio < SLOWER for ratio in ratios) else 0


def export(name: str, arguments: argparse.Namespace) -> Path:
    artifact: Path = arguments.output / name
    if artifact.exists():
        return artifact
    longest = max(map(int, arguments.n_prompt.split(","))) + max(map(int, arguments.n_gen.split(",")))
    # An answer in a batch ends with one token more.
    length = max(map(int, arguments.n_depth.split(","))) + longest + 1
    quant = ["--quant", "int4", "--group-size", arguments.group_size] if name == "int4" else ["--dtype", name]
    with tempfile.TemporaryDirectory() as folder:
        for path in (*arguments.model.glob("*.json"), *TOKENIZER.glob("tokenizer*"), *TOKENIZER.glob("*.jinja")):
            shutil.copy(path, folder)
        command = ["export", "--model", folder, "--load-format", "dummy", "--max-seq-len", str(length), *quant]
        ostinato(*command, "--output", str(artifact))
    return artifact


def bench(artifact: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The records of `ostinato bench`, one per test. They name the machine, too."""
    lengths = ["-p", arguments.n_prompt, "-n", arguments.n_gen, "-d", arguments.n_depth, "-r", arguments.repetitions]
    tests: list[dict[str, Any]] = json.loads(
        ostinato("bench", str(artifact), *lengths, "--cuda-graph", "off", "--output", "json")
    )
    return tests


def batch_spec(arguments: argparse.Namespace) -> BatchSpec | None:
    """The spec for sessions that step together, with the first length of -p and of -n; None without batches. Raises
    OptionError."""
    batches = tuple(sorted(set(arguments.batch) - {0}))
    prompt, answer = (int(lengths.split(",")[0]) for lengths in (arguments.n_prompt, arguments.n_gen))
    return BatchSpec(batches, prompt, answer, int(arguments.repetitions)) if batches else None


def bench_batches(artifact: Path, model: str | None, spec: BatchSpec, arguments: argparse.Namespace) -> list[BatchRow]:
    """Measure batches: ours, and llama.cpp's if its program and a model are given."""
    program = arguments.llama_batched_bench
    command = llama_command(program, model, "cpu", arguments.threads) if model and program else None
    return bench_batch.measure(artifact, spec, False, command)


def llama(model: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Test -> llama.cpp's tokens/s. Tests have the same names as ours."""
    threads = threads_of(arguments.threads)
    lengths = ["-p", arguments.n_prompt, "-n", arguments.n_gen, "-d", arguments.n_depth, "-r", arguments.repetitions]
    command = [str(arguments.llama_bench), "-m", model, *threads, *lengths, "-o", "json"]
    return {name_of(test): test["avg_ts"] for test in json.loads(output_of(command))}


def name_of(test: dict[str, Any]) -> str:
    """Name of a test: pp512, tg32, "tg32 @ d4000". Our records and llama-bench's have the same fields."""
    what = f"pp{test['n_prompt']}" if test["n_prompt"] else f"tg{test['n_gen']}"
    return f"{what} @ d{test['n_depth']}" if test["n_depth"] else what


def seconds_to_first_token(artifact: Path) -> float:
    """Seconds of a whole process that answers a short question with one token. Files are warm; the best of several."""
    command = [sys.executable, "-m", "ostinato.runner.cli", "run", str(artifact), "--prompt", QUESTION]
    return min(timed([*command, "--max-new-tokens", "1"]) for _ in range(STARTS))


def timed(command: list[str]) -> float:
    begin = time.perf_counter()
    output_of(command)
    return time.perf_counter() - begin


def report(rows: list[Row], batches: dict[str, list[BatchRow]], starts: dict[str, float], imports: float) -> None:
    columns: dict[str, Side] = {"format": "left", "test": "left"}
    columns |= dict.fromkeys(("tokens/s", "llama.cpp", "ratio", "GB/s", "of copy"), "right")
    subject = rows[0].test
    print(
        f"\n{subject['device']}, {subject['copy_bytes_per_second'] / 1e9:.1f} GB/s copied, torch {subject['torch']}\n"
    )
    print(table(columns, [row.cells() for row in rows]))
    for name, together in batches.items():
        print(f"\nsessions that step together, {name}\n\n{bench_batch.render(together, {})}")
    print()
    for name, seconds in starts.items():
        print(f"start to first token, {name}: {seconds:.2f} s, of which `import torch` {imports:.2f} s")


if __name__ == "__main__":
    sys.exit(main())
