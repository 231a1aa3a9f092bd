"""Fixtures shared by all tests. Artifacts are exported once and kept in pytest's cache until their sources change."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from .wrappers import keep_sources

if not torch.cuda.is_available():
    # Triton reads this when it is imported, which torch may do, and again when a kernel is defined.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Where flash-linear-attention is installed, transformers takes its GPU kernels even for a model on the CPU, and fails.
sys.modules.setdefault("fla", None)  # type: ignore[arg-type]

ROOT = Path(__file__).resolve().parent.parent
CAPITALS = ROOT / "tests" / "assets" / "capitals"
QWEN3_TEMPLATE = ROOT / "tests" / "assets" / "templates" / "Qwen3-0.6B.jinja"
# A prime, so that no other size in the model is a multiple of the caches' length.
CAPITALS_LENGTH = 251
WIDE_LAYERS, WIDE_MAX_SEQ_LEN = 4, 512

Fails = Callable[..., str]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        from .schedule import rank

        items.sort(key=lambda item: rank(item.nodeid))
    if torch.cuda.is_available():
        return
    why = "no NVIDIA GPU" if torch.version.cuda else f"torch {torch.__version__} is a build without CUDA"
    for item in items:
        if item.get_closest_marker("gpu"):  # keywords also have the names of folders
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """On a GPU, a test that must be alone waits until no other process runs a test, and then the others wait."""
    if not torch.cuda.is_available() or "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    from .schedule import alone

    folder = Path(tempfile.gettempdir(), f"ostinato-tests-{os.getuid()}")
    folder.mkdir(exist_ok=True)
    with _locked(folder / "tests.lock", shared=not alone(item.nodeid)):
        return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return our schedule if `-n` is given alone. A `--dist` from the command line is kept."""
    if config.getoption("dist") != "load":
        return None
    from .schedule import Schedule

    return Schedule(config, log)


@pytest.fixture(scope="session")
def exported(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, Callable[[Path], object], str], Path]:
    """`exported(name, build, extra)`: the artifact that `build(path)` makes, from the cache if nothing has changed.

    `extra` is a text for everything else that the artifact depends on, besides the sources of export/ and delegate/.
    """
    # None if pytest runs with `-p no:cacheprovider`.
    cache = getattr(pytestconfig, "cache", None)
    base = Path(cache.mkdir("artifacts")) if cache else tmp_path_factory.mktemp("artifacts")
    digest = hashlib.sha256(torch.__version__.encode())
    for folder in ("export", "delegate"):
        for path in sorted(path for path in (ROOT / folder).rglob("*.*") if path.suffix in (".py", ".cpp", ".h")):
            digest.update(path.read_bytes())
    for path in (ROOT / "tests" / "modules.py", *sorted(CAPITALS.iterdir())):
        digest.update(path.read_bytes())

    def get(name: str, build: Callable[[Path], object], extra: str = "") -> Path:
        state = digest.copy()
        state.update(extra.encode())
        path = base / f"{name}-{state.hexdigest()[:16]}"
        with _locked(base / f"{name}.lock"):
            if not path.exists():
                for old in (*base.glob(f"{name}-" + "[0-9a-f]" * 16), base / name):
                    shutil.rmtree(old, ignore_errors=True)
                # The folder has another name until it is complete: `build` may write beside the files that the export puts in
                # place.
                build(base / name)
                (base / name).rename(path)
        return path

    return get


@contextmanager
def _locked(path: Path, shared: bool = False) -> Iterator[None]:
    """Let one process in at a time, or all that share; the others wait. A process that is killed releases the lock."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def capitals_checkpoint() -> Path:
    return CAPITALS


@pytest.fixture(scope="session")
def capitals_artifact(exported: Callable[..., Path]) -> Path:
    """The shipped checkpoint on the CPU: float32, CAPITALS_LENGTH, with the generated wrappers. Do not write to it: copy
    it."""

    def build(path: Path) -> None:
        from ostinato.export import export_model

        keep_sources(export_model(CAPITALS, path, max_seq_len=CAPITALS_LENGTH), path)

    return exported("capitals", build, str(CAPITALS_LENGTH))


@pytest.fixture(scope="session")
def capitals_cuda(exported: Callable[..., Path]) -> Path:
    """The shipped checkpoint on a GPU: float32, CAPITALS_LENGTH."""
    return _capitals_on_a_gpu(exported, "capitals-cuda")


@pytest.fixture(scope="session")
def capitals_bfloat16(exported: Callable[..., Path]) -> Path:
    """The shipped checkpoint on a GPU: bfloat16."""
    return _capitals_on_a_gpu(exported, "capitals-cuda-bfloat16", dtype="bfloat16")


@pytest.fixture(scope="session")
def capitals_bfloat16_states(exported: Callable[..., Path]) -> Path:
    """The shipped checkpoint on a GPU: float32, but recurrent states in bfloat16."""
    return _capitals_on_a_gpu(exported, "capitals-cuda-bfloat16-states", state_dtype="bfloat16")


@pytest.fixture(scope="session")
def capitals_int4(exported: Callable[..., Path]) -> Path:
    """The shipped checkpoint on a GPU: int4 and float32."""
    from ostinato.export import Quantization

    return _capitals_on_a_gpu(exported, "capitals-cuda-int4", quant=Quantization(group_size=32))


def export_on_a_gpu(folder: Path, path: Path, methods: Sequence[str] = (), **options: Any) -> Any:
    """Call `export_model` in a fresh process: in this one CUDA is started, and all code would be generated in turn.

    `methods`: the only methods that are exported; () for all.
    """
    with ProcessPoolExecutor(1, get_context("spawn"), _take_a_share_of_the_cores) as pool:
        return pool.submit(_export_methods, folder, path, methods, options).result()


def _export_methods(folder: Path, path: Path, methods: Sequence[str], options: Mapping[str, Any]) -> Any:
    from ostinato.export import export_model

    with only_methods(*methods) if methods else nullcontext():
        return export_model(folder, path, device="cuda", **options)


def _take_a_share_of_the_cores() -> None:
    """Take those of two of pytest's processes: mostly one of the two does something else. An export starts a process for each
    core that it may use, and each of them takes memory of the GPU."""
    pair = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) // 2
    pairs = (int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)) + 1) // 2
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[pair::pairs] or cores)


def _capitals_on_a_gpu(exported: Callable[..., Path], name: str, **options: Any) -> Path:
    def build(path: Path) -> None:
        export_on_a_gpu(CAPITALS, path, max_seq_len=CAPITALS_LENGTH, **options)

    return exported(name, build, repr((CAPITALS_LENGTH, options)))


@pytest.fixture(scope="session")
def wide_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config of the flagship's shape, but only four layers: three delta-net layers and one of attention."""
    sys.path.append(str(ROOT / "scripts"))
    from sanitize import DEFAULT_CONFIG, few_layers

    return few_layers(DEFAULT_CONFIG, WIDE_LAYERS, tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="session", params=(128, None), ids=("int4", "bfloat16"))
def group_size(request: pytest.FixtureRequest) -> int | None:
    """Group size of the wide artifact; None for bfloat16."""
    return request.param


@pytest.fixture(scope="session")
def wide_artifact(exported: Callable[..., Path], wide_config: Path, group_size: int | None) -> Path:
    """The model of `wide_config` on a GPU, with random weights, WIDE_MAX_SEQ_LEN and the generated wrappers."""
    from ostinato.export import Quantization

    def build(path: Path) -> None:
        quant = None if group_size is None else Quantization(group_size)
        report = export_on_a_gpu(wide_config, path, max_seq_len=WIDE_MAX_SEQ_LEN, quant=quant, load_format="dummy")
        keep_sources(report, path)

    return exported(f"wide-cuda-{group_size}", build)


@pytest.fixture(scope="session")
def recurrent_artifact(exported: Callable[..., Path]) -> Path:
    """The toy module of tests/modules.py on the CPU, in two methods. Do not write to it: copy it."""
    from .modules import MAX_SEQ_LEN, VOCAB, Recurrent, recurrent_methods

    def build(path: Path) -> None:
        from ostinato.export import export_program

        export_program(
            recurrent_methods(Recurrent()),
            path,
            metadata={"get_max_seq_len": MAX_SEQ_LEN, "get_vocab_size": VOCAB, "get_eos_ids": [3]},
            value_ranges={"tokens": (0, VOCAB - 1), "input_pos": (0, MAX_SEQ_LEN - 1)},
            output_names=("logits",),
        )

    return exported("recurrent", build)


@pytest.fixture(scope="session")
def chunked_artifact(exported: Callable[..., Path]) -> Path:
    """The toy module with a prefill of 2 to 8 tokens: longer prompts go through in chunks. Its metadata say how many bytes a
    step reads."""
    from .modules import MAX_SEQ_LEN, VOCAB, Recurrent, recurrent_methods

    def build(path: Path) -> None:
        from ostinato.export import export_program

        metadata = {"get_max_seq_len": MAX_SEQ_LEN, "get_vocab_size": VOCAB}
        metadata |= {"get_decode_bytes": 1000, "get_kv_bytes_per_token": 24}
        export_program(recurrent_methods(Recurrent(), longest=8), path, metadata=metadata)

    return exported("chunked", build)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the code by 100,000 bytes, for exports of modules without tensors whose code is never loaded."""
    from ostinato.export import program
    from ostinato.export.compile.aot import Code
    from ostinato.export.compile.trace import TracedMethod

    def compile_all(
        methods: dict[str, TracedMethod], libraries: object, constants: object, beside: Callable[[], object]
    ) -> dict[str, dict[str, Code]]:
        beside()
        code = Code(b"?" * 100_000, b"", {}, "")
        return {name: dict.fromkeys(method.graphs, code) for name, method in methods.items()}

    monkeypatch.setattr(program, "_compile_all", compile_all)


@contextmanager
def only_methods(*names: str) -> Iterator[None]:
    """Make `export_model` export only these methods. The code of the methods that sample takes a quarter of an export."""
    from ostinato.export import model

    read_config = model.read_config

    def read(folder: Path) -> tuple[Any, Any]:
        family, config = read_config(folder)

        def methods(network: Any) -> dict[str, Any]:
            made = family.methods(network)
            return {name: made[name] for name in names}

        return replace(family, methods=methods), config

    with mock.patch.object(model, "read_config", read):
        yield


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Fails:
    """`fails(word, ...)`: run the command in this process, expect exit status 2; returns the one error line."""
    from ostinato.runner.cli import main

    def run(*words: object) -> str:
        capsys.readouterr()
        assert main([str(word) for word in words]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        lines = [line for line in err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, err
        assert "Traceback" not in err
        return lines[0]

    return run
