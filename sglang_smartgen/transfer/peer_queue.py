"""What is to be written to one peer and is not final yet: the part that transports have in common.

Owner: a transport makes one `PeerQueue` a peer. Any thread puts a write and wakes one of the
transport's threads, which take writes in order and say the end of each. `lock` guards the queue's
own numbers; nobody holds it while bytes move or a handle becomes final.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable

from sglang_smartgen.transfer.transport import (
    Completion,
    Region,
    Span,
    TransportError,
    WriteState,
    describe,
)

LARGE_WRITE_BYTES = 64 << 10
"""Of a write that shows what a peer's bandwidth is."""


class Job:
    """One write. aside: a fence's own, which no fence waits for. deadline: monotonic seconds."""

    __slots__ = ("aside", "deadline", "handle", "put_at", "spans")

    def __init__(self, spans: list[Span], aside: bool, deadline_s: float | None) -> None:
        self.spans = spans
        self.aside = aside
        self.handle = Completion()
        self.put_at = time.monotonic()
        self.deadline = None if deadline_s is None else self.put_at + deadline_s

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(span.length for span in self.spans)


class Rate:
    """Bytes/s of recent large writes, as a moving average; `value` is None before any."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, total: int, seconds: float, *, at_most: bool = False) -> None:
        """So many bytes have taken so long. at_most: no longer than that, perhaps far less."""
        if total < LARGE_WRITE_BYTES:
            return
        rate = total / max(seconds, 1e-9)
        old = rate if self.value is None else self.value
        self.value = max(1.1 * old, rate) if at_most else 0.75 * old + 0.25 * rate


class PeerQueue:
    """The writes to one peer.

    peer: as sentences name it. transport: the name of the transport, for the same. failed_at:
    monotonic time of the last write that failed with bytes that may still land.
    """

    def __init__(self, peer: str, transport: str) -> None:
        self.peer = peer
        self.lock = threading.Lock()
        self.rate = Rate()
        self.failed_at: float | None = None
        self.closed = False
        self._transport = transport
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._open: set[Job] = set()
        self._threads = 0

    def start(self, work: Callable[[], None], name: str, threads: int = 1) -> None:
        """Start the threads that `work`: they take writes until `take` returns None."""
        self._threads = threads
        for number in range(threads):
            own = name if threads == 1 else f"{name}-{number}"
            threading.Thread(target=work, name=own, daemon=True).start()

    def serve(self, run: Callable[[Job], str | None], name: str, threads: int = 1) -> None:
        """Start threads that run one write after the other; run: the cause of its failure."""

        def work() -> None:
            while (job := self.take()) is not None:
                try:
                    cause = run(job)
                except Exception as error:  # the handle must become final whatever happened
                    cause = f"{type(error).__name__}: {error}"
                self.end(job, cause)

        self.start(work, name, threads)

    def put(
        self, spans: list[Span], *, aside: bool = False, deadline_s: float | None = None
    ) -> Completion:
        """Queue a write; an empty one is DONE at once. TransportError after `close`."""
        job = Job(spans, aside, deadline_s)
        if not spans and not aside:
            job.handle.finish()
            return job.handle
        with self.lock:
            if self.closed:
                raise TransportError(f"the {self._transport} transport is closed")
            self._open.add(job)
            self._jobs.put(job)
        return job.handle

    def take(self, block: bool = True) -> Job | None:
        """The next write that is not final; None after `close`, or where none waits just now."""
        while True:
            try:
                job = self._jobs.get(block)
            except queue.Empty:
                return None
            if job is None or job.handle.poll() is WriteState.PENDING:
                return job

    def pending(self) -> list[Job]:
        """Writes that are not final, in no order, those of fences among them."""
        with self.lock:
            return list(self._open)

    def outstanding(self) -> list[Completion]:
        """Handles of the writes that a fence waits for."""
        with self.lock:
            return [job.handle for job in self._open if not job.aside]

    def end(self, job: Job, cause: str | None = None, *, settled: bool = False) -> None:
        """A write is DONE, or FAILED for that cause. settled: no byte of it can land any more."""
        with self.lock:
            self._open.discard(job)
            if cause is not None and not (job.aside or settled):
                self.failed_at = time.monotonic()
        job.handle.finish(None if cause is None else self._sentence(job, cause))

    def forgive(self, failed_at: float) -> None:
        """Forget the failure that a fence has covered, unless a later one has come."""
        with self.lock:
            if self.failed_at == failed_at:
                self.failed_at = None

    def close(self) -> bool:
        """Fail what is not final and let the threads end; whether there was any."""
        with self.lock:
            self.closed = True
            jobs = list(self._open)
        for job in jobs:
            self.end(job, "the transport was closed")
        for _ in range(self._threads):
            self._jobs.put(None)
        return bool(jobs)

    def _sentence(self, job: Job, cause: str) -> str:
        return f"{describe(self.peer, job.spans)} failed: {cause}"


class Regions:
    """Registered memory by address; no piece overlaps another. Its owner locks."""

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}

    def add(self, region: Region) -> None:
        """TransportError when it overlaps one that is there."""
        refuse_overlap(region, self._lengths.items())
        self._lengths[region.address] = region.length

    def remove(self, region: Region) -> None:
        """TransportError when it is not there."""
        if self._lengths.pop(region.address, None) is None:
            raise TransportError(f"cannot unregister {region}: it is not registered")

    def clear(self) -> None:
        """Forget all."""
        self._lengths.clear()

    def items(self) -> list[tuple[int, int]]:
        """Address and length of each, in order."""
        return sorted(self._lengths.items())


def refuse_overlap(region: Region, others: Iterable[tuple[int, int]]) -> None:
    """TransportError when it overlaps one of the others (address, length)."""
    end = region.address + region.length
    if any(region.address < address + length and address < end for address, length in others):
        raise TransportError(f"cannot register {region}: it overlaps a registered one")
