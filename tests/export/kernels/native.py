"""Operators in C++, callable from Python: the library is an export's, or built as an export builds it, once for all tests.

An exported program calls their C functions with handles of tensors; here torch's dispatcher does, by way of ctypes.
"""

from __future__ import annotations

import ctypes
import fcntl
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from ostinato.export.compile.inductor_internals import kept_folder
from ostinato.export.compile.native import NativeBuild, NativeLibrary, Operator

_DTYPES = {torch.float32: 6, torch.bfloat16: 15}
_NEW = ctypes.pythonapi.PyCapsule_New
_NEW.restype, _NEW.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_POINTER = ctypes.pythonapi.PyCapsule_GetPointer
_POINTER.restype, _POINTER.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def build(native: NativeBuild, folder: Path) -> Path:
    """The library in `folder`, made if it is not there yet; by one process, and others wait for it."""
    path = folder / native.library
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            kept = kept_folder() / native.library
            with TemporaryDirectory(dir=folder) as made:
                if kept.exists():
                    shutil.copyfile(kept, Path(made) / native.library)
                else:
                    with ThreadPoolExecutor() as pool:
                        list(pool.map(partial(run, folder=Path(made)), native.objects))
                    run(native.link, Path(made))
                (Path(made) / native.library).rename(path)
    return path


def run(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def make_callable(library: NativeLibrary, path: Path) -> None:
    """Let torch run the library's operators on CPU tensors by the functions in the file."""
    code = ctypes.CDLL(str(path))
    torch_code = ctypes.CDLL(str(Path(str(torch.__file__)).parent / "lib" / "libtorch_cpu.so"))
    for operator in library.operators:
        name = operator._schema.name.partition("::")[2]
        function = getattr(code, f"aoti_torch_cpu_{name}")
        torch.library.impl(operator._schema.name, "CPU")(_caller(operator, function, torch_code))


def _caller(operator: Operator, function: Any, torch_code: ctypes.CDLL) -> Callable[..., Any]:
    schema = operator._schema

    def call(*given: Any) -> Any:
        tensors = [value for value in given if isinstance(value, Tensor)]
        assert all(tensor.is_contiguous() for tensor in tensors)
        capsules = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(tensors)
        handles = iter([ctypes.c_void_p(_POINTER(capsule, None)) for capsule in capsules])
        arguments: list[Any] = []
        made: list[ctypes.c_void_p] = []
        for argument, value in zip(schema.arguments, given, strict=True):
            kind = str(argument.real_type)
            if isinstance(value, Tensor):
                made.append(next(handles))
                arguments.append(ctypes.byref(made[-1]) if kind.startswith("Optional") else made[-1])
            elif value is None:
                arguments.append(ctypes.c_void_p())
            elif kind == "str":
                arguments.append(ctypes.c_char_p(value.encode()))
            elif kind == "ScalarType":
                arguments.append(ctypes.c_int32(_DTYPES[value]))
            else:
                arguments.append(ctypes.c_double(value) if kind == "float" else ctypes.c_int64(value))
        results = [ctypes.c_void_p() for _ in schema.returns]
        status = function(*arguments, *map(ctypes.byref, results))
        for handle in made:
            torch_code.aoti_torch_delete_tensor_object(handle)
        assert status == 0, f"{schema.name} failed"
        outputs = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs([_NEW(r.value, None, None) for r in results])
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return call
