"""Options that several commands have, and the loading of an engine as `run` and `chat` do it."""

from __future__ import annotations

import argparse
import json
import reprlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from ostinato.delegate.artifact.digest import parse_digest
from ostinato.delegate.artifact.paths import artifact_paths
from ostinato.delegate.errors import OptionError
from ostinato.delegate.sampling_params import SamplingParams
from ostinato.runner.imports import long_imports
from ostinato.runner.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ostinato.delegate.capacity import CapacityOptions
    from ostinato.runner.engine import Engine

NO_GRAPH_NOTE = (
    "note: this artifact runs on the CPU, where there is no graph for --cuda_graph to capture: the same phases and checks, "
    "no gain"
)


def add_template_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the chat template."""
    parser.add_argument("--system", metavar="TEXT", help="the system message, which says how to answer")
    parser.add_argument(
        "--chat-template-kwargs",
        type=json_object,
        metavar="JSON",
        help="values for the chat template, for example '{\"enable_thinking\": false}' where the model's template has it",
    )


def add_graph_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cuda_graph",
        "--cuda-graph",
        action="store_true",
        help="take decode through warmup -> capture -> replay",
    )


def add_load_options(parser: argparse.ArgumentParser, sessions: str = "1") -> None:
    """Add the options of `Engine.load` that `run`, `chat`, `bench` and `serve` share. `sessions`: the default, in words."""
    parser.add_argument(
        "--digest",
        type=_digest,
        metavar="sha256:HEX",
        help="run this artifact alone, and none of the code of another one; inspect --verify prints it",
    )
    parser.add_argument(
        "--sessions", type=int, metavar="N", help=f"conversations to make room for (default: {sessions})"
    )
    parser.add_argument(
        "--kv-tokens",
        type=int,
        metavar="N",
        help="positions in the KV caches, all sessions together, in whole pages (default: max_seq_len for each)",
    )
    parser.add_argument(
        "--gpu-memory-fraction",
        type=float,
        metavar="F",
        help="fill this share of the GPU's memory beside the weights with sessions, or with positions of --sessions",
    )
    parser.add_argument(
        "--snapshots",
        type=int,
        metavar="N",
        help="rows of state for snapshots, as large as a session's slot each (default: what the command itself takes)",
    )
    parser.add_argument(
        "--prefault",
        action="store_true",
        help="read weights that stay in the mapped file once before anything runs (a CPU's, and --cpu-moe's)",
    )


def capacity_of(arguments: argparse.Namespace) -> CapacityOptions:
    """Return the capacity that the user asks for. Raises OptionError: a value that is not a number, or is out of range."""
    from ostinato.delegate.capacity import CapacityOptions

    return CapacityOptions(**{item.name: getattr(arguments, item.name) for item in fields(CapacityOptions)})


def add_sampling_options(parser: argparse.ArgumentParser, leave_out: Collection[str] = ()) -> None:
    """Add one option per field of `SamplingParams`, with the field's name, type, default and help text."""
    hints = get_type_hints(SamplingParams)
    parsers: dict[str, Callable[[str], Any]] = {"logit_bias": json_object, "stop_token_ids": _token_ids}
    for item in fields(SamplingParams):
        if item.name in leave_out:
            continue
        # An option of type `int | None` takes an int, and is None when it is not given.
        (kind,) = {*(get_args(hints[item.name]) or (hints[item.name],))} - {type(None)}
        kind = parsers.get(item.name, kind)
        parser.add_argument(f"--{item.name.replace('_', '-')}", type=kind, default=item.default, **item.metadata)


def sampling_params_of(arguments: argparse.Namespace) -> SamplingParams:
    """Return the parameters that the user asks for. Raises OptionError: a value out of range."""
    given = vars(arguments)
    return SamplingParams(**{item.name: given[item.name] for item in fields(SamplingParams) if item.name in given})


def _digest(text: str) -> str:
    try:
        return parse_digest(text)
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _token_ids(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"takes token ids with commas between them, got {reprlib.repr(text)}"
        ) from None


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"takes a JSON object, got {reprlib.repr(text)}")
    return value


def load_engine(
    arguments: argparse.Namespace,
    capacity: Callable[[argparse.Namespace], CapacityOptions] = capacity_of,
    snapshots: int = 0,
    prefill_buckets: Sequence[int] | None = (),
    check: Callable[[Tokenizer], None] | None = None,
) -> Engine:
    """Load the artifact with its tokenizer, and show the progress.

    Args:
        capacity: returns what to make room for. It is called when torch has been imported.
        snapshots: how many to make room for, if the user does not say it.
        prefill_buckets: see `Engine.load`. With buckets, the few prompts of a conversation
            would be padded and never captured.
        check: function that refuses a tokenizer, before gigabytes are loaded.

    Raises:
        ArtifactError: the tokenizer is missing; and what `Engine.load` raises.
    """
    # A wrong path is an error before anything is imported.
    artifact_paths(arguments.artifact)
    # The tokenizer is read while this thread imports torch, which takes longer.
    with long_imports(), ThreadPoolExecutor(1) as beside:
        tokenizer = beside.submit(Tokenizer.of_artifact, arguments.artifact, arguments.digest)
        from ostinato.runner.engine import Engine
        from ostinato.runner.load_bar import LoadBar

    rows = snapshots if arguments.snapshots is None else arguments.snapshots
    with LoadBar() as bar:

        def begin(total: int) -> None:
            found = tokenizer.result()
            if check is not None:
                check(found)
            bar.begin(total)

        engine = Engine.load(
            arguments.artifact,
            digest=arguments.digest,
            cuda_graph=arguments.cuda_graph,
            prefill_buckets=prefill_buckets,
            prefault=arguments.prefault,
            **{**asdict(capacity(arguments)), "snapshots": rows},
            on_load=bar.advance,
            on_total=begin,
        )
    engine.tokenizer = tokenizer.result()
    if arguments.cuda_graph and engine.program.device.type == "cpu":
        say(NO_GRAPH_NOTE)
    return engine


def warn_of_fallbacks(methods: Mapping[str, dict[str, Any]], before: Mapping[str, dict[str, Any]]) -> None:
    """Say which methods have failed to capture since the statistics `before`."""
    for name, stats in methods.items():
        if stats["fallbacks"] > before.get(name, {}).get("fallbacks", 0):
            say(f"warning: {name}: a capture failed, what it was for has no graph: {stats['fallback_reason']}")


def say(text: str) -> None:
    """Print a line to stderr. Where stderr takes nothing, the answer on stdout still counts."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
