"""Checks imports between rooms, the groups of modules in FLOORS: a room may import only rooms on lower floors."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from ostinato.export.models import FAMILIES

ROOT = Path(__file__).resolve().parents[1]

# Floors from the bottom. A room may import rooms on lower floors, and the rooms that ALSO lists for it. A module that is not
# listed belongs to the room of its folder: `delegate.program` to `delegate`.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("delegate.errors", "delegate.lazy_names", "delegate.signals", "delegate.version"),
    (
        "delegate.artifact",
        "delegate.cuda_driver",
        "delegate.memory",
        "delegate.sampling_params",
        "delegate.torch_internals",
    ),
    ("delegate.capacity", "delegate.sampling"),
    ("delegate.constants",),
    ("delegate.code",),
    ("delegate.graphs",),
    ("delegate",),
    ("export.formats", "export.progress"),
    ("export.compile",),
    ("export.artifact", "export.kernels"),
    ("export.layers", "export.weights", "export.program"),
    ("export.models",),
    ("export.model",),
    ("export.recompile",),
    ("export.commands", "export"),
    ("runner.model", "runner.text"),
    ("runner.sessions",),
    ("runner.scheduler",),
    ("runner",),
    ("runner.bench", "runner.server"),
    ("runner.commands",),
)
ALSO = {("export.program", "export.artifact")}
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def room_of(module: str) -> str:
    """Return the room of a module: `export.kernels.linear.reference` -> `export.kernels`."""
    parts = module.split(".")
    for length in (2, 1):
        room = ".".join(parts[:length])
        if room in FLOOR_OF:
            return room
    raise AssertionError(f"{module} is in no room that FLOORS lists")


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> set[str]:
    """Modules of ours that a file imports, whole names without `ostinato.`."""
    package = list(path.relative_to(ROOT).parts[:-1])
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *(node.module or "").split(".")]).strip(".").removeprefix("ostinato.")
            if node.level or (node.module or "").startswith("ostinato."):
                # `from . import name` may import a module.
                names = [f"{name}.{alias.name}" for alias in node.names]
                found |= {one for one in names if is_module(one)} or {name}
        elif isinstance(node, ast.Import):
            found |= {
                alias.name.removeprefix("ostinato.") for alias in node.names if alias.name.startswith("ostinato.")
            }
    return found


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


SOURCES = sorted(path for room in ("delegate", "export", "runner") for path in (ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_arrows_point_down(path: Path) -> None:
    module = module_of(path)
    here = room_of(module)
    for target in imported(path):
        there = room_of(target)
        if there == here or (here, there) in ALSO or here == "export":
            continue
        assert FLOOR_OF[there] < FLOOR_OF[here], f"{module} imports {target}"


def test_runner_and_delegate_import_nothing_of_the_export() -> None:
    for path in SOURCES:
        if not path.is_relative_to(ROOT / "export"):
            assert not {name for name in imported(path) if name.startswith("export")}, path


def test_only_models_know_a_family() -> None:
    """No file outside models/ has a family's model type or the name of its file, in any spelling."""
    names = {plain(name) for family in FAMILIES for name in family.model_types}
    names |= {plain(path.stem) for path in (ROOT / "export" / "models").glob("*.py") if plain(path.stem) in names}
    assert names
    for path in (ROOT / "export").rglob("*.py"):
        if not path.is_relative_to(ROOT / "export" / "models"):
            text = plain(path.read_text())
            assert not [name for name in names if name in text], path


def plain(text: str) -> str:
    """Return the letters and digits of a text in lower case: `Qwen3.5` and `qwen3_5` are one name."""
    return re.sub(r"[^a-z0-9]", "", text.lower())
