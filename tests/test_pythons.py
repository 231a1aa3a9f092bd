"""The Python versions that pyproject.toml promises are named everywhere, and the pinned packages exist for each of them."""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, distribution

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from .conftest import ROOT

PROJECT = (ROOT / "pyproject.toml").read_text()
PROMISED = re.search(r'^requires-python = ">=3\.(\d+),<3\.(\d+)"$', PROJECT, re.MULTILINE)
assert PROMISED
PYTHONS = [f"3.{minor}" for minor in range(int(PROMISED[1]), int(PROMISED[2]))]
THIS = f"{sys.version_info.major}.{sys.version_info.minor}"


def pins(device: str, python: str) -> dict[str, Requirement]:
    """Return the pins that hold for a Python version, by name. A package has one at most."""
    lines = (ROOT / "scripts" / f"constraints-{device}.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    valid = [one for one in found if holds(one, python)]
    assert len({one.name for one in valid}) == len(valid), python
    # A package with markers has a pin for each Python.
    assert {one.name for one in valid} == {one.name for one in found}, python
    return {one.name: one for one in valid}


def holds(requirement: Requirement, python: str) -> bool:
    environment = {**default_environment(), "python_version": python, "python_full_version": f"{python}.0"}
    return requirement.marker is None or requirement.marker.evaluate(environment)  # type: ignore[arg-type]


def test_the_versions_are_named_everywhere() -> None:
    first, last = PYTHONS[0], PYTHONS[-1]
    (matrix,) = re.findall(r"^ +python: \[(.*)\]$", (ROOT / ".github/workflows/ci.yml").read_text(), re.MULTILINE)
    assert matrix == ", ".join(f'"{one}"' for one in PYTHONS)
    environment = (ROOT / "scripts" / "environment.sh").read_text()
    assert set(re.findall(r"3\.\d+ to 3\.\d+", environment)) == {f"{first} to {last}"}
    assert f"({first.replace('.', ', ')}) <= sys.version_info[:2] <= ({last.replace('.', ', ')})" in environment
    assert f"Python {first} to {last}" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert re.search(r'^python_version = "(.*)"$', PROJECT, re.MULTILINE)[1] == first  # type: ignore[index]


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_pins_take_the_promised_pythons(device: str, python: str) -> None:
    """What is pinned on this Python says in its metadata which other ones it takes; so no network is needed."""
    here = pins(device, THIS)
    for name, pin in pins(device, python).items():
        if pin.specifier != here[name].specifier:
            continue
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue
        wanted = package.metadata["Requires-Python"]
        if pin.specifier.contains(package.version) and wanted:
            assert SpecifierSet(wanted).contains(f"{python}.99"), f"{pin} needs Python {wanted}: give it a marker"


@pytest.mark.parametrize("python", PYTHONS)
def test_all_that_the_tests_need_is_pinned(python: str) -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads(PROJECT)["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    pinned = pins("cpu", python)
    for requirement in map(Requirement, needed):
        # environment.sh says why triton is no constraint.
        if requirement.name != "triton":
            (version,) = pinned[requirement.name].specifier
            assert requirement.specifier.contains(version.version), requirement
