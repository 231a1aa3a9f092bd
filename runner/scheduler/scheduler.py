"""`Scheduler`: any number of requests, one step of the model at a time. README.md in this folder has its rules."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from ostinato.delegate.errors import CapacityError, ClosedError
from ostinato.runner.model.model import Model
from ostinato.runner.model.steps import TokenBitmask
from ostinato.runner.sessions.prefix_cache import PrefixCache
from ostinato.runner.sessions.session import Session
from ostinato.runner.sessions.sessions import Sessions

from .answer import Answer, seeded
from .kept_sessions import KeptSession, KeptSessions
from .messages import CancelledError, Ended, Output, QueueFullError, Request, SchedulerStats
from .options import DEFAULT_MAX_WAITING
from .prefix_reuse import PrefixReuse
from .prompt_budget import Parts, PromptBudget
from .request_check import check_request
from .room import Room
from .step_times import StepTimes


class Scheduler:
    """Takes requests, and steps their sessions together. One thread at a time may use it.

    Args:
        sessions: the conversations of a model.
        model: the model.
        step_times: returns how long steps take, or raises CapacityError: no room to measure now. Called for two answers.
        clock: returns seconds, from which it learns how long steps take.
        max_waiting: the most answers that wait.
        host_cache_bytes: the most bytes of the host's memory for the prefix cache.
        prefix_caching: whether there is a prefix cache.

    Attributes:
        kept: the kept sessions.
        prefixes, files: the prefix cache, and the files of what it forgets.
        budget: which prompts go into a step.
        failure: why the program can run nothing more; None: it can.
    """

    def __init__(
        self,
        sessions: Sessions,
        model: Model,
        step_times: Callable[[], StepTimes],
        clock: Callable[[], float],
        max_waiting: int = DEFAULT_MAX_WAITING,
        host_cache_bytes: int = 0,
        prefix_caching: bool = True,
    ) -> None:
        self._sessions, self._model, self._max_waiting = sessions, model, max_waiting
        self._room = Room(sessions, model.program.capacity)
        self.budget = PromptBudget(model, step_times, clock, lambda: sessions.steps.goes_ahead)
        # A CPU's copies to the host would be copies to the same memory.
        self._offloads = model.program.device.type == "cuda"
        self.kept = KeptSessions(sessions, self._offloads)
        self.prefixes = PrefixCache(sessions, model, host_cache_bytes, prefix_caching)
        self._reuse = PrefixReuse(sessions, self.prefixes)
        self.files = self._reuse.files
        # By age, the oldest first: a state that was put back is older than all that wait.
        self._waiting: deque[Answer] = deque()
        self._prefilling: list[Answer] = []
        self._decoding: list[Answer] = []
        self._outputs: list[Output] = []
        self._order = 0
        self._stats = SchedulerStats()
        self.failure: str | None = None

    @property
    def busy(self) -> bool:
        """Whether there is anything to do or to give back."""
        return bool(self._decoding or self._prefilling or self._waiting or self._outputs)

    @property
    def has_few_waiting(self) -> bool:
        """Whether a caller with many requests should add one now: those that wait cannot fill all slots."""
        return len(self._waiting) < min(self._max_waiting, self._model.program.capacity.slots)

    @property
    def stats(self) -> SchedulerStats:
        stats = self._stats
        stats.waiting, stats.prefilling, stats.decoding = map(len, (self._waiting, self._prefilling, self._decoding))
        stats.kept_sessions = len(self.kept)
        return stats

    def check(self, request: Request) -> None:
        """Check what `add` checks without adding it.

        Raises:
            ClosedError: the program can run nothing more.
            InputError, OptionError, CapacityError: see `check_request`; a kept session that does not exist or is busy.
        """
        if self.failure is not None:
            raise ClosedError(self.failure)
        if self._model.program.closed:
            raise ClosedError("the program is closed")
        source = self.kept.get(request.session) if request.session is not None else None
        if request.keep is not None and request.keep != request.session:
            self.kept.check_free(request.keep)
        check_request(request, len(source.tokens) if source else 0, self._model, self._room)

    def add(self, request: Request, bitmask: TokenBitmask | None = None) -> None:
        """Have a request wait for its turn.

        Args:
            request: the request; its id is of none that has not ended.
            bitmask: which tokens may follow in its answers, see `Session.token_bitmask`.

        Raises:
            QueueFullError: `max_waiting` answers wait.
            InputError, OptionError, CapacityError, ClosedError: see `check`.
        """
        if len(self._waiting) >= self._max_waiting:
            self._stats.refused += 1
            raise QueueFullError(f"{len(self._waiting)} requests are waiting, which is the most: ask again later")
        self.check(request)
        source = self.kept.get(request.session) if request.session is not None else None
        kept = None
        if request.keep is not None:
            kept = source if source and request.keep == request.session else self.kept.reserve(request.keep)
        tokens = [*source.tokens, *request.tokens] if source else request.tokens
        if source:
            source.busy = True
        params, room = request.sampling_params, self._model.max_seq_len - len(tokens)
        self._order += 1
        self._waiting.append(
            Answer(
                request,
                index=0,
                order=self._order,
                tokens=tokens,
                prompt_end=len(tokens),
                ends=params.ends(() if request.ignore_eos else self._model.eos_ids),
                left=min(request.max_tokens, room),
                limit="length" if request.max_tokens <= room else "max_seq_len",
                params=seeded(params, 0),
                bitmask=bitmask,
                source=source,
                kept=kept,
                further=request.n - 1,
                prompt_logprobs=None if params.prompt_logprobs is None else [],
            )
        )

    def cancel(self, name: str, index: int | None = None) -> None:
        """End the answers of the request with this id, or one of them. Their slots and pages are free then."""
        for answer in [*self._waiting, *self._prefilling, *self._decoding]:
            if answer.request.id != name or index not in (None, answer.index):
                continue
            self._leave(answer)
            self._end(answer, "cancelled")

    def step(self) -> list[Output]:
        """Run one step of the model for as many requests as have room in it, and return what it gives them."""
        if self._waiting:
            if not self.budget.is_measured and len(self._waiting) + len(self._prefilling) + len(self._decoding) > 1:
                # What fails here is nobody's answer: if steps fail, the next one does.
                with suppress(Exception):
                    self.budget.measure()
            self._admit()
        if self._prefilling:
            self._score_a_prompt()
        while self._decoding or self._prefilling:
            parts = self.budget.parts(self._prefilling, len(self._decoding)) if self._prefilling else ()
            self.budget.begin()
            try:
                tokens = self._step_model(parts)
            except CapacityError as error:
                self._make_room(error)
                continue
            except BaseException as error:
                self._fail(error)
                if not isinstance(error, Exception):
                    raise
                break
            self.budget.learn(len(self._decoding), parts)
            self._stats.steps += 1
            self._take(tokens)
            if parts:
                self._took_prompts(parts)
            break
        outputs, self._outputs = self._outputs, []
        return outputs

    def _step_model(self, parts: Parts) -> list[int]:
        """Run prompts, and return the next token of each answer that decodes."""
        prefill = None
        if parts:
            prefill = {answer.session: answer.tokens[answer.fed : answer.fed + count] for answer, count in parts}
        sessions = [answer.session for answer in self._decoding]
        more = any(answer.left > 1 for answer in self._decoding)
        return self._sessions.step(sessions, more, prefill)  # type: ignore[arg-type]

    def _admit(self) -> None:
        """Give waiting answers a session, the oldest first, while there is room; not while others compute their beginning."""
        held: list[Answer] = []
        slots = self._sessions.free
        while self._waiting and len(held) <= slots:
            if slots and self._reuse.awaits(self._waiting[0], not (held or self._prefilling or self._decoding)):
                held.append(self._waiting.popleft())
            elif not self._admit_next():
                break
        self._waiting.extendleft(reversed(held))

    def _admit_next(self) -> bool:
        """Give the next waiting answer a session, or make room for it. Returns whether there may be more to do now."""
        answer, active = self._waiting[0], bool(self._prefilling or self._decoding)
        try:
            tier, reused = self._sessions.tier, self._reuse.on_device(answer) if self._sessions.free else 0
            leaving, room = tier.is_leaving, self._room.is_free(answer, self._prefilling, self._decoding, reused)
            if not room and leaving:
                # That may be room enough: the next step looks. With no step to run, this waits.
                return not active and tier.settle(wait=True)
            pages_alone = not room and self._room.has_slots(answer, self._prefilling)
            if not room and ((pages_alone and self.prefixes.make_room()) or self.kept.make_room()):
                return True
            if not room and active:
                return False
            self._begin(answer)
        except CapacityError as error:
            if self.kept.make_room():
                return True
            if active:
                return False
            if self.kept.make_room(self._waited_for(but=answer)) or self._reuse.forget(answer):
                return True
            if answer.source is not None and answer.source.session is not None:
                # There is no room for it and a fork of it.
                answer.source.forget_state()
                return True
            # Sessions of others have all the slots or pages, and nobody here will give any back.
            self._waiting.popleft()
            self._end(answer, "error", error)
        except Exception as error:
            # The program was closed, or the state cannot come back.
            self._waiting.popleft()
            self._end(answer, "error", error)
        else:
            self._waiting.popleft()
            if answer.rest:
                self._prefilling.append(answer)
            else:
                self._decode(answer)
        return True

    def _begin(self, answer: Answer) -> None:
        """Give an answer a session on the device. Raises CapacityError; nothing has changed."""
        source = answer.source
        if answer.session is not None:
            answer.session.onload()
            return
        session = None
        if source is not None and source.session is not None and source.session.is_ahead and answer.needs_logits:
            source.forget_state()
        if source is not None and source.session is not None:
            source.session.onload()
            if source is answer.kept:
                self.kept.begin(source)
                session, source.session = source.session, None
            else:
                session = source.session.fork()
        if session is None:
            session = self._reuse.open(answer) or self._sessions.open()
        answer.session, answer.source, answer.fed = session, None, session.position
        self._reuse.begin(answer)
        if source is not None and source is not answer.kept:
            source.busy = False
        self._sample_so(answer, session)

    def _sample_so(self, answer: Answer, session: Session) -> None:
        session.begin_answer(answer.params, answer.prompt_end)
        if answer.bitmask is not None:
            session.token_bitmask = answer.allowed(self._model.vocab)

    def _score_a_prompt(self) -> None:
        """Run a part of the first prompt that needs log-probabilities of its own tokens."""
        answer = next((one for one in self._prefilling if one.scores_prompt), None)
        if answer is None:
            return
        assert answer.session is not None and answer.prompt_logprobs is not None
        count = min(answer.prompt_end - answer.fed, self.budget.rows_beside(len(self._decoding)))
        tokens = answer.tokens[answer.fed : answer.fed + count]
        try:
            found = answer.session.prompt_logprobs(tokens, answer.params.prompt_logprobs or 0)
        except CapacityError as error:
            self._make_room(error)
        except Exception as error:
            self._leave(answer)
            answer.leave_device(offload=False)
            self._end(answer, "error", error)
        else:
            answer.prompt_logprobs += found
            self.budget.interrupt()
            self._took_prompts([(answer, count)])

    def _take(self, tokens: Sequence[int]) -> None:
        """Hand on the tokens of the answers that decode, and end those that have ended."""
        ended = []
        outputs = self._outputs
        for answer, token in zip(self._decoding, tokens, strict=True):
            answer.left -= 1
            reason = "stop" if token in answer.ends else None if answer.left else answer.limit
            output = Output(answer.request.id, answer.index, (token,))
            if answer.params.logprobs is not None:
                logprobs = answer.session.logprobs  # type: ignore[union-attr]
                output.logprobs = () if logprobs is None else (logprobs,)
            if not answer.told:
                answer.tell(output)
                self._stats.reused_tokens += output.reused_tokens
            outputs.append(output)
            if answer.error is not None:
                output.tokens, output.logprobs, reason = (), (), "error"
                output.error = Ended.of(answer.error)
            if reason is not None:
                output.finish_reason = reason
                ended.append(answer)
        self._stats.output_tokens += len(tokens)
        for answer in ended:
            self._leave(answer)
            self._release(answer)

    def _took_prompts(self, parts: Parts) -> None:
        """Note the tokens of prompts that were run. Answers whose prompt is complete decode from now on."""
        for answer, count in parts:
            answer.fed += count
            self._stats.prompt_tokens += count
            self._reuse.passed(answer)
            if not answer.rest:
                self._prefilling.remove(answer)
                self._decode(answer)

    def _decode(self, answer: Answer) -> None:
        """Have an answer whose prompt is complete decode from now on, and the request's further answers beside it."""
        self._decoding.append(answer)
        for other in answer.others():
            self._fork(answer, other)
        answer.further = 0

    def _fork(self, answer: Answer, other: Answer) -> None:
        """Have another answer go on from the same prompt."""
        assert answer.session is not None
        try:
            other.session = answer.session.fork()
        except CapacityError:
            # Somebody opened a session of their own meanwhile: it is computed again.
            other.fed, other.put_back = 0, 1
            if other.prompt_logprobs is not None:
                other.prompt_logprobs = []
            self._waiting.appendleft(other)
            return
        self._decoding.append(other)
        self._sample_so(other, other.session)

    def _make_room(self, error: CapacityError) -> None:
        """Have the session that matters least leave the device, so that the others can step."""
        self.budget.interrupt()
        if self.kept.make_room(self._waited_for()):
            return
        active = [*self._decoding, *self._prefilling]
        youngest = max(active, key=lambda answer: (answer.order, answer.index))
        self._leave(youngest)
        if len(active) == 1:
            reason = "kv_tokens" if youngest.has_outputs else "error"
            self._end(youngest, reason, error if reason == "error" else None)
            return
        self._put_back(youngest)

    def _waited_for(self, but: Answer | None = None) -> list[KeptSession]:
        """The kept sessions that waiting answers will go on from, the last one first."""
        return [one.source for one in reversed(self._waiting) if one.source is not None and one is not but]

    def _put_back(self, answer: Answer) -> None:
        """Have an answer wait again, as the next one to go on. Its state goes to the host, or is computed again."""
        self._stats.put_back += 1
        answer.leave_device(self._offloads)
        self._reuse.ended(answer, None)
        self._waiting.appendleft(answer)

    def _fail(self, error: BaseException) -> None:
        """End all answers of a step that failed, and look whether the program can go on."""
        self.budget.interrupt()
        for answer in [*self._decoding, *self._prefilling]:
            self._leave(answer)
            with suppress(Exception):
                # Its state may be that of half a step.
                answer.leave_device(offload=False)
                self._end(answer, "error", error)
        program = self._model.program
        try:
            if program.closed:
                raise ClosedError("the program is closed")
            if program.device.type == "cuda":
                torch.cuda.synchronize(program.device)
        except Exception as gone:
            self.failure = f"the engine can run nothing more, load it again: {gone}"
            for answer in list(self._waiting):
                self._leave(answer)
                with suppress(Exception):
                    self._end(answer, "error", ClosedError(self.failure))

    def _leave(self, answer: Answer) -> None:
        """Take an answer out of the list that it is in."""
        self._reuse.left(answer)
        for answers in (self._decoding, self._prefilling, self._waiting):
            if answer in answers:
                answers.remove(answer)
                return

    def _end(self, answer: Answer, reason: str, error: BaseException | None = None) -> None:
        """End an answer that gets no further token."""
        if error is None and reason == "cancelled":
            error = CancelledError("the answer was cancelled")
        ended = None if error is None else Ended.of(error)
        for index in range(answer.index, answer.index + answer.further + 1):
            self._outputs.append(Output(answer.request.id, index, finish_reason=reason, error=ended))
        self._stats.finished += answer.further
        self._release(answer)

    def _release(self, answer: Answer) -> None:
        """Give back what an answer has that has ended, or keep its session."""
        self._stats.finished += 1
        session, kept, source = answer.session, answer.kept, answer.source
        answer.session = None
        self._reuse.ended(answer, session if kept is None else None)
        if source is not None:
            # The answer never began.
            source.busy = False
            if source is kept:
                return
        if kept is None:
            if session is not None:
                session.close()
        elif session is not None and self.failure is None:
            tokens = list(session.tokens)
            if not session.is_offloaded:
                session.begin_answer(None, None)
            self.kept.keep(kept, session, tokens)
        elif answer.put_back:
            self.kept.keep(kept, None, answer.tokens)
        else:
            self.kept.drop(kept)
