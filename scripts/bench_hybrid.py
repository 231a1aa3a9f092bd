"""Measure routed experts on the host, for several numbers of layers. scripts/bench_hybrid.sh says how, and how to call it."""

from __future__ import annotations

import argparse
import itertools
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
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import hybrid_timeline
import torch
from bench_commands import ROOT, SLOWER, ostinato, output_of
from bench_cpu import name_of
from check_artifact import anonymous_memory
from check_speed import Finding

from ostinato.delegate import OstinatoError, Program, load_program
from ostinato.delegate.artifact.files import artifact_paths, open_artifact
from ostinato.delegate.artifact.names import DECODE, META_CPU_MOE
from ostinato.delegate.code.method_code import MethodCode
from ostinato.delegate.errors import OptionError
from ostinato.delegate.memory import size_text
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
OURS, PEER = "#0072b2", "#d55e00"


@dataclass(frozen=True)
class Result:
    """Results of one artifact.

    Attributes:
        layers: N, the number of layers that keep their routed experts on the host.
        device, host: names of the program's device and of the processor.
        samples: test, such as "tg128" -> tokens/s of each repetition.
        device_loaded, device_used: bytes in use on the GPU, by all processes, after the model was loaded and after all was
            measured; None on a CPU.
        host_memory: bytes of the process outside of mapped files, after all was measured; None if the system does not say.
        expert_bytes: bytes of routed experts that one token reads on the host.
        computing_seconds: seconds of one token in which these experts are computed; None if there are none.
        copy_speed: bytes/s that a host copy reads and writes, both counted, with all threads.
        no_graph: reason why decode, or some of it, has no graph; None if all went well.
        peers: test -> llama.cpp's tokens/s.
        timelines: what ran when, as text, in a token's step and in a prompt; empty unless asked for.
    """

    layers: int
    device: str
    host: str
    samples: dict[str, list[float]]
    device_loaded: int | None
    device_used: int | None
    host_memory: int | None
    expert_bytes: float
    computing_seconds: float | None
    copy_speed: float
    no_graph: str | None = None
    peers: dict[str, float] = field(default_factory=dict)
    timelines: list[str] = field(default_factory=list)

    @property
    def speeds(self) -> dict[str, float]:
        """Median tokens/s by test, decode first."""
        return {name: statistics.median(self.samples[name]) for name in sorted(self.samples, key=_decode_first)}

    @property
    def ratios(self) -> dict[str, float]:
        """Our speed over llama.cpp's by test, for the tests that both have."""
        return {name: speed / self.peers[name] for name, speed in self.speeds.items() if name in self.peers}

    @property
    def copy_share(self) -> float | None:
        """Bytes/s at which a whole step reads experts, as a fraction of the copy's; None if it reads none."""
        decode = next(iter(self.speeds.values()))
        return self.expert_bytes * decode / self.copy_speed or None

    @property
    def computing_share(self) -> float | None:
        """Like `copy_share`, but over the time in which experts are computed instead of the whole step; None if none are."""
        return self.expert_bytes / self.computing_seconds / self.copy_speed if self.computing_seconds else None


@dataclass(frozen=True)
class Goal:
    """Goals for one N: at least these tokens/s, at most these bytes."""

    decode: float
    prefill: float
    device_used: float | None = None
    host_memory: float | None = None


# N -> goals, for Qwen3.5-35B-A3B. Prefill is of 512 tokens.
GOALS = {40: Goal(95, 2800, 4.5e9, 1e9), 20: Goal(150, 3500)}
GOAL_PROMPT = 512


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
    missed = [one for one in found if not one.held]
    for one in missed:
        print(f"MISSED: {one.what}: {one.found}, wanted: {one.wanted}")
    return 1 if missed else 0


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
        with exported(count, arguments) as artifact:
            result = measured_alone(artifact, count, arguments.device, spec, token_fraction, arguments.timeline)
            results.append(replace(result, peers=llama(count, arguments) if arguments.gguf else {}))
    return results


@contextmanager
def exported(layers: int, arguments: argparse.Namespace) -> Iterator[Path]:
    """Provide the artifact of one N. An artifact that was exported here is deleted at the end, unless --keep is given."""
    artifact: Path = arguments.output / str(layers)
    found = artifact.exists()
    if not found:
        quant = ["--quant", "int4", "--group-size", str(arguments.group_size)]
        where = ["--device", arguments.device, "--n-cpu-moe", str(layers), "--max-seq-len", str(MAX_SEQ_LEN)]
        model = ["--model", str(arguments.model), "--load-format", "dummy"]
        ostinato("export", *model, *quant, *where, "--output", str(artifact))
    try:
        yield artifact
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
    with load_program(artifact) as program:
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


def findings(results: Sequence[Result], n_gen: int) -> list[Finding]:
    """Findings for the goals of each N that has some, then for the comparison with llama.cpp."""
    found = []
    for one in results:
        goal, where = GOALS.get(one.layers), f"{one.layers} layers, "
        if goal is None:
            continue
        for name, wanted in ((f"tg{n_gen}", goal.decode), (f"pp{GOAL_PROMPT}", goal.prefill)):
            speed = one.speeds.get(name)
            text = "not measured" if speed is None else f"{speed:,.1f} tokens/s"
            found.append(Finding(where + name, text, speed is not None and speed >= wanted, f"{wanted:,.0f} or more"))
        for what, used, bound in (
            ("GPU memory", one.device_used, goal.device_used),
            ("host memory", one.host_memory, goal.host_memory),
        ):
            if bound is not None:
                held = used is not None and used <= bound
                found.append(Finding(where + what, _size(used) or "not measured", held, f"{_size(bound)} or less"))
    for one in results:
        for name, ratio in one.ratios.items():
            what = f"{one.layers} layers, {name} over llama.cpp"
            found.append(Finding(what, f"{ratio:.3f}", ratio >= SLOWER, f"{SLOWER} or more: two runs differ by 3%"))
    return found


def render(results: Sequence[Result]) -> str:
    """The table, with the machine above it and the meaning of the columns below it. Empty columns are left out."""
    columns: dict[str, Side] = {"N": "right", "test": "left"}
    columns |= dict.fromkeys(("tokens/s", "llama.cpp", "ratio", "experts/token", "copy GB/s", "of copy"), "right")
    columns |= dict.fromkeys(("computing", "GPU memory", "host memory"), "right")
    rows = [row for one in results for row in _rows(one)]
    used = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    headers = list(columns)
    notes = [
        "N: layers whose routed experts are on the host; experts/token: bytes of them that a token reads there",
        "of copy: these bytes times tokens/s, over what a host copy reads and writes; computing: while they are computed",
        "GPU memory: in use when all was measured; host memory: of the process, beside the mapped file",
        *(f"{one.layers} layers: not all of decode has a graph: {one.no_graph}" for one in results if one.no_graph),
    ]
    body = table({headers[i]: columns[headers[i]] for i in used}, [[row[i] for i in used] for row in rows])
    pictures = [f"\nN = {one.layers}: {text}" for one in results for text in one.timelines]
    return "\n".join([f"{_machine(results[0])}, torch {torch.__version__}", "", body, "", *notes, *pictures])


def _rows(one: Result) -> list[list[str]]:
    """One row per test. The figures of decode, and those of the whole artifact, are in the first row."""
    share, computing = one.copy_share, one.computing_share
    whole = [
        size_text(one.expert_bytes, 1) if one.expert_bytes else "",
        f"{one.copy_speed / 1e9:,.1f}",
        "" if share is None else f"{share:.0%}",
        "" if computing is None else f"{computing:.0%}",
        _size(one.device_used),
        _size(one.host_memory),
    ]
    rows = []
    for name, speed in one.speeds.items():
        peer = [f"{one.peers[name]:,.1f}", f"{one.ratios[name]:.2f}"] if name in one.peers else ["", ""]
        rows.append([str(one.layers), name, f"{speed:,.1f}", *peer, *whole])
        whole = [""] * len(whole)
    return rows


def draw(results: Sequence[Result], path: Path) -> None:
    """Draw tokens/s over N, decode above prefill, ours and llama.cpp's. GPU memory is drawn at the side.

    The file's suffix says the format.
    """
    from matplotlib.figure import Figure

    results = sorted(results, key=lambda one: one.layers)
    figure = Figure(figsize=(11, 6), layout="constrained")
    figure.suptitle(f"Routed experts of N layers on the host: {_machine(results[0])}", fontsize=11)
    grid = figure.add_gridspec(2, 2, width_ratios=[1.4, 1])
    decode, prefill, memory = (figure.add_subplot(grid[place]) for place in ((0, 0), (1, 0), (slice(None), 1)))
    for axis, kind, title in ((decode, "tg", "decode"), (prefill, "pp", "prefill")):
        for name, marker in zip(
            (name for name in results[0].speeds if name.startswith(kind)), itertools.cycle("os^D"), strict=False
        ):
            _line(axis, results, [one.speeds[name] for one in results], f"{name}, ours", OURS, "-" + marker)
            _line(axis, results, [one.peers.get(name) for one in results], f"{name}, llama.cpp", PEER, "--" + marker)
        axis.set(title=title, ylabel="tokens/s")
        if axis.lines:
            axis.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    used = [None if one.device_used is None else one.device_used / 1e9 for one in results]
    _line(memory, results, used, "in use", OURS, "-o")
    memory.set(title="GPU memory in use" if any(used) else "GPU memory: there is no GPU", ylabel="GB")
    for axis in (decode, prefill, memory):
        axis.set(xlabel="N: layers with experts on the host", xticks=[one.layers for one in results])
        axis.set_ylim(0, 1.15 * axis.get_ylim()[1])
        axis.margins(x=0.15)
        axis.yaxis.set_major_formatter("{x:,.10g}")
        axis.grid(axis="y", alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    print(f"wrote {path}", file=sys.stderr)


def _line(
    axis: Any, results: Sequence[Result], values: Sequence[float | None], name: str, colour: str, style: str
) -> None:
    """Draw the values over N. Missing values are left out."""
    points = [(one.layers, value) for one, value in zip(results, values, strict=True) if value is not None]
    if points:
        axis.plot(*zip(*points, strict=True), style, color=colour, label=name)


def _machine(one: Result) -> str:
    return one.host if one.device == one.host else f"{one.device}, {one.host}"


def _decode_first(name: str) -> tuple[bool, int]:
    """Sort key for the names of tests, such as "tg128", "pp512", "pp2048"."""
    return name.startswith("pp"), int(name[2:])


def _size(nbytes: float | None) -> str:
    return "" if nbytes is None else size_text(nbytes, 2)


if __name__ == "__main__":
    sys.exit(main())
