"""Backend options: ExecuTorch's names, checked against the program's methods."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from .errors import OptionError


@dataclass(frozen=True)
class BackendOptions:
    """Options of `load_method`.

    Attributes:
        enable_cuda_graph_for_method: comma-separated names of the methods that go through
            warmup -> capture -> replay.
        skip_copy_output_to_cpu_for_method: comma-separated names of the methods whose outputs stay on the device.
            Without it `execute` returns host copies that the caller owns. With it, in the replay phase, the
            outputs are the graph's own buffers, which the next call of any method of the program may overwrite.
        use_shared_cuda_stream: run this method on the stream that captures use, instead of on the caller's current stream.
            Captured graphs are still launched on the caller's stream: the option moves only code that is in no graph. Either
            way the work keeps its order with the work on the caller's stream.
        weight_sharing_across_methods: bind the pool's constants (the default); if False this method gets a private copy.
            Mutable buffers are always shared.
        cuda_graph_warmup_steps: calls that run without a graph before the capture, 1 or more.
        cuda_graph_max_plans: number of input shapes that keep a plan with its graphs, 1 or more. The least recently used plan
            is freed first.
        cuda_graph_early_kernels: in a captured graph, let kernels that support it start before the kernel ahead has ended,
            on GPUs of compute capability 9.0 and newer. False to compare.
    """

    enable_cuda_graph_for_method: str = ""
    skip_copy_output_to_cpu_for_method: str = ""
    use_shared_cuda_stream: bool = False
    weight_sharing_across_methods: bool = True
    cuda_graph_warmup_steps: int = 3
    cuda_graph_max_plans: int = 16
    cuda_graph_early_kernels: bool = True

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None, method_names: Sequence[str]) -> BackendOptions:
        """Check names, types and method names.

        Raises:
            OptionError: a wrong name, type or value. The message gives it and the choices.
        """
        defaults = {item.name: item.default for item in fields(cls)}
        for key, value in (options or {}).items():
            if key not in defaults:
                near = difflib.get_close_matches(str(key), defaults, 1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise OptionError(
                    f"unknown backend option {key!r}{hint}; the options are: {', '.join(sorted(defaults))}"
                )
            expected = type(defaults[key])
            if type(value) is not expected:
                raise OptionError(
                    f"backend option {key!r} takes {_WORD[expected]}, got {value!r} ({type(value).__name__})"
                )
        parsed = cls(**(dict(options) if options else {}))
        if parsed.cuda_graph_warmup_steps < 1:
            raise OptionError(
                f"cuda_graph_warmup_steps must be 1 or more, got {parsed.cuda_graph_warmup_steps}: the first run loads "
                "kernels, which a capture must not see"
            )
        if parsed.cuda_graph_max_plans < 1:
            raise OptionError(f"cuda_graph_max_plans must be 1 or more, got {parsed.cuda_graph_max_plans}")
        for key in ("enable_cuda_graph_for_method", "skip_copy_output_to_cpu_for_method"):
            unknown = [name for name in _names(getattr(parsed, key)) if name not in method_names]
            if unknown:
                raise OptionError(
                    f"{key} names {', '.join(map(repr, unknown))}; the program's methods are: {', '.join(method_names)}"
                )
        return parsed

    def uses_graph(self, method: str) -> bool:
        return method in _names(self.enable_cuda_graph_for_method)

    def skips_copy(self, method: str) -> bool:
        return method in _names(self.skip_copy_output_to_cpu_for_method)


_WORD: dict[type, str] = {
    bool: "True or False",
    int: "an integer",
    str: "a string (method names, separated by commas)",
}


def _names(value: str) -> list[str]:
    return [name.strip() for name in value.split(",") if name.strip()]
