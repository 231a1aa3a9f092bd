"""Measure how fast an artifact runs, as llama-bench does: without and with --cuda_graph, in one run.

Tests: pp512 prefills 512 tokens, tg128 decodes 128 tokens one by one. "@ d4000": the test starts after 4,000 other tokens.
The figures do not include loading, warm-up, capture and filling the state. The device is synchronised before and after
each repetition, not for each token.

With --batch, several sessions step together instead, as in llama-batched-bench: all start at once with a prompt of -p
tokens, and decode -n tokens each. With --mixed 32+224, a step of 32 sessions with -p tokens each is timed, a prompt of 224
tokens, and both in one step. With --load, callers send requests of random tokens to an engine in a process of its own, which
schedules them: how fast answers come, and how evenly. With --load --url http://HOST:PORT they are sent to a server; there is
no ARTIFACT then.

stdout gets the table (or another --output); progress, notes and errors go to stderr.
Exit status: 0 done, 2 an error in the arguments or the files, 130 interrupted.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import torch

from ostinato.delegate import Program, load_program
from ostinato.delegate.artifact.names import META_DTYPE, META_MODEL_TYPE, META_N_LAYERS
from ostinato.delegate.errors import OptionError
from ostinato.runner.bench.batch_bench import (
    BatchMeasurement,
    BatchSpec,
    check_length,
    draw_batches,
    measure_batches,
    render_batches,
)
from ostinato.runner.bench.bench import (
    DEFAULT_ANSWERS,
    DEFAULT_DEPTHS,
    DEFAULT_PROMPTS,
    DEFAULT_REPETITIONS,
    BenchSpec,
    load_for_bench,
    make_spec,
    measure,
    sizes_of,
)
from ostinato.runner.bench.device import copy_speed, device_memory, device_name
from ostinato.runner.bench.mixed_bench import MixedMeasurement, MixedSpec, measure_mixed, render_mixed
from ostinato.runner.bench.plot import draw
from ostinato.runner.bench.report import FORMATS, Reads, Report, Subject, render
from ostinato.runner.model.buckets import PREFILL_BUCKETS, choose_prefill_buckets
from ostinato.runner.model.methods import method_names
from ostinato.runner.model.model import Model

from . import bench_load
from .bench_options import buckets_of, check_files, check_sampling, room_for, sizes
from .options import NO_GRAPH_NOTE, add_load_options, capacity_of, json_object, say

_MODES = {"both": (False, True), "off": (False,), "on": (True,)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", metavar="ARTIFACT", nargs="?", help="artifact folder; none with --url")
    for flags, what, default in (
        (("-p", "--n-prompt"), "lengths of prompts to prefill", DEFAULT_PROMPTS),
        (("-n", "--n-gen"), "numbers of tokens to decode", DEFAULT_ANSWERS),
        (("-d", "--n-depth"), "tokens in the state before each test", DEFAULT_DEPTHS),
    ):
        none = "; 0: none" if flags[0] != "-d" else ""
        shown = ",".join(map(str, default))
        parser.add_argument(
            *flags, action="append", metavar="N,N", help=f"{what}, separated by commas{none} (default: {shown})"
        )
    parser.add_argument(
        "-r",
        "--repetitions",
        type=int,
        default=DEFAULT_REPETITIONS,
        metavar="N",
        help="how often each test is timed (default: %(default)s)",
    )
    parser.add_argument(
        "--cuda_graph",
        "--cuda-graph",
        type=_modes,
        nargs="?",
        const=(True,),
        metavar="on|off|both",
        help="measure with CUDA graphs (on, or the bare option), without (off), or both and their ratio (default; with "
        "--load: on if the artifact runs on a GPU)",
    )
    parser.add_argument(
        "--prefill-buckets",
        action="append",
        metavar="N,N",
        help="lengths of prompts that have a graph with --cuda_graph, shorter ones are padded; 0: none "
        f"(default: {','.join(map(str, PREFILL_BUCKETS))} on a GPU, none on a CPU)",
    )
    parser.add_argument(
        "--batch",
        action="append",
        metavar="N,N",
        help="numbers of sessions that step together, separated by commas; -p and -n are one number then (default: 128 each)",
    )
    parser.add_argument(
        "--sampling",
        action="append",
        type=json_object,
        metavar="JSON",
        help='with --batch or --load: sample so, as in \'{"temperature": 0.8, "top_p": 0.95}\'; several are measured in turn '
        "with --batch (default: the most likely token)",
    )
    parser.add_argument(
        "--mixed",
        action="append",
        metavar="S+P,S+P",
        help="numbers of sessions and of tokens of a prompt that rides in their step; -p is one number then (default: 128)",
    )
    bench_load.add_options(parser)
    add_load_options(parser)
    parser.add_argument(
        "-o", "--output", choices=FORMATS, default="table", help="what to print; json has every sample (default: table)"
    )
    parser.add_argument("--save", type=Path, metavar="FILE.json", help="write the json output to a file as well")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="draw tokens/s over depth, and the time of the first answer by phase; with --batch and --load, over the numbers "
        "of sessions (needs ostinato[plot])",
    )


def main(arguments: argparse.Namespace) -> int:
    if (arguments.artifact is None) == (arguments.url is None):
        raise OptionError("bench takes an ARTIFACT or, with --load, the --url of a server")
    if arguments.load:
        return bench_load.main(arguments)
    bench_load.check_not_given(arguments)
    if arguments.sampling is not None and arguments.batch is None:
        raise OptionError("--sampling says how the sessions of --batch and of --load sample: give one of these, too")
    if arguments.mixed is not None:
        return _main_of_mixed(arguments)
    if arguments.batch is not None:
        return _main_of_batches(arguments)
    modes = arguments.cuda_graph or _MODES["both"]
    prompts, answers = sizes("-p", arguments.n_prompt), sizes("-n", arguments.n_gen)
    depths = sizes("-d", arguments.n_depth)
    buckets, capacity = buckets_of(arguments), capacity_of(arguments)
    check_files(arguments)
    begin = time.perf_counter()
    with load_for_bench(arguments.artifact, capacity, arguments.digest) as program:
        max_seq_len, vocabulary = sizes_of(program)
        choose_prefill_buckets(buckets, program, method_names(program)[0], True in modes)
        spec = make_spec(max_seq_len, prompts, answers, depths, arguments.repetitions)
        for reason in spec.skipped:
            say(f"note: left out: {reason}")
        _note_of_graphs(program, modes)
        report = _measure_all(program, arguments, modes, buckets, spec, vocabulary, begin)
    print(render(report, arguments.output))
    if arguments.save:
        arguments.save.write_text(render(report, "json") + "\n")
    if arguments.plot:
        draw(report, arguments.plot)
        say(f"wrote {arguments.plot}")
    return 0


def _main_of_batches(arguments: argparse.Namespace) -> int:
    batches = sizes("--batch", arguments.batch) or []
    prompts, answers = sizes("-p", arguments.n_prompt) or [128], sizes("-n", arguments.n_gen) or [128]
    if len(prompts) != 1 or len(answers) != 1 or arguments.n_depth:
        raise OptionError("with --batch, -p and -n take one number each, and there is no -d")
    modes, buckets = arguments.cuda_graph or _MODES["both"], buckets_of(arguments)
    sampling = tuple(arguments.sampling or [{}])
    for given in sampling:
        check_sampling(given)
    spec = BatchSpec(tuple(sorted(set(batches))), prompts[0], answers[0], arguments.repetitions, sampling)
    capacity = room_for("--batch", spec.max_batch, spec.positions, arguments)
    check_files(arguments)
    with load_program(arguments.artifact, digest=arguments.digest, **asdict(capacity)) as program:
        max_seq_len, vocabulary = sizes_of(program)
        check_length(spec.positions, max_seq_len)
        choose_prefill_buckets(buckets, program, method_names(program)[0], True in modes)
        _note_of_graphs(program, modes)
        rows: list[BatchMeasurement] = []
        for cuda_graph in modes:
            model = Model(program, cuda_graph, prefill_buckets=buckets if cuda_graph else None)
            if arguments.prefault and not rows:
                program.prefault()
            rows += measure_batches(model, spec, vocabulary, say)
        rows.sort(key=lambda row: (row.batch, row.cuda_graph))
        print(render_batches(program, rows, arguments.output))
        if arguments.save:
            arguments.save.write_text(render_batches(program, rows, "json") + "\n")
        if arguments.plot:
            draw_batches(program, rows, arguments.plot)
            say(f"wrote {arguments.plot}")
    return 0


def _main_of_mixed(arguments: argparse.Namespace) -> int:
    words = ",".join(arguments.mixed).split(",")
    pairs = [sizes("--mixed", [word.replace("+", ",")]) or [] for word in words]
    depths = sizes("-p", arguments.n_prompt) or [128]
    if any(len(pair) != 2 for pair in pairs) or len(depths) != 1 or arguments.n_depth or arguments.plot:
        raise OptionError(
            "--mixed takes pairs such as 32+224; with it -p takes one number, and there is no -d or --plot"
        )
    modes, buckets = arguments.cuda_graph or _MODES["both"], buckets_of(arguments)
    spec = MixedSpec(tuple((pair[0], pair[1]) for pair in pairs), depths[0], arguments.repetitions)
    capacity = room_for("--mixed", spec.sessions, spec.positions, arguments)
    check_files(arguments)
    with load_program(arguments.artifact, digest=arguments.digest, **asdict(capacity)) as program:
        max_seq_len, vocabulary = sizes_of(program)
        check_length(spec.positions, max_seq_len)
        _note_of_graphs(program, modes)
        rows: list[MixedMeasurement] = []
        for cuda_graph in modes:
            model = Model(program, cuda_graph, prefill_buckets=buckets if cuda_graph else None)
            rows += measure_mixed(model, spec, vocabulary, say)
        rows.sort(key=lambda row: (row.sessions, row.prompt, row.cuda_graph))
        print(render_mixed(program, rows, spec.depth, arguments.output))
        if arguments.save:
            arguments.save.write_text(render_mixed(program, rows, spec.depth, "json") + "\n")
    return 0


def _note_of_graphs(program: Program, modes: Sequence[bool]) -> None:
    if True in modes and program.device.type == "cpu":
        say(NO_GRAPH_NOTE)


def _measure_all(
    program: Program,
    arguments: argparse.Namespace,
    modes: Sequence[bool],
    buckets: Sequence[int] | None,
    spec: BenchSpec,
    vocabulary: int,
    begin: float,
) -> Report:
    """Load a model for each mode and measure with it. All models share the constants of the one program."""
    say(f"loading {arguments.artifact}")
    total = len(modes) * len(spec.cases)
    counter = itertools.count(1)

    def say_number(line: str) -> None:
        say(f"[{next(counter):>{len(str(total))}}/{total}] {line}")

    results = []
    subject = None
    for cuda_graph in modes:
        model = Model(program, cuda_graph, prefill_buckets=buckets if cuda_graph else None)
        if arguments.prefault and subject is None:
            program.prefault()
        subject = subject or _subject(model, arguments.artifact, time.perf_counter() - begin)
        results.append(measure(model, spec, vocabulary, say_number))
    assert subject is not None
    return Report(subject, tuple(results))


def _subject(model: Model, path: str, load_seconds: float) -> Subject:
    program = model.program
    # Before `copy_speed`, whose buffers would count.
    memory = device_memory(program.device)
    return Subject(
        artifact=path,
        model_type=str(program.metadata.get(META_MODEL_TYPE, "a program")),
        dtype=str(program.metadata.get(META_DTYPE, "unknown dtype")),
        n_layers=program.metadata.get(META_N_LAYERS),
        max_seq_len=model.max_seq_len,
        constant_bytes=program.stats.constant_bytes,
        state_bytes=program.stats.mutable_buffer_bytes,
        load_seconds=load_seconds,
        device=device_name(program.device),
        torch=torch.__version__,
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
        memory=memory,
        copy=copy_speed(program.device),
        reads=Reads.of(program),
    )


def _modes(word: str) -> tuple[bool, ...]:
    if word not in _MODES:
        # The user wrote `--cuda_graph ARTIFACT`, as for `run`.
        raise argparse.ArgumentTypeError(
            f"takes on, off or both, got {word!r}: write ARTIFACT first, or --cuda_graph=on"
        )
    return _MODES[word]
