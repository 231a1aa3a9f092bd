"""Any model: a dict of methods -> torch.export -> AOTInductor -> an ExecuTorch program -> artifact folder."""

from __future__ import annotations

import logging
import re
import shutil
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from ..delegate.artifact import CONSTANTS_FILE, PROGRAM_FILE
from ..delegate.errors import ExportError, OstinatoError
from ..delegate.target import Target, host_target
from .aot import CompiledMethod, Lowering, compile_method
from .assemble import assemble
from .compiler import find_compiler
from .mutation import written_buffers
from .progress import Progress
from .writer import atomic_folder, write_constants

MethodSpec = tuple[torch.nn.Module, tuple[torch.Tensor, ...], Any]


@dataclass(frozen=True)
class ExportReport:
    """What an export did: where, seconds by stage, sizes in bytes, and the generated C++ wrapper of each method."""

    output: Path
    target: Target
    seconds: dict[str, float]
    program_bytes: int
    constant_bytes: int
    sources: dict[str, str]


def export_program(
    methods: Mapping[str, MethodSpec],
    output: str | Path,
    *,
    device: str = "cpu",
    metadata: Mapping[str, Any] | None = None,
    value_ranges: Mapping[str, tuple[int, int]] | None = None,
    output_names: Sequence[str] = (),
    extra_files: Sequence[Path] = (),
    weights: Mapping[str, torch.Tensor] | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Export the methods of any model into one artifact folder.

    A tensor that several modules hold (the same tensor, not an equal one) is stored and loaded once, whether it is a
    parameter or a buffer; a buffer that a method writes is state that all methods share.

    Args:
        methods: name -> (module, example inputs, dynamic shapes as in `torch.export.export`, None if all are static).
            Modules and inputs are on the CPU. Inputs and outputs are tensors.
        output: the folder to write; it appears whole, or not at all.
        device: "cpu" or "cuda".
        metadata: constant methods of the program: name -> int, float, bool, str, or a list of one of them.
        value_ranges: input name -> (lowest, highest) value; checked at run time for inputs on the host.
        output_names: what the methods' outputs are called, in order; `output_0`, ... by default.
        extra_files: files to copy into the folder.
        weights: values of tensors that the modules hold for their shape only, by the tensor's name in the artifact. Each is
            asked for once, when it is written. Other constants are written as the modules hold them.
        progress: shows and keeps the time of each stage.

    Raises:
        ExportError: no compiler, an operator that cannot be lowered (named), no room on the disk.
        TargetError: device "cuda" without a GPU.
    """
    progress = progress or Progress()
    if not methods:
        raise ExportError("there is no method to export")
    if device not in ("cpu", "cuda"):
        raise ExportError(f"unknown device {device!r}; the devices are: cpu, cuda")
    find_compiler()
    target = host_target(device)
    with atomic_folder(Path(output)) as folder:
        programs = _trace(methods, progress)
        state = Lowering(device, progress, value_ranges=dict(value_ranges or {}), output_names=tuple(output_names))
        for name, (_, _, dynamic_shapes) in methods.items():
            state.symbols[name] = _symbol_names(programs[name], dynamic_shapes)
            state.ranges[name] = {str(symbol): bounds for symbol, bounds in programs[name].range_constraints.items()}
        _settle_constants(state, programs)
        export_id = uuid.uuid4().hex
        compiled = _compile_all(state, programs)
        with progress.stage("assemble program"), _quiet():
            program = assemble(compiled, target, export_id, dict(metadata or {}))
        constants = {key: state.tensors[key] for key in sorted(state.used)}
        with progress.stage("write artifact"):
            (folder / PROGRAM_FILE).write_bytes(program)
            load = partial(_value, weights or {}, constants)
            write_constants(folder / CONSTANTS_FILE, constants, export_id, program, load)
            for path in extra_files:
                shutil.copyfile(path, folder / path.name)
    return ExportReport(
        output=Path(output),
        target=target,
        seconds=dict(progress.seconds),
        program_bytes=len(program),
        constant_bytes=sum(tensor.nbytes for tensor in constants.values()),
        sources=state.sources,
    )


def _value(weights: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], key: str) -> torch.Tensor:
    return weights[key] if key in weights else own[key]


def _trace(methods: Mapping[str, MethodSpec], progress: Progress) -> dict[str, ExportedProgram]:
    programs = {}
    for name, (module, example, dynamic_shapes) in methods.items():
        others = sorted({type(value).__name__ for value in example if not isinstance(value, torch.Tensor)})
        if others:
            raise ExportError(f"method {name!r}: inputs must be tensors, got {', '.join(others)}")
        with progress.stage(f"trace {name}"), torch.no_grad(), _quiet():
            try:
                # The runtime hands contiguous inputs to the code, so it is made for such; and one tensor given as the
                # example of two inputs would be traced as one input.
                inputs = tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in example)
                programs[name] = torch.export.export(module, inputs, dynamic_shapes=dynamic_shapes, strict=False)
            except Exception as error:
                raise ExportError(f"method {name!r} cannot be traced by torch.export: {error}") from error
        _check_ends(name, programs[name])
    return programs


def _check_ends(method: str, program: ExportedProgram) -> None:
    """A delegate call has computed outputs only, and only inputs that are used."""
    signature = program.graph_signature
    nodes = {node.name: node for node in program.graph.nodes}
    for name in signature.user_inputs:
        if isinstance(name, str) and not nodes[name].users:
            raise ExportError(f"method {method!r}: input {name!r} is not used: take it out of forward's arguments")
    for index, name in enumerate(signature.user_outputs):
        if not isinstance(name, str) or nodes[name].op == "placeholder":
            raise ExportError(
                f"method {method!r}: output {index} is an input or a constant as it came in: return a copy (`.clone()`)"
            )


def _symbol_names(program: ExportedProgram, dynamic_shapes: Any) -> dict[str, str]:
    """torch's symbol (`s27`) -> the name of the `Dim` that the caller gave, for shapes that people read."""
    if not isinstance(dynamic_shapes, (tuple, list)):
        return {}
    user_inputs = set(program.graph_signature.user_inputs)
    nodes = [n for n in program.graph.nodes if n.op == "placeholder" and n.name in user_inputs]
    names = {}
    for node, dims in zip(nodes, dynamic_shapes, strict=False):
        for index, dim in (dims or {}).items() if isinstance(dims, dict) else ():
            size = node.meta["val"].shape[index]
            if isinstance(size, torch.SymInt) and getattr(dim, "__name__", None):
                names[str(size.node.expr)] = dim.__name__
    return names


def _settle_constants(state: Lowering, programs: Mapping[str, ExportedProgram]) -> None:
    """Give every tensor one key, and find what is mutable, while the tensors are still the modules' own."""
    key_of_tensor: dict[tuple[Any, ...], str] = {}
    for method, program in programs.items():
        mutated = written_buffers(method, program)
        for name, value in {**program.state_dict, **program.constants}.items():
            if not isinstance(value, torch.Tensor):
                continue
            identity = (value.untyped_storage()._cdata, value.storage_offset(), value.shape, value.stride())
            key = key_of_tensor.get(identity)
            if key is None:
                key = name if name not in state.tensors else f"{method}.{name}"
                key_of_tensor[identity] = key
                state.tensors[key] = value.detach()
            state.keys[method, name] = key
            if name in mutated:
                state.mutable.add(key)


def _compile_all(state: Lowering, programs: Mapping[str, ExportedProgram]) -> dict[str, CompiledMethod]:
    compiled = {}
    for name, program in programs.items():
        with state.progress.stage(f"compile {name}"), _quiet():
            try:
                compiled[name] = compile_method(state, name, program)
            except (OstinatoError, OSError):
                raise
            except Exception as error:
                raise ExportError(f"method {name!r}: {_explain(error)}") from error
    return compiled


def _explain(error: Exception) -> str:
    """The first line of a compiler's complaint, and the operator that it is about where it names one."""
    text = str(error).strip()
    operator = re.search(r"(?:target|op|operator)[:= ]+\s*((?:torch\.ops\.)?\w+[.:]{1,2}\w+(?:\.\w+)?)", text)
    first = text.splitlines()[0] if text else type(error).__name__
    return f"the model cannot be lowered: {first}" + (f" (operator {operator[1]})" if operator else "")


@contextmanager
def _quiet() -> Iterator[None]:
    """exir and inductor warn of their own internals; nothing of it is for the person who exports."""
    previous = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(previous)
