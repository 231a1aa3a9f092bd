"""Answer a prompt with an artifact, or several prompts as the turns of one conversation.

stdout gets only the answers (or one JSON object for each, on a line of its own); progress, figures and errors go to stderr.
With --prompts, a file of prompts is answered with many sessions at once, see "A file of prompts" in runner/README.md.
Exit status: 0 done, 1 some lines of --prompts have an error, 2 an error in the arguments or the files, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostinato.delegate.errors import InputError, OptionError, OstinatoError
from ostinato.delegate.sampling_params import SamplingParams
from ostinato.runner.imports import long_imports
from ostinato.runner.stream import DEFAULT_MAX_NEW_TOKENS, Result
from ostinato.runner.text.tokenizer import Message

from .options import (
    add_graph_option,
    add_load_options,
    add_sampling_options,
    add_template_options,
    load_engine,
    sampling_params_of,
    say,
    warn_of_fallbacks,
)

if TYPE_CHECKING:
    from ostinato.runner.engine import Engine

# What --prompts makes room for on a CPU, and on a GPU, if the user does not say it.
SESSIONS_FOR_LINES = 16
FRACTION_FOR_LINES = 0.9
# Rows of state for what the prompts begin with, such as one system prompt.
SNAPSHOTS_FOR_LINES = 8


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
    add_template_options(parser)
    parser.add_argument("--raw", action="store_true", help="no chat template: continue the text as it is")
    add_graph_option(parser)
    add_load_options(parser)
    parser.add_argument(
        "--max-new-tokens", type=int, default=DEFAULT_MAX_NEW_TOKENS, metavar="N", help="default: %(default)s"
    )
    add_sampling_options(parser)
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the end-of-sequence token")
    parser.add_argument("--json", action="store_true", help="print one JSON object per answer instead of the text")


def main(arguments: argparse.Namespace) -> int:
    if arguments.prompt_lines is not None:
        for prompt in arguments.prompts or ():
            option = "--prompt-file" if isinstance(prompt, Path) else "--prompt"
            raise OptionError(f"{option} is for one conversation, --prompts for a file of prompts: give one of the two")
    elif arguments.output is not None:
        raise OptionError("--output is for the answers to --prompts: give both, or redirect standard output")
    elif not arguments.prompts:
        arguments.usage_error("give a prompt: --prompt TEXT, --prompt -, --prompt-file FILE or --prompts FILE")
    params = sampling_params_of(arguments)
    messages = _messages(arguments)
    if arguments.prompt_lines is not None:
        # Imported here: it imports torch.
        with long_imports():
            from .run_lines import run_lines

        return run_lines(arguments, params)
    prompts = _prompts(arguments.prompts, arguments.raw)
    with load_engine(arguments) as engine:
        result = Result()
        for prompt in prompts:
            messages.append({"role": "user", "content": prompt})
            result = _answer(engine, messages, arguments, params, result)
            if result.finish_reason == "interrupted":
                return 130
            messages.append({"role": "assistant", "content": result.text})
    return 0


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
    if result.finish_reason == "kv_tokens":
        say("note: there are no more pages, so the answer ends here: give a larger --kv-tokens")
    warn_of_fallbacks(result.methods, before.methods)
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
