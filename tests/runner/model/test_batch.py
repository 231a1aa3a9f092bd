"""Batches that a step of the model takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ostinato.delegate import InputError
from ostinato.runner import Engine
from ostinato.runner.model.batch import LastTokens, Run


def test_the_runs_of_last_tokens(capitals_artifact: Path, recurrent_artifact: Path) -> None:
    runs = LastTokens([2, 0, -1])
    assert [*runs] == [Run(2), Run(0), Run(-1)] == [runs[0], *runs[1:]] and len(runs) == 3
    found = []
    with Engine.load(capitals_artifact, sessions=3) as engine:
        for given in (runs, [*runs]):
            for slot in (0, 2):
                engine.model.step([Run(slot, [3, slot, 5], 0)])
                engine.model.write_last_token(slot, 6 + slot, 3)
            logits, tokens = engine.model.step(given)
            assert tokens is not None
            found.append((logits[:2].clone(), tokens[:2].tolist()))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]
    with Engine.load(recurrent_artifact) as engine, pytest.raises(InputError, match="takes one run with tokens"):
        engine.model.step(LastTokens([0]))
