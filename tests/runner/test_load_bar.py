"""Tests of the line that shows a load's progress."""

from __future__ import annotations

import functools
import io
import re
import threading
import time
from pathlib import Path

import pytest
from tqdm import tqdm

from ostinato.delegate.memory import size_text
from ostinato.runner import Engine, LoadBar
from ostinato.runner import load_bar as load_bar_module

from ..modules import VOCAB, WIDTH

BYTES = 2 * VOCAB * WIDTH * 4 + 8


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Stands in for `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(load_bar_module, "time", clock)
    return clock


def test_a_terminal_sees_one_line_that_redraws(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    # tqdm draws at most ten times per second.
    monkeypatch.setattr(tqdm, "__init__", functools.partialmethod(tqdm.__init__, mininterval=0, miniters=1))
    terminal = Terminal()
    with LoadBar(terminal) as bar:
        bar.begin(18_100_000_000)
        for _ in range(3):
            clock.now += 1
            bar.advance(3_258_000_000)
        clock.now += 1
        bar.advance(18_100_000_000 - 3 * 3_258_000_000)
    lines = terminal.getvalue().split("\r")
    shown = [re.match(r"loading: +(\d+)%.* (\S+)/18.1G ", line) for line in lines]
    assert [found.groups() for found in shown if found] == [
        ("0", "0.00"),
        ("18", "3.26G"),
        ("36", "6.52G"),
        ("54", "9.77G"),
        ("100", "18.1G"),
    ]
    # The bar's line is wiped before the final line is written.
    assert lines[-2].strip() == ""
    assert lines[-1] == "loaded 18.1 GB in 4.0 s  4.5 GB/s\n"
    assert "\n" not in terminal.getvalue()[:-1]


def test_drawing_is_rare() -> None:
    terminal = Terminal()
    begin = time.perf_counter()
    with LoadBar(terminal) as bar:
        bar.begin(10**9)
        for _ in range(1000):
            bar.advance(10**6)
    assert terminal.getvalue().count("loading") <= 2 + 10 * (time.perf_counter() - begin)


def test_elsewhere_one_line_at_the_end(clock: Clock) -> None:
    log = io.StringIO()
    with LoadBar(log) as bar:
        bar.begin(2 * 10**9)
        clock.now += 2
        bar.advance(2 * 10**9)
        assert log.getvalue() == ""
    assert log.getvalue() == "loaded 2.0 GB in 2.0 s  1.0 GB/s\n"


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "log"])
def test_small_loads_show_nothing(stream: io.StringIO) -> None:
    with LoadBar(stream) as bar:
        bar.begin(10**9 - 1)
        bar.advance(10**9 - 1)
    with LoadBar(stream):
        pass
    assert stream.getvalue() == ""


def test_a_failed_load_wipes_its_line(clock: Clock) -> None:
    terminal, log = Terminal(), io.StringIO()
    for stream in (terminal, log):
        with pytest.raises(ZeroDivisionError), LoadBar(stream) as bar:
            bar.begin(2 * 10**9)
            clock.now += 1
            bar.advance(10**9)
            raise ZeroDivisionError
    wiped = terminal.getvalue().split("\r")[-2:]
    assert "loading" in terminal.getvalue()
    assert (wiped[0].strip(), wiped[1]) == ("", "")
    assert log.getvalue() == ""


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tqdm, "__init__", functools.partialmethod(tqdm.__init__, mininterval=0, miniters=1))
    terminal = Terminal()
    with LoadBar(terminal, smallest=1) as bar:
        bar.begin(8000)

        def advance() -> None:
            for _ in range(1000):
                bar.advance(1)

        threads = [threading.Thread(target=advance) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    shown = [int(percent) for percent in re.findall(r"(\d+)%", terminal.getvalue())]
    assert len(shown) == 8001
    assert shown == sorted(shown)
    assert shown[-1] == 100
    assert "loaded 8.0 kB" in terminal.getvalue()


def test_an_engine_feeds_it(recurrent_artifact: Path) -> None:
    log = io.StringIO()
    totals: list[int] = []
    sizes: list[int] = []
    with LoadBar(log, smallest=1) as bar:
        Engine.load(recurrent_artifact, on_load=bar.advance, on_total=bar.begin).close()
    assert log.getvalue().startswith(f"loaded {BYTES} B in ")
    Engine.load(recurrent_artifact, on_load=sizes.append, on_total=totals.append).close()
    assert totals == [sum(sizes)] == [BYTES]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_500_000, "1.5 MB"), (18_140_000_000, "18.1 GB")],
)
def test_size_text(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text
