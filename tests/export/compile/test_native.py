"""Operators in C++: their declarations, and that the kernels compile here for every instruction set."""

from __future__ import annotations

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ostinato.export.compile.native import NativeLibrary, native_library_of
from ostinato.export.compile.toolchain import find_compiler
from ostinato.export.kernels import cpu as _declares_them  # noqa: F401
from ostinato.export.kernels.operators_cpu import LIBRARY

CXX = find_compiler()
# Compiler's name of a processor -> an instruction that its code must have, and one that it must not.
PROCESSORS = {
    "haswell": ("vpmaddubsw", "zmm"),
    "alderlake": ("vpdpbusd", "zmm"),
    "cascadelake": (r"vpdpbusd.*zmm", "vdpbf16ps"),
    "cooperlake": (r"vdpbf16ps.*zmm", "tdpbf16ps"),
    "sapphirerapids": ("tdpbssd", "tdpfp16ps"),
}
PRODUCT = "linear/product_cpu.cpp"
# Processors that differ from the one before them in PROCESSORS only by the code of products, which uses this macro or
# function.
PRODUCTS_ALONE = {"alderlake": "add_dot", "cooperlake": "__AVX512BF16__"}


def test_declarations() -> None:
    """The declarations are in the form in which AOTInductor calls operators."""
    found = {operator._schema.name: text for operator, (text,) in LIBRARY.declarations.items()}
    assert found["ostinato_cpu::norm_linear"] == (
        "AOTITorchError aoti_torch_cpu_norm_linear(AtenTensorHandle x, AtenTensorHandle norm, double eps, "
        "AtenTensorHandle values, AtenTensorHandle* scale, AtenTensorHandle* minimum, AtenTensorHandle* bias, "
        "const char* form, int32_t dtype, AtenTensorHandle* result_0)"
    )
    assert found["ostinato_cpu::delta_step"].endswith(
        "int64_t key_heads, AtenTensorHandle* result_0, AtenTensorHandle* result_1)"
    )


def test_functions_in_cpp_are_those_declared() -> None:
    """The C++ functions have the declared names, and the declared types in the same order."""
    text = " ".join(path.read_text() for path in LIBRARY.folder.rglob("*_cpu.cpp"))
    defined = dict(re.findall(r'extern "C" AOTITorchError (\w+)\(([^)]*)\)', text))
    for (declaration,) in LIBRARY.declarations.values():
        name, arguments = re.fullmatch(r"AOTITorchError (\w+)\((.*)\)", declaration).groups()  # type: ignore[union-attr]
        assert types(defined.pop(name)) == types(arguments), name
    assert not defined


def types(arguments: str) -> list[str]:
    return [re.sub(r"\s*\w+$", "", argument.strip()) for argument in arguments.split(",")]


def test_library_of_a_graph() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
            return torch.ops.ostinato_cpu.norm_linear(x, norm, 1e-6, x, None, None, None, "", torch.float32)

    plain = torch.export.export(torch.nn.Linear(4, 4), (torch.ones(2, 4),))
    ours = torch.export.export(Model(), (torch.ones(4, 4), torch.ones(4)), strict=False)
    assert native_library_of(plain.graph) is None
    assert native_library_of(ours.graph) is LIBRARY


def test_name_is_of_what_is_in_it(tmp_path: Path) -> None:
    """Other flags, sources or headers give the library another name: the loader takes libraries of one name for the same."""
    (tmp_path / "a_cpu.cpp").write_text("int one() { return 1; }")
    library = NativeLibrary("some", tmp_path, ("a_cpu.cpp",))
    names = {library.build().library, library.build(("-march=haswell",)).library}
    (tmp_path / "b_cpu.h").write_text("#pragma once")
    names.add(library.build().library)
    (tmp_path / "b_cpu.h").rename(tmp_path / "c_cpu.h")
    names |= {library.build().library, replace(library, sources=("a_cpu.cpp", "c_cpu.h")).build().library}
    assert len(names) == 5 and library.build().library in names


def test_only_products_have_code_for_these() -> None:
    using = {path.name for path in LIBRARY.folder.rglob("*_cpu.cpp") if uses(path, *PRODUCTS_ALONE.values())}
    headers = {path.name for path in LIBRARY.folder.rglob("*_cpu.h") if uses(path, *PRODUCTS_ALONE.values())}
    assert using == {Path(PRODUCT).name}
    # The first is a part of the products' source. The second defines the macro and the function.
    assert headers == {"integers_cpu.h", "vectors_cpu.h"}
    # Python's bytecode has such names, too.
    sources = [*LIBRARY.folder.rglob("*_cpu.cpp"), *LIBRARY.folder.rglob("*_cpu.h")]
    including = [path.name for path in sources if uses(path, '#include "integers_cpu.h"')]
    assert including == [Path(PRODUCT).name]


def uses(path: Path, *words: str) -> bool:
    return any(word in path.read_text() for word in words)


@pytest.mark.skipif("g++" not in CXX, reason="the names are those of g++")
@pytest.mark.parametrize("processor", PROCESSORS)
def test_instruction_sets(processor: str, tmp_path: Path) -> None:
    """Every instruction set compiles, also those that this machine cannot run. At run time a missing instruction set is
    refused by name (tests/delegate/artifact/test_damage.py)."""
    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("no objdump")
    commands = LIBRARY.build((f"-march={processor}",)).objects
    if processor in PRODUCTS_ALONE:
        commands = tuple(command for command in commands if str(LIBRARY.folder / PRODUCT) in command)
        assert len(commands) == 1
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda command: subprocess.run(command, cwd=tmp_path, check=True), commands))
    found = tmp_path / f"{Path(PRODUCT).stem}.o"
    code = subprocess.run([objdump, "-d", str(found)], capture_output=True, text=True, check=True).stdout
    there, absent = PROCESSORS[processor]
    assert re.search(there, code) and not re.search(absent, code)
