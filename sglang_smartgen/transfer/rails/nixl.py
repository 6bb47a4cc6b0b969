"""Writes through NIXL's UCX backend: TCP, shared memory of one host, or what else UCX finds.

`session` is `agent/metadata` (see nixl_agent.py). The metadata grows with each registration, so a
peer must be given it after the last one that it shall write to; it may be given more later on.

Threads: one `_Lane` thread a peer posts its transfers and asks how they are; NIXL's own progress
thread moves the bytes. Asking sleeps in between, because a spinning thread starves that one on few
cores.

NIXL has no deadline and no cancel: a transfer to a peer that hangs goes on for ever. So a write
that is not complete in time is FAILED, and its transfer is `late`: the lane asks on, posts nothing
behind it, and knows when it is over. What `fence` can know: late transfers that NIXL completed have
landed. After a lost connection nothing was said, so the fence waits `QUIET_S`, in which a peer that
lives empties its end of the old connection, and completes a write on a new one.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from sglang_smartgen.transfer.peer_queue import Job, PeerQueue, Regions
from sglang_smartgen.transfer.rails.nixl_agent import Lost, NixlAgent
from sglang_smartgen.transfer.transport import (
    Completion,
    Priority,
    Region,
    Span,
    TransportError,
    WriteState,
    all_final,
    checked_spans,
)

WRITE_TIMEOUT_S = 10.0  # in which some transfer to the peer must complete
QUIET_S = 1.0
_SLEEP_S = (50e-6, 1e-3)  # between two questions; the first, and what it grows to
_LATE_SLEEP_S = 0.01  # where only late ones are left
_AHEAD = 4  # transfers under way to a peer


class NixlTransport:
    """A Transport over one NIXL agent that uses the network device of `host` ("" = any).

    TransportError when NIXL is not installed or does not start.
    """

    name = "nixl"

    def __init__(self, host: str = "") -> None:
        self._agent = NixlAgent(host)
        self._regions = Regions()
        self._gone: list[Region] = []  # unregistered, but perhaps still read
        self._lanes: dict[str, _Lane] = {}
        self._closed = False
        self._lock = threading.Lock()
        self._probe = ctypes.create_string_buffer(64)
        self._agent.register(Region(ctypes.addressof(self._probe), 64))

    @property
    def session(self) -> str:
        """The agent's name, and its metadata as it is now."""
        return f"{self._agent.name}/{self._agent.metadata()}"

    def register(self, region: Region) -> None:
        """See Transport.register."""
        with self._lock:
            self._regions.add(region)
            if region in self._gone:
                self._gone.remove(region)  # NIXL has it still
                return
            self._sweep()
            try:
                self._agent.register(region)
            except TransportError:
                self._regions.remove(region)
                raise

    def unregister(self, region: Region) -> None:
        """See Transport.unregister. What late transfers may read stays with NIXL until later."""
        with self._lock:
            self._regions.remove(region)
            self._gone.append(region)
            self._sweep()

    def write(
        self,
        peer: str,
        spans: Sequence[Span],
        priority: Priority = Priority.PROACTIVE,
        deadline_s: float | None = None,
    ) -> Completion:
        """See Transport.write; ValueError when ``peer`` is no session of this transport."""
        wanted = checked_spans(spans)
        return self._lane(peer).queue.put(wanted, deadline_s=deadline_s)

    def fence(self, peer: str, scratch: int, timeout_s: float) -> bool:
        """See Transport.fence; what it can know is in the text at the top of this module."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            lane = self._lanes.get(agent_of(peer))
        if lane is None:
            return True
        if not all_final(lane.queue.outstanding(), deadline) or not lane.settled(deadline):
            return False
        failed_at = lane.queue.failed_at
        if failed_at is None:
            return True
        quiet_at = failed_at + QUIET_S
        time.sleep(max(0.0, min(quiet_at, deadline) - time.monotonic()))
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        probe = Span(ctypes.addressof(self._probe), scratch, 1)
        handle = lane.queue.put([probe], aside=True, deadline_s=left)
        if handle.wait(left) is not WriteState.DONE:
            return False
        lane.queue.forgive(failed_at)
        return True

    def bandwidth(self, peer: str) -> float | None:
        """See Transport.bandwidth: moving average over writes >= 64 KiB."""
        with self._lock:
            lane = self._lanes.get(agent_of(peer))
        return None if lane is None else lane.queue.rate.value

    def close(self) -> None:
        """See Transport.close."""
        with self._lock:
            self._closed = True
            lanes = list(self._lanes.values())
        for lane in lanes:
            lane.queue.close()

    def _lane(self, peer: str) -> _Lane:
        name, slash, metadata = peer.partition("/")
        if not slash:
            raise ValueError(f"peer must be 'agent/metadata', got {peer[:64]!r}")
        with self._lock:
            if self._closed:
                raise TransportError("the nixl transport is closed")
            lane = self._lanes.get(name)
            if lane is None:
                lane = self._lanes[name] = _Lane(self._agent, name)
            lane.metadata = metadata
        return lane

    def _sweep(self) -> None:
        """Give memory back that nothing reads any more."""
        if self._gone and not any(lane.busy for lane in self._lanes.values()):
            for region in self._gone:
                self._agent.unregister(region)
            self._gone.clear()


class _Running(NamedTuple):
    job: Job
    transfer: Any
    began: float


class _Lane:
    """The transfers to one peer; its thread owns `_running` and `_late`."""

    def __init__(self, agent: NixlAgent, name: str) -> None:
        self.queue = PeerQueue(name, "nixl")
        self.metadata = ""
        self._agent = agent
        self._known: str | None = None  # the metadata that NIXL has; None: it is not connected
        self._running: list[_Running] = []
        self._late: list[Any] = []
        self._moved = 0.0  # when a transfer was last complete
        self.queue.start(self._work, "smartgen-nixl")

    @property
    def busy(self) -> bool:
        """Whether a transfer may be reading memory."""
        return bool(self._running or self._late or self.queue.pending())

    def settled(self, deadline: float) -> bool:
        """Wait until no late transfer is left, at most until then."""
        while self._late:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_SLEEP_S[1])
        return True

    def _work(self) -> None:
        nap = _SLEEP_S[0]
        while not self.queue.closed:
            moved = self._begin()
            moved |= self._ask()
            self._time_out(time.monotonic())
            if moved:
                nap = _SLEEP_S[0]
            elif self._running or self._late:
                time.sleep(nap if self._running else _LATE_SLEEP_S)
                nap = min(2 * nap, _SLEEP_S[1])
        for running in self._running:
            self._agent.leave(running.transfer)
        for transfer in self._late:
            self._agent.leave(transfer)

    def _begin(self) -> bool:
        """Post what waits, unless the peer hangs; blocks while there is nothing to do at all."""
        begun = False
        while len(self._running) < _AHEAD and not self._late:
            job = self.queue.take(block=not (self._running or begun))
            if job is None:
                break
            begun = True
            try:
                if self._known != self.metadata:
                    wanted = self.metadata
                    self._agent.know(wanted)
                    self._known = wanted
                began = time.monotonic()
                transfer, goes_on = self._agent.post(self.queue.peer, job.spans)
            except Lost as error:
                self._lost(job, error)
                continue
            running = _Running(job, transfer, began)
            if goes_on:
                self._running.append(running)
            else:
                self._done(running)
        return begun

    def _ask(self) -> bool:
        """Look which transfers are over."""
        ended = False
        for running in list(self._running):
            try:
                if self._agent.goes_on(running.transfer):
                    continue
                self._running.remove(running)
                self._done(running)
            except Lost as error:
                self._running.remove(running)
                self._lost(running.job, error)
            ended = True
        for transfer in list(self._late):
            try:
                if self._agent.goes_on(transfer):
                    continue
            except Lost:
                self._known = None
                self.queue.failed_at = time.monotonic()
            self._late.remove(transfer)
            ended = True
        return ended

    def _done(self, running: _Running) -> None:
        self._moved = time.monotonic()
        self.queue.rate.add(running.job.total, self._moved - running.began)
        self.queue.end(running.job)

    def _lost(self, job: Job, error: Lost) -> None:
        if error.sent:
            self._known = None  # NIXL forgets a peer whose connection it has lost
        self.queue.end(job, str(error), settled=not error.sent)

    def _time_out(self, now: float) -> None:
        """Fail what is not complete in time; what was posted goes on and is late."""
        for job in self.queue.pending():
            if job.deadline is not None and now >= job.deadline:
                cause = f"not complete after {now - job.put_at:.1f} s, its deadline"
            elif now - max(job.put_at, self._moved) > WRITE_TIMEOUT_S:
                cause = f"nothing has come through for {WRITE_TIMEOUT_S:.0f} s"
            else:
                continue
            self._late += [r.transfer for r in self._running if r.job is job]
            self._running = [r for r in self._running if r.job is not job]
            self.queue.end(job, cause, settled=True)


def agent_of(session: str) -> str:
    """Name of the agent whose session this is; it stays when the metadata grow."""
    return session.partition("/")[0]
