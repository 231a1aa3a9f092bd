"""Sessions of models with sliding windows: their page groups, many windows long, against transformers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from torch import Tensor

from ostinato.delegate import CapacityError, GroupCapacity, StateKind, load_program
from ostinato.delegate.artifact.records import Growth
from ostinato.export import export_model
from ostinato.runner import Engine, SamplingParams
from ostinato.runner.sessions.session import Session

from ...conftest import export_on_a_gpu
from ...export.conversations import errors, run
from ...export.models import dense_references
from ...export.models.dense_references import CASES, make_dense
from ...export.references import Reference
from .conversations import SESSIONS, SNAPSHOTS, Conversations, close, settle

MAX_SEQ_LEN, CHUNK, PAGE = 1024, 100, 64
WINDOW, PAGES = 24, MAX_SEQ_LEN // PAGE
# The pages that a window and a chunk touch: 123 positions; on a GPU, with 512 rows of one session in a call, 535.
TOUCHED = {"cpu": 3, "cuda": 10}
# All layers have the window, or two of three.
MODELS = {"window": "mistral-window", "mixed": "qwen2-mixed"}
Made = tuple[str, str, Reference, Path]


@pytest.fixture(
    scope="module",
    params=[
        *(("cpu", name) for name in MODELS),
        *(pytest.param(("cuda", name), marks=pytest.mark.gpu) for name in MODELS),
    ],
    ids=str,
)
def made(
    request: pytest.FixtureRequest, exported: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Made:
    """The device, the name in MODELS, the model of transformers, and its artifact."""
    device, name = request.param
    reference = make_dense(tmp_path_factory.mktemp(name), CASES[MODELS[name]])

    def build(path: Path) -> None:
        options: dict[str, Any] = {"max_seq_len": MAX_SEQ_LEN, "prefill_chunk": CHUNK}
        if device == "cuda":
            export_on_a_gpu(reference.folder, path, **options)
        else:
            export_model(reference.folder, path, **options)

    extra = repr((MAX_SEQ_LEN, CHUNK)) + Path(dense_references.__file__).read_text()
    return device, name, reference, exported(f"pages-{name}-{device}", build, extra)


@pytest.fixture(scope="module")
def engine(made: Made) -> Iterator[Engine]:
    """Room for 4 sessions, and in each group for a few pages more."""
    kv_tokens = (SESSIONS * PAGES + 2) * PAGE
    with Engine.load(made[-1], cuda_graph=True, sessions=SESSIONS, kv_tokens=kv_tokens, snapshots=SNAPSHOTS) as loaded:
        yield loaded
        gc.collect()
        settle(loaded)
        capacity = loaded.program.capacity
        assert loaded.sessions.free_pages_by_group == {group.name: group.pages for group in capacity.groups}


def poison(engine: Engine, *sessions: Session) -> None:
    """Fill all pages that no session has with NaN, and name such a page for all positions that sessions have left behind."""
    program = engine.program
    for place, group in enumerate(program.capacity.groups):
        mine = {page for session in sessions for page in session._open.pages[place].numbers}
        others = [page for page in range(group.pages) if page not in mine]
        for cache in program.buffers_that_grow(Growth.PAGES, group.name).values():
            cache[others] = torch.nan
        for table in program.buffers_of(StateKind.BLOCK_TABLE, group.name).values():
            for session in sessions:
                table[session.slot, : session._open.pages[place].first] = others[0]


def used(engine: Engine) -> dict[str, int]:
    free = engine.sessions.free_pages_by_group
    return {group.name: group.pages - free[group.name] for group in engine.program.capacity.groups}


def test_capacity(made: Made) -> None:
    """A group with a window takes the pages that a window and a chunk touch, however long a session is."""
    device, name, _, path = made
    each, window = TOUCHED[device], f"window {WINDOW}"
    # Keys and values of 2 heads of 16 in float32. Two layers have the window.
    page_bytes = 2 * 2 * 16 * PAGE * 4
    for kv_tokens, pages in ((None, 4 * PAGES), (5 * PAGE, 5), ((4 * PAGES + 7) * PAGE, 4 * PAGES + 7)):
        with load_program(path, sessions=4, kv_tokens=kv_tokens) as program:
            groups = {group.name: group for group in program.capacity.groups}
        narrow = min(pages, 4 * each + max(0, pages - 4 * PAGES))
        assert groups.pop(window) == GroupCapacity(window, WINDOW, narrow, each, 2 * page_bytes)
        if name == "mixed":
            assert groups.pop("global") == GroupCapacity("global", 0, pages, PAGES, page_bytes)
        assert not groups


def test_without_sessions(made: Made) -> None:
    """A program by itself deals the pages of a window out in turn: chunks and steps through the whole length."""
    *_, reference, path = made
    tokens = reference.tokens(MAX_SEQ_LEN, seed=1)
    expected = reference.logits(tokens)
    with load_program(path) as program:
        prefill, decode = program.load_method("prefill"), program.load_method("decode")
        ends = (*range(CHUNK, 501, CHUNK), 530, 630, 641)
        found = [run(prefill, tokens, begin, end) for begin, end in pairwise((0, *ends))]
        found += [run(decode, tokens, at, at + 1) for at in range(641, 850)]
        found.append(run(prefill, tokens, 850, 950))
        wanted = expected[[*(end - 1 for end in ends), *range(641, 850), 949]]
        assert max(errors([logits.cpu() for logits in found], wanted)) < 1e-4
        prefill.close()
        decode.close()


def test_many_windows(made: Made, engine: Engine) -> None:
    """Logits at long positions, while a group with a window has few pages, and all others are full of NaN."""
    *_, reference, _ = made
    tokens = reference.tokens(MAX_SEQ_LEN, seed=2)
    texts = tokens[0].tolist()
    expected = reference.logits(tokens)
    found: list[Tensor] = []
    wanted: list[int] = []
    with engine.open_session() as session, engine.open_session() as other:
        other.prefill(texts[:30])
        for begin, end in pairwise((0, 700, 703, 850, 851, 960)):
            poison(engine, session, other)
            session.prefill(texts[begin:end])
            found.append(session.logits.clone())
            wanted.append(end - 1)
            # The window lies in one or two pages.
            assert len(session._open.pages[-1].numbers) <= 2
            assert used(engine).get("global", 0) in (0, 1 + -(-end // PAGE))
        poison(engine, session, other)
        found += [row for part in session.prefill_logits(texts[960:]) for row in part]
        wanted += range(960, MAX_SEQ_LEN)
        assert max(errors([logits.cpu() for logits in found], expected[wanted])) < 1e-4
        # Steps in company, from before the first page is left until many have been.
        text = list(texts[:30])
        for _ in range(300):
            poison(engine, session, other)
            text += engine.step([other])
            assert used(engine)[f"window {WINDOW}"] <= 2 + 2
        assert text[30:] == reference.logits(torch.tensor([text[:-1]]))[29:].argmax(1).tolist()


def test_back_to_pages_that_were_left(made: Made, engine: Engine) -> None:
    """A snapshot keeps the pages that it needs, whoever else has left them."""
    *_, reference, _ = made
    text = reference.tokens(900, seed=3)[0].tolist()

    def follows(session: Session) -> None:
        """Three more tokens are those that transformers finds most likely."""
        begin = session.position
        for _ in range(3):
            poison(engine, *alive, *keepers)
            engine.step([session])
        logits = reference.logits(torch.tensor([session.tokens[:-1]]))
        assert session.tokens[begin:] == logits[begin - 1 :].argmax(1).tolist()

    session = engine.open_session()
    alive, keepers = [session], list[Session]()
    session.prefill(text[:90])
    early = session.snapshot()
    # NaN must not reach what snapshots keep: a fork has the same pages.
    keepers.append(session.fork())
    follows(session)
    session.prefill(text[90:600])
    late = session.snapshot()
    keepers.append(session.fork())
    follows(session)
    session.restore(early)
    assert session.tokens == text[:90]
    follows(session)
    session.restore(late)
    follows(session)
    close(late, keepers.pop())
    session.restore(early)
    session.prefill(text[90:95])
    follows(session)
    close(session, early, *keepers)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(1.5, top_k=40, seed=11)], ids=["greedy", "seed"])
def test_to_the_host_and_to_a_file(made: Made, engine: Engine, params: SamplingParams, tmp_path: Path) -> None:
    """Only pages that a session still sees go with it. All others are full of NaN when it is back, in other pages."""
    *_, reference, _ = made
    text = reference.tokens(600, seed=4)[0].tolist()

    def follows(session: Session, *others: Session) -> list[int]:
        for _ in range(3 + WINDOW):
            poison(engine, session, *others)
            engine.step([session])
        return session.tokens[600:]

    with engine.open_session(params) as session, engine.open_session() as other:
        session.prefill(text)
        session.save(tmp_path / "kept")
        before = [mine.numbers for mine in session._open.pages]
        session.offload()
        settle(engine)
        assert not any(used(engine).values())
        poison(engine)
        other.prefill(text[:90])
        session.onload()
        assert [len(mine.numbers) for mine in session._open.pages] == [len(numbers) for numbers in before]
        found = follows(session, other)
        with engine.load_session(tmp_path / "kept") as loaded:
            assert follows(loaded, session, other) == found
    with engine.open_session(params) as session:
        session.prefill(text)
        assert follows(session) == found
    if params.temperature == 0:
        logits = reference.logits(torch.tensor([[*text, *found[:-1]]]))
        assert found == logits[599:].argmax(1).tolist()


def test_in_any_company(made: Made, engine: Engine) -> None:
    """Joins, forks, snapshots and steps in any order."""
    *_, reference, _ = made
    known: dict[tuple[int, ...], torch.Tensor] = {}

    def logits(tokens: list[int]) -> torch.Tensor:
        if tuple(tokens) not in known:
            rows = reference.logits(torch.tensor([tokens]))
            new = [place for place in range(len(tokens)) if tuple(tokens[: place + 1]) not in known]
            # A view would keep all rows.
            known.update({tuple(tokens[: place + 1]): rows[place].clone() for place in new})
        return known[tuple(tokens)]

    machine = type(
        "Machine",
        (Conversations,),
        {"engine": engine, "logits": staticmethod(logits), "vocab": 97, "max_seq_len": 700, "longest": 270},
    )
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=10, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_which_group_is_short(made: Made) -> None:
    """The message names the group only if there are several."""
    *_, reference, path = made
    text = reference.tokens(200)[0].tolist()
    with Engine.load(path, sessions=1, kv_tokens=PAGE) as engine, engine.open_session() as session:
        mixed = len(engine.program.capacity.groups) > 1
        where = " in the page group 'global'" if mixed else ""
        wanted = 4 if mixed or engine.program.device.type == "cuda" else 3
        with pytest.raises(
            CapacityError, match=f"need {wanted} more pages of 64 positions{where}, 1 of 1 are free: close"
        ):
            session.prefill(text)
        described = engine.describe()["capacity"]["groups"]
        assert [group["free_pages"] for group in described] == [1] * len(described)
