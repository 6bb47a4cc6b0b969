"""A transport inside one process whose failures follow a script, for deterministic tests.

Addresses are addresses of this process; bytes move with ``memmove``. A ``FakeNetwork`` joins the
``FakeTransport`` of every node of a test. What happens to the n-th write to a peer is a ``Fault``;
a write without one is done when ``write`` returns.

Time: the network has a clock of its own that only the test moves (``advance``, ``step``), and every
delayed effect happens in the thread that moves it, earliest first, then first come. ``wait`` and
``fence`` wait in real time for such an effect, so that threads can use them too; in a test of one
thread a timeout of 0 asks for the state now. ``FakeNetwork.changed`` guards all state of the
network and its transports and wakes ``fence``.
"""

from __future__ import annotations

import ctypes
import enum
import heapq
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_smartgen.transfer.peer_queue import Regions
from sglang_smartgen.transfer.transport import (
    Completion,
    Priority,
    Region,
    Span,
    TransportError,
    WriteHandle,
    WriteState,
    checked_spans,
    describe,
)


class FaultKind(enum.Enum):
    """What goes wrong with a write."""

    DELAY = "delay"  # lands whole and is DONE after delay_s
    NEVER = "never"  # stays PENDING, nothing lands
    FAIL = "fail"  # FAILED after delay_s, nothing lands
    PARTIAL = "partial"  # the first `spans` spans land, then FAILED after delay_s
    LATE = "late"  # the first `spans` spans land, FAILED at once; the rest lands after delay_s
    DUPLICATE = "duplicate"  # DONE at once; lands once more after delay_s


@dataclass(frozen=True)
class Fault:
    """One scripted fault. Late and duplicate landings read the source as it is at that time."""

    kind: FaultKind
    delay_s: float = 0.0
    spans: int = 0


class FakeNetwork:
    """The nodes of one test, their clock and the writes under way between them."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.now = 0.0  # seconds
        self.nodes: dict[str, FakeTransport] = {}
        self._events: list[tuple[float, int, _Effect]] = []
        self._order = itertools.count()

    def step(self) -> bool:
        """Move the clock to the next effect and let it happen; False when none is left."""
        with self.changed:
            if not self._events:
                return False
            due, _, effect = heapq.heappop(self._events)
            self.now = max(self.now, due)
            effect.happen()
            self.changed.notify_all()
            return True

    def advance(self, seconds: float) -> None:
        """Let everything happen that is due within ``seconds`` and move the clock by them."""
        with self.changed:
            end = self.now + seconds
            while self._events and self._events[0][0] <= end:
                self.step()
            self.now = end

    def kill(self, session: str) -> None:
        """End a node without a goodbye: nothing lands on it any more.

        Writes to it fail, those under way at the time of their next effect.
        """
        with self.changed:
            node = self.nodes.pop(session, None)
            if node is not None:
                node.alive = False
            self.changed.notify_all()

    def later(self, delay_s: float, effect: _Effect) -> None:
        """Let ``effect`` happen after ``delay_s``; at once for 0."""
        with self.changed:
            if delay_s <= 0:
                effect.happen()
            else:
                heapq.heappush(self._events, (self.now + delay_s, next(self._order), effect))
            self.changed.notify_all()


class FakeTransport:
    """A node of a ``FakeNetwork``. A second one with the same session replaces the first.

    The counters that a test may read: ``writes`` (peer -> number of writes so far), ``log``
    (peer, spans) of every write in order.
    """

    name = "fake"

    def __init__(self, network: FakeNetwork, session: str) -> None:
        self.session = session
        self.network = network
        self.alive = True
        self.writes: dict[str, int] = {}
        self.log: list[tuple[str, list[Span]]] = []
        self._regions = Regions()
        self._faults: dict[tuple[str, int], Fault] = {}
        self._always: dict[str, Fault] = {}
        self._held: list[Callable[[], None]] | None = None
        self._under_way: dict[str, list[_Write]] = {}
        with network.changed:
            network.kill(session)
            network.nodes[session] = self

    def script(self, peer: str, nth: int, fault: Fault) -> None:
        """Give the ``nth`` write to ``peer`` (1 = the first since construction) a fault."""
        if nth < 1:
            raise ValueError(f"nth must be >= 1, got {nth}")
        self._faults[peer, nth] = fault

    def script_all(self, peer: str, fault: Fault | None) -> None:
        """Give every further write to ``peer`` without a fault of its own this one; None ends."""
        if fault is None:
            self._always.pop(peer, None)
        else:
            self._always[peer] = fault

    def hold(self) -> None:
        """Keep every further write PENDING, with no byte landed, until ``release``."""
        with self.network.changed:
            if self._held is None:
                self._held = []

    def release(self) -> None:
        """Let the held writes go, in the order of their ``write`` calls."""
        with self.network.changed:
            held, self._held = self._held or [], None
            for start in held:
                start()

    def pending(self, peer: str) -> int:
        """Return how many writes to ``peer`` may still land a byte."""
        with self.network.changed:
            return sum(write.may_land() for write in self._under_way.get(peer, []))

    def register(self, region: Region) -> None:
        """See Transport.register."""
        with self.network.changed:
            self._regions.add(region)

    def unregister(self, region: Region) -> None:
        """See Transport.unregister."""
        with self.network.changed:
            self._regions.remove(region)

    def covers(self, address: int, length: int) -> bool:
        """Tell whether a peer may write these bytes."""
        return any(
            start <= address and address + length <= start + size
            for start, size in self._regions.items()
        )

    def write(
        self,
        peer: str,
        spans: Sequence[Span],
        priority: Priority = Priority.PROACTIVE,
        deadline_s: float | None = None,
    ) -> WriteHandle:
        """See Transport.write; what happens follows the script."""
        wanted = checked_spans(spans)
        with self.network.changed:
            if not self.alive:
                raise TransportError(f"the fake transport {self.session} is closed")
            nth = self.writes[peer] = self.writes.get(peer, 0) + 1
            self.log.append((peer, wanted))
            write = _Write(self.network, peer, wanted)
            fault = self._faults.get((peer, nth), self._always.get(peer))
            doubtful = [w for w in self._under_way.get(peer, []) if w.doubtful()]
            self._under_way[peer] = [*doubtful, write]
            if self._held is not None:
                self._held.append(lambda: write.start(fault))
            else:
                write.start(fault)
        return write.handle

    def fence(self, peer: str, scratch: int, timeout_s: float) -> bool:
        """See Transport.fence: True once no earlier write to ``peer`` may land.

        False also for a dead peer after a failed write, as on a real network: nobody answers.
        """
        deadline = time.monotonic() + timeout_s
        with self.network.changed:
            earlier = [write for write in self._under_way.get(peer, []) if write.doubtful()]
            while any(write.may_land() for write in earlier):
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self.network.changed.wait(left)
            if earlier and peer not in self.network.nodes:
                return False
            self._under_way[peer] = [w for w in self._under_way.get(peer, []) if w not in earlier]
            return True

    def bandwidth(self, peer: str) -> float | None:
        """Return None: the fake measures nothing."""
        return None

    def close(self) -> None:
        """Leave the network and fail what is pending; it lands no more."""
        with self.network.changed:
            self.alive = False
            if self.network.nodes.get(self.session) is self:
                del self.network.nodes[self.session]
            for writes in self._under_way.values():
                for write in writes:
                    write.abandon("the transport was closed")
            self.network.changed.notify_all()


class _Effect:
    """Something that a write does at a time of the network's clock."""

    def __init__(self, write: _Write, land: slice | None, final: bool, error: str | None) -> None:
        self.write = write
        self.land = land
        self.final = final
        self.error = error

    def happen(self) -> None:
        self.write.apply(self)


class _Write:
    """One write under way; every method runs with ``network.changed`` held."""

    def __init__(self, network: FakeNetwork, peer: str, spans: list[Span]) -> None:
        self.handle = Completion()
        self._network = network
        self._peer = peer
        self._spans = spans
        # The process the write was meant for: a restarted one at the same name is another.
        self._target = network.nodes.get(peer)
        self._landings = 0 if not spans else 1  # landings that may come, held or scheduled
        self._abandoned = False

    def may_land(self) -> bool:
        target = self._target
        return self._landings > 0 and not self._abandoned and target is not None and target.alive

    def doubtful(self) -> bool:
        return self.may_land() or self.handle.poll() is not WriteState.DONE

    def start(self, fault: Fault | None) -> None:
        refusal = self._refusal()
        if refusal is not None:
            self._landings = 0
            self._fail(refusal)
            return
        kind = FaultKind.DELAY if fault is None else fault.kind
        delay = 0.0 if fault is None else fault.delay_s
        first = 0 if fault is None else fault.spans
        whole = slice(None)
        if kind is FaultKind.DELAY:
            self._plan((delay, _Effect(self, whole, True, None)))
        elif kind is FaultKind.NEVER:
            self._landings = 1
        elif kind is FaultKind.FAIL:
            self._plan((delay, _Effect(self, None, True, "scripted failure")))
        elif kind is FaultKind.PARTIAL:
            self._plan(
                (0.0, _Effect(self, slice(first), False, None)),
                (delay, _Effect(self, None, True, f"scripted failure after {first} spans")),
            )
        elif kind is FaultKind.LATE:
            self._plan(
                (0.0, _Effect(self, slice(first), True, f"scripted failure after {first} spans")),
                (delay, _Effect(self, slice(first, None), False, None)),
            )
        else:
            self._plan(
                (0.0, _Effect(self, whole, True, None)),
                (delay, _Effect(self, whole, False, None)),
            )

    def apply(self, effect: _Effect) -> None:
        if effect.land is not None:
            refusal = self._refusal()
            if refusal is None and not self._abandoned:
                for span in self._spans[effect.land]:
                    ctypes.memmove(span.destination, span.source, span.length)
            elif refusal is not None and effect.final:
                self._fail(refusal)
            self._landings -= 1
        if effect.final and effect.error is not None:
            self._fail(effect.error)
        elif effect.final:
            self.handle.finish()

    def abandon(self, cause: str) -> None:
        self._abandoned = True
        self._fail(cause)

    def _plan(self, *effects: tuple[float, _Effect]) -> None:
        self._landings = sum(effect.land is not None for _, effect in effects)
        for delay, effect in effects:
            self._network.later(delay, effect)

    def _fail(self, cause: str) -> None:
        self.handle.finish(f"{describe(self._peer, self._spans)} failed: {cause}")

    def _refusal(self) -> str | None:
        target = self._target
        if target is None or not target.alive:
            return "the peer is dead"
        for span in self._spans:
            if not target.covers(span.destination, span.length):
                return f"the peer has not registered {span.length} bytes at {span.destination:#x}"
        return None
