"""Answer a prompt with an artifact, or several prompts as the turns of one conversation.

stdout gets only the answers (or one JSON object for each, on a line of its own); progress, figures and errors go to stderr.
With --prompts, a file of prompts is answered with many sessions at once, see "A file of prompts" in runner/README.md.
Exit status: 0 done, 1 some lines of --prompts have an error, 2 an error in the arguments or the files, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import reprlib
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from ostinato.delegate.artifact.paths import artifact_paths
from ostinato.delegate.errors import InputError, OptionError, OstinatoError
from ostinato.delegate.sampling_params import SamplingParams
from ostinato.runner.imports import long_imports
from ostinato.runner.stream import DEFAULT_MAX_NEW_TOKENS, Result
from ostinato.runner.text.tokenizer import Message, Tokenizer

if TYPE_CHECKING:
    from ostinato.delegate.capacity import CapacityOptions
    from ostinato.runner.engine import Engine

# What --prompts makes room for on a CPU, and on a GPU, if the user does not say it.
SESSIONS_FOR_LINES = 16
FRACTION_FOR_LINES = 0.9

NO_GRAPH_NOTE = (
    "note: this artifact runs on the CPU, where there is no graph for --cuda_graph to capture: the same phases and checks, "
    "no gain"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", metavar="ARTIFACT", help="artifact folder")
    parser.set_defaults(usage_error=parser.error)
    parser.add_argument(
        "--prompt",
        dest="prompts",
        action="append",
        metavar="TEXT",
        help="what to ask; the chat template is applied. -: read it from standard input. Several prompts are the turns of "
        "one conversation: each is asked after the answer to the one before",
    )
    parser.add_argument(
        "--prompt-file",
        dest="prompts",
        action="append",
        type=Path,
        metavar="FILE",
        help="the same from a file in UTF-8 (here and from standard input, without the line end at its end)",
    )
    parser.add_argument(
        "--prompts",
        dest="prompt_lines",
        type=Path,
        metavar="FILE",
        help="a file of prompts to answer, in JSON Lines: requests of OpenAI's batch format, or objects with id, prompt or "
        "messages, and options. The options given here are for lines that do not say them. Without --sessions and "
        f"--gpu-memory-fraction, {SESSIONS_FOR_LINES} sessions on a CPU, and on a GPU as many as {FRACTION_FOR_LINES} of its "
        "free memory holds",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="the file to which --prompts adds its answers, a line for each as it ends (default: standard output). Prompts "
        "that it has answers to are not asked again, so the same command goes on after an interruption",
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message, which says how to answer")
    parser.add_argument(
        "--chat-template-kwargs",
        type=json_object,
        metavar="JSON",
        help="values for the chat template, for example '{\"enable_thinking\": false}' where the model's template has it",
    )
    parser.add_argument("--raw", action="store_true", help="no chat template: continue the text as it is")
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
    parser.add_argument("--json", action="store_true", help="print one JSON object per answer instead of the text")


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `Engine.load` that `run` and `bench` share."""
    parser.add_argument("--sessions", type=int, metavar="N", help="conversations to make room for (default: 1)")
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


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add one option per field of `SamplingParams`, with the field's name, type, default and help text."""
    hints = get_type_hints(SamplingParams)
    parsers: dict[str, Callable[[str], Any]] = {"logit_bias": json_object, "stop_token_ids": _token_ids}
    for item in fields(SamplingParams):
        # An option of type `int | None` takes an int, and is None when it is not given.
        (kind,) = {*(get_args(hints[item.name]) or (hints[item.name],))} - {type(None)}
        kind = parsers.get(item.name, kind)
        parser.add_argument(f"--{item.name.replace('_', '-')}", type=kind, default=item.default, **item.metadata)


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


def main(arguments: argparse.Namespace) -> int:
    if arguments.prompt_lines is not None:
        for prompt in arguments.prompts or ():
            option = "--prompt-file" if isinstance(prompt, Path) else "--prompt"
            raise OptionError(f"{option} is for one conversation, --prompts for a file of prompts: give one of the two")
    elif arguments.output is not None:
        raise OptionError("--output is for the answers to --prompts: give both, or redirect standard output")
    elif not arguments.prompts:
        arguments.usage_error("give a prompt: --prompt TEXT, --prompt -, --prompt-file FILE or --prompts FILE")
    params = SamplingParams(**{item.name: getattr(arguments, item.name) for item in fields(SamplingParams)})
    messages = _messages(arguments)
    if arguments.prompt_lines is not None:
        # Imported here: it imports torch.
        with long_imports():
            from .run_lines import run_lines

        return run_lines(arguments, params)
    prompts = _prompts(arguments.prompts, arguments.raw)
    # With buckets, the few prompts of this process would be padded and never captured.
    with load_engine(arguments, capacity_of, prefill_buckets=()) as engine:
        result = Result()
        for prompt in prompts:
            messages.append({"role": "user", "content": prompt})
            result = _answer(engine, messages, arguments, params, result)
            if result.finish_reason == "interrupted":
                return 130
            messages.append({"role": "assistant", "content": result.text})
    return 0


def load_engine(
    arguments: argparse.Namespace,
    capacity: Callable[[argparse.Namespace], CapacityOptions],
    prefill_buckets: Sequence[int] | None,
) -> Engine:
    """Return the artifact's engine with its tokenizer, and show how loading goes on.

    Args:
        capacity: returns what to make room for. It is called when torch has been imported.

    Raises:
        ArtifactError and others: see `Engine.load`.
    """
    folder = artifact_paths(arguments.artifact)[0].parent
    # The tokenizer is read while this thread imports torch, which takes longer.
    with long_imports(), ThreadPoolExecutor(1) as beside:
        tokenizer = beside.submit(Tokenizer, folder)
        from ostinato.runner.engine import Engine
        from ostinato.runner.load_bar import LoadBar

    with LoadBar() as bar:

        def begin(total: int) -> None:
            # A tokenizer that is missing is refused before gigabytes are loaded.
            tokenizer.result()
            bar.begin(total)

        engine = Engine.load(
            arguments.artifact,
            cuda_graph=arguments.cuda_graph,
            prefill_buckets=prefill_buckets,
            prefault=arguments.prefault,
            **{**asdict(capacity(arguments)), "snapshots": arguments.snapshots or 0},
            on_load=bar.advance,
            on_total=begin,
        )
    engine.tokenizer = tokenizer.result()
    if arguments.cuda_graph and engine.program.device.type == "cpu":
        say(NO_GRAPH_NOTE)
    return engine


def _messages(arguments: argparse.Namespace) -> list[Message]:
    """Return the messages before the first prompt. Raises OptionError: an option of the chat template with --raw."""
    for option, value in (("--system", arguments.system), ("--chat-template-kwargs", arguments.chat_template_kwargs)):
        if arguments.raw and value is not None:
            raise OptionError(f"{option} is for the chat template, which --raw leaves out: give one of the two")
    return [] if arguments.system is None else [{"role": "system", "content": arguments.system}]


def _prompts(given: Sequence[str | Path], raw: bool) -> list[str]:
    """Return the texts of prompts: "-" is read from standard input, and a path from its file.

    Raises:
        OptionError: a file that cannot be read; standard input twice.
        InputError: an empty text, or bytes that are not UTF-8.
    """
    if given.count("-") > 1:
        raise OptionError("--prompt - stands twice: standard input can be read once")
    prompts = [_read(item) if item == "-" or isinstance(item, Path) else item for item in given]
    if any(not (prompt if raw else prompt.strip()) for prompt in prompts):
        raise InputError("the prompt is empty")
    return prompts


def _read(source: str | Path) -> str:
    name, file = ("standard input", 0) if source == "-" else (str(source), source)
    try:
        with open(file, "rb", closefd=file != 0) as stream:
            return stream.read().decode().removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise OptionError(f"{name} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _answer(
    engine: Engine,
    messages: Sequence[Message],
    arguments: argparse.Namespace,
    params: SamplingParams,
    before: Result,
) -> Result:
    """Print the answer to the last of `messages`, and what was counted since the result `before`."""
    answer = engine.generate(
        "".join(message["content"] for message in messages) if arguments.raw else messages,
        raw=arguments.raw,
        chat_template_kwargs=arguments.chat_template_kwargs,
        max_new_tokens=arguments.max_new_tokens,
        sampling_params=params,
        ignore_eos=arguments.ignore_eos,
    )
    result = answer.result
    try:
        for text in answer:
            if not arguments.json:
                sys.stdout.write(text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        answer.close()
        result.finish_reason = "interrupted"
    except OstinatoError:
        # End the line of an unfinished answer before the error is printed.
        if result.text and not arguments.json:
            print(flush=True)
        raise
    if arguments.json:
        print(json.dumps(result.as_dict()), flush=True)
    else:
        sys.stdout.write("\n")
        sys.stdout.flush()
        say(figures(result, before))
    for name, stats in result.methods.items():
        if stats["fallbacks"] > before.methods.get(name, {}).get("fallbacks", 0):
            say(f"warning: {name}: a capture failed, what it was for has no graph: {stats['fallback_reason']}")
    return result


def figures(result: Result, before: Result | None = None) -> str:
    """One line: prompt and decode speed, and the number of steps in each phase since the result `before`."""
    from ostinato.delegate.graphs.state_machine import PHASE_OF_COUNTER

    decode, earlier = _decode_stats(result), _decode_stats(before)
    counts = {word: decode.get(counter, 0) - earlier.get(counter, 0) for counter, word in PHASE_OF_COUNTER.items()}
    steps = ", ".join(f"{count} {word}" for word, count in counts.items() if count) or "none"
    return (
        f"prompt: {result.prompt_tokens} tokens, {result.prefill_tokens_per_second:.1f} tokens/s | "
        f"decode: {len(result.tokens)} tokens, {result.decode_tokens_per_second:.1f} tokens/s | "
        f"steps: {steps} | {result.finish_reason}"
    )


def _decode_stats(result: Result | None) -> dict[str, Any]:
    return list(result.methods.values())[-1] if result and result.methods else {}


def say(text: str) -> None:
    """Print a line to stderr. Where stderr takes nothing, the answer on stdout still counts."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
