"""Traces methods into graphs with torch.export. A method is one module, or a chain of modules of which many are alike."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from ostinato.delegate.artifact.names import HOST
from ostinato.delegate.errors import ExportError, first_line

from .torch_internals import is_metadata_check, size_example, size_expression
from .written_buffers import written_buffers

MethodSpec = tuple[nn.Module, tuple[Tensor, ...], Any]
# All that a link's code depends on (module, method, device, and the shapes and dtypes of its inputs) -> the link's graph.
Known = dict[tuple[Any, ...], "TracedGraph"]


@dataclass(frozen=True)
class Link:
    """One module of a chain.

    Attributes:
        module: module with a method that takes values of the chain and returns a tensor or a tuple of tensors.
        outputs: names of the returned values.
        kind: name of the link's kind. Links of one kind are on one device and differ only in their tensors. A kind is traced
            and compiled once.
        prefix: beginning of the names of the module's tensors in the artifact, such as `model.layers.3.`.
        method: name of the module's method.
        inputs: names of the values that the method takes; None: the names of its arguments.
        capture: whether its code may be part of a CUDA graph. If not, the code is called each time. An example is code that
            waits for the host.
        device: "cpu" if it runs on the host, whatever the program's device is. Its code is compiled for the CPU and called,
            never captured. Its constants and mutable buffers are on the host. This holds in a program for the CPU too, so
            that it can be tried without a GPU. None: it runs on the program's device.
        streamed_by: name of the method's input, [1] int64, that says how many entries of its constants' first dimension a
            call needs. The first dimension is the same for all its constants. They stay on the host, although the link runs
            on the program's device. In each call these entries are copied to the device while the streamed link before it
            computes. A streamed link is called, never captured, and has no mutable buffers. None: its constants are where it
            runs.
    """

    module: nn.Module
    outputs: tuple[str, ...]
    kind: str
    prefix: str = ""
    method: str = "forward"
    inputs: tuple[str, ...] | None = None
    capture: bool = True
    device: str | None = None
    streamed_by: str | None = None

    @property
    def taken(self) -> tuple[str, ...]:
        """Names of the values that the link takes."""
        if self.inputs is not None:
            return self.inputs
        return tuple(inspect.signature(getattr(self.module, self.method)).parameters)

    @property
    def called(self) -> nn.Module:
        """The module, with `method` as its `forward`."""
        if self.method == "forward":
            return self.module
        # A shallow copy shares the module's tables of tensors and children.
        called = copy.copy(self.module)
        called.forward = getattr(called, self.method)
        return called

    def run(self, values: dict[str, Tensor]) -> None:
        """Call the module in eager PyTorch on its inputs among `values`, and add its outputs to them."""
        given = self.called(*[values[name] for name in self.taken])
        values.update(zip(self.outputs, given if isinstance(given, tuple) else (given,), strict=True))


@dataclass(frozen=True)
class Chain:
    """A method whose modules run one after the other. Its code grows with the number of their kinds, not with their number.

    Attributes:
        links: the modules, in the order of their calls.
        inputs: the method's inputs, name -> example.
        outputs: names of the values that the method returns.
        dynamic_shapes: input name -> {dimension: Dim}; all other sizes are static. Values between links may have these
            dimensions, but no sizes computed from them.
    """

    links: Sequence[Link]
    inputs: Mapping[str, Tensor]
    outputs: tuple[str, ...]
    dynamic_shapes: Mapping[str, Mapping[int, Any]]


@dataclass(frozen=True)
class TracedGraph:
    """A traced module.

    Attributes:
        label: its name in messages and in the lines of progress.
        program: the graph; compiling changes it.
        tensors: name in the graph -> parameter, buffer or constant, as the module held it.
        device: device of its links: "cpu" for the host, None for the program's device.
        written: names of the buffers that it writes.
        symbols: torch's symbol -> the name that its dimension has for people.
        ranges: torch's symbol -> the sizes that its dimension may have.
    """

    label: str
    program: ExportedProgram
    tensors: dict[str, Tensor]
    device: str | None
    written: frozenset[str]
    symbols: dict[str, str]
    ranges: dict[str, Any]

    @property
    def read(self) -> set[str]:
        """Names of the `tensors` that it reads."""
        signature = self.program.graph_signature
        names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        names |= signature.inputs_to_lifted_tensor_constants
        nodes = self.program.graph.find_nodes(op="placeholder")
        used = {node.name for node in nodes if not all(map(is_metadata_check, node.users))}
        return {name for node, name in names.items() if node in used}

    @property
    def inputs(self) -> dict[str, Any]:
        """Name -> the tracer's tensor, in the order of the graph's arguments."""
        wanted = set(self.program.graph_signature.user_inputs)
        nodes = self.program.graph.find_nodes(op="placeholder")
        return {node.name: node.meta["val"] for node in nodes if node.name in wanted}

    @property
    def outputs(self) -> list[Any]:
        """The tracer's tensors, in the order of the graph's results."""
        output = next(node for node in self.program.graph.nodes if node.op == "output")
        values = {node.name: node.meta["val"] for node in output.args[0] if hasattr(node, "meta")}
        return [values[name] for name in self.program.graph_signature.user_outputs]


@dataclass(frozen=True)
class TracedLink:
    """A link with its graph, which all links of its kind share, and the names of the link's inputs."""

    link: Link
    graph: TracedGraph
    inputs: tuple[str, ...]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Name in the graph -> the link's own tensor."""
        return _own_tensors(self.link.module, self.graph)


@dataclass(frozen=True)
class TracedMethod:
    """A method's links, and the names of the method's inputs and outputs."""

    name: str
    links: tuple[TracedLink, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def graphs(self) -> dict[str, TracedGraph]:
        """Kind of link -> graph."""
        return {traced.link.kind: traced.graph for traced in self.links}


def trace_method(
    name: str, spec: MethodSpec | Chain, output_names: Sequence[str] = (), known: Known | None = None
) -> TracedMethod:
    """Trace one method.

    Args:
        name: name of the method.
        spec: the method's module with its example, or its chain.
        output_names: names for the outputs of a module.
        known: graphs of links that other methods traced. This method reuses the graphs of equal links, and adds its own.

    Raises:
        ExportError: torch.export cannot trace it (its own error is the cause); an input is not a tensor, or is not used; an
            output is an unchanged input or constant; a device is unknown; or links of one kind are not alike.
    """
    if isinstance(spec, Chain):
        return _trace_chain(name, spec, {} if known is None else known)
    return _trace_module(name, spec, output_names)


def _trace_module(name: str, spec: MethodSpec, output_names: Sequence[str]) -> TracedMethod:
    module, example, dynamic_shapes = spec
    graph = _trace(name, f"method {name!r}", module, example, dynamic_shapes)
    _check_inputs(name, graph.program)
    inputs = tuple(graph.inputs)
    outputs = tuple(
        output_names[index] if index < len(output_names) else f"output_{index}" for index in range(len(graph.outputs))
    )
    # Each name is for one value: an output with the name of an input would hide the input.
    values = tuple(f"result {output}" for output in outputs)
    link = TracedLink(Link(module, values, name), graph, inputs)
    return TracedMethod(name, (link,), inputs, values)


def _trace_chain(name: str, chain: Chain, known: Known) -> TracedMethod:
    values = _Values(name, chain)
    first: dict[str, TracedLink] = {}
    ends: dict[str, Any] = {}
    traced: list[TracedLink] = []
    for link in chain.links:
        example, shapes = values.take(link)
        forms = [(value.shape, value.dtype, dims) for value, dims in zip(example, shapes, strict=True)]
        if link.kind not in first:
            shapes_known = tuple((shape, dtype, tuple(dims.items())) for shape, dtype, dims in forms)
            identity = (id(link.module), link.method, link.device, shapes_known)
            if identity not in known:
                where = f"method {name!r}, {link.kind}"
                # None without a dynamic dimension: torch.export wants the shapes of `*args` in another form.
                dynamic = shapes if any(shapes) else None
                known[identity] = _trace(f"{name} {link.kind}", where, link.called, example, dynamic, link.device)
            first[link.kind], ends[link.kind] = TracedLink(link, known[identity], link.taken), forms
        alike = first[link.kind]
        if not _are_alike(alike.graph, alike.link, link) or forms != ends[link.kind]:
            raise ExportError(
                f"method {name!r}: {link.prefix or link.kind} and {alike.link.prefix or link.kind} are of one kind, "
                f"{link.kind!r}, but not alike: give them kinds of their own"
            )
        _check_streamed(name, chain, link, alike.graph, [one.link for one in traced])
        values.give(link, alike.graph)
        traced.append(TracedLink(link, alike.graph, link.taken))
    values.check_results()
    return TracedMethod(name, tuple(traced), tuple(chain.inputs), chain.outputs)


def _check_streamed(method: str, chain: Chain, link: Link, graph: TracedGraph, before: Sequence[Link]) -> None:
    if link.streamed_by is None:
        return
    if link.streamed_by not in chain.inputs or link.streamed_by not in link.taken:
        raise ExportError(
            f"method {method!r}: {link.kind} is streamed by {link.streamed_by!r}, which must be an input of the method, and "
            "one that the link takes"
        )
    for other in before:
        if link.streamed_by in other.outputs:
            raise ExportError(
                f"method {method!r}: {link.kind} is streamed by {link.streamed_by!r}, which {other.kind} gives before it: it "
                "must be as the method's caller gave it"
            )
    if graph.written:
        raise ExportError(
            f"method {method!r}: {link.kind} is streamed and writes {', '.join(sorted(graph.written))}: what stays on the "
            "host cannot change"
        )


class _Values:
    """The values of a chain while it is traced: for each value an example and its dynamic dimensions."""

    def __init__(self, method: str, chain: Chain) -> None:
        self._method = method
        self._chain = chain
        self._examples = dict(chain.inputs)
        self._dims = {name: dict(chain.dynamic_shapes.get(name, {})) for name in chain.inputs}
        self._lengths = {dim.__name__: dim for dims in self._dims.values() for dim in dims.values()}
        self._unused = set(chain.inputs)
        # Name -> why no link can take the value. It may still be an output of the method.
        self._unfit: dict[str, str] = {}
        self._given: set[str] = set()

    def take(self, link: Link) -> tuple[tuple[Tensor, ...], tuple[dict[int, Any], ...]]:
        """Examples of the values that a link takes, and their dynamic dimensions."""
        if link.device not in (None, HOST):
            self._fail(
                f"{link.kind} has the unknown device {link.device!r}: a link is on {HOST!r} or the program's, None"
            )
        names = link.taken
        unknown = [name for name in names if name not in self._examples]
        if unknown:
            self._fail(f"{link.kind} takes {', '.join(unknown)}, which nothing before it gives")
        for name in names:
            if name in self._unfit:
                self._fail(f"{link.kind} takes {name!r}, {self._unfit[name]}")
        self._unused -= set(names)
        return tuple(self._examples[name] for name in names), tuple(self._dims[name] for name in names)

    def give(self, link: Link, graph: TracedGraph) -> None:
        outputs = graph.outputs
        if len(link.outputs) != len(outputs):
            self._fail(f"{link.kind} gives {len(outputs)} values, its link has {len(link.outputs)} names for them")
        for name, value in zip(link.outputs, outputs, strict=True):
            if not isinstance(value, Tensor):
                self._fail(f"{name!r} of {link.kind} is a {type(value).__name__}; only tensors are supported")
            if name in self._unused:
                self._fail(f"input {name!r} is not used before {link.kind} gives another value of that name")
            self._give_one(name, value, graph)

    def check_results(self) -> None:
        if self._unused:
            self._fail(f"inputs that no module takes: {', '.join(sorted(self._unused))}")
        if not self._chain.links:
            self._fail("a chain without links")
        missing = [name for name in self._chain.outputs if name not in self._given]
        if missing:
            self._fail(f"it returns {', '.join(missing)}, which none of its modules gives")

    def _give_one(self, name: str, value: Tensor, graph: TracedGraph) -> None:
        self._given.add(name)
        self._unfit.pop(name, None)
        if not value.is_contiguous():
            # Code is compiled for contiguous inputs, and would not notice others.
            self._unfit[name] = "which is not contiguous: hand on `.contiguous()`"
        sizes: list[int] = []
        dims: dict[int, Any] = {}
        for index, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt):
                length = self._lengths.get(graph.symbols.get(str(size_expression(size)), ""))
                if length is None:
                    self._unfit[name] = (
                        f"whose size {index} is computed ({size}); hand on sizes of the method's inputs only"
                    )
                dims[index] = length
            sizes.append(size_example(size) if isinstance(size, torch.SymInt) else size)
        self._examples[name], self._dims[name] = torch.zeros(sizes, dtype=value.dtype), dims

    def _fail(self, what: str) -> NoReturn:
        raise ExportError(f"method {self._method!r}: {what}")


def _trace(
    label: str,
    where: str,
    module: nn.Module,
    example: tuple[Tensor, ...],
    dynamic_shapes: Any,
    device: str | None = None,
) -> TracedGraph:
    others = sorted({type(value).__name__ for value in example if not isinstance(value, Tensor)})
    if others:
        raise ExportError(f"{where}: inputs must be tensors, got {', '.join(others)}")
    # The runtime passes contiguous inputs to the code, so it is made for these. And a tensor that is the example of two
    # inputs would be traced as one input, so each input gets a copy.
    inputs = tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in example)
    try:
        with torch.no_grad():
            program = torch.export.export(module, inputs, dynamic_shapes=dynamic_shapes, strict=False)
    except Exception as error:
        raise ExportError(f"{where} cannot be traced by torch.export: {first_line(error)}") from error
    _check_outputs(where, program)
    stored = {**program.state_dict, **program.constants}
    return TracedGraph(
        label,
        program,
        {name: value for name, value in stored.items() if isinstance(value, Tensor)},
        device,
        frozenset(written_buffers(where, program)),
        _symbol_names(program, dynamic_shapes),
        {str(symbol): bounds for symbol, bounds in program.range_constraints.items()},
    )


def _check_inputs(method: str, program: ExportedProgram) -> None:
    """Refuse inputs that are not used: a delegate call cannot have them."""
    nodes = {node.name: node for node in program.graph.nodes}
    for name in program.graph_signature.user_inputs:
        if isinstance(name, str) and not nodes[name].users:
            raise ExportError(f"method {method!r}: input {name!r} is not used: take it out of forward's arguments")


def _check_outputs(where: str, program: ExportedProgram) -> None:
    """Refuse outputs that are inputs or constants: compiled code returns only what it computed."""
    signature = program.graph_signature
    nodes = {node.name: node for node in program.graph.nodes}
    for index, name in enumerate(signature.user_outputs):
        if not isinstance(name, str) or nodes[name].op == "placeholder":
            raise ExportError(
                f"{where}: output {index} is an input or a constant as it came in: return a copy (`.clone()`)"
            )


def _symbol_names(program: ExportedProgram, dynamic_shapes: Any) -> dict[str, str]:
    """torch's symbol (`s27`) -> the name of the `Dim` that the caller gave."""
    if not isinstance(dynamic_shapes, (tuple, list)):
        return {}
    user_inputs = set(program.graph_signature.user_inputs)
    nodes = [n for n in program.graph.nodes if n.op == "placeholder" and n.name in user_inputs]
    names = {}
    for node, dims in zip(nodes, dynamic_shapes, strict=False):
        for index, dim in (dims or {}).items() if isinstance(dims, dict) else ():
            size = node.meta["val"].shape[index]
            if isinstance(size, torch.SymInt) and getattr(dim, "__name__", None):
                names[str(size_expression(size))] = dim.__name__
    return names


def _are_alike(graph: TracedGraph, first: Link, other: Link) -> bool:
    """Whether links have the same class, method and device, and tensors of the same shapes and dtypes.

    If two names in one module are the same tensor, they must be so in the other module, too.
    """

    def layout(module: nn.Module) -> dict[str, tuple[Any, ...]]:
        names: dict[int, str] = {}
        tensors = {**_named_tensors(module), **_own_tensors(module, graph)}
        return {
            name: (tensor.shape, tensor.dtype, names.setdefault(id(tensor), name)) for name, tensor in tensors.items()
        }

    def form(link: Link) -> tuple[Any, ...]:
        return type(link.module), link.method, link.device, link.streamed_by

    if form(first) != form(other):
        return False
    return layout(first.module) == layout(other.module)


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _own_tensors(module: nn.Module, graph: TracedGraph) -> dict[str, Tensor]:
    """Name in the graph -> the tensor that `module` has there, also as a plain attribute. Literals in the code are the
    graph's."""
    found = {name: _attribute(module, name) for name in graph.tensors}
    return {name: found[name] if isinstance(found[name], Tensor) else value for name, value in graph.tensors.items()}


def _attribute(module: nn.Module, name: str) -> Any:
    """`module.layers.0.weight` for the name "layers.0.weight"; None if there is no such attribute."""
    return reduce(lambda value, part: getattr(value, part, None), name.split("."), cast(Any, module))
