"""Finds the C++ compiler, and checks that torch can load what it built."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from ostinato.delegate.errors import ExportError


def find_compiler() -> str:
    """Path of the C++ compiler that AOTInductor will call: `CXX` if that is set, else g++ or clang++.

    Raises:
        ExportError: there is none; the message says how to get one.
    """
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else ("g++", "clang++"):
        path = shutil.which(name)
        if path:
            return path
    if wanted:
        raise ExportError(
            f"the C++ compiler that CXX names, {wanted!r}, does not exist: set CXX to one that does, or unset it"
        )
    raise ExportError(
        "no C++ compiler found: an export compiles code. Install one (Debian, Ubuntu: apt-get install g++; "
        "Fedora: dnf install gcc-c++), or set CXX to its path"
    )


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
