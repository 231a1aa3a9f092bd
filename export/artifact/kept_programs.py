"""Keeps whole programs between exports: the next export of a model of the same config only writes its weights.

A file is a zip archive in the folder of `export/compile/kept_code.py`. Its name is a hash of all that the program depends
on.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from ostinato.delegate.artifact.records import dtype_from_name, dtype_name
from ostinato.delegate.artifact.target import Target
from ostinato.delegate.errors import ArtifactError
from ostinato.export.compile.inductor_internals import kept_folder
from ostinato.export.compile.kept_code import PROGRAM_SUFFIX, keep_archive, read_archive, surroundings, version_of

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
    files = read_archive(path)
    if files is None:
        return None
    try:
        own = safetensors.torch.load(files["own.safetensors"])
        stored = {
            key: own[key] if key in own else torch.empty(shape, dtype=dtype_from_name(dtype), device="meta")
            for key, shape, dtype in json.loads(files["stored.json"])
        }
        head = io.BytesIO(files["layout.bin"])
        layout = [part if isinstance(part, str) else head.read(part) for part in json.loads(files["layout.json"])]
        return UnsealedProgram(files["program.pte"], stored, layout, json.loads(files["sources.json"]))
    except (ArtifactError, SafetensorError, KeyError, ValueError, TypeError):
        return None


def keep_program(path: Path | None, exported: UnsealedProgram, given: Collection[str]) -> None:
    """Keep the program at the path. If this fails, the next export makes it again.

    `given`: keys of the constants that a checkpoint gives.
    """
    own = {key: tensor.contiguous() for key, tensor in exported.stored.items() if key not in given}
    if path is None or sum(tensor.nbytes for tensor in own.values()) > _MOST_BYTES:
        return
    stored = [(key, tuple(tensor.shape), dtype_name(tensor.dtype)) for key, tensor in exported.stored.items()]
    layout = [part if isinstance(part, str) else len(part) for part in exported.layout]
    keep_archive(
        path,
        {
            "program.pte": exported.program,
            "stored.json": json.dumps(stored),
            "own.safetensors": safetensors.torch.save(own),
            "layout.json": json.dumps(layout),
            "layout.bin": b"".join(part for part in exported.layout if isinstance(part, bytes)),
            "sources.json": json.dumps(exported.sources),
        },
    )
