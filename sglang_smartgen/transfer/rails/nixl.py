"""Writes through NIXL's UCX backend, on a host without a GPU too (wheel `nixl-cu12`, optional).

`session` is the agent's metadata (its name, address and registered memory), in base64: it changes
with each registration, so a peer must be given it after the last one. Local memory must be
registered too.

Threads: one `_Lane` thread a peer makes and polls the transfers to it; NIXL's own progress thread
moves the bytes. Polling sleeps, because a spinning thread starves that one on few cores. The agent
is not safe for threads by itself, so `_lock` guards every call.

What `fence` can know: NIXL has no order and no cancel that a peer confirms. After a failed write it
drops the connection to the peer, waits `QUIET_S` and completes a write on the new one.
"""

from __future__ import annotations

import base64
import importlib
import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from sglang_smartgen.transfer.transport import (
    Completion,
    Priority,
    Region,
    Span,
    TransportError,
    WriteState,
    checked_spans,
    describe,
)

MODULES = ("nixl_cu12._api", "nixl_cu13._api", "nixl._api")
WRITE_TIMEOUT_S = 10.0
QUIET_S = 1.0
LARGE_WRITE_BYTES = 64 << 10
_SLEEP_S = (50e-6, 1e-3)
_AHEAD = 4  # transfers under way to a peer


class NixlTransport:
    """A Transport over one NIXL agent that uses the network device of `host` ("" = any).

    TransportError when NIXL is not installed or does not start.
    """

    name = "nixl"

    def __init__(self, host: str = "") -> None:
        api = _api()
        api.logger.setLevel(logging.WARNING)  # it writes to the standard output
        self._name = f"smartgen-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            with _devices(host):
                self._agent: Any = api.nixl_agent(self._name, api.nixl_agent_config())
        except Exception as error:
            raise TransportError(f"NIXL does not start: {error}") from None
        if "UCX" not in self._agent.backends:
            raise TransportError("NIXL has no UCX backend here")
        self._lock = threading.Lock()
        self._regions: dict[int, tuple[int, Any]] = {}
        self._lanes: dict[str, _Lane] = {}
        self._closed = False
        self._probe = bytearray(64)

    @property
    def session(self) -> str:
        """The agent's metadata as it is now."""
        with self._lock:
            return base64.b64encode(self._agent.get_agent_metadata()).decode()

    def register(self, region: Region) -> None:
        """See Transport.register."""
        with self._lock:
            for address, (length, _) in self._regions.items():
                if region.address < address + length and address < region.address + region.length:
                    raise TransportError(f"cannot register {region}: it overlaps a registered one")
            try:
                made = self._agent.register_memory([(*region, 0, "")], "DRAM")
            except Exception as error:
                raise TransportError(f"cannot register {region}: {error}") from None
            self._regions[region.address] = (region.length, made)

    def unregister(self, region: Region) -> None:
        """See Transport.unregister."""
        with self._lock:
            found = self._regions.pop(region.address, None)
            if found is None:
                raise TransportError(f"cannot unregister {region}: it is not registered")
            self._agent.deregister_memory(found[1])

    def write(
        self,
        peer: str,
        spans: Sequence[Span],
        priority: Priority = Priority.PROACTIVE,
        deadline_s: float | None = None,
    ) -> Completion:
        """See Transport.write."""
        wanted = checked_spans(spans)
        with self._lock:
            if self._closed:
                raise TransportError("the NIXL transport is closed")
            lane = self._lanes.get(peer)
            if lane is None:
                lane = self._lanes[peer] = _Lane(self, peer)
        return lane.put(wanted)

    def fence(self, peer: str, scratch: int, timeout_s: float) -> bool:
        """See Transport.fence; what it can know is in the text at the top of this module."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            lane = self._lanes.get(peer)
            source = next(iter(self._regions), None)
        if lane is None:
            return True
        for handle in lane.outstanding():
            if handle.wait(deadline - time.monotonic()) is WriteState.PENDING:
                return False
        failed_at = lane.failed_at
        if failed_at is None:
            return True
        lane.renew = True
        quiet_at = failed_at + QUIET_S
        time.sleep(max(0.0, min(quiet_at, deadline) - time.monotonic()))
        if quiet_at >= deadline or source is None:
            return False
        probe = lane.put([Span(source, scratch, 1)])
        if probe.wait(deadline - time.monotonic()) is not WriteState.DONE:
            return False
        lane.forgive(failed_at)
        return True

    def bandwidth(self, peer: str) -> float | None:
        """See Transport.bandwidth: moving average over writes >= 64 KiB."""
        with self._lock:
            lane = self._lanes.get(peer)
        return None if lane is None else lane.bandwidth

    def close(self) -> None:
        """See Transport.close."""
        with self._lock:
            self._closed = True
            lanes = list(self._lanes.values())
        for lane in lanes:
            lane.close()

    # What a lane does -----------------------------------------------------------------------

    def connect(self, peer: str, before: str | None) -> str:
        """The agent's name of a peer; `before`: an older connection, which is dropped."""
        metadata = base64.b64decode(peer)
        with self._lock:
            if before is not None:
                self._agent.remove_remote_agent(before)
            name = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def post(self, name: str, spans: Sequence[Span]) -> tuple[Any, str]:
        """Start a transfer; its handle and its state."""
        here = [(span.source, span.length, 0) for span in spans]
        there = [(span.destination, span.length, 0) for span in spans]
        with self._lock:
            local = self._agent.get_xfer_descs(here, "DRAM")
            remote = self._agent.get_xfer_descs(there, "DRAM")
            handle = self._agent.initialize_xfer("WRITE", local, remote, name)
            return handle, self._agent.transfer(handle)

    def state(self, handle: Any) -> str:
        """DONE, PROC or ERR."""
        with self._lock:
            return str(self._agent.check_xfer_state(handle))

    def release(self, handle: Any) -> None:
        """Give a transfer's handle back; one that goes on is aborted, as far as NIXL can."""
        with self._lock:
            self._agent.release_xfer_handle(handle)


class _Job:
    def __init__(self, spans: list[Span]) -> None:
        self.spans = spans
        self.handle = Completion()
        self.transfer: Any = None
        self.began = 0.0


class _Lane:
    """The transfers to one peer; the thread owns them."""

    def __init__(self, owner: NixlTransport, peer: str) -> None:
        self.bandwidth: float | None = None
        self.failed_at: float | None = None
        self.renew = False
        self._owner = owner
        self._peer = peer
        self._name: str | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._open: set[_Job] = set()
        self._closed = False
        self._lock = threading.Lock()
        threading.Thread(target=self._work, name="smartgen-nixl", daemon=True).start()

    def put(self, spans: list[Span]) -> Completion:
        job = _Job(spans)
        if not spans:
            job.handle.finish()
            return job.handle
        with self._lock:
            if self._closed:
                raise TransportError("the NIXL transport is closed")
            self._open.add(job)
        self._jobs.put(job)
        return job.handle

    def outstanding(self) -> list[Completion]:
        with self._lock:
            return [job.handle for job in self._open]

    def forgive(self, failed_at: float) -> None:
        with self._lock:
            if self.failed_at == failed_at:
                self.failed_at = None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            jobs = list(self._open)
        for job in jobs:
            self._end(job, "the transport was closed")
        self._jobs.put(None)

    def _work(self) -> None:
        running: list[_Job] = []
        nap = _SLEEP_S[0]
        while True:
            while len(running) < _AHEAD:
                try:
                    job = self._jobs.get(block=not running)
                except queue.Empty:
                    break
                if job is None:
                    return
                if job.handle.poll() is WriteState.PENDING and self._start(job):
                    running.append(job)
                    nap = _SLEEP_S[0]
            before = len(running)
            running = [job for job in running if not self._over(job)]
            if running and len(running) == before:
                time.sleep(nap)
                nap = min(2 * nap, _SLEEP_S[1])

    def _start(self, job: _Job) -> bool:
        """Post it; False when it is final at once."""
        job.began = time.monotonic()
        try:
            if self._name is None or self.renew:
                before, self._name = self._name, None
                self._name = self._owner.connect(self._peer, before)
                self.renew = False
            job.transfer, state = self._owner.post(self._name, job.spans)
        except Exception as error:
            self._end(job, str(error) or type(error).__name__)
            return False
        if state == "PROC":
            return True
        self._finish(job, None if state == "DONE" else "NIXL returned an error")
        return False

    def _over(self, job: _Job) -> bool:
        try:
            state = self._owner.state(job.transfer)
        except Exception as error:
            self._finish(job, str(error) or type(error).__name__)
            return True
        if state == "PROC" and time.monotonic() - job.began < WRITE_TIMEOUT_S:
            return job.handle.poll() is not WriteState.PENDING
        late = f"nothing has come through for {WRITE_TIMEOUT_S:.0f} s"
        cause = {"DONE": None, "PROC": late}.get(state, "NIXL returned an error")
        self._finish(job, cause)
        return True

    def _finish(self, job: _Job, cause: str | None) -> None:
        total = sum(span.length for span in job.spans)
        if cause is None and total >= LARGE_WRITE_BYTES:
            rate = total / max(time.monotonic() - job.began, 1e-9)
            self.bandwidth = 0.75 * (self.bandwidth or rate) + 0.25 * rate
        try:
            self._owner.release(job.transfer)
        except Exception as error:
            cause = cause or str(error)
        self._end(job, cause)

    def _end(self, job: _Job, cause: str | None) -> None:
        with self._lock:
            self._open.discard(job)
            if cause is not None:
                self.failed_at = time.monotonic()
        text = f"{describe(self._peer[:64], job.spans)} failed: {cause}"
        job.handle.finish(None if cause is None else text)


class _devices:
    """UCX uses the device of an address while this is entered: it reads its environment once."""

    def __init__(self, host: str) -> None:
        self._device = device_of(host) if host else None
        self._before = os.environ.get("UCX_NET_DEVICES")

    def __enter__(self) -> None:
        if self._device is not None:
            os.environ["UCX_NET_DEVICES"] = self._device

    def __exit__(self, *rest: object) -> None:
        if self._device is None:
            return
        if self._before is None:
            os.environ.pop("UCX_NET_DEVICES", None)
        else:
            os.environ["UCX_NET_DEVICES"] = self._before


def device_of(host: str) -> str | None:
    """Name of the network device with this IPv4 address; None when there is none."""
    from sglang_smartgen.transfer.rails.make import address_of

    if host.startswith("127."):
        return "lo"
    for _, name in socket.if_nameindex():
        if address_of(name) == host:
            return name
    return None


def _api() -> Any:
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise TransportError("NIXL is not installed (the extra `nixl` of this package)")
