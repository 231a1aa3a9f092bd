"""Contents of a session file: a session's bookkeeping in the header, and in the body its rows as offloading moves them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ostinato.delegate import ClosedError, Growth, Program, StateRows
from ostinato.delegate.artifact.records import dtype_from_name, dtype_name
from ostinato.delegate.errors import SessionFileError, first_line
from ostinato.delegate.sampling_params import SamplingParams, TokenLogprobs

from .history import History
from .offloaded import Offloaded, OnHost
from .pages import Kept, Pages
from .session import SessionState
from .session_file import opened_session, read_rows, write_session

# Says whether a file's state is to be read, when its pages, by group, and its bookkeeping are known.
Wanted = Callable[[Sequence[Kept], SessionState], bool]


class SavedState:
    """Writes state on the host to files, and reads it. Any thread may.

    Args:
        program: the program whose state it is.
        pages: its pages.
    """

    def __init__(self, program: Program, pages: Pages) -> None:
        self._program, self._pages = program, pages

    def packed(self, given: OnHost) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """The header and the body of a file. See `write_session`."""
        return self._header(*given), self._body(given.offloaded)

    def write(self, path: Path, given: OnHost) -> None:
        """Write state whose copy has ended to a file. Raises SessionFileError: it cannot be written."""
        write_session(path, *self.packed(given))

    def tokens_of(self, path: Path) -> list[int]:
        """The tokens after which a file has state. Raises SessionFileError: see `Engine.load_session`."""
        with opened_session(path, self._program.id) as (header, _):
            tokens: list[int] = header["tokens"]
            return tokens[: header["seen"]]

    def parts(self, logits: torch.Tensor | None) -> list[tuple[str, StateRows]]:
        """The rows that a session has, with names: of its slot, of each page group, and its logits."""
        program = self._program
        growth = Growth.SLOTS if program.capacity.slot_bytes else Growth.FIXED
        # Block tables are written anew: the pages have other numbers.
        found = [("slot", program.rows_of(growth, tables=False))]
        found += [(f"pages {name}", program.rows_of(Growth.PAGES, name)) for name in self._pages.names]
        return found if logits is None else [*found, ("logits", StateRows({"logits": logits[None]}))]

    def _header(self, offloaded: Offloaded, state: SessionState) -> dict[str, Any]:
        """The values, in JSON's types, that `read` needs beside the rows."""
        # A token that was sampled from logits is sampled again.
        pending = [] if offloaded.logits is not None else state.pending
        logits = offloaded.logits
        return {
            "artifact": self._program.id,
            "tokens": state.history.tokens,
            "logprobs": state.logprobs,
            "pending": [(tokens.tokens()[number], tokens.logprobs(number)) for tokens, number in pending],
            "seen": state.seen,
            "prompt_end": state.prompt_end,
            "sampling_params": asdict(state.sampling_params),
            "pages": {
                name: (kept.first, kept.all_pages)
                for name, kept in zip(self._pages.names, offloaded.pages, strict=True)
            },
            "logits": None if logits is None else [len(logits), dtype_name(logits.dtype)],
            "rows": self._layout(logits),
        }

    def _body(self, offloaded: Offloaded) -> list[torch.Tensor]:
        """The bytes of a file: those of a session that shares no pages."""
        body: list[torch.Tensor] = []
        begin = 0
        copies = [None, *(kept.full for kept in offloaded.pages), None]
        counts = [1, *(kept.pages for kept in offloaded.pages), 1]
        for sizes, full, count in zip(self._layout(offloaded.logits).values(), copies, counts, strict=False):
            chunks = [(offloaded.rows.data, begin, count)]
            while full is not None:
                chunks.append((full.rows.data, 0, full.count))
                full = full.before
            before = 0
            for row_bytes in sizes.values():
                for data, first, rows in reversed(chunks):
                    body += _part_of(data, first + before * rows, row_bytes * rows)
                before += row_bytes
            begin += before * count
        return body

    def read(self, path: Path, wanted: Wanted | None = None) -> OnHost | None:
        """Read a session from a file, to the host.

        Args:
            path: the file.
            wanted: see `Wanted`.

        Returns:
            Its state; None: it is not wanted.

        Raises:
            SessionFileError: see `Engine.load_session`.
        """
        if self._program.closed:
            raise ClosedError("the program is closed")
        with opened_session(path, self._program.id) as (header, file):
            try:
                pages = [Kept(*header["pages"][name]) for name in self._pages.names]
                shape = header["logits"]
                logits = shape and torch.empty(shape[0], dtype=dtype_from_name(shape[1]), device="meta")
                state = SessionState(
                    History(list(header["tokens"])),
                    header["seen"],
                    header["prompt_end"],
                    [(_Saved(token, _logprobs(given)), 0) for token, given in header["pending"]],
                    logprobs=_logprobs(header["logprobs"]),
                    sampling_params=SamplingParams(**header["sampling_params"]),
                )
                same = header["rows"] == self._layout(logits)
                held = min(
                    ((one.first + one.pages) * self._program.capacity.page_size for one in pages), default=state.seen
                )
                if not 0 <= state.seen <= min(held, len(state.history) + len(state.pending)):
                    raise ValueError(f"its state is that of {state.seen} tokens")
                if not 0 <= state.prompt_end <= len(state.history):
                    raise ValueError(f"its prompt has {state.prompt_end} tokens")
            except (KeyError, TypeError, ValueError) as error:
                raise SessionFileError(f"{path} is damaged: its header cannot be read ({first_line(error)})") from error
            if not same:
                raise SessionFileError(f"{path} has other state than the program: save the session again")
            if wanted is not None and not wanted(pages, state):
                return None
            numbers = [1, *(kept.pages for kept in pages), 1]
            # The bytes lie together as those that a transfer takes to this device.
            there = None if logits is None else torch.empty_like(logits, device=self._program.device)
            rows = [rows for _, rows in self.parts(there)]
            host = self._program.row_transfers.empty([(one, range(n)) for one, n in zip(rows, numbers, strict=False)])
            read_rows(path, header, file, host)
        return OnHost(Offloaded(host, pages, logits), state)

    def _layout(self, logits: torch.Tensor | None) -> dict[str, dict[str, int]]:
        """Bytes of a row in each buffer, in the order of a file's body."""
        return {name: rows.bytes_by_name for name, rows in self.parts(logits)}


@dataclass(frozen=True)
class _Saved:
    """A token that a step had sampled when the session was saved."""

    token: int
    token_logprobs: TokenLogprobs | None

    def tokens(self) -> list[int]:
        return [self.token]

    def logprobs(self, number: int) -> TokenLogprobs | None:
        return self.token_logprobs


def _part_of(data: Sequence[torch.Tensor], begin: int, nbytes: int) -> Iterator[torch.Tensor]:
    """Yield bytes of tensors that lie one after the other: so many from byte `begin` on."""
    for one in data:
        if begin < one.nbytes and nbytes:
            part = one[begin : begin + nbytes]
            yield part
            nbytes -= part.nbytes
        begin = max(0, begin - one.nbytes)


def _logprobs(given: Sequence[Any] | None) -> TokenLogprobs | None:
    """Log-probabilities as JSON has them."""
    if given is None:
        return None
    token, logprob, rank, top = given
    return TokenLogprobs(token, logprob, rank, [(one, value) for one, value in top])
