"""The transport protocol: one-sided writes into a peer's registered memory.

What every implementation promises, and what it does not:

* **No order.** Two writes, and two spans of one write, may land in any order, also when they go to
  the same peer. Whoever needs "data before mask" waits for DONE of the data before it writes the
  mask.
* **DONE means visible.** Once ``poll`` or ``wait`` has returned DONE, every byte of the write can
  be read at the peer. Source memory may be reused.
* **FAILED is not a fence.** Any part of a failed write may have landed, and may still land later,
  read from the source as it is *then*. Neither source nor destination may be reused before the
  peer has acknowledged that it is done with them or ``fence`` has returned True.
* **PENDING after wait is not a failure.** The write goes on; the caller decides what its deadline
  means. The same rule as after FAILED holds for its memory.
* **Nothing is retried.** A FAILED write says why, in one sentence that names the peer. (A transport
  over several rails retries on another rail; when it is DONE then, ``late`` says that a copy of the
  same bytes may still land: its destination is not reused before a fence.)

Threads: every method may be called from any thread. Handles are completed by a thread of the
transport; waiting on one never holds a lock of the transport.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol


class TransportError(RuntimeError):
    """The transport could not do what was asked (registration, start-up, use after close)."""


class Region(NamedTuple):
    """A piece of this process's memory: ``address`` and ``length`` in bytes."""

    address: int
    length: int


class Span(NamedTuple):
    """``length`` bytes from local address ``source`` to the peer's address ``destination``."""

    source: int
    destination: int
    length: int


class Priority(enum.IntEnum):
    """What goes first where a transport can choose; the smaller number."""

    ON_DEMAND = 0
    METADATA = 1
    PROACTIVE = 2
    SPECULATIVE = 3


class WriteState(enum.Enum):
    """State of one write; DONE and FAILED are final."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class WriteHandle(Protocol):
    """One write under way. ``error`` is set exactly when the state is FAILED.

    ``late``: DONE, but a copy of some of its bytes may land again before the peer is fenced.
    """

    error: str | None
    late: bool

    def poll(self) -> WriteState:
        """Return the state now, without blocking."""

    def wait(self, timeout_s: float) -> WriteState:
        """Block until the write is final, at most ``timeout_s``; PENDING on timeout."""


class Transport(Protocol):
    """One-sided writes to peers. ``session`` is what peers pass as ``peer`` to write to us."""

    name: str

    @property
    def session(self) -> str:
        """What peers pass as ``peer``."""

    def register(self, region: Region) -> None:
        """Let peers write to ``region``. TransportError when it overlaps a registered one."""

    def unregister(self, region: Region) -> None:
        """Refuse later writes to ``region``. TransportError when it is not registered.

        Not a fence: a write that passed its address check before may still land.
        """

    def write(
        self,
        peer: str,
        spans: Sequence[Span],
        priority: Priority = Priority.PROACTIVE,
        deadline_s: float | None = None,
    ) -> WriteHandle:
        """Start to write ``spans`` to ``peer`` and return at once; no order between two writes.

        A transport that cannot choose ignores ``priority``, and ``deadline_s``, the seconds after
        which a write that is not complete is FAILED. Problems of the peer or the address make the
        handle FAILED. ValueError for a malformed span, TransportError after ``close``.
        """

    def fence(self, peer: str, scratch: int, timeout_s: float) -> bool:
        """Return True when no byte of an earlier write to ``peer`` can land any more.

        ``scratch`` is an address of >= 64 registered bytes at the peer whose content nobody reads.
        Writes still pending are waited for, and may be failed. Without a failed or pending write
        the answer is True at once. False (never later than ``timeout_s``): not known; ask again.
        """

    def bandwidth(self, peer: str) -> float | None:
        """Return the measured bytes/s of recent large writes to ``peer``; None before any."""

    def close(self) -> None:
        """Fail what is pending and free threads and connections. Idempotent."""


class Completion:
    """A WriteHandle that a transport's thread completes once with ``finish``."""

    def __init__(self) -> None:
        self.error: str | None = None
        self.late = False
        self._final = threading.Event()
        self._then: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def finish(self, error: str | None = None) -> bool:
        """Make it DONE, or FAILED with ``error``. False when it was final already."""
        with self._lock:
            if self._final.is_set():
                return False
            self.error = error
            self._final.set()
            then = self._then
        if then is not None:
            then()
        return True

    def then(self, action: Callable[[], None]) -> None:
        """Call ``action`` once when the write is final, perhaps now, on the thread that ends it.

        That thread may hold locks of the transport: ``action`` must not wait for another thread.
        """
        with self._lock:
            if not self._final.is_set():
                self._then = action
                return
        action()

    def poll(self) -> WriteState:
        """Return the state now, without blocking."""
        if not self._final.is_set():
            return WriteState.PENDING
        return WriteState.DONE if self.error is None else WriteState.FAILED

    def wait(self, timeout_s: float) -> WriteState:
        """Block until the write is final, at most ``timeout_s``; PENDING on timeout."""
        self._final.wait(max(0.0, timeout_s))
        return self.poll()


def all_final(handles: Iterable[WriteHandle], deadline: float) -> bool:
    """Wait until all are final, at most until `deadline` (monotonic seconds); False then."""
    return all(
        handle.wait(deadline - time.monotonic()) is not WriteState.PENDING for handle in handles
    )


def checked_spans(spans: Sequence[Span]) -> list[Span]:
    """Return the spans without empty ones; ValueError for a negative field."""
    for span in spans:
        if span.source < 0 or span.destination < 0 or span.length < 0:
            raise ValueError(f"span {span}: source, destination and length must be >= 0")
    return [span for span in spans if span.length > 0]


def describe(peer: str, spans: Sequence[Span]) -> str:
    """Say what a write was, for the sentence of its failure."""
    count = len(spans)
    noun = "span" if count == 1 else "spans"
    return f"write of {count} {noun}, {sum(s.length for s in spans)} bytes, to peer {peer}"
