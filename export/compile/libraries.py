"""Compiles graphs: Inductor generates their code, in several processes, while compilers work on what it has generated."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ostinato.delegate.artifact.names import HOST
from ostinato.delegate.errors import ExportError, OstinatoError, first_line
from ostinato.export.progress import Progress

from .aot import Code, generate_code, read_code
from .compilers import CompilerError, Compilers, timed
from .gpu import gpu_properties
from .inductor_internals import (
    Generated,
    Interface,
    choose_vector_instructions,
    compilers_run_by,
    forget_vector_instructions,
    kept_folder,
    load_inductor,
    one_process_of_several,
    threads_assumed,
)
from .kept_code import code_path, keep, keep_file, read_kept
from .native import NativeBuild, NativeLibrary, native_libraries, native_library_of
from .processes import call_in_processes
from .trace import TracedGraph

# Bytes of a GPU's free memory for each process that generates code for it: 0.6 GB for CUDA, and the weights of one graph.
_GPU_MEMORY = 3 << 30


@dataclass(frozen=True)
class _Task:
    """A graph to compile.

    Attributes:
        graph: the graph.
        native: the library of our own operators that it calls; None: it calls none.
        grows: whether it has a tensor whose first dimension may be another one when the code is loaded.
        path: where the code is kept for later exports; None: nowhere.
    """

    graph: TracedGraph
    native: NativeLibrary | None
    grows: bool
    path: Path | None


@dataclass(frozen=True)
class _Job:
    """A graph whose code was generated, and the build of its library; or the code that an earlier export kept.

    Attributes:
        task: the graph.
        seconds: time that generating the code took.
        work: what was generated, and the build, which gives the seconds that it took; or the code.
    """

    task: _Task
    seconds: float
    work: tuple[Generated, Future[tuple[None, float]]] | Code

    @property
    def done(self) -> bool:
        return isinstance(self.work, Code) or self.work[1].done()

    @property
    def failed(self) -> bool:
        return not isinstance(self.work, Code) and self.work[1].done() and self.work[1].exception() is not None


class Libraries:
    """Compiles graphs: call `generate`, then `codes`. On exit, all compilers are ended, and their files are deleted.

    Args:
        device: "cpu" or "cuda". A graph that has a device of its own is compiled for that one.
        progress: gets a line for each graph, in the order of the graphs, with the seconds of generating and compiling its
            code. Several graphs are compiled at a time, so these seconds add up to more than the time that passed.
    """

    def __init__(self, device: str, progress: Progress) -> None:
        self._device = device
        self._progress = progress
        self._compilers = Compilers()
        self._headers: list[Future[None]] = []
        self._interfaces: dict[Interface, Future[Path]] = {}
        self._kernels: dict[str, Future[Path]] = {}
        # By number; the codes have the same order.
        self._jobs: dict[int, _Job] = {}
        self._codes: list[Code] = []
        self._open = ExitStack()

    def __enter__(self) -> Libraries:
        with ExitStack() as opened:
            self._folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="ostinato-")))
            opened.enter_context(self._compilers)
            opened.enter_context(compilers_run_by(self._compilers.run, self._make_header))
            # These run beside the tracing, which comes first.
            self._ready = self._compilers.start(choose_vector_instructions)
            opened.callback(forget_vector_instructions)
            if self._device == HOST:
                self._begin_natives(native_libraries())
            self._open = opened.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def generate(
        self,
        graphs: Sequence[TracedGraph],
        growing: Set[int] = frozenset(),
        forked: Callable[[], object] = lambda: None,
    ) -> None:
        """Generate the graphs' code. When this returns, compilers may still work on it. Changes each `graph.program`.

        Args:
            graphs: the graphs, in the order that `codes` will have.
            growing: `id` of each graph with tensors whose first dimension may be another one when the code is loaded.
            forked: function that is called once, when this process forks no more: it may start CUDA, and threads.

        Raises:
            ExportError: a graph cannot be lowered. Only the first such graph is reported; later ones may not have been tried.
        """
        natives = [native_library_of(graph.program.graph) for graph in graphs]
        # Built first, because all libraries that call these kernels are linked with them.
        self._begin_natives(native for native in natives if native is not None)
        tasks = {}
        for number, (graph, native) in enumerate(zip(graphs, natives, strict=True), len(self._jobs)):
            begin, grows = time.perf_counter(), id(graph) in growing
            task = _Task(graph, native, grows, code_path(graph, self._device_of(graph), native, grows))
            kept = read_kept(task.path)
            if kept is None:
                tasks[number] = task
            else:
                self._jobs[number] = _Job(task, time.perf_counter() - begin, kept)
        if tasks:
            self._ready.result()
        with closing(self._generated(tasks, forked)) as results:
            for number, generated, seconds in results:
                self._jobs[number] = self._begin(tasks[number], generated, seconds)
                self._finish_some()
        self._finish_some()

    def codes(self) -> list[Code]:
        """Wait for all compilers. Returns the graphs' code, in the order of `generate`.

        Raises:
            ExportError: a graph cannot be lowered, as in `generate`.
        """
        while len(self._codes) < len(self._jobs):
            job = self._jobs[len(self._codes)]
            self._progress.show(_stage(job.task))
            self._finish(job)
        return self._codes

    def _device_of(self, graph: TracedGraph) -> str:
        return graph.device or self._device

    def _generated(
        self, tasks: Mapping[int, _Task], forked: Callable[[], object]
    ) -> Generator[tuple[int, Generated, float], None, None]:
        """Generate the code of these graphs, and yield each one's number, code and seconds as it comes.

        They are generated in processes that are forked from this one, unless it has started CUDA: then they could not use the
        GPU. The first graph for a CPU is generated here, so that what Inductor loads once is loaded. What fails elsewhere is
        tried again here, where the error is seen.
        """
        left = list(tasks)
        if left and self._device == HOST:
            yield self._generate_here(left.pop(0), tasks)
        if len(left) > 1 and not torch.cuda.is_initialized():
            load_inductor()
            work = partial(self._generate_forked, tasks, torch.get_num_threads())
            self._progress.show(_stage(tasks[left[0]]))
            with closing(call_in_processes(work, tuple(left), self._most_processes(), forked)) as results:
                for number, generated, seconds in results:
                    if generated is not None:
                        left.remove(number)
                        yield number, generated, seconds
        else:
            forked()
        for number in left:
            yield self._generate_here(number, tasks)

    def _most_processes(self) -> int:
        gpu = None if self._device == HOST else gpu_properties()
        cores = len(os.sched_getaffinity(0))
        return cores if gpu is None else max(1, min(cores, gpu.free_memory // _GPU_MEMORY))

    def _generate_here(self, number: int, tasks: Mapping[int, _Task]) -> tuple[int, Generated, float]:
        task, begin = tasks[number], time.perf_counter()
        self._progress.show(_stage(task))
        with self._failure(task, begin):
            return number, self._generate(task), time.perf_counter() - begin

    def _generate_forked(self, tasks: Mapping[int, _Task], threads: int, number: int) -> Generated:
        """Generate code in a process that was forked from the one of this object, which had so many threads."""
        with (
            Compilers() as compilers,
            compilers_run_by(compilers.run, lambda make, *arguments: make(*arguments)),
            threads_assumed(threads),
            nullcontext() if self._device == HOST else one_process_of_several(self._folder / "timing.lock"),
        ):
            try:
                return self._generate(tasks[number])
            finally:
                if self._device != HOST:
                    # Other processes need it, and this one may not need it again.
                    torch.cuda.empty_cache()

    def _generate(self, task: _Task) -> Generated:
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        declarations = task.native.declarations if task.native else {}
        return generate_code(task.graph, self._device_of(task.graph), folder, declarations, task.grows)

    def _begin(self, task: _Task, generated: Generated, seconds: float) -> _Job:
        interface = None if generated.interface is None else self._interface(generated.interface)
        kernels = self._kernels_of(task)
        built = self._compilers.start(timed, self._build, generated, [*self._headers], interface, kernels)
        return _Job(task, seconds, (generated, built))

    def _finish_some(self) -> None:
        """Finish the jobs that are done, from the first; if one has failed, all that stand before it, and it."""
        while (job := self._jobs.get(len(self._codes))) is not None:
            if not job.done and not any(job.failed for job in self._jobs.values()):
                break
            self._finish(job)

    def _finish(self, job: _Job) -> None:
        begin, seconds = time.perf_counter() - job.seconds, job.seconds
        with self._failure(job.task, begin):
            if isinstance(job.work, Code):
                code = job.work
            else:
                generated, built = job.work
                seconds += built.result()[1]
                begin = time.perf_counter()
                code = read_code(generated, self._device_of(job.task.graph))
                shutil.rmtree(generated.path.parent)
                keep(job.task.path, code)
                seconds += time.perf_counter() - begin
            kernels = self._kernels_of(job.task)
            self._codes.append(replace(code, kernels=kernels.result() if kernels else None))
        self._progress.done(_stage(job.task), seconds)

    def _kernels_of(self, task: _Task) -> Future[Path] | None:
        return None if task.native is None else self._kernels[task.native.name]

    def _build(
        self,
        generated: Generated,
        headers: Sequence[Future[None]],
        interface: Future[Path] | None,
        kernels: Future[Path] | None,
    ) -> None:
        """Compile and link one library, in a thread. All that it waits for was started before it."""
        folder = generated.path.parent
        for header in headers:
            header.result()
        for command in generated.objects:
            self._compilers.run(command, folder)
        link = generated.link if interface is None else (*generated.link, str(interface.result()))
        if kernels is not None:
            # At run time, too, the kernels lie beside the library.
            beside = folder / kernels.result().name
            beside.symlink_to(kernels.result())
            link = (*link, str(beside), "-Wl,-rpath,$ORIGIN")
        self._compilers.run(link, folder)

    def _begin_natives(self, natives: Iterable[NativeLibrary]) -> None:
        for native in natives:
            if native.name not in self._kernels:
                self._kernels[native.name] = self._begin_native(native)

    def _begin_native(self, native: NativeLibrary) -> Future[Path]:
        folder, build = Path(tempfile.mkdtemp(dir=self._folder)), native.build()
        kept = kept_folder() / build.library
        if kept.exists():
            return self._compilers.start(shutil.copyfile, kept, folder / build.library)
        objects = [self._compilers.start(self._compilers.run, command, folder) for command in build.objects]
        return self._compilers.start(self._link_native, build, objects, folder, kept)

    def _link_native(self, build: NativeBuild, objects: Sequence[Future[None]], folder: Path, kept: Path) -> Path:
        """Link the kernels, in a thread. All that it waits for was started before it."""
        for made in objects:
            made.result()
        self._compilers.run(build.link, folder)
        library = folder / build.library
        _keep(library, kept)
        return library

    def _make_header(self, make: Callable[..., None], *arguments: Any) -> None:
        self._headers.append(self._compilers.start(make, *arguments))

    def _interface(self, interface: Interface) -> Future[Path]:
        if interface not in self._interfaces:
            self._interfaces[interface] = self._compilers.start(self._make_interface, interface, [*self._headers])
        return self._interfaces[interface]

    def _make_interface(self, interface: Interface, headers: Sequence[Future[None]]) -> Path:
        if interface.kept is not None and interface.kept.exists():
            return interface.kept
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        (folder / interface.SOURCE).write_text(interface.source)
        for header in headers:
            header.result()
        self._compilers.run(interface.command, folder)
        made = folder / interface.OBJECT
        if interface.kept is not None:
            _keep(made, interface.kept)
        return made

    @contextmanager
    def _failure(self, task: _Task, begin: float) -> Iterator[None]:
        """Turn errors into ExportError, and report the graph as failed."""
        try:
            yield
        except BaseException as error:
            self._progress.failed(_stage(task), time.perf_counter() - begin)
            if isinstance(error, (OstinatoError, OSError)) or not isinstance(error, Exception):
                raise
            raise ExportError(f"method {task.graph.label!r}: the model cannot be lowered: {_explain(error)}") from error


def _keep(made: Path, kept: Path) -> None:
    """Copy a file to `kept` for the next export: making it takes 5 s of a core for the interface, 22 s for the kernels for
    CPUs."""
    keep_file(kept, partial(shutil.copyfile, made))


def _stage(task: _Task) -> str:
    return f"compile {task.graph.label}"


def _explain(error: Exception) -> str:
    """The first line of an error, and the operator that it is about if it names one."""
    if isinstance(error, CompilerError):
        return str(error)
    operator = re.search(r"(?:target|op|operator)[:= ]+\s*((?:torch\.ops\.)?\w+[.:]{1,2}\w+(?:\.\w+)?)", str(error))
    return first_line(error) + (f" (operator {operator[1]})" if operator else "")
