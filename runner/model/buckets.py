"""Buckets: lengths of prompts, and numbers of sessions in a step, that have a CUDA graph. Smaller ones are padded.

Rows of padding behind a prompt repeat the position of the last token and change nothing. So a padded prompt gives the same
result as the prompt alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from ostinato.delegate import InputError, Program
from ostinato.delegate.artifact.names import (
    META_MAX_SEQ_LEN,
    META_PADDED_PREFILL,
    PREFILL_STREAMED,
    ROWS,
    ROWS_METHODS,
    ROWS_STREAMED,
)
from ostinato.delegate.errors import OptionError

from .streamed import MIN_STREAMED_TOKENS

# Between 128 and 512 a row of padding costs more than the launches that a graph saves, so these buckets are closer together.
PREFILL_BUCKETS = (16, 32, 64, 128, 192, 224, 256, 384, 512)

# Numbers of sessions whose step has a graph. One session alone has a method of its own.
ROW_BUCKETS = (2, 4, 8, 16, 24, 32, *range(48, 129, 16), *range(160, 257, 32), 384, 512)

# Numbers of rows that give logits, in steps of prompts and single tokens together. The number of rows is a prompt's bucket.
OUTPUT_BUCKETS = (1, 8, 32, 128, 256)

# On a GPU, the most rows of a prompt alone that go through the method for rows. `prefill` has kernels for longer prompts.
MAX_PROMPT_ROWS = 256


def choose_prefill_buckets(
    wanted: Sequence[int] | None, program: Program, prefill: str, cuda_graph: bool
) -> tuple[int, ...]:
    """Choose the buckets of a model's prompts, ascending. No method needs to be loaded.

    Args:
        wanted: buckets that the caller asks for. None: with graphs and on a GPU, the default buckets that fit. On a CPU there
            are none, because no graph would make up for the rows of padding.
        program: the model's program.
        prefill: name of the method that takes prompts.
        cuda_graph: whether the model is loaded with graphs.

    Raises:
        OptionError: buckets without graphs, or for a program whose prefill takes no padding; a bucket that is not a number of
            tokens, or is too long.
    """
    takes_padding = bool(program.metadata.get(META_PADDED_PREFILL))
    tokens = program.method_inputs(prefill)[0]
    longest = tokens.shape[-1].max
    if wanted is None:
        # Longer prompts go to a method that has no graphs.
        longest = min(longest, MIN_STREAMED_TOKENS - 1) if PREFILL_STREAMED in program.method_names else longest
        fits = cuda_graph and takes_padding and program.device.type == "cuda"
        return tuple(bucket for bucket in PREFILL_BUCKETS if fits and bucket <= longest)
    if wanted and not cuda_graph:
        raise OptionError("prefill buckets are lengths of prompts that have a CUDA graph: they need cuda_graph")
    if wanted and not takes_padding:
        raise OptionError(
            f"prefill buckets need a program whose {prefill!r} takes rows of padding, and says so by {META_PADDED_PREFILL!r} "
            "in its metadata, as those of `ostinato export` do"
        )
    max_seq_len = int(program.metadata.get(META_MAX_SEQ_LEN, longest))
    for bucket in wanted:
        if type(bucket) is not int or bucket < 2:
            raise OptionError(f"a prefill bucket is a number of tokens from 2 on, got {bucket!r}")
        if bucket > max_seq_len:
            raise OptionError(f"prefill bucket {bucket} is longer than max_seq_len {max_seq_len}")
        if bucket >= MIN_STREAMED_TOKENS and PREFILL_STREAMED in program.method_names:
            raise OptionError(
                f"prefill bucket {bucket}: with experts on the host, prompts of {MIN_STREAMED_TOKENS} tokens or more go to "
                f"{PREFILL_STREAMED!r}, which has no graphs: name shorter ones"
            )
        if bucket > longest:
            option = "--max-seq-len" if longest >= max_seq_len - 1 else "--prefill-chunk"
            raise OptionError(
                f"prefill bucket {bucket} is longer than what one call of prefill takes, {longest}: name a shorter one, or "
                f"export with a larger {option}"
            )
    return tuple(sorted(set(wanted)))


def choose_row_buckets(wanted: Sequence[int] | None, program: Program, cuda_graph: bool) -> tuple[int, ...]:
    """Choose the numbers of sessions whose step has a graph, ascending.

    Args:
        wanted: buckets that the caller asks for. None: with graphs and on a GPU, ROW_BUCKETS up to the number of sessions.
        program: the model's program.
        cuda_graph: whether the model is loaded with graphs.

    Raises:
        OptionError: buckets without graphs, or for a program that steps one session at a time; a bucket that is not a number
            of rows, or is too large.
    """
    several = steps_several(program)
    methods = [name for name in ROWS_METHODS if name in program.method_names]
    max_rows = program.method_inputs(methods[-1])[0].shape[0].max if several else 1
    if ROWS_STREAMED in program.method_names:
        # More rows go to a method that has no graphs.
        max_rows = min(max_rows, MIN_STREAMED_TOKENS - 1)
    if wanted is None:
        if not several or not cuda_graph or program.device.type != "cuda":
            return ()
        needed = bisect_left(ROW_BUCKETS, min(program.capacity.slots, max_rows))
        return tuple(min(bucket, max_rows) for bucket in ROW_BUCKETS[: needed + 1])
    if wanted and not cuda_graph:
        raise OptionError("row buckets are numbers of sessions whose step has a CUDA graph: they need cuda_graph")
    if wanted and not several:
        raise OptionError(
            f"row buckets need a program with the method {ROWS!r}, loaded for several sessions, as in sessions=2"
        )
    for bucket in wanted:
        if type(bucket) is not int or not 2 <= bucket <= max_rows:
            raise OptionError(f"a row bucket is a number of sessions from 2 to {max_rows}, got {bucket!r}")
    return tuple(sorted(set(wanted)))


def steps_several(program: Program) -> bool:
    """Whether several of the program's sessions can step together."""
    return program.capacity.slots > 1 and ROWS in program.method_names


def bucket_of(buckets: Sequence[int], count: int) -> int | None:
    """Smallest bucket for `count` tokens or rows; None if all buckets are too small."""
    place = bisect_left(buckets, count)
    return buckets[place] if place < len(buckets) else None


def known_buckets(buckets: Sequence[int], wanted: Sequence[int] | None) -> tuple[int, ...]:
    """Return `wanted`, or all of `buckets` if `wanted` is None. Raises InputError: an unknown bucket."""
    for bucket in wanted or ():
        if bucket not in buckets:
            known = ", ".join(map(str, buckets)) or "none"
            raise InputError(f"unknown prefill bucket {bucket!r}; the model's are: {known}")
    return tuple(buckets if wanted is None else wanted)
