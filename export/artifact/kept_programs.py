"""Keeps whole programs between exports: the next export of a model of the same config only writes its weights.

A file is a zip archive in the folder of `export/compile/kept_code.py`. Its name is a hash of all that the program depends
on.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from ostinato.delegate.artifact.records import dtype_name
from ostinato.delegate.artifact.target import Target
from ostinato.export.compile.inductor_internals import kept_folder
from ostinato.export.compile.kept_code import PROGRAM_SUFFIX, keep_file, surroundings, version_of

from .writer import Layout

# A program with more bytes of constants that no checkpoint gives is not kept.
_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class UnsealedProgram:
    """A program that lacks its constants and its seal.

    Attributes:
        program: the bytes of `model.pte`, without the seal.
        stored: key -> tensor, for all constants in their order. Tensors that a checkpoint gives have only shape and dtype.
        layout: of the file of all constants.
        sources: each method's generated C++ wrappers.
    """

    program: bytes
    stored: Mapping[str, Tensor]
    layout: Layout
    sources: Mapping[str, str]


def program_path(identity: str | None, device: str, target: Target) -> Path | None:
    """Where a program is kept. None: nothing says what its methods depend on.

    `identity`: text that says all that the methods depend on, beside our sources, torch and this machine.
    """
    if identity is None:
        return None
    versions = f"{platform.python_version()} {version_of('executorch')} {target.to_bytes().decode()}"
    digest = hashlib.sha256("\n".join((surroundings(device), versions, identity)).encode())
    return kept_folder() / f"{digest.hexdigest()}{PROGRAM_SUFFIX}"


def read_program(path: Path | None) -> UnsealedProgram | None:
    """Return the program that is kept at the path; None: there is none, or it cannot be read."""
    if path is None:
        return None
    try:
        with zipfile.ZipFile(path) as file:
            own = safetensors.torch.load(file.read("own.safetensors"))
            stored = {
                key: own[key] if key in own else torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
                for key, shape, dtype in json.loads(file.read("stored.json"))
            }
            bytes_of_layout = io.BytesIO(file.read("layout.bin"))
            layout = [
                part if isinstance(part, str) else bytes_of_layout.read(part)
                for part in json.loads(file.read("layout.json"))
            ]
            found = UnsealedProgram(file.read("program.pte"), stored, layout, json.loads(file.read("sources.json")))
        os.utime(path)
    except (OSError, zipfile.BadZipFile, SafetensorError, KeyError, ValueError, TypeError, AttributeError):
        return None
    return found


def keep_program(path: Path | None, exported: UnsealedProgram, given: Collection[str]) -> None:
    """Keep the program at the path. If this fails, the next export makes it again.

    `given`: keys of the constants that a checkpoint gives.
    """
    own = {key: tensor.contiguous() for key, tensor in exported.stored.items() if key not in given}
    if path is None or sum(tensor.nbytes for tensor in own.values()) > _MOST_BYTES:
        return
    stored = [(key, tuple(tensor.shape), dtype_name(tensor.dtype)) for key, tensor in exported.stored.items()]

    def write(unfinished: Path) -> None:
        with zipfile.ZipFile(unfinished, "w") as file:
            file.writestr("program.pte", exported.program)
            layout = [part if isinstance(part, str) else len(part) for part in exported.layout]
            file.writestr("layout.json", json.dumps(layout))
            file.writestr("layout.bin", b"".join(part for part in exported.layout if isinstance(part, bytes)))
            file.writestr("stored.json", json.dumps(stored))
            file.writestr("own.safetensors", safetensors.torch.save(own))
            file.writestr("sources.json", json.dumps(exported.sources))

    keep_file(path, write)
