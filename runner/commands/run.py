"""Answer a prompt with an artifact.

stdout gets only the answer (or one JSON object); progress, figures and errors go to stderr.
Exit status: 0 done, 2 an error in the arguments or the files, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, fields
from typing import get_args, get_type_hints

from ostinato.delegate.capacity import CapacityOptions
from ostinato.delegate.errors import OstinatoError
from ostinato.delegate.graphs.state_machine import PHASE_OF_COUNTER
from ostinato.delegate.sampling import SamplingParams
from ostinato.runner.engine import DEFAULT_MAX_NEW_TOKENS, Engine, Result
from ostinato.runner.load_bar import LoadBar

NO_GRAPH_NOTE = (
    "note: this artifact runs on the CPU, where there is no graph for --cuda_graph to capture: the same phases and checks, "
    "no gain"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", metavar="ARTIFACT", help="artifact folder")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="what to ask; the chat template is applied")
    parser.add_argument("--raw", action="store_true", help="no chat template: continue the prompt as it is")
    parser.add_argument(
        "--cuda_graph",
        "--cuda-graph",
        action="store_true",
        help="take decode through warmup -> capture -> replay",
    )
    add_load_options(parser)
    parser.add_argument(
        "--max-new-tokens", type=int, default=DEFAULT_MAX_NEW_TOKENS, metavar="N", help="default: %(default)s"
    )
    _add_sampling_options(parser)
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the end-of-sequence token")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `Engine.load` that `run` and `bench` share."""
    parser.add_argument("--sessions", type=int, metavar="N", help="conversations to make room for (default: 1)")
    parser.add_argument(
        "--kv-tokens",
        type=int,
        metavar="N",
        help="positions in the KV caches, all sessions together (default: max_seq_len for each)",
    )
    parser.add_argument(
        "--gpu-memory-fraction",
        type=float,
        metavar="F",
        help="fill this share of the GPU's memory beside the weights with sessions, or with positions of --sessions",
    )
    parser.add_argument(
        "--prefault",
        action="store_true",
        help="read weights that stay in the mapped file once before anything runs (a CPU's, and --cpu-moe's)",
    )


def capacity_of(arguments: argparse.Namespace) -> CapacityOptions:
    """Return the capacity that the user asks for. Raises OptionError: a value that is not a number, or is out of range."""
    return CapacityOptions(**{item.name: getattr(arguments, item.name) for item in fields(CapacityOptions)})


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add one option per field of `SamplingParams`, with the field's name, type, default and help text."""
    hints = get_type_hints(SamplingParams)
    for item in fields(SamplingParams):
        # An option of type `int | None` takes an int, and is None when it is not given.
        (kind,) = {*(get_args(hints[item.name]) or (hints[item.name],))} - {type(None)}
        parser.add_argument(f"--{item.name.replace('_', '-')}", type=kind, default=item.default, **item.metadata)


def main(arguments: argparse.Namespace) -> int:
    params = SamplingParams(**{item.name: getattr(arguments, item.name) for item in fields(SamplingParams)})
    with LoadBar() as bar:
        loaded = Engine.load(
            arguments.artifact,
            cuda_graph=arguments.cuda_graph,
            # With buckets, the one prompt of this process would be padded and never captured.
            prefill_buckets=(),
            prefault=arguments.prefault,
            **asdict(capacity_of(arguments)),
            on_load=bar.advance,
            on_total=bar.begin,
        )
    with loaded as engine:
        if arguments.cuda_graph and engine.program.device.type == "cpu":
            _say(NO_GRAPH_NOTE)
        texts = engine.generate(
            arguments.prompt,
            raw=arguments.raw,
            max_new_tokens=arguments.max_new_tokens,
            sampling_params=params,
            ignore_eos=arguments.ignore_eos,
        )
        interrupted = False
        try:
            for text in texts:
                if not arguments.json:
                    sys.stdout.write(text)
                    sys.stdout.flush()
        except KeyboardInterrupt:
            interrupted = True
            texts.close()
        except OstinatoError:
            # End the line of an unfinished answer before the error is printed.
            if engine.last.text and not arguments.json:
                print(flush=True)
            raise
        result = engine.last
    if arguments.json:
        print(json.dumps(result.as_dict(), ensure_ascii=False))
    else:
        sys.stdout.write("\n")
        sys.stdout.flush()
        _say(figures(result))
    for name, stats in result.methods.items():
        if stats["fallbacks"]:
            _say(f"warning: {name}: a capture failed, what it was for has no graph: {stats['fallback_reason']}")
    return 130 if interrupted else 0


def figures(result: Result) -> str:
    """One line: prompt and decode speed, and the number of steps in each phase."""
    decode = list(result.methods.values())[-1] if result.methods else {}
    counts = {word: decode.get(counter, 0) for counter, word in PHASE_OF_COUNTER.items()}
    steps = ", ".join(f"{count} {word}" for word, count in counts.items() if count) or "none"
    return (
        f"prompt: {result.prompt_tokens} tokens, {result.prefill_tokens_per_second:.1f} tokens/s | "
        f"decode: {len(result.tokens)} tokens, {result.decode_tokens_per_second:.1f} tokens/s | "
        f"steps: {steps} | {result.finish_reason}"
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
