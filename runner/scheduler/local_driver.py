"""Drives a scheduler in the process of its callers, which may be several threads: whoever waits for tokens runs the steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from threading import RLock

from ostinato.delegate.errors import OstinatoError
from ostinato.runner.model.steps import TokenBitmask

from .messages import Ended, Output, Request
from .scheduler import Scheduler


class LocalDriver:
    """Runs steps while somebody waits for an answer, and hands each output to the one who asked.

    Attributes:
        scheduler: the scheduler. Hold `lock` to use it.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.lock = RLock()
        self._arrived: dict[str, deque[Output]] = {}
        self._count = 0
        self._steps = False
        # To be cancelled when the step that runs has ended.
        self._left: list[str] = []

    def new_id(self) -> str:
        """Name for a request that no other one of this driver has."""
        with self.lock:
            self._count += 1
            return f"local-{self._count}"

    def check(self, request: Request) -> None:
        """See `Scheduler.check`."""
        with self.lock:
            self.scheduler.check(request)

    def outputs(self, request: Request, bitmask: TokenBitmask | None = None) -> Generator[Output, None, None]:
        """Add a request, and yield its outputs as they come; one without tokens after each step that gives it nothing. If the
        generator is closed before the end, the request is cancelled.

        Raises:
            InputError, CapacityError, QueueFullError, ClosedError: see `Scheduler.add`.
        """
        arrived = deque[Output]()
        with self.lock:
            self.scheduler.add(request, bitmask)
            self._arrived[request.id] = arrived
        going_on = request.n
        try:
            while going_on:
                with self.lock:
                    if not arrived:
                        self._step()
                if not arrived:
                    yield Output(request.id, 0)
                while arrived:
                    output = arrived.popleft()
                    going_on -= output.finish_reason is not None
                    yield output
        finally:
            with self.lock:
                if going_on:
                    self._leave(request.id)
                del self._arrived[request.id]

    def outputs_of_all(self, requests: Iterable[Request]) -> Generator[Output, None, None]:
        """Yield the outputs of all requests, which are taken as there is room for them.

        For a request that `Scheduler.add` refuses, each of its answers has an output with the error. If the generator is
        closed before the end, what goes on is cancelled.
        """
        arrived, going_on = deque[Output](), dict[str, int]()
        waiting = iter(requests)
        more = True
        try:
            while more or going_on:
                with self.lock:
                    while more and self.scheduler.has_few_waiting:
                        request = next(waiting, None)
                        if request is None:
                            more = False
                            break
                        going_on[request.id] = request.n
                        self._arrived[request.id] = arrived
                        try:
                            self.scheduler.add(request)
                        except OstinatoError as error:
                            refused = Ended.of(error)
                            arrived += [Output(request.id, i, (), (), "error", refused) for i in range(request.n)]
                    # Others may have filled the queue.
                    if not arrived and (more or going_on):
                        self._step()
                while arrived:
                    output = arrived.popleft()
                    if output.finish_reason is not None:
                        going_on[output.id] -= 1
                        if not going_on[output.id]:
                            del going_on[output.id], self._arrived[output.id]
                    yield output
        finally:
            with self.lock:
                for name in going_on:
                    self._leave(name)
                    del self._arrived[name]

    def cancel(self, name: str, index: int) -> None:
        """See `Scheduler.cancel`."""
        with self.lock:
            self.scheduler.cancel(name, index)

    def finish(self) -> None:
        """Run steps until all requests have ended."""
        with self.lock:
            while self.scheduler.busy:
                self._step()

    def _step(self) -> None:
        self._steps = True
        try:
            outputs = self.scheduler.step()
        finally:
            self._steps = False
            while self._left:
                self.scheduler.cancel(self._left.pop())
        for output in outputs:
            arrived = self._arrived.get(output.id)
            if arrived is not None:
                arrived.append(output)

    def _leave(self, name: str) -> None:
        """Cancel a request that nobody waits for any more. The garbage collector may close a generator in the middle of this
        thread's step."""
        if self._steps:
            self._left.append(name)
        else:
            self.scheduler.cancel(name)
