"""Random closings of programs with work under way, beside another program that goes on answering.

    python -m tests.delegate.closings ARTIFACT COUNT

runs them in a process of its own, whose allocator is set in the environment. The artifact has the methods of `methods`.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ostinato.delegate import Method, Program, load_program
from ostinato.delegate.graphs.plans import MAX_CHANGES

from .chain import WIDTH, layers
from .pair import Pair, inputs_of

if TYPE_CHECKING:
    from ostinato.export import Chain

NAMES = ("step", "host", "streamed")
LENGTHS = (2, 3, 5)
# Rows of a constant that is streamed.
ROWS = 128
# Cycles of a GPU's clock that work under way takes at most: about a millisecond.
BUSY = 2_000_000
# Programs that wait to be closed, in any order.
WAITING = 3


class Scale(nn.Module):
    """`forward(x [T, WIDTH], count [1]) -> x`: its constants are streamed through the device, the first `count`
    rows only."""

    def __init__(self, index: int) -> None:
        super().__init__()
        weight = torch.linspace(0.5, 1.5, ROWS * 4096).view(ROWS, 4096) + index
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        rows = torch.arange(ROWS, device=x.device).unsqueeze(1)
        return (x + torch.where(rows < count, self.weight, 0)[:, :WIDTH].sum(0)).sin()


def methods() -> dict[str, Chain]:
    """`step` is three layers on the device. In `host` the second one is on the host. `streamed` has streamed links."""
    from ostinato.export import Chain, Link

    stack = layers(4)
    length = {"x": {0: torch.export.Dim("T", min=2, max=8)}}
    inputs = {"x": torch.randn(5, WIDTH), "seen": torch.zeros(1, dtype=torch.int64)}

    def link(index: int, host: bool = False) -> Link:
        kind = "layer on the host" if host else "layer"
        return Link(stack[index], ("x", "seen"), kind, f"layers.{index}.", device="cpu" if host else None)

    streamed = [
        Link(Scale(index), ("x",), "scale", f"scales.{index}.", inputs=("x", "seen"), streamed_by="seen")
        for index in range(3)
    ]
    chains = {
        "step": [link(0), link(1), link(2)],
        "host": [link(0), link(3, host=True), link(2)],
        "streamed": [*streamed, link(0)],
    }
    return {name: Chain(links, inputs, ("x", "seen"), length) for name, links in chains.items()}


@contextmanager
def answering(path: Path, seed: int) -> Iterator[None]:
    """Let another thread's program answer meanwhile; each answer is compared. It changes its state, and is loaded anew."""
    stop, failures = threading.Event(), list[BaseException]()
    random = Random(seed)

    def answer() -> None:
        on_gpu = torch.cuda.is_available()
        with torch.cuda.stream(torch.cuda.Stream()) if on_gpu else nullcontext():
            while not stop.is_set():
                pair, changes = Pair(path), 0
                for _ in range(random.randrange(5, 40)):
                    # After more changes, one for each call of a shape, its graph would be given up.
                    if changes < MAX_CHANGES and random.random() < 0.1:
                        pair.change_state()
                        changes += 1
                    pair.step(random.choice(LENGTHS))
                stats = pair.method.stats
                assert (stats.fallbacks, stats.fallback_reason) == (0, None), stats
                pair.close()

    def run() -> None:
        try:
            answer()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if failures:
        raise failures[0]


@dataclass
class Closings:
    """Opens programs, puts them to work, and closes them at random moments and in random ways.

    Attributes:
        path: an artifact with `methods`.
        random: where all choices come from.
        ways: number of closings by the way they were made.
    """

    path: Path
    random: Random
    ways: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._waiting: list[tuple[Program, list[Method]]] = []
        with load_program(self.path) as program:
            self._expected = {}
            for name in NAMES:
                method = program.load_method(name)
                for length in LENGTHS:
                    program.reset()
                    self._expected[name, length] = method.execute(inputs_of(length, length))

    def run(self, count: int) -> None:
        for _ in range(count):
            self._one()
            # Only here nothing refers any more to a program that nobody closed.
            if self.random.random() < 0.1:
                gc.collect()
        while self._waiting:
            self._close(*self._waiting.pop(self.random.randrange(len(self._waiting))))

    def _one(self) -> None:
        random = self.random
        program = load_program(self.path, on_load=self._on_load)
        opened: list[Method] = []
        apart = torch.cuda.Stream() if program.device.type == "cuda" and random.random() < 0.7 else None
        with nullcontext() if apart is None else torch.cuda.stream(apart):
            with suppress(ZeroDivisionError):
                for name in random.sample(NAMES, random.randrange(1, len(NAMES) + 1)):
                    opened.append(program.load_method(name, self._options(name)))
            first = self._work(program, opened)
        if random.random() < 0.2:
            self._waiting.append((program, opened))
            if len(self._waiting) > WAITING:
                self._close(*self._waiting.pop(random.randrange(len(self._waiting))))
        else:
            self._close(program, opened)
        if first is not None:
            name, length, found = first
            if apart is not None:
                # Closing has waited for this stream, unless the program is still open.
                apart.synchronize()
            for tensor, expected in zip(found, self._expected[name, length], strict=True):
                assert torch.equal(tensor.cpu(), expected), (name, length)

    def _on_load(self, _: int) -> None:
        if self.random.random() < 0.02:
            raise ZeroDivisionError

    def _options(self, name: str) -> dict[str, bool | int | str]:
        options: dict[str, bool | int | str] = {
            "skip_copy_output_to_cpu_for_method": name,
            "use_shared_cuda_stream": self.random.random() < 0.3,
            "weight_sharing_across_methods": self.random.random() < 0.8,
        }
        if self.random.random() < 0.6:
            options |= {"enable_cuda_graph_for_method": name, "cuda_graph_warmup_steps": 1}
        return options

    def _work(self, program: Program, opened: list[Method]) -> tuple[str, int, tuple[Tensor, ...]] | None:
        """Queue steps behind other work. Return the first one's outputs, which belong to us."""
        if not opened:
            return None
        random = self.random
        if program.device.type == "cuda":
            torch.cuda._sleep(random.randrange(1, BUSY))
        length, method = random.choice(LENGTHS), random.choice(opened)
        first = method.name, length, method.execute(inputs_of(length, length))
        for index in range(random.randrange(6)):
            if random.random() < 0.1:
                program.bind_state(program.new_state())
            random.choice(opened).execute(inputs_of(random.choice(LENGTHS), index), graph=random.random() < 0.9)
        return first

    def _close(self, program: Program, opened: list[Method]) -> None:
        way = self.random.choice(("program", "methods", "both", "another thread", "nobody"))
        self.ways[way] = self.ways.get(way, 0) + 1
        if way in ("methods", "both"):
            self.random.shuffle(opened)
            for method in opened:
                method.close()
        if way == "another thread":
            thread = threading.Thread(target=program.close)
            thread.start()
            thread.join()
        elif way in ("program", "both"):
            program.close()


def main() -> None:
    path, count = Path(sys.argv[1]), int(sys.argv[2])
    closings = Closings(path, Random(count))
    with answering(path, seed=count):
        closings.run(count)
    left = load_program(path)
    left.load_method("streamed").execute(inputs_of(3, 1))
    backend = torch.cuda.get_allocator_backend() if torch.cuda.is_available() else "host"
    # `left` is closed when the interpreter ends.
    print(backend, *sorted(closings.ways.items()))


if __name__ == "__main__":
    main()
