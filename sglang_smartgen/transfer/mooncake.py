"""Writes through Mooncake's classic TransferEngine (TCP here; RDMA keeps the same calls).

Threads: each peer has one ``_Lane``: a queue of writes and two daemon worker threads, started by
the first write to that peer. ``write`` queues and wakes one of them; the worker submits the chunks
of a write one after the other and completes its handle. A hung peer blocks its own two workers
only. The queue's lock guards the lane's numbers; no thread holds it while it calls the engine.

Why the limits:

* The engine takes 4 lanes + 1,024 queued requests a peer; what is beyond waits in a second queue
  that expires after 1 s, or fails at once beyond 2,052. Two workers with at most 480 spans each and
  one round of probes stay inside the first 1,024.
* A span is cut at 1 MiB and a chunk at 64 MiB: the engine gives a chunk 30 s, cannot cancel
  anything, and its progress timeout restarts with each socket write. Small pieces bound what a
  failure leaves behind.
* ``get_batch_transfer_status`` spins a core until the chunk is final, and a spinning thread can
  keep the peer's own threads off a machine that both share (measured: for 10 s, on Linux 6.18 with
  autogroups). So a small chunk is submitted request by request, because only such a request can be
  asked about without waiting, and of a large one the last are: the worker sleeps for most of the
  time it expects the chunk to take, asks now and then, and makes the call when they are done and
  little is left to spin for.

What ``fence`` can know, and why it cannot know more. The classic engine has no cancel; after -1 the
other requests of the chunk stay in its queue and are sent later, from the source as it is then
(measured: 28 of 32 MiB landed with new content). So after a failed write the fence

1. completes a round of probes. The engine's queue to a peer is first in, first out, so every older
   request has been handed to a connection when the probes are done;
2. waits for the lane progress timeout, after which the engine has dropped every connection on
   which an older request made no progress (what does make progress is at most 1 MiB each);
3. completes more probes than there are connections, then a series of single ones, each answered
   by the peer. The peer's one I/O thread serves its connections in turn, a socket chunk of 64 KiB
   each, so the series lets it empty what an abandoned connection left in its receive buffer.

A hole remains, and no call of the engine can close it: bytes of an abandoned connection may sit in
our kernel's send buffer behind a network outage and arrive after it. A peer that must be certain
keeps the slots quarantined until the request's own acknowledgement, or for the kernel's TCP retry
time. On RDMA a failed request's queue pair is destroyed, which is the stronger fence.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from sglang_smartgen.core.counts import counts
from sglang_smartgen.transfer.peer_queue import LARGE_WRITE_BYTES, Job, PeerQueue
from sglang_smartgen.transfer.transport import (
    Completion,
    Priority,
    Region,
    Span,
    TransportError,
    WriteHandle,
    WriteState,
    all_final,
    checked_spans,
)

MAX_CHUNK_SPANS = 480
MAX_CHUNK_BYTES = 64 << 20
MAX_SPAN_BYTES = 1 << 20
WORKERS_PER_PEER = 2
FLUSH_PROBES = 96  # Linux's largest receive buffer (6 MiB) / the engine's socket chunk (64 KiB)
DEFAULT_PROGRESS_TIMEOUT_S = 30
DEFAULT_TRANSFER_TIMEOUT_S = 30
_SMALL_SPAN_BYTES = 16 << 10  # below it a request's fixed cost, not its bytes, sets the time
_SLEEP_SHARE = 0.7
_MIN_SLEEP_S = 300e-6  # shorter sleeps cost more latency than they save CPU
_SINGLY = 16  # spans: a chunk of no more is submitted request by request
_WATCHED = 8  # requests of a larger one, twice the engine's lanes to a peer
_SPIN_S = 100e-6  # asking costs less than a sleep for so long
_ASK_SHARE = 0.03  # of the time since the chunk was submitted, between two questions
_MIN_PAUSE_S = 50e-6
_AT_ONCE_S = 100e-6  # a status call this short found the chunk finished: the nap was too long
_SUBMIT_FAILED = frozenset({0, -1, 2**64 - 1})

_CODES = {
    -1: "invalid argument or transport not initialised",
    -3: "the address is not registered",
    -7: "the region overlaps one that is registered already",
    -102: "the peer's port does not answer",
}


def engine_progress_timeout_s() -> float:
    """Return the engine's lane progress timeout in seconds, as the engine itself reads it.

    ``MC_TCP_PROGRESS_TIMEOUT_SEC`` and ``MC_TCP_STATUS_TIMEOUT_SEC`` (whole seconds, default 30)
    bound a stalled payload and a missing acknowledgement; the larger one counts. The engine reads
    them from its own environment, so a launcher that wants a quicker fence sets both before the
    process starts.
    """
    names = ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC")
    return float(max(_positive_env(name, DEFAULT_PROGRESS_TIMEOUT_S) for name in names))


class MooncakeTransport:
    """A Transport over a ``mooncake.engine.TransferEngine`` that is initialised already.

    ``session`` is the engine's own ``host:rpc_port``. The engine may be shared: ``close`` leaves
    it alone. ``progress_timeout_s`` overrides what ``engine_progress_timeout_s`` reads.
    """

    name = "mooncake"

    def __init__(
        self, engine: Any, session: str, *, progress_timeout_s: float | None = None
    ) -> None:
        self.session = session
        self._engine = engine
        self._progress_timeout_s = (
            engine_progress_timeout_s() if progress_timeout_s is None else progress_timeout_s
        )
        self._lock = threading.Lock()
        self._lanes: dict[str, _Lane] = {}
        self._closed = False
        self._probe = ctypes.create_string_buffer(64)

    @classmethod
    def create(cls, host: str, protocol: str = "tcp", devices: str = "") -> MooncakeTransport:
        """Start an engine on ``host``; TransportError when Mooncake is missing or refuses."""
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise TransportError(f"Mooncake's transfer engine cannot be loaded: {error}") from error
        engine = TransferEngine()
        code = engine.initialize(host, "P2PHANDSHAKE", protocol, devices)
        if code != 0:
            raise TransportError(f"Mooncake's engine does not start on {host}: {_meaning(code)}")
        return cls(engine, f"{host}:{engine.get_rpc_port()}")

    def register(self, region: Region) -> None:
        """Let peers write to ``region``. TransportError with the meaning of Mooncake's code."""
        code = self._engine.register_memory(region.address, region.length)
        if code != 0:
            raise TransportError(f"cannot register {region}: {_meaning(code)}")

    def unregister(self, region: Region) -> None:
        """Refuse later writes to ``region``. TransportError when it is not registered."""
        code = self._engine.unregister_memory(region.address)
        if code != 0:
            raise TransportError(f"cannot unregister {region}: {_meaning(code)}")

    def write(
        self,
        peer: str,
        spans: Sequence[Span],
        priority: Priority = Priority.PROACTIVE,
        deadline_s: float | None = None,
    ) -> WriteHandle:
        """Queue the write for the peer's workers and return at once (see Transport.write)."""
        wanted = checked_spans(spans)
        with self._lock:
            if self._closed:
                raise TransportError("the Mooncake transport is closed")
            lane = self._lanes.get(peer)
            if lane is None:
                lane = self._lanes[peer] = _Lane(self._engine, peer)
        return lane.queue.put(wanted)

    def fence(self, peer: str, scratch: int, timeout_s: float) -> bool:
        """See Transport.fence; what it can know is in the text at the top of this module."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            lane = self._lanes.get(peer)
        if lane is None:
            return True
        if not all_final(lane.queue.outstanding(), deadline):
            return False
        failed_at = lane.queue.failed_at
        if failed_at is None:
            return True
        wide = 2 * _positive_env("MC_TCP_LANES_PER_PEER", 4)
        if lane.drained_at < failed_at:
            if not self._probes(lane, scratch, wide, deadline):
                return False
            lane.drained_at = time.monotonic()
        quiet_at = max(failed_at, lane.drained_at) + self._progress_timeout_s
        time.sleep(max(0.0, min(quiet_at, deadline) - time.monotonic()))
        if quiet_at >= deadline or not self._probes(lane, scratch, wide, deadline):
            return False
        for _ in range(FLUSH_PROBES):
            if not self._probes(lane, scratch, 1, deadline):
                return False
        lane.queue.forgive(failed_at)
        return True

    def bandwidth(self, peer: str) -> float | None:
        """Return bytes/s: moving average of writes >= 64 KiB whose spans average >= 16 KiB."""
        with self._lock:
            lane = self._lanes.get(peer)
        return None if lane is None else lane.queue.rate.value

    def close(self) -> None:
        """Fail what is queued and end the workers; a chunk inside the engine ends on its own."""
        with self._lock:
            self._closed = True
            lanes = list(self._lanes.values())
        for lane in lanes:
            lane.queue.close()

    def _probes(self, lane: _Lane, scratch: int, count: int, deadline: float) -> bool:
        source = ctypes.addressof(self._probe)
        spans = [Span(source, scratch + i % 64, 1) for i in range(count)]
        handle = lane.queue.put(spans, aside=True)
        return handle.wait(deadline - time.monotonic()) is WriteState.DONE


class _Lane:
    """The writes to one peer: queue, workers, and what a request costs."""

    def __init__(self, engine: Any, peer: str) -> None:
        self.queue = PeerQueue(peer, "Mooncake")
        self.drained_at = 0.0  # monotonic seconds
        self._request_s = 40e-6  # seconds a small request
        self._timeout_s = _positive_env("MC_TRANSFER_TIMEOUT", DEFAULT_TRANSFER_TIMEOUT_S)
        self._engine = engine
        self._peer = peer
        self.queue.serve(self._run, f"smartgen-mooncake-{peer}", WORKERS_PER_PEER)

    def _run(self, job: Job) -> str | None:
        for chunk in chunks(job.spans):
            cause = self._run_chunk(chunk, job.handle)
            if cause is not None:
                return cause
        return None

    def _run_chunk(self, chunk: list[Span], handle: Completion) -> str | None:
        if handle.poll() is not WriteState.PENDING:
            return "the transport was closed"
        total = sum(span.length for span in chunk)
        expected = self._expected_s(total, len(chunk))
        together = 0 if len(chunk) <= _SINGLY else len(chunk) - _WATCHED
        started = time.monotonic()
        batches = [self._submit(chunk[:together])] if together else []
        single = [
            self._engine.transfer_submit_write(self._peer, *span) for span in chunk[together:]
        ]
        refused = not _SUBMIT_FAILED.isdisjoint([*batches, *single])
        counts.posted(len(chunk), time.monotonic() - started)
        nap = _SLEEP_SHARE * expected
        if nap >= _MIN_SLEEP_S and not refused:
            time.sleep(nap)
        woke = time.monotonic()
        # What was submitted is waited for even when the rest was refused: it may still land.
        codes = [self._watch(single, started)]
        waiting = [batch for batch in batches if batch not in _SUBMIT_FAILED]
        if waiting:
            codes.append(self._engine.get_batch_transfer_status(waiting))
        if refused:
            return "Mooncake could not submit it (is the peer dead, or its queue full?)"
        if code := next((code for code in codes if code != 0), 0):
            elapsed = time.monotonic() - started
            return (
                f"Mooncake returned {code} after {elapsed:.3f} s "
                "(address refused, peer dead, or timeout); parts of it may still land"
            )
        now = time.monotonic()
        overslept = nap >= _MIN_SLEEP_S and now - woke < _AT_ONCE_S
        self._learn(total, len(chunk), now - started, overslept)
        return None

    def _submit(self, spans: list[Span]) -> int:
        batch: int = self._engine.batch_transfer_async_write(
            self._peer,
            [span.source for span in spans],
            [span.destination for span in spans],
            [span.length for span in spans],
        )
        return batch

    def _watch(self, single: list[int], started: float) -> int:
        """Ask about requests until all are final, at most the engine's own timeout; 0: all done."""
        open_ = [request for request in single if request not in _SUBMIT_FAILED]
        asked = time.monotonic()
        worst = 0
        while open_:
            states = {request: self._engine.transfer_check_status(request) for request in open_}
            worst = min([worst, *states.values()])
            open_ = [request for request, state in states.items() if state == 0]
            now = time.monotonic()
            if open_ and now - started > self._timeout_s:
                return -2
            if open_ and now - asked > _SPIN_S:
                time.sleep(max(_MIN_PAUSE_S, _ASK_SHARE * (now - started)))
        return worst

    def _expected_s(self, total: int, count: int) -> float:
        with self.queue.lock:
            rate = self.queue.rate.value
            return max(0.0 if rate is None else total / rate, self._request_s * count)

    def _learn(self, total: int, count: int, elapsed: float, overslept: bool) -> None:
        # After an overslept nap `elapsed` is only an upper bound: try a tenth less next time.
        with self.queue.lock:
            if total >= count * _SMALL_SPAN_BYTES and total >= LARGE_WRITE_BYTES:
                self.queue.rate.add(total, elapsed, at_most=overslept)
            elif count >= 16:
                cost, old = elapsed / count, self._request_s
                self._request_s = min(0.9 * old, cost) if overslept else 0.75 * old + 0.25 * cost


def chunks(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Cut spans at MAX_SPAN_BYTES and group them to chunks inside MAX_CHUNK_SPANS and _BYTES."""
    chunk: list[Span] = []
    size = 0
    for span in spans:
        for offset in range(0, span.length, MAX_SPAN_BYTES):
            length = min(MAX_SPAN_BYTES, span.length - offset)
            if len(chunk) == MAX_CHUNK_SPANS or size + length > MAX_CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
            chunk.append(Span(span.source + offset, span.destination + offset, length))
            size += length
    if chunk:
        yield chunk


def _meaning(code: int) -> str:
    return f"Mooncake returned {code}: {_CODES.get(code, 'no meaning known')}"


def _positive_env(name: str, default: int) -> int:
    try:
        value = int(os.environ.get(name, ""))
    except ValueError:
        return default
    return value if value > 0 else default
