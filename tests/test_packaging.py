"""The statements of pyproject.toml and README.md about the packages are true."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from ostinato.delegate import BackendOptions, __version__
from ostinato.export.kernels.operators_cpu import LIBRARY

from .conftest import ROOT

ROOMS = ("delegate", "export", "runner")


def test_every_package_is_in_the_wheel() -> None:
    tomllib = pytest.importorskip("tomllib")
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert setuptools["package-dir"] == {f"ostinato.{room}": room for room in ROOMS}
    folders = [path.parent.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("__init__.py")]
    assert sorted(setuptools["packages"]) == sorted(".".join(("ostinato", *folder.parts)) for folder in folders)
    # Each folder with code is a package.
    assert {path.parent.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("*.py")} == set(folders)


def test_the_version_is_that_of_pyproject() -> None:
    tomllib = pytest.importorskip("tomllib")
    assert __version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_types_are_in_the_wheel() -> None:
    tomllib = pytest.importorskip("tomllib")
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "py.typed" in setuptools["package-data"]["*"]
    assert all((ROOT / room / "py.typed").exists() for room in ROOMS)


def test_kernels_in_cpp_are_in_the_wheel() -> None:
    """The wheel has all sources and headers: an export compiles them where the package is installed."""
    tomllib = pytest.importorskip("tomllib")
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    found = {path for pattern in patterns["ostinato.export.kernels"] for path in LIBRARY.folder.glob(pattern)}
    assert found == {path for ending in ("*.cpp", "*.h") for path in LIBRARY.folder.rglob(ending)}
    assert {LIBRARY.folder / source for source in LIBRARY.sources} == {p for p in found if p.suffix == ".cpp"}


def test_every_backend_option_is_in_its_readme() -> None:
    readme = (ROOT / "delegate" / "README.md").read_text(encoding="utf-8")
    for item in fields(BackendOptions):
        assert re.search(rf"^\| `{item.name}` \|", readme, re.MULTILINE), item.name
