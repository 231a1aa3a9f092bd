"""Finds the C++ compiler, and checks that torch can load what it built."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

from ostinato.delegate.errors import ExportError


def find_compiler() -> str:
    """Path of the C++ compiler that AOTInductor will call: `CXX` if that is set, else g++ or clang++.

    Raises:
        ExportError: there is none, or it does not work; the message says how to get one.
    """
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else ("g++", "clang++"):
        path = shutil.which(name)
        if path:
            _check_works(path)
            return path
    if wanted:
        raise ExportError(
            f"the C++ compiler that CXX names, {wanted!r}, does not exist: set CXX to one that does, or unset it"
        )
    raise ExportError(
        "no C++ compiler found: an export compiles code. Install one (Debian, Ubuntu: apt-get install g++; "
        "Fedora: dnf install gcc-c++), or set CXX to its path"
    )


@cache
def _check_works(compiler: str) -> None:
    """Raises ExportError: it does not preprocess a file with OpenMP's header, which generated code includes."""
    command = (compiler, "-x", "c++", "-fopenmp", "-E", "-")
    try:
        done = subprocess.run(
            command, input="#include <omp.h>\nstarted _OPENMP\n", capture_output=True, text=True, errors="replace"
        )
    except OSError as error:
        raise ExportError(f"the C++ compiler {compiler} cannot be started: {error.strerror}") from error
    if done.returncode != 0 and "omp.h" in done.stderr:
        raise ExportError(
            f"the C++ compiler {compiler} finds no omp.h, which an export needs. Install it (Debian, Ubuntu: apt-get install "
            "libomp-dev; Fedora: dnf install libomp-devel), or set CXX=g++"
        )
    if done.returncode != 0 or "started 2" not in done.stdout:
        said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[0]
        raise ExportError(f"the C++ compiler {compiler} does not work ({said}): set CXX to one that does, or unset it")


@cache
def compiler_version(compiler: str) -> str:
    """The first line that a compiler prints for `--version`."""
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    return said.partition("\n")[0]


def check_library(path: Path) -> None:
    """Refuse a shared library that carries its own libstdc++: torch crashes when it makes a container from such a library.

    Without `readelf` nothing is checked.

    Raises:
        ExportError: `libstdc++.so.6` (or libc++) is not among the libraries that it needs.
    """
    readelf = shutil.which("readelf")
    if readelf is None:
        return
    listing = subprocess.run([readelf, "-d", str(path)], capture_output=True, text=True, check=True).stdout
    if "libstdc++.so" not in listing and "libc++.so" not in listing:
        raise ExportError(
            f"the compiler {find_compiler()} links libstdc++ statically, and code built so crashes inside torch: set CXX to "
            "the system's compiler, for example CXX=/usr/bin/g++ CC=/usr/bin/gcc"
        )
