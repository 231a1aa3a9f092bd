"""Tests of what an export shows while it runs."""

from __future__ import annotations

import io

import pytest

from ostinato.export import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def last_lines(text: str) -> list[str]:
    """Return what stays visible in each line after carriage returns."""
    return [line.rpartition("\r")[2].rstrip() for line in text.removesuffix("\n").split("\n")]


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_a_stage_is_one_line(stream: type[io.StringIO]) -> None:
    progress = Progress(stream())
    assert isinstance(progress.stream, io.StringIO)
    with progress.stage("trace decode"):
        # The stage's name is shown while the stage runs.
        assert progress.stream.getvalue().split() == ["trace", "decode"]
    with progress.stage("write artifact"):
        pass
    progress.note("weights are random")
    first, second, note = last_lines(progress.stream.getvalue())
    assert first.split()[:2] == ["trace", "decode"] and first.endswith(" s")
    assert second.split()[:2] == ["write", "artifact"] and second.endswith(" s")
    assert note == "  weights are random"
    assert ("\r" in progress.stream.getvalue()) is (stream is Terminal)
    assert list(progress.seconds) == ["trace decode", "write artifact"]
    assert all(seconds >= 0 for seconds in progress.seconds.values())


def test_a_failed_stage_says_so() -> None:
    progress = Progress(io.StringIO())
    with pytest.raises(ZeroDivisionError), progress.stage("compile"):
        raise ZeroDivisionError
    assert isinstance(progress.stream, io.StringIO)
    assert "compile" in progress.stream.getvalue() and "failed after 0." in progress.stream.getvalue()
    assert progress.seconds == {}


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_stages_beside_each_other_have_whole_lines(stream: type[io.StringIO]) -> None:
    progress = Progress(stream())
    assert isinstance(progress.stream, io.StringIO)
    progress.show("compile head")
    shown = "compile head" in progress.stream.getvalue()
    progress.show("compile a layer that has a long name")
    progress.done("compile head", 2.5)
    progress.show("compile layer")
    progress.failed("compile layer", 61.04)
    assert shown is progress.stream.isatty()
    assert [line.split() for line in last_lines(progress.stream.getvalue())] == [
        ["compile", "head", "2.5", "s"],
        ["compile", "layer", "failed", "after", "61.0", "s"],
    ]
    assert progress.seconds == {"compile head": 2.5}
    assert 0 < progress.elapsed < 1


def test_bytes_are_a_bar_on_a_terminal_alone() -> None:
    for stream in (io.StringIO(), Terminal()):
        progress = Progress(stream)
        with progress.stage("write constants"), progress.bytes(4 * 10**9) as advance:
            for _ in range(4):
                advance(10**9)
        (line,) = last_lines(stream.getvalue())
        assert line.split()[:2] == ["write", "constants"] and line.endswith(" s")
        assert ("4.00G" in stream.getvalue()) is stream.isatty()


def test_without_a_stream_the_times_are_kept() -> None:
    progress = Progress()
    with progress.stage("write"), progress.bytes(10) as advance:
        advance(10)
    progress.note("nothing is written")
    assert list(progress.seconds) == ["write"]
