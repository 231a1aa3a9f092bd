"""Which answers go on from the prefix cache, and what they leave there."""

from __future__ import annotations

from bisect import insort
from concurrent.futures import wait
from pathlib import Path
from time import perf_counter

from ostinato.runner.sessions.prefix import Hit
from ostinato.runner.sessions.prefix_cache import PrefixCache
from ostinato.runner.sessions.session import Session
from ostinato.runner.sessions.sessions import Sessions
from ostinato.runner.sessions.state_files import StateFiles
from ostinato.runner.text.common_prefix import MIN_SHARED

from .answer import Answer

# In long prompts state is kept every so many tokens.
STOP_EVERY = 8192
# How long a scheduler with nothing to run waits for a file to be read, before it looks at its messages.
_PATIENCE_SECONDS = 0.005


class PrefixReuse:
    """Has answers begin with what the prefix cache knows of their tokens.

    Args:
        sessions: the sessions.
        cache: their prefix cache.

    Attributes:
        files: state that the prefix cache has forgotten.
    """

    def __init__(self, sessions: Sessions, cache: PrefixCache) -> None:
        self.cache, self.files = cache, StateFiles(sessions, cache)

    def find(self, answer: Answer) -> Hit:
        """The beginning of an answer that has no session."""
        if answer.prompt_logprobs is not None:
            # All tokens of the prompt must be run.
            return Hit()
        if answer.hit is None or answer.hit.version != self.cache.version:
            answer.hit = self.cache.find(answer.tokens)
        return answer.hit

    def on_device(self, answer: Answer) -> int:
        """Number of tokens whose pages an answer without a session would share."""
        if answer.session is not None or answer.source is not None:
            return 0
        hit = self.find(answer)
        if hit.prefix is None or answer.reading is not None:
            return 0
        # It is the last one that leaves the device.
        self.cache.touch(hit.prefix)
        return hit.position if hit.prefix.snapshot is not None else 0

    def awaits(self, answer: Answer, idle: bool) -> bool:
        """Whether an answer should wait, as its state is being read, or another one computes a beginning that both have.
        `idle`: there is no step to run meanwhile."""
        if answer.session is not None or answer.source is not None or answer.prompt_logprobs is not None:
            return False
        if self._reads(answer, idle):
            return True
        if answer.reading is not None:
            return False
        if answer.awaited is not None:
            before, position = answer.awaited
            if position in before.stops and self.cache.is_owner(before):
                return True
            answer.awaited = None
        hit = self.find(answer)
        other = hit.owner
        if not isinstance(other, Answer):
            return False
        position = min(hit.known, len(other.tokens) - 1, len(answer.tokens) - 1)
        if position - hit.position < MIN_SHARED or other.fed >= position:
            return False
        if position not in other.stops:
            insort(other.stops, position)
        answer.awaited = other, position
        return True

    def open(self, answer: Answer) -> Session | None:
        """Open a session with the beginning of an answer's tokens; None: there is none. Raises CapacityError."""
        if answer.reading is None:
            return self.cache.open(self.find(answer))
        found = answer.reading.result()
        assert found is not None
        session = self.files.open(found, answer.tokens)
        answer.reading = None
        return session

    def forget(self, answer: Answer) -> bool:
        """Forget what an answer would begin with. Returns whether there was anything."""
        if answer.reading is not None:
            answer.reading = None
            return True
        hit = self.find(answer)
        if hit.prefix is not None:
            self.cache.drop(hit.prefix)
        return hit.prefix is not None

    def begin(self, answer: Answer) -> None:
        """Note that an answer's prompt is computed from now on, behind the tokens that its session has."""
        if answer.begun is None:
            answer.begun = perf_counter()
        if not answer.has_outputs:
            answer.reused = min(answer.fed, answer.prompt_end)
        if not self.cache.enabled or answer.prompt_logprobs is not None:
            return
        tokens, fed, hit = answer.tokens, answer.fed, self.find(answer)
        if self.cache.needs_rows:
            known = hit.known
            stops = {known} if known - fed >= MIN_SHARED else set()
            stops |= {*_shared(answer), *range(STOP_EVERY, len(tokens), STOP_EVERY)}
            answer.stops = sorted(stop for stop in stops if fed < stop < len(tokens))
        answer.node = self.cache.announce(tokens, answer, hit)
        if not answer.rest:
            self.cache.withdraw(answer)

    def passed(self, answer: Answer) -> None:
        """Keep the state of an answer's session, if its prompt has come to where that is due: to a stop, or to its end, where
        nothing is known of later prompts or where any token is a stop."""
        if answer.session is None:
            return
        due = False
        while answer.stops and answer.stops[0] <= answer.fed:
            answer.stops.pop(0)
            due = True
        if not answer.rest:
            self.cache.withdraw(answer)
            due = due or answer.request.shared is None or not self.cache.needs_rows
        if due and answer.prompt_logprobs is None:
            self.cache.keep(answer.session, not answer.rest, answer.node, _shared(answer))

    def left(self, answer: Answer) -> None:
        """Note that an answer's prompt is not computed any more."""
        answer.stops = []
        self.cache.withdraw(answer)

    def ended(self, answer: Answer, session: Session | None) -> None:
        """Note that an answer has ended, or is to begin anew, and keep the state of its session, if there is one to keep."""
        if (
            session is not None
            and not session.is_offloaded
            and answer.request.goes_on
            and answer.prompt_logprobs is None
        ):
            self.cache.keep(session, known=answer.node)
        if answer.node is not None:
            self.cache.release(answer.node)
        answer.node = answer.hit = None

    def _reads(self, answer: Answer, idle: bool) -> bool:
        """Whether the state that an answer goes on from is being read from its file."""
        path = answer.request.state_file
        if path is None:
            return False
        position = self.find(answer).position
        # A state that stands in the cache is no older than its file. The cache may lose it until the answer has a session.
        looked = answer.looked is not None and position >= answer.looked
        if not looked and Path(path) not in self.cache.standing:
            answer.looked = position
            answer.reading = self.files.read(Path(path), answer.tokens, position + MIN_SHARED)
        if answer.reading is None:
            return False
        if idle:
            wait([answer.reading], _PATIENCE_SECONDS)
        if not answer.reading.done():
            return True
        if answer.reading.result() is None:
            answer.reading = None
        return False


def _shared(answer: Answer) -> set[int]:
    """Numbers of an answer's tokens up to which a later prompt is likely to be the same."""
    before = answer.prompt_end - len(answer.request.tokens)
    return {before + count for count in answer.request.shared or ()}
