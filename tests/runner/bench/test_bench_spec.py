"""Tests which cases `ostinato bench` measures."""

from __future__ import annotations

from typing import Any

import pytest

from ostinato.delegate import OptionError
from ostinato.runner.bench.bench import Case, make_spec


def test_spec_of_the_defaults() -> None:
    spec = make_spec(8192)
    assert [case.name for case in spec.cases] == ["pp512", "tg128", "pp512 @ d4000", "tg128 @ d4000"]
    assert (spec.repetitions, spec.skipped) == (5, ())


def test_defaults_that_do_not_fit_are_left_out() -> None:
    spec = make_spec(4200)
    assert [case.name for case in spec.cases] == ["pp512", "tg128", "tg128 @ d4000"]
    assert spec.skipped == ("pp512 @ d4000 has 4000 + 512 tokens, max_seq_len is 4200",)
    assert [case.name for case in make_spec(256).cases] == ["tg128"]
    assert [case.name for case in make_spec(1024, prompts=[100]).cases] == ["pp100", "tg128"]
    assert [case.name for case in make_spec(300, depths=[0]).cases] == ["tg128"]


def test_spec_drops_what_is_said_twice() -> None:
    cases = make_spec(100, [7, 0, 7], [0], [3, 3, 0]).cases
    assert cases == (Case("pp", 7, 3), Case("pp", 7, 0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([200], None, None), "pp200 has 200 tokens, max_seq_len is 150: ask for less, or export with a larger"),
        ((None, [151], None), "tg151 has 151 tokens, max_seq_len is 150"),
        ((None, [50], [120]), "pp512 @ d120 has 120 [+] 512 tokens, max_seq_len is 150"),
        (([0], [50], [101]), "tg50 @ d101 has 101 [+] 50 tokens"),
        (([0], [0], None), "there is nothing to measure"),
    ],
)
def test_spec_errors(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make_spec(150, *arguments)


def test_nothing_fits() -> None:
    with pytest.raises(OptionError, match="nothing to measure; pp512 has 512 tokens, max_seq_len is 32; tg128"):
        make_spec(32)


# --- what is printed
