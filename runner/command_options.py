"""What several commands take on their command lines."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ostinato.delegate.errors import OptionError

from .buckets import DEFAULT_BUCKETS

NO_GRAPH_NOTE = (
    "note: this artifact runs on the CPU, where there is no graph for --cuda_graph to capture: the same phases and checks, "
    "no gain"
)
_BUCKETS = "--prefill-buckets"


def add_prefill_buckets(parser: argparse.ArgumentParser) -> None:
    shown = ",".join(map(str, DEFAULT_BUCKETS))
    parser.add_argument(
        _BUCKETS,
        action="append",
        metavar="N,N",
        help="lengths of prompts that have a graph with --cuda_graph, shorter ones are padded; 0: none "
        f"(default: {shown} on a GPU, none on a CPU)",
    )


def prefill_buckets(arguments: argparse.Namespace) -> list[int] | None:
    """For `Model`; None: the default. Raises OptionError as `sizes`."""
    chosen = sizes(_BUCKETS, arguments.prefill_buckets)
    return None if chosen is None else [bucket for bucket in chosen if bucket]


def sizes(option: str, texts: Sequence[str] | None) -> list[int] | None:
    """`["512,1024"]` -> `[512, 1024]`; None stays None, for the default. Raises OptionError: something else in it."""
    if texts is None:
        return None
    words = ",".join(texts).split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise OptionError(f"{option} takes whole numbers, 0 or more, separated by commas; got {','.join(texts)!r}")
    return [int(word) for word in words]
