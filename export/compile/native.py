"""Operators whose code is our own C++. An export compiles this code into one library, which travels in the artifact.

Tracing needs only an operator's schema and the shapes of its results, so only these are declared to torch. AOTInductor's code
calls the operator's C function, `aoti_torch_cpu_NAME`, without a dispatcher between. The function takes and returns handles
of tensors.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph

from .toolchain import compiler_version, find_compiler

# Without `-ffast-math`: NaN in must be NaN out.
_FLAGS = ("-O3", "-std=c++20", "-fPIC", "-fno-math-errno", "-march=native")
# The library's threads outlive the container that loaded it first.
_LINK_FLAGS = ("-shared", "-Wl,-z,nodelete", "-pthread")

# Schema's type -> C type.
_C_TYPES = {
    "Tensor": "AtenTensorHandle",
    "Optional[Tensor]": "AtenTensorHandle*",
    "bool": "int32_t",
    "float": "double",
    "int": "int64_t",
    "str": "const char*",
}

Operator = torch._ops.OpOverload

# Name -> library, for libraries that have an operator.
_LIBRARIES: dict[str, NativeLibrary] = {}


@dataclass(frozen=True)
class NativeLibrary:
    """A set of operators, and the C++ sources of their functions.

    Attributes:
        name: namespace of the operators; also in the library's file name.
        folder: folder below which the sources lie, and the headers that they include.
        sources: source files, each compiled by itself.
        operators: operators declared so far.
    """

    name: str
    folder: Path
    sources: tuple[str, ...]
    operators: list[Operator] = field(default_factory=list)

    def operator(self, schema: str) -> Callable[[Callable[..., Any]], Operator]:
        """Declare an operator: `@library.operator("f(Tensor x, Tensor(a!) state, float eps) -> Tensor")`.

        Decorates a function that returns empty results for the operator's arguments. torch's operator takes the function's
        place. Arguments are contiguous tensors, optional tensors, bools, floats, ints, texts and dtypes. The operator returns
        new tensors, at least one.
        """

        def declare(empty_results: Callable[..., Any]) -> Operator:
            name = schema.partition("(")[0]
            torch.library.define(f"{self.name}::{name}", schema[len(name) :], tags=(torch.Tag.needs_exact_strides,))
            torch.library.register_fake(f"{self.name}::{name}", empty_results)
            made: Operator = getattr(getattr(torch.ops, self.name), name).default
            self.operators.append(made)
            _LIBRARIES[self.name] = self
            return made

        return declare

    @property
    def declarations(self) -> dict[Operator, list[str]]:
        """Operator -> the declaration of its C function."""
        return {operator: [_declaration(operator)] for operator in self.operators}

    def build(self, flags: Sequence[str] = ()) -> NativeBuild:
        """Commands by which this machine's compiler makes the library. It is for this machine's CPU unless `flags` name
        another."""
        compiler = find_compiler()
        home = Path(str(torch.__file__)).parent
        command = (compiler, *_FLAGS, *flags, f"-I{home / 'include'}")
        digest = hashlib.sha256(
            "\0".join((compiler_version(compiler), processor(), *command, torch.__version__, *self.sources)).encode()
        )
        for path in sorted(path for path in self.folder.rglob("*_cpu.*") if path.suffix in (".cpp", ".h")):
            digest.update(f"\0{path.relative_to(self.folder)}\0".encode() + path.read_bytes())
        library = f"lib{self.name}-{digest.hexdigest()[:16]}.so"
        objects = {f"{Path(source).stem}.o": str(self.folder / source) for source in self.sources}
        compiled = tuple((*command, "-c", source, "-o", made) for made, source in objects.items())
        link = (
            compiler,
            *_LINK_FLAGS,
            f"-Wl,-soname,{library}",
            "-o",
            library,
            *objects,
            f"-L{home / 'lib'}",
            "-ltorch_cpu",
        )
        return NativeBuild(library, compiled, link)


@dataclass(frozen=True)
class NativeBuild:
    """Commands that make a library.

    Attributes:
        library: file name and SONAME. Another source, flag, compiler or processor gives another name, because the system's
            loader takes libraries of one SONAME for the same.
        objects: commands that can run at the same time, all in one folder.
        link: command to run after them, in that folder.
    """

    library: str
    objects: tuple[tuple[str, ...], ...]
    link: tuple[str, ...]


def native_libraries() -> list[NativeLibrary]:
    """The libraries that have operators so far."""
    return list(_LIBRARIES.values())


def native_library_of(graph: Graph) -> NativeLibrary | None:
    """The library of the graph's native operators; None if it has none. A graph uses the operators of one library only."""
    for node in graph.nodes:
        if isinstance(node.target, Operator) and node.target.namespace in _LIBRARIES:
            return _LIBRARIES[node.target.namespace]
    return None


def _declaration(operator: Operator) -> str:
    arguments = [f"{_c_type(argument)} {argument.name}" for argument in operator._schema.arguments]
    arguments += [f"AtenTensorHandle* result_{index}" for index in range(len(operator._schema.returns))]
    name = operator._schema.name.partition("::")[2]
    return f"AOTITorchError aoti_torch_cpu_{name}({', '.join(arguments)})"


def _c_type(argument: Any) -> str:
    # The schema prints a dtype as an int. Only its real type tells the difference.
    return "int32_t" if str(argument.real_type) == "ScalarType" else _C_TYPES[str(argument.type)]


def processor() -> str:
    """Description of the CPU: what `-march=native` looks at, as far as it is known without the compiler."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    kept = ("vendor_id", "cpu family", "model", "flags", "Features")
    known: Mapping[str, str] = {key.strip(): value for key, _, value in (line.partition(":") for line in lines)}
    return platform.machine() + "".join(known.get(key, "") for key in kept)
