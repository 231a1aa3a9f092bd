"""Keeps compiled code between exports. The name of a file is a hash of all that the code depends on.

A file is a zip archive of one `Code`, in `kept_folder()`. It is written whole or not at all, so that exports at the same time
may share the folder. Files that were not used for longest are deleted when all of them take more than MOST_BYTES, together
with the programs that `export/artifact/kept_programs.py` keeps there.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .aot import Code
from .gpu import gpu_properties
from .inductor_internals import inductor_settings, kept_folder
from .native import NativeLibrary, processor
from .toolchain import compiler_version, find_compiler
from .torch_internals import size_example, storage_key
from .trace import TracedGraph

MOST_BYTES = 4 << 30
_SUFFIX = ".code"
PROGRAM_SUFFIX = ".program"
# Operators whose code is torch's or ours; the hash of our sources stands for ours. Functions are Python's for sizes.
_NAMESPACES = frozenset({"aten", "prims", "ostinato"})
_MODULES = frozenset({"_operator", "builtins", "math", "torch", "torch.fx.experimental.symbolic_shapes"})


def code_path(graph: TracedGraph, device: str, native: NativeLibrary | None, grows: bool) -> Path | None:
    """Where the graph's code is kept. None: it depends on something that has no hash, such as an operator of the user's.

    Args:
        graph: the graph, before its code is generated.
        device: "cpu" or "cuda".
        native: the library of our operators that the code calls.
        grows: see `generate_library`.
    """
    digest = hashlib.sha256(surroundings(device).encode())
    try:
        lines = [*_described(graph, set() if native is None else {native.name})]
    except _NoHash:
        return None
    lines += [str(grows), "" if native is None else native.build().library]
    digest.update("\n".join(lines).encode())
    return kept_folder() / f"{digest.hexdigest()}{_SUFFIX}"


def read_kept(path: Path | None) -> Code | None:
    """Return the code that is kept at the path, without its native library; None: there is none, or it cannot be read."""
    files = read_archive(path)
    if files is None:
        return None
    try:
        names, source = json.loads(files["names.json"]), files["source.cpp"].decode()
        return Code(files["code.so"], files["extern.json"], names, source)
    except (KeyError, ValueError):
        return None


def keep(path: Path | None, code: Code) -> None:
    """Keep the code at the path. If this fails, the next export compiles it again."""
    files = {"code.so": code.library, "extern.json": code.extern}
    keep_archive(path, {**files, "names.json": json.dumps(code.names), "source.cpp": code.source})


def read_archive(path: Path | None) -> dict[str, bytes] | None:
    """Return what `keep_archive` was given, as bytes; None: there is nothing at the path, or it cannot be read."""
    if path is None:
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            files = {name: archive.read(name) for name in archive.namelist()}
        os.utime(path)
    except (OSError, zipfile.BadZipFile):
        return None
    return files


def keep_archive(path: Path | None, files: Mapping[str, bytes | str]) -> None:
    """Keep these files, by name, in one archive at the path, as `keep_file` does. A path of None keeps nothing."""
    if path is None:
        return

    def write(unfinished: Path) -> None:
        with zipfile.ZipFile(unfinished, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)

    keep_file(path, write)


def keep_file(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` make a file beside `path`, which gets its name when it is complete. If this fails, there is no file.

    Then older files are deleted if all take too much.
    """
    unfinished = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        try:
            write(unfinished)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        _make_room(path.parent)


def _make_room(folder: Path) -> None:
    kept = [file for suffix in (_SUFFIX, PROGRAM_SUFFIX) for file in folder.glob(f"*{suffix}")]
    files = sorted(((file, file.stat()) for file in kept), key=lambda entry: -entry[1].st_mtime)
    total = 0
    for file, found in files:
        total += found.st_size
        if total > MOST_BYTES:
            file.unlink(missing_ok=True)


class _NoHash(Exception):
    """The graph has something that no text describes."""


@cache
def surroundings(device: str) -> str:
    """Describe what code depends on beside its graph: our sources, torch, its settings, the compiler, the machine."""
    sources = hashlib.sha256()
    for room in ("export", "delegate"):
        for path in sorted((Path(__file__).parents[2] / room).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h"):
                sources.update(f"{path.relative_to(path.parents[2])}\0".encode() + path.read_bytes())
    machine = processor()
    if device == "cuda":
        machine += f"\n{gpu_properties()}"
    parts = (
        sources.hexdigest(),
        torch.__version__,
        # Libraries hold the names of torch's headers.
        torch.__file__,
        str(torch.version.cuda),
        version_of("triton"),
        # Code for CPUs has parallel loops only where they are worth these threads.
        str(torch.get_num_threads()),
        inductor_settings(),
        compiler_version(find_compiler()),
        machine,
        device,
    )
    return "\n".join(parts)


def version_of(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _described(graph: TracedGraph, native: set[str]) -> Iterator[str]:
    """Describe a graph in lines: nodes, values, constants, and which of these share memory.

    Raises:
        _NoHash: an operator that is neither torch's nor ours, or a constant that is no tensor.
    """
    program = graph.program
    for name, module in program.graph_module.named_modules():
        if not isinstance(module, GraphModule):
            raise _NoHash
        for node in module.graph.nodes:
            target = _target(node, _NAMESPACES | native)
            value = _value(node.meta.get("val"))
            yield f"{name} {node.op} {node.name} {target} {node.args} {node.kwargs} {value}"
    first: dict[int, str] = {}
    for kind, values in (("state", program.state_dict), ("constant", program.constants)):
        for name, value in values.items():
            if not isinstance(value, Tensor):
                raise _NoHash
            same = first.setdefault(storage_key(value), name)
            shape, stride, offset = tuple(value.shape), value.stride(), value.storage_offset()
            yield f"{kind} {name} {type(value).__name__} {value.dtype} {shape} {stride} {offset} {same}"
    yield str(program.graph_signature)
    yield str(program.range_constraints)
    yield f"{graph.device} {sorted(graph.written)} {sorted(graph.tensors)}"


def _target(node: Node, namespaces: frozenset[str]) -> str:
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        if target.namespace not in namespaces:
            raise _NoHash
    elif node.op == "call_function" and getattr(target, "__module__", None) not in _MODULES:
        # Also operators of higher order: their functions are elsewhere.
        raise _NoHash
    return str(target) if isinstance(target, (str, torch._ops.OpOverload)) else target.__qualname__


def _value(value: Any) -> str:
    """Describe the tracer's value of a node. The example's sizes count: Inductor may choose by them."""
    if isinstance(value, Tensor):
        sizes = ", ".join(map(_value, (*value.shape, *value.stride(), value.storage_offset())))
        return f"{value.dtype} {value.device} [{sizes}] {type(value).__name__} {value.requires_grad}"
    if isinstance(value, torch.SymInt):
        return f"{value} {size_example(value)}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(map(_value, value)) + ")"
    return repr(value)
