"""Prompts in buckets: padded to a length that has a plan, with the results of unpadded prompts."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.delegate import CapacityError, InputError, OptionError, StateKind
from ostinato.delegate.graphs.recorders import Graph, HostGraphRecorder, Work
from ostinato.runner import Engine
from ostinato.runner.cli import main
from ostinato.runner.model.batch import BatchInputs, Run
from ostinato.runner.model.buckets import bucket_of

from ...comparison import logits_of, relative_error
from ...conftest import CAPITALS, CAPITALS_LENGTH, Fails

BUCKETS = (4, 8, 32)
# A little longer than the largest bucket.
LONGEST = 40


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return torch.randint(1500, (120,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def expected(tokens: list[int]) -> Tensor:
    """transformers' logits after each of the tokens."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(CAPITALS, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.fixture(scope="module")
def engine(capitals_artifact: Path) -> Iterator[Engine]:
    with Engine.load(capitals_artifact, cuda_graph=True, warmup_steps=1, prefill_buckets=BUCKETS) as loaded:
        yield loaded


def prefill(engine: Engine, tokens: list[int], begin: int, end: int) -> Tensor:
    """Return a copy of the logits: a bucket's logits lie in its graph's output."""
    return logits_of(engine.model, tokens[begin:end], begin).clone()


def test_inputs_of_a_prompt() -> None:
    inputs = BatchInputs(5)
    found = [tensor.tolist() for tensor in inputs.filled([Run(3, [5, 6, 7], 10)])]
    assert found == [[[5, 6, 7, 7, 7]], [10, 11, 12, 12, 12], [3, 3, 3, -1, -1]]
    found = [tensor.tolist() for tensor in inputs.filled([Run(0, [1, 2, 3, 4, 5], 0)])]
    assert found == [[[1, 2, 3, 4, 5]], [0, 1, 2, 3, 4], [0] * 5]


def test_inputs_of_a_batch() -> None:
    inputs = BatchInputs(9, outputs=3)
    first = inputs.filled([Run(2), Run(1, [8, 9], 7, outputs=0), Run(0, [3, 4, 5], 0, outputs=2)])
    assert [tensor.tolist() for tensor in first] == [
        [-1, 8, 9, 3, 4, 5, 5, 5, 5],
        [-1, 7, 8, 0, 1, 2, 2, 2, 2],
        [2, 1, 1, 0, 0, 0, -1, -1, -1],
        [0, 4, 5],
    ]
    again = inputs.filled([Run(2, [5, 6], 10, outputs=0)])
    assert [tensor.tolist() for tensor in again] == [[5] + [6] * 8, [10] + [11] * 8, [2] * 2 + [-1] * 7, [-1] * 3]
    assert inputs.filled([Run(2, [5, 6], 10)])[3].tolist() == [1, -1, -1]
    assert [one.data_ptr() for one in again] == [one.data_ptr() for one in first]


def test_bucket_of() -> None:
    assert [bucket_of(BUCKETS, count) for count in (1, 4, 5, 8, 31, 32, 33)] == [4, 4, 8, 8, 32, 32, None]
    assert bucket_of((), 3) is None


def test_every_length(engine: Engine, tokens: list[int], expected: Tensor) -> None:
    """Each length runs three times, so that buckets are warmed up, captured and replayed, later from used state."""
    for _ in range(3):
        for length in range(1, LONGEST):
            error = relative_error(prefill(engine, tokens, 0, length), expected[length - 1])
            assert error < 1e-4, f"{length} tokens: {error}"
    stats = engine.model.method_stats[engine.model.prompt_method(BUCKETS[0])]
    assert stats["fallbacks"] == 0
    assert {plan["shapes"][0][-1] for plan in stats["plans"]} == set(BUCKETS)
    assert stats["runs"] >= 3 * (LONGEST - 1 - BUCKETS[-1])


def test_values_out_of_range(engine: Engine, tokens: list[int]) -> None:
    """Wrong values are refused, also where a bucket has its graph, and the state does not change."""
    prompt, longest = tokens[: BUCKETS[0]], engine.model.max_seq_len
    for _ in range(3):
        before = prefill(engine, tokens, 0, len(prompt))
    wrong = (
        ([-1, *prompt[1:]], 0, 0),
        ([*prompt[1:], 10**9], 0, 0),
        (prompt, -1, 0),
        (prompt, longest - 1, 0),
        (prompt, 0, 99),
    )
    for inputs in wrong:
        with pytest.raises(InputError, match="values must lie in"):
            logits_of(engine.model, *inputs)
    with pytest.raises(InputError, match="values must lie in"):
        logits_of(engine.model, prompt[:1], 0, 99)
    assert torch.equal(prefill(engine, tokens, 0, len(prompt)), before)


def test_at_any_position(engine: Engine, tokens: list[int], expected: Tensor) -> None:
    """Prompts in random parts, some of them decode steps: each part starts from the state that the parts before it left."""
    sample = random.Random(1)
    for _ in range(12):
        at = 0
        while at < len(tokens):
            end = min(len(tokens), at + sample.randint(1, LONGEST))
            error = relative_error(prefill(engine, tokens, at, end), expected[end - 1])
            assert error < 1e-4, f"tokens {at} to {end}: {error}"
            at = end


def test_padding_is_written_nowhere(engine: Engine, tokens: list[int]) -> None:
    keys_and_values = engine.program.buffers_of(StateKind.KV_CACHE)
    for tensor in engine.program.mutable_buffers.values():
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
    logits = prefill(engine, tokens, 0, 5)
    assert logits.isfinite().all()
    for name, tensor in keys_and_values.items():
        # Pages of [kv_heads, positions, D]; the first one belongs to the slot.
        assert tensor[0, :, :5].isfinite().all() and tensor[0, :, 5:].isnan().all() and tensor[1:].isnan().all(), name
    engine.program.reset()


def test_to_the_last_position(engine: Engine, tokens: list[int]) -> None:
    """A bucket may be longer than what is left of the sequence."""
    many = (tokens * 3)[:CAPITALS_LENGTH]
    with Engine.load(engine._path) as plain:
        for last in (2, 3, 9, 31):
            logits_of(plain.model, many[:-last])
            logits_of(engine.model, many[:-last])
            first = len(many) - last
            found, wanted = (logits_of(one.model, many[first:], first) for one in (engine, plain))
            assert relative_error(found, wanted) < 1e-4


def test_warm_up(capitals_artifact: Path, tokens: list[int], expected: Tensor) -> None:
    with Engine.load(capitals_artifact, cuda_graph=True, prefill_buckets=BUCKETS) as engine:
        some = engine.warm_up([8])
        assert [(one.method, one.rows, one.given_up) for one in some.captured] == [
            (engine.model.prompt_method(8), 8, None),
            ("decode_sample", 1, None),
            ("sample", 1, None),
        ]
        capacity = engine.describe()["capacity"]
        (group,) = capacity["groups"]
        assert (capacity["free_slots"], group["free_pages"]) == (capacity["slots"], group["pages"])
        rest = engine.warm_up()
        assert [one.rows for one in rest.captured] == [32, 4]
        assert engine.warm_up().captured == ()
        assert some.seconds > 0 and rest.pool_bytes == 0
        described, prompts = engine.describe(), engine.model.prompt_method(8)
        assert described["prefill_buckets"] == list(BUCKETS)
        assert len(described["methods"][prompts]["plans"]) == len(BUCKETS)
        before = described["methods"][prompts]["replays"]
        assert relative_error(prefill(engine, tokens, 0, 7), expected[6]) < 1e-4
        assert engine.model.method_stats[engine.model.prompt_method(BUCKETS[0])]["replays"] == before + 1
        with pytest.raises(InputError, match=re.escape("unknown prefill bucket 20; the model's are: 4, 8, 32")):
            engine.warm_up([8, 20])


def test_warm_up_loads_what_it_needs(capitals_artifact: Path) -> None:
    """As on a GPU, whose long prompts go through a method that is loaded on first use."""
    with Engine.load(capitals_artifact, cuda_graph=True, prefill_buckets=(8, 32)) as engine:
        engine.model._max_prompt = 8
        assert engine.model.prompt_method(32) == "prefill" not in engine.model.method_stats
        assert [one.method for one in engine.warm_up().captured] == [
            "prefill",
            engine.model.prompt_method(8),
            "decode_sample",
            "sample",
        ]


def test_warm_up_beside_sessions(capitals_artifact: Path, tokens: list[int]) -> None:
    """The warm-up takes a session of its own, and changes no other session."""
    with Engine.load(capitals_artifact, cuda_graph=True, sessions=2, prefill_buckets=(8,), row_buckets=(2,)) as engine:
        expected = list(engine.generate_tokens(tokens[:9], max_new_tokens=4, ignore_eos=True))
        session = engine.open_session()
        session.prefill(tokens[:9])
        sampled = engine.step([session])
        rows = engine.model.step_method(2)
        assert [(one.method, one.rows, one.given_up) for one in engine.warm_up().captured] == [
            (engine.model.prompt_method(8), 8, None),
            ("decode_sample", 1, None),
            ("sample", 1, None),
            (rows, 2, None),
        ]
        assert engine.warm_up().captured == ()
        assert sampled + list(session.generate(3, eos_ids=())) == expected
        engine.open_session()
        with pytest.raises(CapacityError, match="all 2 sessions are open"):
            engine.warm_up()


def test_steps_of_several_sessions(capitals_artifact: Path, tokens: list[int]) -> None:
    """The number of sessions is padded to the next one that has a graph. Above the largest there is no graph."""
    with Engine.load(capitals_artifact, cuda_graph=True, warmup_steps=1, sessions=5, row_buckets=(4, 2, 2)) as engine:
        assert engine.describe()["row_buckets"] == [2, 4]
        sessions = [engine.open_session() for _ in range(5)]
        for session in sessions:
            session.prefill(tokens[:9])
        # The first tokens are sampled from the prompts' logits, without a step.
        for count in (5, 2, 3, 4, 5):
            for _ in range(1 if sessions[0].position == 9 else 3):
                engine.step(sessions[:count])
        stats = engine.model.method_stats[engine.model.step_method(4)]
        assert [plan["shapes"][0] for plan in stats["plans"]] == [[2], [4]]
        # 3 and 4 sessions make six steps with the graph of 4. Steps of 5 sessions have no graph, nor have the prompts.
        prompts = 5 if engine.model.prompt_method(9) == engine.model.step_method(4) else 0
        assert (stats["warmups"], stats["captures"], stats["replays"], stats["runs"]) == (2, 2, 1 + 4, prompts + 3)


def test_outputs_of_a_prompt_beside_sessions(capitals_artifact: Path, tokens: list[int]) -> None:
    """Their number is padded too, but to no more than the rows."""
    with Engine.load(
        capitals_artifact, cuda_graph=True, warmup_steps=1, sessions=16, prefill_buckets=(16, 64)
    ) as engine:
        sessions = [engine.open_session() for _ in range(15)]
        for session in sessions:
            session.prefill(tokens[:1])
        engine.step(sessions)
        expected = [(16, 8, 7, 7), (64, 8, 7, 30), (16, 16, 11, 4), (64, 32, 15, 4)]
        for rows, outputs, count, length in expected:
            for _ in range(2):
                with engine.open_session() as other:
                    engine.step(sessions[:count], prefill={other: tokens[:length]})
            plan = engine.model.method_stats[engine.model.step_method(rows)]["plans"][-1]
            assert [shape[0] for shape in plan["shapes"]] == [rows, rows, rows, outputs]


def test_long_prompts_alone(engine: Engine, tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, prompts that rows would take go through `prefill`, unless more than one of their rows is an output."""
    model = engine.model
    if model.max_rows == 1:
        pytest.skip("this CPU takes the references")
    expected = [prefill(engine, tokens, 0, length) for length in (100, 101)]
    monkeypatch.setattr(model, "_max_prompt", 100)
    assert [model.prompt_method(rows) for rows in (100, 101)] == ["rows", "prefill"]
    for length, logits in zip((100, 101), expected, strict=True):
        before = {name: stats["runs"] for name, stats in model.method_stats.items()}
        assert relative_error(prefill(engine, tokens, 0, length), logits) < 1e-4
        called = {name for name, stats in model.method_stats.items() if stats["runs"] > before.get(name, 0)}
        assert called == {model.prompt_method(length)}
    several = model.step([Run(0, tokens[:101], 0, outputs=2)])
    assert several.tokens is not None
    assert relative_error(several.logits[1], expected[1]) < 1e-4


def test_a_prompt_between_equal_steps(capitals_artifact: Path, tokens: list[int]) -> None:
    """Steps and prompts have plans of one method. A prompt between two steps of the same sessions changes neither."""
    answers = []
    for between in (False, True):
        with Engine.load(
            capitals_artifact, cuda_graph=True, warmup_steps=1, sessions=3, row_buckets=(2,), prefill_buckets=(8,)
        ) as engine:
            sessions = [engine.open_session() for _ in range(2)]
            for place, session in enumerate(sessions):
                session.prefill(tokens[place : place + 9])
            found = []
            for turn in range(12):
                found += [engine.step(sessions), engine.step(sessions)]
                prompt = tokens[: 7 + turn % 2] if between else []
                with engine.open_session() as other:
                    if prompt and turn < 8:
                        other.prefill(prompt)
                    found.append(engine.step(sessions, prefill={other: prompt[:2]} if prompt and turn > 4 else None))
            answers.append(found)
    assert answers[0] == answers[1]


def test_a_bucket_that_cannot_be_captured(
    capitals_artifact: Path, tokens: list[int], expected: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bucket is given up: prompts of its length run without padding."""
    record, attempts = HostGraphRecorder.record, 0

    def fail(self: HostGraphRecorder, work: Work) -> Graph:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return record(self, work)

    monkeypatch.setattr(HostGraphRecorder, "record", fail)
    with Engine.load(capitals_artifact, cuda_graph=True, prefill_buckets=(8, 16)) as engine:
        first = engine.warm_up()
        assert [(one.rows, one.given_up is None) for one in first.captured] == [
            (16, False),
            (8, True),
            (1, True),
            (1, True),
        ]
        assert "ran out of memory while capturing a graph" in (first.captured[0].given_up or "")
        assert engine.model.prefill_buckets == (8,) and engine.warm_up().captured == ()
        runs = engine.model.method_stats[engine.model.prompt_method(BUCKETS[0])]["runs"]
        assert relative_error(prefill(engine, tokens, 0, 13), expected[12]) < 1e-4
        assert engine.model.method_stats[engine.model.prompt_method(BUCKETS[0])]["runs"] == runs + 1


def test_bench(capitals_artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt in a bucket is captured before it is timed; a prompt longer than all buckets runs without a graph."""
    words = ["-p", "6,30", "-n", "1", "-d", "0", "-r", "2", "--prefill-buckets", "8", "--output", "json"]
    assert main(["bench", str(capitals_artifact), *words]) == 0
    rows = json.loads(capsys.readouterr().out)
    methods = next(row for row in rows if row["cuda_graph"])["methods"]
    stats = methods.get("rows") or methods["prefill"]
    assert [plan["shapes"][0][-1] for plan in stats["plans"]] == [8]
    # The prompt of 6 tokens runs 2 times in the first answer, 4 times as warm-up and 2 times timed; that of 30 runs once
    # untimed.
    assert (stats["warmups"], stats["captures"], stats["replays"], stats["runs"]) == (3, 1, 4, 3)
    assert all(row["host_us_per_prompt"] is None and row["fallback_reason"] is None for row in rows)


def test_warm_up_without_graphs(capitals_artifact: Path) -> None:
    with Engine.load(capitals_artifact) as engine:
        assert engine.warm_up().captured == ()


def test_answers_are_the_same(capitals_artifact: Path) -> None:
    options: dict[str, Any] = {"prefill_buckets": (64,), "prefix_caching": False}
    with Engine.load(capitals_artifact, cuda_graph=True, warmup_steps=1, **options) as engine:
        for _ in range(3):
            assert "".join(engine.generate("What is the capital of France?")) == "Paris"
        assert engine.model.method_stats[engine.model.prompt_method(BUCKETS[0])]["replays"] == 1


def test_a_cpu_has_none_by_default(capitals_artifact: Path) -> None:
    with Engine.load(capitals_artifact, cuda_graph=True) as engine:
        assert engine.model.prefill_buckets == ()


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        ((1,), "a prefill bucket is a number of tokens from 2 on, got 1"),
        ((8, "x"), "a prefill bucket is a number of tokens from 2 on, got 'x'"),
        ((1024,), f"prefill bucket 1024 is longer than max_seq_len {CAPITALS_LENGTH}"),
        (
            (CAPITALS_LENGTH,),
            f"prefill bucket {CAPITALS_LENGTH} is longer than what one call of prefill takes, {CAPITALS_LENGTH - 1}: name a "
            "shorter one, or export with a larger --max-seq-len",
        ),
    ],
)
def test_buckets_that_cannot_be(capitals_artifact: Path, buckets: tuple[int, ...], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Engine.load(capitals_artifact, cuda_graph=True, prefill_buckets=buckets)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"row_buckets": (1,)}, f"a row bucket is a number of sessions from 2 to {CAPITALS_LENGTH - 1}, got 1"),
        ({"row_buckets": (2, "x")}, f"a row bucket is a number of sessions from 2 to {CAPITALS_LENGTH - 1}, got 'x'"),
        ({"row_buckets": (8, 2.0)}, f"a row bucket is a number of sessions from 2 to {CAPITALS_LENGTH - 1}, got 2.0"),
        (
            {"row_buckets": (CAPITALS_LENGTH,)},
            f"a row bucket is a number of sessions from 2 to {CAPITALS_LENGTH - 1}, got {CAPITALS_LENGTH}",
        ),
        (
            {"row_buckets": (2,), "cuda_graph": False},
            "row buckets are numbers of sessions whose step has a CUDA graph: they need cuda_graph",
        ),
        (
            {"row_buckets": (2,), "sessions": None},
            "row buckets need a program with the method 'rows', loaded for several sessions, as in sessions=2",
        ),
    ],
)
def test_row_buckets_that_cannot_be(capitals_artifact: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        Engine.load(capitals_artifact, **{"cuda_graph": True, "sessions": 3, **options})
    assert str(caught.value) == message


def test_row_buckets_by_default(capitals_artifact: Path, recurrent_artifact: Path) -> None:
    """A CPU has no row buckets by default, and neither has a program that steps one session at a time."""
    with Engine.load(capitals_artifact, cuda_graph=True, sessions=3) as engine:
        assert engine.model.row_buckets == () and engine.model.max_rows == CAPITALS_LENGTH - 1
    with Engine.load(recurrent_artifact, cuda_graph=True, row_buckets=()) as engine:
        assert engine.model.row_buckets == () and engine.model.max_rows == 1
    with pytest.raises(OptionError, match="row buckets need a program with the method 'rows'"):
        Engine.load(recurrent_artifact, cuda_graph=True, row_buckets=(2,))


def test_refusals(capitals_artifact: Path, recurrent_artifact: Path, fails: Fails) -> None:
    with pytest.raises(OptionError, match="they need cuda_graph"):
        Engine.load(capitals_artifact, prefill_buckets=(8,))
    with pytest.raises(OptionError, match="takes rows of padding, and says so by 'enable_padded_prefill'"):
        Engine.load(recurrent_artifact, cuda_graph=True, prefill_buckets=(8,))
    words = ("bench", capitals_artifact, "--prefill-buckets")
    assert "prefill bucket 1024 is longer than max_seq_len" in fails(*words, "16,1024")
    assert "--prefill-buckets takes whole numbers, 0 or more, separated by commas; got '16,x'" in fails(*words, "16,x")
    assert "they need cuda_graph" in fails(*words, "16", "--cuda_graph=off")
