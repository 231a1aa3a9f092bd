"""Checks of the options that the modes of `ostinato bench` share."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from ostinato.delegate.artifact.names import META_PAGE_SIZE
from ostinato.delegate.capacity import CapacityOptions
from ostinato.delegate.errors import OptionError
from ostinato.delegate.sampling_params import SamplingParams
from ostinato.runner.bench.bench import metadata_of, with_kv_tokens
from ostinato.runner.bench.plot import check_plot, check_writable

from .options import capacity_of


def check_sampling(given: Mapping[str, Any]) -> None:
    """Raises OptionError: not fields of `SamplingParams`, or a value that they do not take."""
    known = [item.name for item in fields(SamplingParams)]
    wrong = [name for name in given if name not in known]
    if wrong:
        raise OptionError(f"--sampling has {wrong[0]!r}, which is none of {', '.join(known)}")
    SamplingParams(**given)


def room_for(option: str, wanted: int, positions: int, arguments: argparse.Namespace) -> CapacityOptions:
    """Return the capacity that the caller asks for. By default it is what `wanted` sessions of `positions` tokens need.

    Raises:
        OptionError: a value that is not a number, or is out of range; fewer sessions than wanted.
    """
    capacity = capacity_of(arguments)
    sessions = wanted if capacity.sessions is None else capacity.sessions
    if sessions < wanted:
        raise OptionError(f"{option} needs {wanted} sessions, got --sessions {sessions}")
    page_size = int(metadata_of(arguments.artifact).get(META_PAGE_SIZE, 1))
    return with_kv_tokens(replace(capacity, sessions=sessions), sessions * -(-positions // page_size) * page_size)


def buckets_of(arguments: argparse.Namespace) -> list[int] | None:
    buckets = sizes("--prefill-buckets", arguments.prefill_buckets)
    return None if buckets is None else [bucket for bucket in buckets if bucket]


def check_files(arguments: argparse.Namespace) -> None:
    """Raises OptionError: --plot or --save names a file that cannot be written."""
    if arguments.plot:
        check_plot(arguments.plot)
    if arguments.save:
        if not arguments.save.absolute().parent.is_dir():
            raise OptionError(f"--save: no such folder: {arguments.save.absolute().parent}")
        check_writable("--save", arguments.save)


def sizes(option: str, texts: Sequence[str] | None) -> list[int] | None:
    """`["512,1024"]` -> `[512, 1024]`; None stays None, for the default."""
    if texts is None:
        return None
    words = ",".join(texts).split(",")
    # Python reads no number of thousands of digits.
    if not all(word.strip().isdecimal() and len(word) < 100 for word in words):
        raise OptionError(f"{option} takes whole numbers, 0 or more, separated by commas; got {','.join(texts)!r}")
    return [int(word) for word in words]
