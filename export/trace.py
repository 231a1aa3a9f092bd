"""Methods -> graphs, by torch.export. A method is one module, or a chain of modules of which many are alike."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from ..delegate.errors import ExportError
from .mutation import written_buffers

MethodSpec = tuple[nn.Module, tuple[Tensor, ...], Any]


@dataclass(frozen=True)
class Link:
    """One module of a chain.

    Attributes:
        module: its `forward` takes values of the chain by the names of its arguments, and returns a tensor or a tuple.
        outputs: names for what it returns.
        kind: links of one kind differ in their tensors and in nothing else; they are traced and compiled once.
        prefix: goes before the names of the module's tensors in the artifact, such as `model.layers.3.`.
    """

    module: nn.Module
    outputs: tuple[str, ...]
    kind: str
    prefix: str = ""


@dataclass(frozen=True)
class Chain:
    """A method whose modules run one after the other, and whose code grows with their kinds and not with their number.

    Attributes:
        links: in the order of their calls.
        inputs: the method's inputs, name -> example.
        outputs: names of the values that the method returns.
        dynamic_shapes: input name -> {dimension: Dim}; other sizes are static. What links hand on may have these
            dimensions, and no sizes computed from them.
    """

    links: Sequence[Link]
    inputs: Mapping[str, Tensor]
    outputs: tuple[str, ...]
    dynamic_shapes: Mapping[str, Mapping[int, Any]]


@dataclass(frozen=True)
class Graph:
    """A traced module.

    Attributes:
        label: what it is called in messages and while it is compiled.
        program: the graph.
        written: names of the buffers that it writes.
        symbols: torch's symbol -> the name that its dimension has for people.
        ranges: torch's symbol -> the sizes that its dimension may have.
        tensors: name -> parameter, buffer or constant as it was traced; compiling replaces those of `program`.
    """

    label: str
    program: ExportedProgram
    written: frozenset[str]
    symbols: dict[str, str]
    ranges: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def inputs(self) -> dict[str, Any]:
        """Name -> the tracer's tensor, in the order of the graph's arguments."""
        wanted = set(self.program.graph_signature.user_inputs)
        nodes = self.program.graph.find_nodes(op="placeholder")
        return {node.name: node.meta["val"] for node in nodes if node.name in wanted}

    @property
    def outputs(self) -> list[Any]:
        """The tracer's tensors."""
        output = next(node for node in self.program.graph.nodes if node.op == "output")
        values = {node.name: node.meta["val"] for node in output.args[0] if hasattr(node, "meta")}
        return [values[name] for name in self.program.graph_signature.user_outputs]


@dataclass(frozen=True)
class TracedLink:
    """A link with its graph, which all links of its kind share, and the names of the values that it takes."""

    link: Link
    graph: Graph
    inputs: tuple[str, ...]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The link's own tensors by the graph's names for them."""
        own = _named_tensors(self.link.module)
        return {
            name: own[name] if name in own else _attribute(self.link.module, name, tensor)
            for name, tensor in self.graph.tensors.items()
        }


@dataclass(frozen=True)
class TracedMethod:
    """A method's links, and the names of what it takes and returns."""

    name: str
    links: tuple[TracedLink, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def graphs(self) -> dict[str, Graph]:
        """Kind -> graph."""
        return {traced.link.kind: traced.graph for traced in self.links}


def trace_method(name: str, spec: MethodSpec | Chain, output_names: Sequence[str] = ()) -> TracedMethod:
    """Trace one method.

    Raises:
        ExportError: torch.export cannot trace it (its own account is the cause), an input that is no tensor or not used, an
            output that is an input or constant as it came in, or links of one kind that are not alike.
    """
    return _trace_chain(name, spec) if isinstance(spec, Chain) else _trace_module(name, spec, output_names)


def _trace_module(name: str, spec: MethodSpec, output_names: Sequence[str]) -> TracedMethod:
    module, example, dynamic_shapes = spec
    graph = _trace(name, f"method {name!r}", module, example, dynamic_shapes)
    _check_inputs(name, graph.program)
    inputs = tuple(graph.inputs)
    outputs = tuple(
        output_names[index] if index < len(output_names) else f"output_{index}" for index in range(len(graph.outputs))
    )
    # A value's name is taken once: an output called like an input would hide it.
    values = tuple(f"result {output}" for output in outputs)
    link = TracedLink(Link(module, values, name), graph, inputs)
    return TracedMethod(name, (link,), inputs, values)


def _trace_chain(name: str, chain: Chain) -> TracedMethod:
    examples: dict[str, Tensor] = dict(chain.inputs)
    dims: dict[str, dict[int, Any]] = {key: dict(value) for key, value in chain.dynamic_shapes.items()}
    lengths = {dim.__name__: dim for value in dims.values() for dim in value.values()}
    taken = [tuple(inspect.signature(link.module.forward).parameters) for link in chain.links]
    firsts: dict[str, tuple[TracedLink, Any]] = {}
    traced_links = []
    for index, (link, names) in enumerate(zip(chain.links, taken, strict=True)):
        where = f"method {name!r}, {link.kind}"
        unknown = [argument for argument in names if argument not in examples]
        if unknown:
            raise ExportError(f"{where}: it takes {', '.join(unknown)}, which nothing before it gives")
        example = tuple(examples[argument] for argument in names)
        shapes = tuple(dims.get(argument, {}) for argument in names)
        takes = [(tensor.shape, tensor.dtype, shape) for tensor, shape in zip(example, shapes, strict=True)]
        if link.kind not in firsts:
            graph = _trace(f"{name} {link.kind}", where, link.module, example, shapes)
            firsts[link.kind] = TracedLink(link, graph, names), takes
        first, first_takes = firsts[link.kind]
        graph = first.graph
        traced = TracedLink(link, graph, names)
        _check_alike(name, first, traced, first_takes == takes)
        _check_output_names(where, link, graph)
        handed_on = {argument for later in taken[index + 1 :] for argument in later}
        for output, value in zip(link.outputs, graph.outputs, strict=True):
            if output in handed_on:
                examples[output], dims[output] = _example_of(name, output, value, graph, lengths)
        traced_links.append(traced)
    given = {output for link in chain.links for output in link.outputs}
    missing = [output for output in chain.outputs if output not in given]
    if missing or not chain.links:
        raise ExportError(f"method {name!r}: no module gives {', '.join(missing) or 'anything'}")
    return TracedMethod(name, tuple(traced_links), tuple(chain.inputs), chain.outputs)


def _trace(label: str, where: str, module: nn.Module, example: tuple[Tensor, ...], dynamic_shapes: Any) -> Graph:
    others = sorted({type(value).__name__ for value in example if not isinstance(value, Tensor)})
    if others:
        raise ExportError(f"{where}: inputs must be tensors, got {', '.join(others)}")
    # The runtime hands contiguous inputs to the code, so it is made for such; and one tensor given as the example of two
    # inputs would be traced as one input.
    inputs = tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in example)
    try:
        with torch.no_grad():
            program = torch.export.export(module, inputs, dynamic_shapes=dynamic_shapes, strict=False)
    except Exception as error:
        raise ExportError(f"{where} cannot be traced by torch.export: {error}") from error
    _check_outputs(where, program)
    return Graph(
        label,
        program,
        frozenset(written_buffers(where, program)),
        _symbol_names(program, dynamic_shapes),
        {str(symbol): bounds for symbol, bounds in program.range_constraints.items()},
        {
            name: value
            for name, value in {**program.state_dict, **program.constants}.items()
            if isinstance(value, Tensor)
        },
    )


def _check_inputs(method: str, program: ExportedProgram) -> None:
    """A delegate call has only inputs that are used."""
    nodes = {node.name: node for node in program.graph.nodes}
    for name in program.graph_signature.user_inputs:
        if isinstance(name, str) and not nodes[name].users:
            raise ExportError(f"method {method!r}: input {name!r} is not used: take it out of forward's arguments")


def _check_outputs(where: str, program: ExportedProgram) -> None:
    """Compiled code hands out what it computed."""
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
                names[str(size.node.expr)] = dim.__name__
    return names


def _check_output_names(where: str, link: Link, graph: Graph) -> None:
    if len(link.outputs) != len(graph.outputs):
        raise ExportError(
            f"{where}: it returns {len(graph.outputs)} tensors, and has {len(link.outputs)} names for them"
        )


def _check_alike(method: str, first_traced: TracedLink, traced: TracedLink, same_inputs: bool) -> None:
    def layout(traced: TracedLink) -> dict[str, tuple[torch.Size, torch.dtype]]:
        tensors = {**_named_tensors(traced.link.module), **traced.tensors}
        return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}

    first, link = first_traced.link, traced.link
    same_modules = type(first.module) is type(link.module) and layout(first_traced) == layout(traced)
    if not same_modules or not same_inputs:
        raise ExportError(
            f"method {method!r}: {link.prefix or link.kind} and {first.prefix or first.kind} are of one kind, {link.kind!r}, "
            "but not alike: give them kinds of their own"
        )


def _attribute(module: nn.Module, name: str, default: Tensor) -> Tensor:
    """A tensor that is a plain attribute of the module, or `default`, one that the tracer made."""
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, Tensor) else default


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _example_of(
    method: str, name: str, value: Any, graph: Graph, lengths: Mapping[str, Dim]
) -> tuple[Tensor, dict[int, Any]]:
    """An example of what a link hands on, and its dynamic dimensions."""
    # Code reads its inputs as they were laid out when it was traced, and checks nothing.
    if not value.is_contiguous():
        raise ExportError(f"method {method!r}: {name!r} is handed on, and not contiguous: return `.contiguous()` of it")
    sizes, dims = [], {}
    for index, size in enumerate(value.shape):
        if isinstance(size, torch.SymInt):
            length = lengths.get(graph.symbols.get(str(size.node.expr), ""))
            if length is None:
                raise ExportError(
                    f"method {method!r}: size {index} of {name!r} is computed ({size}); a link can hand on sizes of the "
                    "method's inputs only"
                )
            dims[index] = length
        sizes.append(size.node.hint if isinstance(size, torch.SymInt) else size)
    return torch.zeros(sizes, dtype=value.dtype), dims
