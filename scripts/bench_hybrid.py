"""Measure routed experts on the host, for several numbers of layers. scripts/bench_hybrid.sh says how, and how to call it."""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import hybrid_timeline
import torch
from bench_commands import ROOT, ostinato, output_of, told
from bench_cpu import name_of
from check_artifact import anonymous_memory
from hybrid_results import Result, draw, findings, render

from ostinato.delegate import OstinatoError, Program, load_program
from ostinato.delegate.artifact.files import open_artifact
from ostinato.delegate.artifact.names import DECODE, META_CPU_MOE
from ostinato.delegate.artifact.paths import artifact_paths
from ostinato.delegate.code.method_code import MethodCode
from ostinato.delegate.errors import OptionError
from ostinato.export.models import read_config
from ostinato.runner.bench.bench import BenchSpec, make_spec, measure, sizes_of
from ostinato.runner.bench.device import device_memory, device_name
from ostinato.runner.bench.plot import check_plot
from ostinato.runner.bench.tables import Side, table
from ostinato.runner.model.model import Model

CONFIG = ROOT / "tests" / "assets" / "configs" / "Qwen3.5-35B-A3B"
GROUP_SIZE = 128
MAX_SEQ_LEN = 5120
# Larger than any cache: large server processors have caches of several 100 MB.
COPY_BYTES, COPY_ROUNDS = 1 << 30, 8


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse(words)
    try:
        results = run(arguments)
    except OstinatoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"\n{render(results)}")
    if arguments.plot:
        draw(results, arguments.plot)
    found = findings(results, arguments.n_gen) if has_goals(arguments) else []
    if arguments.json:
        records = [
            asdict(one) | {"copy_share": one.copy_share, "computing_share": one.computing_share} for one in results
        ]
        goals = [asdict(one) for one in found]
        arguments.json.write_text(json.dumps({"results": records, "goals": goals}, indent=1) + "\n")
    if found:
        columns: dict[str, Side] = {"goal": "left", "measured": "right", "wanted": "left"}
        print(f"\n{table(columns, [(one.what, one.found, one.wanted) for one in found])}\n")
    return told(found)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=CONFIG)
    parser.add_argument("--layers", type=numbers, metavar="N,N")
    parser.add_argument("--group-size", type=int, default=GROUP_SIZE)
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir()) / "hybrid")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("-p", "--n-prompt", type=numbers, default=[512, 2048], metavar="N,N")
    parser.add_argument("-n", "--n-gen", type=int, default=128)
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    parser.add_argument("--llama-bench", type=Path, metavar="FILE")
    parser.add_argument("--gguf", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--timeline", action="store_true")
    parser.add_argument("--skip-goals", action="store_true")
    parser.add_argument("--keep", action="store_true")
    arguments = parser.parse_args(words)
    if (arguments.llama_bench is None) != (arguments.gguf is None):
        parser.error("--llama-bench and --gguf go together")
    if arguments.n_gen < 1:
        parser.error(f"-n must be 1 or more, got {arguments.n_gen}")
    return arguments


def numbers(text: str) -> list[int]:
    return list(dict.fromkeys(int(word) for word in text.split(",")))


def run(arguments: argparse.Namespace) -> list[Result]:
    """Export and measure each N. Wrong options are refused before the first export.

    Raises:
        OstinatoError: lengths, layers or files do not fit, or an export or a load fails.
    """
    spec = make_spec(MAX_SEQ_LEN, arguments.n_prompt, [arguments.n_gen], [0], arguments.repetitions)
    if arguments.plot:
        check_plot(arguments.plot)
    if arguments.json and not arguments.json.absolute().parent.is_dir():
        raise OptionError(f"--json: no such folder: {arguments.json.absolute().parent}")
    for file in (arguments.llama_bench, arguments.gguf):
        if file is not None and not file.is_file():
            raise OptionError(f"no such file: {file}")
    config: Any = read_config(arguments.model)[1]
    layer_count = config.num_expert_layers
    if not layer_count:
        raise OptionError(f"--model {arguments.model}: {config.model_type!r} has no routed experts")
    layers = arguments.layers or [layer_count, layer_count // 2]
    if not all(0 <= count <= layer_count for count in layers):
        raise OptionError(
            f"--layers takes numbers from 0 to {layer_count}, the model's layers with experts; got {layers}"
        )
    arguments.output.mkdir(parents=True, exist_ok=True)
    token_fraction = config.moe.top_k / config.moe.experts
    results = []
    for count in layers:
        with exported(count, arguments) as (artifact, seconds):
            result = measured_alone(artifact, count, arguments.device, spec, token_fraction, arguments.timeline)
            peers = llama(count, arguments) if arguments.gguf else {}
            results.append(replace(result, peers=peers, export_seconds=seconds))
    return results


@contextmanager
def exported(layers: int, arguments: argparse.Namespace) -> Iterator[tuple[Path, float | None]]:
    """Provide the artifact of one N, and the seconds of its export, None if it was there. An artifact that was exported here
    is deleted at the end, unless --keep is given."""
    artifact: Path = arguments.output / str(layers)
    found, begin = artifact.exists(), time.perf_counter()
    if not found:
        quant = ["--quant", "int4", "--group-size", str(arguments.group_size)]
        where = ["--device", arguments.device, "--n-cpu-moe", str(layers), "--max-seq-len", str(MAX_SEQ_LEN)]
        model = ["--model", str(arguments.model), "--load-format", "dummy"]
        ostinato("export", *model, *quant, *where, "--output", str(artifact))
    seconds = time.perf_counter() - begin
    try:
        yield artifact, None if found else seconds
    finally:
        if not found and not arguments.keep:
            shutil.rmtree(artifact, ignore_errors=True)


def measured_alone(
    artifact: Path, layers: int, device: str, spec: BenchSpec, token_fraction: float, timeline: bool
) -> Result:
    """Call `measured` in a new process, so that only the memory of this artifact is counted."""
    print(f"measuring {artifact}", file=sys.stderr, flush=True)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(measured, artifact, layers, device, spec, token_fraction, timeline).result()
        except BrokenProcessPool:
            raise OptionError(f"the process that measured {artifact} was ended: is there enough memory?") from None


def measured(
    artifact: Path, layers: int, device: str, spec: BenchSpec, token_fraction: float, timeline: bool = False
) -> Result:
    """Load the artifact and measure it, with CUDA graphs.

    Args:
        token_fraction: fraction of a layer's experts that one token reads.
        timeline: whether to record what runs when, too.
    """
    with load_program(artifact, snapshots=2) as program:
        check(program, artifact, layers, device)
        vocabulary = sizes_of(program)[1]
        model = Model(program, cuda_graph=True)
        loaded = device_memory(program.device)
        mode = measure(model, spec, vocabulary, lambda line: print(line, file=sys.stderr, flush=True))
        # Read before the measurements that follow, which need memory that an answer does not need.
        used, host_memory = device_memory(program.device), anonymous_memory()
        return Result(
            layers=layers,
            device=device_name(program.device),
            host=device_name(torch.device("cpu")),
            samples={one.case.name: one.samples for one in mode.measurements},
            device_loaded=loaded.used if loaded else None,
            device_used=used.used if used else None,
            host_memory=host_memory,
            expert_bytes=token_fraction * bytes_of_host_experts(artifact),
            computing_seconds=computing_seconds(program, spec, vocabulary),
            copy_speed=host_copy_speed(),
            no_graph=mode.fallback_reason("tg"),
            timelines=hybrid_timeline.pictures(model, spec, vocabulary) if timeline and layers else [],
        )


def check(program: Program, artifact: Path, layers: int, device: str) -> None:
    """Raise OptionError if the artifact was there before, and is of another N or device."""
    found = program.metadata.get(META_CPU_MOE)
    if (found, program.device.type) != (layers, device):
        raise OptionError(
            f"{artifact} has the experts of {found} layers on the host and is for {program.device.type}, expected {layers} "
            f"and {device}: delete it, or choose another --output"
        )


def bytes_of_host_experts(artifact: Path) -> int:
    """Bytes of all constants of routed experts that code on the host reads."""
    parsed, constants = open_artifact(*artifact_paths(artifact), verify=False)
    record = parsed.methods[DECODE].record
    keys = {record.constants[name] for name in record.host_names & record.constants.keys()}
    return sum(constants.entries[key].nbytes for key in keys if ".experts." in key)


def computing_seconds(program: Program, spec: BenchSpec, vocabulary: int) -> float | None:
    """Seconds of a decode step in which code on the host runs; None if none does.

    The sum of each segment's median, over answers that are generated for this.
    """
    answers = BenchSpec(tuple(case for case in spec.cases if case.kind == "tg"), 1)
    seconds: dict[int, list[float]] = defaultdict(list)
    run_segment = MethodCode.run_segment

    def timed(code: MethodCode, index: int, values: dict[int, torch.Tensor]) -> None:
        begin = time.perf_counter()
        run_segment(code, index, values)
        if code.segments[index].on_host:
            seconds[index].append(time.perf_counter() - begin)

    with mock.patch.object(MethodCode, "run_segment", timed):
        measure(Model(program, cuda_graph=True), answers, vocabulary, lambda _: None)
    return sum(map(statistics.median, seconds.values())) or None


def host_copy_speed() -> float:
    """Bytes/s that a copy of 1 GiB reads and writes on the host, with torch's number of threads: the best of several."""
    # Not zeros: memory that was never written is one physical page over and over, and this page is in a cache.
    source = torch.ones(COPY_BYTES, dtype=torch.uint8)
    target = torch.ones_like(source)
    best = float("inf")
    for _ in range(COPY_ROUNDS):
        begin = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - begin)
    return 2 * COPY_BYTES / best


def llama(layers: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Test -> llama.cpp's tokens/s. Tests have the same names as ours."""
    lengths = ["-p", ",".join(map(str, arguments.n_prompt)), "-n", str(arguments.n_gen)]
    where = ["-ngl", "99", "-ncmoe", str(layers), "-fa", "1"]
    command = [str(arguments.llama_bench), "-m", str(arguments.gguf), *where, *lengths]
    command += ["-r", str(arguments.repetitions), "-o", "json"]
    print(f"$ {' '.join(command)}", file=sys.stderr, flush=True)
    return {name_of(test): test["avg_ts"] for test in json.loads(output_of(command))}


def has_goals(arguments: argparse.Namespace) -> bool:
    default = arguments.model.resolve() == CONFIG and arguments.group_size == GROUP_SIZE
    return default and arguments.device == "cuda" and not arguments.skip_goals


if __name__ == "__main__":
    sys.exit(main())
