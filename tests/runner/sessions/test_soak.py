"""Many steps with batches that change in every step: no leak, no fallback, and every token as in a session that runs
alone."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from ostinato.runner import Engine

from ...export.memory import MIB
from .soak import Memory, Soak, Standing, replays, scripts

# Numbers of steps; on a GPU they take a few minutes of an H200. A tenth of them runs first, and fills what is kept for later
# steps.
STEPS = {"cpu": 400, "cuda": 200_000}
# Fewer pages than all sessions may want, so that pages run out now and then.
SESSIONS = {"cpu": 10, "cuda": 40}
KV_TOKENS = {"cpu": 16 * 64, "cuda": 54 * 64}
ROW_BUCKETS = {"cpu": (2, 4, 8, 16), "cuda": (2, 4, 8, 16, 24, 32, 48)}
# The number of scripts. On a CPU their tokens stay the same if noise of 1e-4 is added to all logits, the largest of which is
# 20.
SCRIPTS = 16


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    device = request.param
    with Engine.load(
        request.getfixturevalue("capitals_cuda" if device == "cuda" else "capitals_artifact"),
        cuda_graph=True,
        warmup_steps=1,
        sessions=SESSIONS[device],
        kv_tokens=KV_TOKENS[device],
        # All prompts, and all that is said later, fit these buckets.
        prefill_buckets=(16, 64),
        row_buckets=ROW_BUCKETS[device],
    ) as loaded:
        yield loaded


def test_batches_that_change_in_every_step(engine: Engine) -> None:
    device = engine.program.device
    steps = STEPS[device.type]
    engine.warm_up()
    known = [(script, script.alone(engine)) for script in scripts(Random(1), SCRIPTS, vocabulary=1500)]
    Soak(engine, known, Random(2)).run(steps // 10)
    standing, memory, before = Standing.of(engine), Memory.now(device), replays(engine)

    soak = Soak(engine, known, Random(3))
    soak.run(steps)
    after = Memory.now(device)
    print(
        f"{soak.steps} steps, {soak.tokens} tokens, {soak.finished} finished, {soak.refused} refused; {memory}, {after}"
    )

    assert Standing.of(engine) == standing
    assert after.host - memory.host < 16 * MIB
    assert after.tensors <= memory.tensors
    # The allocator may hold one or two blocks more than before.
    assert after.device - memory.device <= 8 * MIB
    # Steps of one session have a graph, and so have steps of several sessions, for each bucket.
    grown = {name: count - before[name] for name, count in replays(engine).items()}
    several = sum(count for rows, count in soak.sizes.items() if rows > 1)
    assert grown["decode_sample"] > 0
    assert (
        sum(grown[name] for name in {engine.model.step_method(rows) for rows in engine.model.row_buckets})
        >= several / 2
    )
    reached = {min(bucket for bucket in engine.model.row_buckets if bucket >= rows) for rows in soak.sizes}
    assert reached == set(engine.model.row_buckets)
    assert soak.finished > steps / 50 and soak.refused > 0
