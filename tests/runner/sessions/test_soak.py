"""Many steps with batches that change in every step: no leak, no fallback, and every token as in a session that runs
alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from ostinato.runner import Engine

from ...export.memory import MIB
from .soak import MAX_SNAPSHOTS, Memory, Script, Soak, Standing, replays, scripts

# Numbers of steps of each of the two parts; on a GPU a part takes a minute or two of an H200. A tenth of them runs first, and
# fills what is kept for later steps.
STEPS = {"cpu": 400, "cuda": 100_000}
# Steps of the test that no other may run beside. The driver takes the GPU's memory in pieces of 2 MiB: more than one of them
# is a leak of 42 bytes in a step, or more.
STEPS_ALONE = 50_000
# Fewer pages than all sessions may want, so that pages run out now and then.
SESSIONS = {"cpu": 10, "cuda": 40}
KV_TOKENS = {"cpu": 16 * 64, "cuda": 54 * 64}
ROW_BUCKETS = {"cpu": (2, 4, 8, 16), "cuda": (2, 4, 8, 16, 24, 32, 48)}
# The number of scripts. On a CPU their tokens stay the same if noise of 1e-4 is added to all logits, the largest of which is
# 20.
SCRIPTS = 16


def loaded(artifact: Path, device: str) -> Engine:
    return Engine.load(
        artifact,
        cuda_graph=True,
        warmup_steps=1,
        sessions=SESSIONS[device],
        kv_tokens=KV_TOKENS[device],
        snapshots=MAX_SNAPSHOTS + 1,
        # All prompts, and all that is said later, fit these buckets.
        prefill_buckets=(16, 64),
        row_buckets=ROW_BUCKETS[device],
    )


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    name = "capitals_cuda" if request.param == "cuda" else "capitals_artifact"
    with loaded(request.getfixturevalue(name), request.param) as engine:
        yield engine


def warmed(engine: Engine) -> list[tuple[Script, list[int]]]:
    """Run the first steps. Returns the scripts, each with its tokens in a session that runs alone."""
    engine.warm_up()
    known = [(script, script.alone(engine)) for script in scripts(Random(1), SCRIPTS, vocabulary=1500)]
    Soak(engine, known, Random(2)).run(STEPS[engine.program.device.type] // 10)
    return known


@pytest.mark.parametrize("part", [0, 1], ids=["first", "second"])
def test_batches_that_change_in_every_step(engine: Engine, part: int) -> None:
    device = engine.program.device
    steps = STEPS[device.type]
    known = warmed(engine)
    standing, memory, before = Standing.of(engine), Memory.now(device), replays(engine)

    soak = Soak(engine, known, Random(3 + part))
    soak.run(steps)
    after = Memory.now(device)
    print(
        f"{soak.steps} steps, {soak.tokens} tokens, {soak.finished} finished, {soak.refused} refused; {memory}, {after}"
    )

    assert Standing.of(engine) == standing
    assert after.host - memory.host < 8 * MIB
    assert after.tensors <= memory.tensors
    # The allocator may hold one or two blocks more than before.
    assert after.reserved - memory.reserved <= 4 * MIB
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


@pytest.mark.gpu
def test_the_gpus_memory(capitals_cuda: Path) -> None:
    """Graphs, kernels and what else the driver keeps take no more of it from step to step. `tests/schedule.py` lets nothing
    else run beside this test."""
    with loaded(capitals_cuda, "cuda") as engine:
        known, device = warmed(engine), engine.program.device
        before = Memory.now(device)
        Soak(engine, known, Random(3)).run(STEPS_ALONE)
        assert Memory.now(device).others - before.others <= 2 * MIB
