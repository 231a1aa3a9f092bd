"""The names that the three packages offer: all that a user's type hints and `except` clauses need, without heavy imports."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest

from ostinato.delegate import errors

from .conftest import ROOT

PACKAGES = {name: importlib.import_module(f"ostinato.{name}") for name in ("delegate", "export", "runner")}
ERRORS = {name for name, value in vars(errors).items() if inspect.isclass(value)}
# Errors that only an export raises.
EXPORTS_OWN = {"CheckpointError", "ExportError"}


@pytest.mark.parametrize("name", PACKAGES)
def test_type_checkers_see_the_same_names(name: str) -> None:
    (block,) = (node for node in ast.parse((ROOT / name / "__init__.py").read_text()).body if isinstance(node, ast.If))
    seen = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom) and len(node.names) == 1 and node.names[0].asname == node.names[0].name
        seen[node.names[0].name] = "." * node.level + (node.module or "")
    package = PACKAGES[name]
    assert sorted(seen) == package.__all__
    for public, home in seen.items():
        module = importlib.import_module(home, f"ostinato.{name}")
        assert getattr(package, public) is getattr(module, public)
        assert public in dir(package)


def test_every_error_can_be_caught_by_name() -> None:
    assert set(PACKAGES["delegate"].__all__) >= ERRORS
    assert set(PACKAGES["runner"].__all__) >= ERRORS - EXPORTS_OWN
    assert set(PACKAGES["export"].__all__) >= EXPORTS_OWN


def test_an_unknown_name_is_an_attribute_error() -> None:
    for name, package in PACKAGES.items():
        with pytest.raises(AttributeError, match=f"module 'ostinato.{name}' has no attribute 'Sesion'"):
            _ = package.Sesion


def test_importing_them_imports_nothing_heavy() -> None:
    program = (
        "import sys, ostinato.delegate, ostinato.export, ostinato.runner; "
        "from ostinato.runner import CapacityError; "
        "print([name for name in ('torch', 'numpy', 'executorch', 'jinja2', 'tqdm') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def hinted(value: Any) -> Iterator[type]:
    """Yield the classes of ours that a type hint contains."""
    if inspect.isclass(value) and value.__module__.startswith("ostinato."):
        yield value
    for part in get_args(value):
        yield from hinted(part)


def signatures(thing: Any) -> Iterator[dict[str, Any]]:
    """Yield the type hints of a function, or those of a class's public fields, properties and methods."""
    if inspect.isfunction(thing):
        yield get_type_hints(thing)
    if not inspect.isclass(thing):
        return
    if dataclasses.is_dataclass(thing):
        yield {name: hint for name, hint in get_type_hints(thing).items() if not name.startswith("_")}
    for name, member in vars(thing).items():
        if not name.startswith("_"):
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if inspect.isfunction(function):
                yield get_type_hints(function)


@pytest.mark.parametrize("name", PACKAGES)
def test_what_public_signatures_name_is_offered(name: str) -> None:
    offered = {id(value) for package in PACKAGES.values() for value in map(package.__getattr__, package.__all__)}
    for public in PACKAGES[name].__all__:
        for hints in signatures(getattr(PACKAGES[name], public)):
            named = {one for hint in hints.values() for one in hinted(hint)}
            assert not {one.__qualname__ for one in named if id(one) not in offered}, public
