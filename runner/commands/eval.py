"""Measure an artifact's perplexity over a text, in sliding windows.

A window begins every --stride tokens; each token is predicted in the first window that has it. Of two artifacts of
one model, the one with the lower perplexity has lost less. Perplexities of models with different tokenizers do not compare.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from ostinato.delegate.errors import InputError, OptionError
from ostinato.runner.engine import Engine
from ostinato.runner.load_bar import LoadBar

DEFAULT_WINDOW = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", metavar="ARTIFACT", help="artifact folder")
    parser.add_argument("--text", required=True, metavar="FILE", help="UTF-8 text")
    parser.add_argument(
        "--window",
        type=int,
        metavar="N",
        help=f"tokens of a window (default: what the artifact allows, at most {DEFAULT_WINDOW})",
    )
    parser.add_argument("--stride", type=int, metavar="N", help="tokens between windows (default: half a window)")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N tokens of the text")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: argparse.Namespace) -> int:
    from tqdm import tqdm

    from ostinato.runner.bench.perplexity import perplexity

    text = _read(Path(arguments.text))
    with LoadBar() as bar:
        engine = Engine.load(arguments.artifact, on_load=bar.advance, on_total=bar.begin)
    with engine:
        window, stride = _window(arguments, engine.model.max_seq_len)
        tokens = engine.encode_prompt(text, raw=True)[: arguments.limit]
        if len(tokens) < 2:
            raise InputError(f"a text of 2 tokens or more is needed, this has {len(tokens)}")
        begin = time.perf_counter()
        with tqdm(total=len(tokens), unit=" tokens", leave=False, disable=None, file=sys.stderr) as progress:
            found = perplexity(engine.sessions, tokens, window, stride, progress.update)
        seconds = time.perf_counter() - begin
    values = {
        "perplexity": found.value,
        "tokens": found.tokens,
        "windows": found.windows,
        "window": window,
        "stride": stride,
        "seconds": seconds,
    }
    if arguments.json:
        print(json.dumps(values))
    else:
        print(
            f"perplexity {found.value:.4f} over {found.tokens:,} tokens, in {found.windows} windows of {window} every "
            f"{stride}; {seconds:.1f} s"
        )
    return 0


def _window(arguments: argparse.Namespace, longest: int) -> tuple[int, int]:
    window = min(longest, DEFAULT_WINDOW) if arguments.window is None else arguments.window
    if not 2 <= window <= longest:
        raise OptionError(f"--window must be 2 to {longest}, the artifact's max_seq_len; got {window}")
    stride = max(1, window // 2) if arguments.stride is None else arguments.stride
    if not 1 <= stride <= window:
        raise OptionError(f"--stride must be 1 to {window}, the window; got {stride}")
    if arguments.limit is not None and arguments.limit < 2:
        raise OptionError(f"--limit must be 2 or more, got {arguments.limit}")
    return window, stride


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    if not text:
        raise InputError(f"{path} is empty")
    return text
