"""Exports any model: methods -> torch.export -> AOTInductor -> an ExecuTorch program in an artifact folder."""

from __future__ import annotations

import hashlib
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import nn

from ostinato.delegate.artifact.files import open_constants
from ostinato.delegate.artifact.names import CONSTANTS_FILE, PROGRAM_FILE
from ostinato.delegate.artifact.records import StateForm
from ostinato.delegate.artifact.seal import Seal
from ostinato.delegate.artifact.target import Target
from ostinato.delegate.errors import ExportError
from ostinato.delegate.memory import size_text
from ostinato.export.artifact.kept_programs import UnsealedProgram, keep_program, program_path, read_program
from ostinato.export.artifact.records import Constants, ValueRange, make_method
from ostinato.export.artifact.writer import (
    ConstantsWriter,
    Layout,
    atomic_folder,
    check_constants,
    check_room,
    constants_layout,
    take_constants,
)
from ostinato.export.compile.aot import Code
from ostinato.export.compile.gpu import compile_target, gpus_counted_by_nvml, triton_target
from ostinato.export.compile.libraries import Libraries
from ostinato.export.compile.toolchain import find_compiler
from ostinato.export.compile.trace import Chain, Known, MethodSpec, TracedMethod, trace_method

from .progress import Progress

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExportReport:
    """Result of an export: the folder, the target, seconds by stage, sizes in bytes, and each method's generated C++
    wrappers."""

    output: Path
    target: Target
    seconds: dict[str, float]
    program_bytes: int
    constant_bytes: int
    sources: dict[str, str]

    def __repr__(self) -> str:
        """Three lines. The wrappers alone may be a million characters."""
        methods = shorten(", ".join(self.sources), 80, placeholder=" ...")
        return (
            f"ExportReport: {self.output}, compiled for {self.target}\n"
            f"  program {size_text(self.program_bytes)}, constants {size_text(self.constant_bytes)}\n"
            f"  methods: {methods}"
        )


def export_program(
    methods: Mapping[str, MethodSpec | Chain],
    output: str | Path,
    *,
    device: str = "cpu",
    metadata: Mapping[str, Any] | None = None,
    value_ranges: Mapping[str, ValueRange] | None = None,
    output_names: Sequence[str] = (),
    extra_files: Sequence[Path] = (),
    root: nn.Module | None = None,
    state_forms: Mapping[str, StateForm] | None = None,
    weights: Mapping[str, torch.Tensor] | None = None,
    constants_file: str | Path | None = None,
    identity: str | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Export the methods of any model into one artifact folder.

    Modules may share a parameter or buffer (the same memory, not only equal values): it is stored and loaded once. A buffer
    that a method writes is state, which all methods share.

    Args:
        methods: name -> (module, example inputs, dynamic shapes), or a `Chain` of modules. Dynamic shapes are as in
            `torch.export.export`; None if all shapes are static. Modules and inputs are on the CPU. Inputs and outputs are
            tensors. A module in training mode is exported as it is, with a warning.
        output: folder to write. It is written completely, or not at all.
        device: "cpu" or "cuda". With "cuda", single links may still run on the CPU (see `Link`).
        metadata: values of the program's constant methods: name -> int, float, bool, str, or a list of one of these types.
        value_ranges: input name -> (lowest, highest) value, which the runtime checks for inputs on the host. For an index
            into buffers that grow, the second entry is a `Growth`: what the index counts. A key "method.input" is for that
            method alone.
        output_names: names for the outputs of methods that are not chains; `output_0`, ... by default.
        extra_files: files to copy into the folder.
        root: module whose names for tensors the artifact uses. A tensor that `root` does not hold has the name that its own
            module has for it, after the link's `prefix`.
        state_forms: name in the artifact -> what a mutable buffer holds, and how it grows. Compiled code takes any first
            dimension of a buffer that grows. Only the runtime checks indices into it.
        weights: name in the artifact -> value, for tensors that the modules hold for their shape only. Each value is asked
            for once, when it is written. Other constants are written as the modules hold them.
        constants_file: the `model.ptd` of an earlier export, which is taken as it is: linked, or copied to another disk. Then
            no value of `weights` is asked for.
        identity: text that says all that the methods, `metadata`, `value_ranges` and `state_forms` depend on, beside this
            package. The program is then kept between exports, for any values of `weights`. None keeps only the code of each
            graph.
        progress: shows and keeps the time of each stage.

    Raises:
        ArtifactError: `constants_file` is none, or is damaged.
        ExportError: there is no compiler, or no room on the disk; an operator cannot be lowered (the message names it); or a
            constant is not in `constants_file` as the code needs it.
        TargetError: the device is "cuda", and there is no GPU.
    """
    progress = progress or Progress()
    if not isinstance(methods, Mapping):
        raise ExportError(f"methods must be a mapping from name to method, got {type(methods).__name__}")
    if not methods:
        raise ExportError("there is no method to export")
    if device not in ("cpu", "cuda"):
        raise ExportError(f"unknown device {device!r}; the devices are: cpu, cuda")
    for name, spec in methods.items():
        if not isinstance(spec, Chain) and not (isinstance(spec, tuple) and len(spec) == 3):
            what = f"a tuple of {len(spec)}" if isinstance(spec, tuple) else type(spec).__name__
            raise ExportError(
                f"method {name!r} must be (module, example inputs, dynamic shapes), with None for static shapes, or a Chain; "
                f"got {what}"
            )
    find_compiler()
    target = compile_target(device)
    given = None if constants_file is None else open_constants(Path(constants_file))
    values = weights or {}
    with (
        atomic_folder(Path(output)) as folder,
        ConstantsWriter(folder / CONSTANTS_FILE) as writer,
        gpus_counted_by_nvml(),
    ):

        def check(tensors: Mapping[str, torch.Tensor]) -> None:
            if given is None:
                # The code comes on top.
                check_room(folder, sum(tensor.nbytes for tensor in tensors.values()), Path(output))
            else:
                check_constants(given, tensors, values)

        def begin_to_write(stored: Mapping[str, torch.Tensor], layout: Layout) -> None:
            if given is None:
                writer.start(stored, partial(_value, values, stored), layout)

        path = program_path(identity, device, target)
        exported = read_program(path)
        if exported is not None:
            progress.note("the program is that of an earlier export, which was kept")
            check(exported.stored)
            begin_to_write(exported.stored, exported.layout)
        else:
            with Libraries(device, progress) as libraries:
                with triton_target(device):
                    traced = _trace_all(methods, output_names, progress)
                constants = _constants_of(traced, state_forms or {}, root)
                # Before minutes of compiling.
                check(constants.tensors)
                ranges, data = value_ranges or {}, dict(metadata or {})
                exported = _compile_program(
                    traced, libraries, constants, target, ranges, data, progress, begin_to_write
                )
            keep_program(path, exported, values)
        constant_bytes = sum(tensor.nbytes for tensor in exported.stored.values())
        with progress.stage("write artifact"), progress.bytes(constant_bytes) as advance:
            if given is None:
                # Most of it is written by now.
                manifest = writer.finish(advance)
            else:
                manifest = take_constants(folder / CONSTANTS_FILE, given, exported.stored)
                advance(constant_bytes)
            program = exported.program + Seal(hashlib.sha256(exported.program).hexdigest(), manifest.id).to_bytes()
            (folder / PROGRAM_FILE).write_bytes(program)
            for file in extra_files:
                shutil.copyfile(file, folder / file.name)
    return ExportReport(
        output=Path(output),
        target=target,
        seconds=dict(progress.seconds),
        program_bytes=len(program),
        constant_bytes=constant_bytes,
        sources=dict(exported.sources),
    )


def _value(weights: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], key: str) -> torch.Tensor:
    return weights[key] if key in weights else own[key]


def _trace_all(
    methods: Mapping[str, MethodSpec | Chain], output_names: Sequence[str], progress: Progress
) -> dict[str, TracedMethod]:
    traced = {}
    known: Known = {}
    for name, spec in methods.items():
        with progress.stage(f"trace {name}"), _quiet():
            traced[name] = trace_method(name, spec, output_names, known)
    return traced


def _constants_of(
    methods: Mapping[str, TracedMethod], forms: Mapping[str, StateForm], root: nn.Module | None
) -> Constants:
    constants = Constants(forms)
    if root is not None:
        constants.name_after(root)
    for name, method in methods.items():
        constants.add(method)
        _warn_of_training(name, method)
    return constants


def _compile_program(
    methods: dict[str, TracedMethod],
    libraries: Libraries,
    constants: Constants,
    target: Target,
    value_ranges: Mapping[str, ValueRange],
    metadata: dict[str, Any],
    progress: Progress,
    begin_to_write: Callable[[Mapping[str, torch.Tensor], Layout], object],
) -> UnsealedProgram:
    """Compile and assemble. `begin_to_write` is called beside it, with the constants and their layout."""
    stored, layout = constants.stored(), list[bytes | str]()

    def begin_beside() -> None:
        # It imports exir, which takes seconds, while other processes are at work.
        with _quiet():
            layout.extend(constants_layout(stored))
        begin_to_write(stored, layout)

    codes = _compile_all(methods, libraries, constants, begin_beside)
    with progress.stage("assemble program"), _quiet():
        from ostinato.export.artifact.assemble import assemble

        compiled = {name: make_method(method, codes[name], constants, value_ranges) for name, method in methods.items()}
        program = assemble(compiled, target, metadata)
    sources = {name: "".join(code.source for code in kinds.values()) for name, kinds in codes.items()}
    return UnsealedProgram(program, stored, layout, sources)


def _warn_of_training(name: str, method: TracedMethod) -> None:
    """Log one line, which stderr gets unless the program has handlers: also without a `Progress` this must be seen."""
    if any(module.training for traced in method.links for module in traced.link.module.modules()):
        logger.warning(
            "method %r: its module is exported in training mode, with dropout and batch norm as in training: call its eval() "
            "before the export",
            name,
        )


def _compile_all(
    methods: Mapping[str, TracedMethod], libraries: Libraries, constants: Constants, beside: Callable[[], object]
) -> dict[str, dict[str, Code]]:
    """Compile all graphs: method -> kind of link -> code. A graph that several methods share is compiled once.

    `beside` begins what may go on beside the compilers. It is called when no process is forked any more.
    """
    graphs = {id(graph): graph for method in methods.values() for graph in method.graphs.values()}
    growing = {id(one.graph) for method in methods.values() for one in method.links if constants.has_growing(one)}
    with _quiet():
        libraries.generate(list(graphs.values()), growing, beside)
        codes = dict(zip(graphs, libraries.codes(), strict=True))
    return {name: {kind: codes[id(graph)] for kind, graph in method.graphs.items()} for name, method in methods.items()}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warnings of exir and Inductor. They are about internals, and do not help the person who exports."""
    previous = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(previous)
