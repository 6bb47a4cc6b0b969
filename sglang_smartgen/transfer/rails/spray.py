"""Everything under way to one peer: which slice goes on which link now, and what became of it.

Owner: one `Sprayer` a peer. Whoever writes submits an intent on its own thread; completions come on
threads of the rails; a ticker (see transport.py) calls `tick`. All of them first change the state
under `lock`, then hand slices to the rails without it: a rail may call back from inside `write`,
and with locks of its own held. A thread that is handing over already is not entered again, it
looks once more.

An intent is DONE when every slice of it has landed. A slice whose attempt failed, or whose link has
fallen silent, is given to another link while the deadline lasts. The first attempt may then still
land: it was copied before it was sent (see staging.py), so it carries the same bytes, and the
intent says `late`, so that its destination is not reused before a fence.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from sglang_smartgen.transfer.rails.decide import pick, usable
from sglang_smartgen.transfer.rails.follow import follow
from sglang_smartgen.transfer.rails.intent import Attempt, Intent, Slice
from sglang_smartgen.transfer.rails.link import LARGEST_UNCOPIED, Link
from sglang_smartgen.transfer.rails.staging import Staging
from sglang_smartgen.transfer.rails.twice import BULK, silent_links, worth_twice
from sglang_smartgen.transfer.transport import (
    Completion,
    Priority,
    Span,
    TransportError,
    WriteHandle,
    WriteState,
    describe,
)

FAILURES = 3  # of one slice, on as many links as there are: then its intent fails
BACK_OFF_S = 0.01  # before a slice is tried again where it has failed, doubled each time
LINGER_S = 0.4  # what an urgent intent waits for a first attempt, rather than be `late`

Reach = Callable[[Sequence[Span]], list[bool] | None]
"""Which of the links can reach this memory; None: all."""


class Sprayer:
    """Intents to one peer over its links."""

    def __init__(
        self,
        peer: str,
        links: list[Link],
        staging: Staging,
        *,
        heal: Callable[[Sprayer, Link], None],
        reach: Reach = lambda spans: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """heal: begin to probe and fence this link, until it needs neither; called without lock.

        clock: seconds; what deadlines of intents refer to.
        """
        self.peer = peer
        self.links = links
        self.lock = threading.Lock()
        self.switches = 0
        self.failed = 0
        for link in links:
            if link.settles or len(links) == 1:
                link.largest = LARGEST_UNCOPIED
        self._staging = staging
        self._heal = heal
        self._reach = reach
        self._clock = clock
        self._queues: list[deque[Intent]] = [deque() for _ in Priority]
        self._backlog = [0] * len(Priority)  # bytes that wait in front of the links
        self._open: dict[Intent, None] = {}
        self._starting: set[Attempt] = set()
        self._inside = threading.local()
        self._closed: str | None = None
        self._tier: int | None = None
        self._ticked = clock()

    # What callers do ------------------------------------------------------------------------

    def submit(self, intent: Intent) -> None:
        """Send it; its handle is the intent. Raises TransportError when this is closed."""
        intent.canceller = self.cancel
        intent.may = self._reach(intent.spans)
        intent.device = self._staging.has_device(intent.spans)
        if intent.may is not None and not any(intent.may):
            intent.finish(f"{describe(self.peer, intent.spans)} failed: no rail reaches its memory")
            return
        with self.lock:
            if self._closed is not None:
                raise TransportError(self._closed)
            if intent.total:
                self._open[intent] = None
                self._queues[intent.priority].append(intent)
                self._backlog[intent.priority] += intent.uncut
        if not intent.total:
            intent.finish()
        self.pump()

    def cancel(self, intent: Intent) -> None:
        """See Intent.cancel."""
        with self.lock:
            if intent not in self._open:
                return
            self._give_up(intent, "it was cancelled")
            under_way = self._under_way(intent)
            if not under_way:
                self._open.pop(intent)
        self._conclude(None if under_way else intent)

    def pending(self) -> list[Intent]:
        """Intents that are not final."""
        with self.lock:
            return list(self._open)

    def starting(self) -> set[Attempt]:
        """Attempts that are being handed to their rail at this moment."""
        with self.lock:
            return set(self._starting)

    def busy(self) -> bool:
        """Whether `tick` has anything to watch."""
        return bool(self._open)

    def close(self, cause: str) -> None:
        """Fail every intent that is not final, and take no further one."""
        with self.lock:
            self._closed = cause
            intents = list(self._open)
            self._open.clear()
            for intent in intents:
                self._give_up(intent, cause)
        for intent in intents:
            self._tell(intent)

    # Handing slices to rails ----------------------------------------------------------------

    def pump(self) -> None:
        """Hand over whatever can go now. A repeat inside the same thread is left to the first."""
        if getattr(self._inside, "pump", False):
            self._inside.again = True
            return
        if not any(self._queues):
            return  # whoever puts something there comes here afterwards
        self._inside.pump = True
        try:
            self._inside.again = True
            while self._inside.again:
                self._inside.again = False
                with self.lock:
                    batch = self._decide()
                    self._starting.update(batch)
                for attempt in batch:
                    self._start(attempt)
                if batch and any(self._queues):
                    self._inside.again = True
        finally:
            self._inside.pump = False

    def _decide(self) -> list[Attempt]:
        now = self._clock()
        batch: list[Attempt] = []
        backlog = 0
        for priority in Priority:
            queue = self._queues[priority]
            backlog += self._backlog[priority]
            for intent in list(queue):
                backlog = self._cut(intent, backlog, now, batch)
                if not (intent.uncut or intent.again):
                    queue.remove(intent)
                elif not any(link.is_open(priority) for link in self.links):
                    return batch  # nor for anything less urgent
        return batch

    def _cut(self, intent: Intent, backlog: int, now: float, batch: list[Attempt]) -> int:
        """Give slices of one intent to links while one is worth it; the backlog that is left."""
        ways = usable(self.links, intent.may)
        for _ in range(len(intent.again)):
            slice_ = intent.again[0]
            fresh = self._others(slice_, intent.may)
            if now < slice_.not_before and not fresh:
                break
            link = pick(fresh or ways, intent.priority, backlog, slice_.length, now)
            if link is None or not self._assign(slice_, link, now, batch):
                break
            intent.again.popleft()
            link.retries += 1
            self._backlog[intent.priority] -= slice_.length
            backlog -= slice_.length
        while intent.uncut:
            link = pick(ways, intent.priority, backlog, None, now)
            if link is None:
                break
            slice_ = intent.cut(link.slice_bytes(intent.priority))
            self._backlog[intent.priority] -= slice_.length
            backlog -= slice_.length
            if not self._assign(slice_, link, now, batch):
                intent.again.append(slice_)  # no staging memory just now
                self._backlog[intent.priority] += slice_.length
                backlog += slice_.length
                break
        return backlog

    def _others(self, slice_: Slice, may: list[bool] | None) -> list[Link]:
        """Links in use on which the slice has not failed, of whatever tier."""
        other = [
            (may is None or may[i]) and link not in slice_.failed_on and not link.paused
            for i, link in enumerate(self.links)
        ]
        return usable(self.links, other)

    def _copied(self, link: Link, intent: Intent) -> bool:
        """Whether its slices are copied first: they may be sent twice, or are no host memory."""
        return (not link.settles and len(self.links) > 1) or (link.host_only and intent.device)

    def _assign(self, slice_: Slice, link: Link, now: float, batch: list[Attempt]) -> bool:
        buffer = None
        if self._copied(link, slice_.intent):
            buffer = self._staging.allocate(slice_.length)
            # Where lost writes hold the staging memory, go on without: a failure then is final.
            if buffer is None and (link.attempts or slice_.intent.device):
                return False
        if link.tier != self._tier:
            self.switches += self._tier is not None
            self._tier = link.tier
        attempt = link.begin(slice_, now)
        attempt.buffer = buffer
        slice_.attempts += 1
        batch.append(attempt)
        return True

    def _start(self, attempt: Attempt) -> None:
        slice_, link = attempt.slice, attempt.link
        handle: WriteHandle
        try:
            if slice_.intent.cause is not None or slice_.done:
                self._discard(attempt)
                return
            spans = slice_.spans
            if attempt.buffer is not None:
                spans = self._staging.fill(attempt.buffer, spans)
            handle = link.transport.write(link.session, spans, slice_.intent.priority)
        except Exception as error:  # a rail that is broken is one that has failed
            handle = Completion()
            handle.finish(str(error) or type(error).__name__)
        finally:
            with self.lock:
                self._starting.discard(attempt)
                ended = self._ended(slice_)
            self._conclude(ended)
        follow(handle, lambda: self._final(attempt, handle))

    def _discard(self, attempt: Attempt) -> None:
        """Never given to its rail: as if it had not been."""
        with self.lock:
            attempt.link.drop(attempt)
            attempt.slice.attempts -= 1
            if attempt.buffer is not None:
                self._staging.free(attempt.buffer)

    # What becomes of them -------------------------------------------------------------------

    def _final(self, attempt: Attempt, handle: WriteHandle) -> None:
        """The rail has said the end of an attempt."""
        error = None if handle.poll() is WriteState.DONE else handle.error or "it failed"
        slice_, link = attempt.slice, attempt.link
        with self.lock:
            now = self._clock()
            if not attempt.abandoned:
                link.end(attempt, error, now)
                if not link.attempts and any(self._backlog[priority] for priority in BULK):
                    link.ran_dry()
            slice_.attempts -= 1
            self._give_back(attempt, settled=error is None or link.settles)
            if error is None:
                self._landed(slice_)
                if all(way.paused for way in self.links):  # tried for want of another
                    link.health.answered()
            else:
                slice_.doubt = slice_.doubt or not link.settles
                if attempt.buffer is None and not link.settles:
                    self._give_up(slice_.intent, error)  # its source may be read late
                elif not slice_.done and not attempt.abandoned:
                    self._again(slice_, link, error, now)
            ended = self._ended(slice_)
            heal = self._needs_healing(link)
        if heal:
            self._heal(self, link)
        self._conclude(ended)
        self.pump()

    def _give_back(self, attempt: Attempt, settled: bool) -> None:
        if attempt.buffer is None:
            return
        if settled:
            self._staging.free(attempt.buffer)
        else:
            attempt.link.held.append(attempt.buffer)

    def _landed(self, slice_: Slice) -> None:
        if slice_.done:
            return
        intent = slice_.intent
        slice_.done = True
        intent.open -= 1
        intent.landed += slice_.length
        if slice_ in intent.again:  # a first attempt came through after all
            intent.again.remove(slice_)
            self._backlog[intent.priority] -= slice_.length
        if slice_.attempts or slice_.doubt:
            intent.twice.append(slice_)

    def _again(self, slice_: Slice, link: Link, error: str, now: float) -> None:
        """Put a slice back in front of the links, or let its intent fail with the error."""
        intent = slice_.intent
        slice_.failures += 1
        slice_.failed_on.add(link)
        if intent.cause is not None:
            return
        if slice_.failures >= max(FAILURES, len(self.links)):
            self._give_up(intent, error)
            return
        slice_.not_before = now + BACK_OFF_S * 2**slice_.failures
        self._requeue(slice_)

    def _requeue(self, slice_: Slice) -> None:
        intent = slice_.intent
        if slice_.done or intent.cause is not None or slice_ in intent.again:
            return
        if not (intent.uncut or intent.again):
            self._queues[intent.priority].appendleft(intent)
        intent.again.append(slice_)
        self._backlog[intent.priority] += slice_.length

    def _give_up(self, intent: Intent, cause: str) -> None:
        """Nothing of it is sent any more; it will be FAILED."""
        if intent.cause is not None:
            return
        intent.cause = cause
        waiting = intent.uncut + sum(slice_.length for slice_ in intent.again)
        self._backlog[intent.priority] -= waiting
        if waiting and intent in self._queues[intent.priority]:
            self._queues[intent.priority].remove(intent)
        intent.uncut = 0
        intent.again.clear()

    def _ended(self, slice_: Slice) -> Intent | None:
        """The slice's intent, if it is to be told its end now."""
        intent = slice_.intent
        if intent not in self._open or self._being_started(intent):
            return None
        if intent.cause is not None:
            waits = intent.cause == "it was cancelled" and self._under_way(intent)
            ended = not waits
        else:
            ended = not (intent.open or intent.uncut) and not self._lingers(intent)
        if ended:
            del self._open[intent]
        return intent if ended else None

    def _being_started(self, intent: Intent) -> bool:
        """Its source may be read at this moment: it cannot be DONE yet."""
        return intent.cause is None and any(a.slice.intent is intent for a in self._starting)

    def _under_way(self, intent: Intent) -> bool:
        return any(a.slice.intent is intent for link in self.links for a in link.attempts)

    def _lingers(self, intent: Intent) -> bool:
        """Urgent bytes go to memory that is soon used again: rather wait than be late."""
        pending = [slice_ for slice_ in intent.twice if slice_.attempts]
        sure = not any(slice_.doubt for slice_ in intent.twice)
        if intent.priority in BULK or not (pending and sure):
            return False
        if intent.linger_until is None:
            intent.linger_until = self._clock() + LINGER_S
        return self._clock() < intent.linger_until

    def _conclude(self, intent: Intent | None) -> None:
        if intent is not None:
            self._tell(intent)

    def _tell(self, intent: Intent) -> None:
        if intent.twice:
            with self.lock:
                intent.late = any(slice_.attempts or slice_.doubt for slice_ in intent.twice)
        if intent.cause is None:
            intent.finish()
        else:
            self.failed += 1
            intent.finish(f"{describe(self.peer, intent.spans)} failed: {intent.cause}")

    # Time -----------------------------------------------------------------------------------

    def tick(self, period_s: float) -> None:
        """Time has passed: deadlines, silent links, slices that are worth a second attempt."""
        now = self._clock()
        stalled = now - self._ticked > 4 * period_s + 0.05  # it was this process that was silent
        self._ticked = now
        ended: list[Intent] = []
        with self.lock:
            for intent in list(self._open):
                if intent.deadline is not None and now >= intent.deadline:
                    self._give_up(intent, "not complete at its deadline")
                    ended.append(intent)
                elif intent.linger_until is None or self._being_started(intent):
                    continue
                elif now >= intent.linger_until:
                    ended.append(intent)
            for intent in ended:
                self._open.pop(intent, None)
            batch = [] if stalled else self._second_attempts(now)
            self._starting.update(batch)
            silent = [] if stalled else silent_links(self.links, now)
            for link in silent:
                self._pause(link, now)
            heal = [link for link in self.links if self._needs_healing(link)]
        for intent in ended:
            self._tell(intent)
        for attempt in batch:
            self._start(attempt)
        for link in heal:
            self._heal(self, link)
        self.pump()

    def _pause(self, link: Link, now: float) -> None:
        link.health.pause(f"nothing has completed for {link.silent_s(now):.2f} s")
        link.speed.doubt()
        for attempt in list(link.attempts):
            if attempt.buffer is None or attempt in self._starting or attempt.slice.done:
                continue  # where its source is still read it cannot be sent a second time
            attempt.abandoned = True
            link.drop(attempt)
            self._requeue(attempt.slice)

    def _second_attempts(self, now: float) -> list[Attempt]:
        batch: list[Attempt] = []
        for slice_, other in worth_twice(self.links, self._starting, now):
            if self._assign(slice_, other, now, batch):
                other.retries += 1
        return batch

    # Healing --------------------------------------------------------------------------------

    def _needs_healing(self, link: Link) -> bool:
        if link.healing or not (link.paused or link.held):
            return False
        link.healing = True
        return True

    def healed(self, link: Link) -> bool:
        """True when the link needs neither probe nor fence: whoever heals it may stop."""
        with self.lock:
            link.healing = (link.paused or bool(link.held)) and self._closed is None
            return not link.healing

    def answered(self, link: Link) -> None:
        """A probe came through: the link is used again."""
        with self.lock:
            link.health.answered()
            link.last_done = self._clock()
        self.pump()

    def fenced(self, link: Link, held: Sequence[tuple[int, int]]) -> None:
        """No failed write of the link reads these buffers any more."""
        with self.lock:
            mine = {id(buffer) for buffer in held}  # the same range may be held again by now
            for buffer in [b for b in link.held if id(b) in mine]:
                self._staging.free(buffer)
            link.held = [b for b in link.held if id(b) not in mine]
