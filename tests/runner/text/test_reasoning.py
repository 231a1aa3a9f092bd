"""Reasoning in answers, wherever their text is cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.runner.text.reasoning import ReasoningSplitter

ASKED = "<|im_start|>assistant\n"


def divided(prompt: str, pieces: Sequence[str]) -> tuple[str, str]:
    splitter = ReasoningSplitter(prompt)
    found = [*map(splitter.push, pieces), splitter.flush()]
    return "".join(one.reasoning for one in found), "".join(one.content for one in found)


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "content"),
    [
        (ASKED, "<think>\nHm.\n\nYes.\n</think>\n\nParis\n", "Hm.\n\nYes.", "Paris\n"),
        (ASKED, " \n<think></think>Paris", "", "Paris"),
        (f"{ASKED}<think>\n", "Hm.\n</think>\n\nParis", "Hm.", "Paris"),
        (f"{ASKED}<think>\n", "Hm, and no end\n", "Hm, and no end", ""),
        (f"{ASKED}<think>\n\n</think>\n\n", "Paris <think>x</think>", "", "Paris <think>x</think>"),
        (ASKED, "Paris, <think>x</think>", "", "Paris, <think>x</think>"),
        (ASKED, "  <thin", "", "  <thin"),
        (ASKED, "<think>a </thin b</think> </think>", "a </thin b", "</think>"),
        (ASKED, "", "", ""),
    ],
)
def test_whole_answers(prompt: str, text: str, reasoning: str, content: str) -> None:
    assert divided(prompt, [text]) == divided(prompt, list(text)) == (reasoning, content)


@given(
    st.sampled_from((ASKED, f"{ASKED}<think>\n", f"{ASKED}<think>\n\n</think>\n\n")),
    st.lists(st.sampled_from(("<think>", "</think>", "<", "</th", "ink>", " ", "\n", "a", "b")), max_size=12),
    st.lists(st.integers(0, 60), max_size=8),
)
def test_any_cut(prompt: str, words: list[str], cuts: list[int]) -> None:
    text = "".join(words)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(places)]
    assert divided(prompt, pieces) == divided(prompt, [text])
