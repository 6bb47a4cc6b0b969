"""Writes to another process of this machine: one copy, by the kernel, past the network stack.

`process_vm_writev` copies from our memory to the other process's. It needs no shared mapping, so
SGLang's own pool can be a destination; it needs the right to trace the other process: the same
user, and where the kernel's yama module restricts that, the other process's leave, which `register`
gives (PR_SET_PTRACER). The peer says what may be written in a table in its own memory:

    MAGIC, nonce (16 bytes), count (u64), count x (address u64, length u64)

It is read before each write, so a span outside of it is refused as a whole, and a process that has
got the number of one that ended is not taken for it. A write that has returned can land no more:
FAILED is a fence here, as long as the peer answers.

Threads: one `_Lane` thread a peer, which copies; one more takes half of what is large.
"""

from __future__ import annotations

import ctypes
import functools
import os
import queue
import secrets
import struct
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

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

MAX_REGIONS = 8192
LARGE_WRITE_BYTES = 64 << 10
HALVED_BYTES = 512 << 10
_MAGIC = b"SMARTGENSHM1"
_HEAD = struct.Struct("=12s16sQ")
_ROW = struct.Struct("=QQ")
_TABLE_BYTES = _HEAD.size + MAX_REGIONS * _ROW.size
_MAX_VECTORS = 512  # the kernel takes 1,024
_PIECE = 32 << 20  # of one call: `close` waits for no more than that
_PR_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _kernel(name: str) -> ctypes._NamedFuncPointer | None:
    call = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if call is not None:
        vectors = ctypes.POINTER(_Vector)
        call.restype = ctypes.c_ssize_t
        call.argtypes = (
            ctypes.c_int,
            vectors,
            ctypes.c_ulong,
            vectors,
            ctypes.c_ulong,
            ctypes.c_ulong,
        )
    return call


class ShmTransport:
    """A Transport to processes of this machine. `session` is `machine/pid/nonce/table address`.

    TransportError where the kernel has no process_vm_writev.
    """

    name = "shm"

    def __init__(self) -> None:
        write, read = _kernel("process_vm_writev"), _kernel("process_vm_readv")
        if write is None or read is None:
            raise TransportError("this system cannot write to another process's memory")
        self._write_call, self._read_call = write, read
        self._nonce = secrets.token_bytes(16)
        self._table = ctypes.create_string_buffer(_TABLE_BYTES)
        self._regions: dict[int, int] = {}
        self._lanes: dict[str, _Lane] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="smartgen-shm-half")
        self._publish()
        address = ctypes.addressof(self._table)
        self.session = f"{machine()}/{os.getpid()}/{self._nonce.hex()}/{address:x}"

    def register(self, region: Region) -> None:
        """See Transport.register."""
        with self._lock:
            for address, length in self._regions.items():
                if region.address < address + length and address < region.address + region.length:
                    raise TransportError(f"cannot register {region}: it overlaps a registered one")
            if len(self._regions) == MAX_REGIONS:
                raise TransportError(f"cannot register {region}: there are {MAX_REGIONS} already")
            self._regions[region.address] = region.length
            self._publish()
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)  # without yama: no effect

    def unregister(self, region: Region) -> None:
        """See Transport.unregister."""
        with self._lock:
            if self._regions.pop(region.address, None) is None:
                raise TransportError(f"cannot unregister {region}: it is not registered")
            self._publish()

    def reaches(self, session: str) -> bool:
        """Whether that process is on this machine and lets us write to it."""
        try:
            return table_of(session, self._read) is not None
        except (ValueError, OSError):
            return False

    def write(
        self,
        peer: str,
        spans: Sequence[Span],
        priority: Priority = Priority.PROACTIVE,
        deadline_s: float | None = None,
    ) -> Completion:
        """See Transport.write; ValueError when ``peer`` is no session of this transport."""
        wanted = checked_spans(spans)
        parse(peer)
        with self._lock:
            if self._closed:
                raise TransportError("the shm transport is closed")
            lane = self._lanes.get(peer)
            if lane is None:
                lane = self._lanes[peer] = _Lane(self, peer)
        return lane.put(wanted)

    def fence(self, peer: str, scratch: int, timeout_s: float) -> bool:
        """See Transport.fence: what is pending has to end; then a failed peer has to answer."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            lane = self._lanes.get(peer)
        if lane is None:
            return True
        for handle in lane.outstanding():
            if handle.wait(deadline - time.monotonic()) is WriteState.PENDING:
                return False
        if lane.failed and self.reaches(peer):
            lane.failed = False
        return not lane.failed

    def bandwidth(self, peer: str) -> float | None:
        """See Transport.bandwidth: moving average over writes >= 64 KiB."""
        with self._lock:
            lane = self._lanes.get(peer)
        return None if lane is None else lane.bandwidth

    def close(self) -> None:
        """See Transport.close."""
        with self._lock:
            self._closed = True
            self._regions.clear()
            self._publish()
            lanes = list(self._lanes.values())
        for lane in lanes:
            lane.close()
        self._helper.shutdown(wait=False)

    def copy(self, peer: str, spans: Sequence[Span]) -> str | None:
        """Copy the spans now; None, or what is wrong."""
        machine_, pid, _, _ = parse(peer)
        if machine_ != machine():
            return "the peer is on another machine"
        try:
            regions = table_of(peer, self._read)
        except OSError as error:
            return f"the peer is dead or forbids it: {error.strerror}"
        if regions is None:
            return "the peer is dead: its process number belongs to another process"
        starts = [address for address, _ in regions]
        for span in spans:
            i = bisect_right(starts, span.destination) - 1
            if i < 0 or span.destination + span.length > sum(regions[i]):
                return f"the peer has not registered {span.length} bytes at {span.destination:#x}"
        try:
            self._move_all(pid, spans)
        except OSError as error:
            return f"the kernel refused it: {error.strerror}"
        return None

    def _move_all(self, pid: int, spans: Sequence[Span]) -> None:
        """Copy; a second thread takes half of much, for one core does not fill the memory bus."""
        total = sum(span.length for span in spans)
        if total < HALVED_BYTES:
            for group in _groups(spans, _PIECE):
                self._move(pid, group)
            return
        groups = _groups(spans, -(-total // 2))
        helped = [self._helper.submit(self._move, pid, group) for group in groups[1::2]]
        try:
            for group in groups[::2]:
                self._move(pid, group)
        finally:
            wait(helped)  # nothing is copied any more when this returns
        for future in helped:
            future.result()

    def _move(self, pid: int, spans: Sequence[Span]) -> None:
        here, there = ((_Vector * len(spans))() for _ in range(2))
        for i, span in enumerate(spans):
            here[i] = _Vector(span.source, span.length)
            there[i] = _Vector(span.destination, span.length)
        total = sum(span.length for span in spans)
        moved = self._write_call(pid, here, len(spans), there, len(spans), 0)
        if moved == total:
            return
        if moved < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        raise OSError(0, f"{moved} of {total} bytes were copied")

    def _read(self, pid: int, address: int, length: int) -> bytes:
        """Bytes of another process. Raises OSError."""
        buffer = ctypes.create_string_buffer(length)
        here, there = (_Vector * 1)(), (_Vector * 1)()
        here[0] = _Vector(ctypes.addressof(buffer), length)
        there[0] = _Vector(address, length)
        if self._read_call(pid, here, 1, there, 1, 0) != length:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return buffer.raw

    def _publish(self) -> None:
        """Write the table; whoever reads it meanwhile sees too few regions, never a wrong one."""
        at = ctypes.addressof(self._table)
        _HEAD.pack_into(self._table, 0, _MAGIC, self._nonce, 0)
        rows = b"".join(_ROW.pack(*row) for row in sorted(self._regions.items()))
        ctypes.memmove(at + _HEAD.size, rows, len(rows))
        _HEAD.pack_into(self._table, 0, _MAGIC, self._nonce, len(self._regions))


class _Job:
    def __init__(self, spans: list[Span]) -> None:
        self.spans = spans
        self.handle = Completion()


class _Lane:
    """The copies to one peer, by one thread, in order."""

    def __init__(self, owner: ShmTransport, peer: str) -> None:
        self.bandwidth: float | None = None
        self.failed = False
        self._owner = owner
        self._peer = peer
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._open: set[_Job] = set()
        self._closed = False
        self._lock = threading.Lock()
        threading.Thread(target=self._work, name="smartgen-shm", daemon=True).start()

    def put(self, spans: list[Span]) -> Completion:
        job = _Job(spans)
        if not spans:
            job.handle.finish()
            return job.handle
        with self._lock:
            if self._closed:
                raise TransportError("the shm transport is closed")
            self._open.add(job)
        self._jobs.put(job)
        return job.handle

    def outstanding(self) -> list[Completion]:
        with self._lock:
            return [job.handle for job in self._open]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            jobs = list(self._open)
        for job in jobs:
            job.handle.finish(self._sentence(job, "the transport was closed"))
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if job.handle.poll() is not WriteState.PENDING:
                continue
            began = time.monotonic()
            try:
                cause = self._owner.copy(self._peer, job.spans)
            except Exception as error:  # the handle must become final
                cause = str(error) or type(error).__name__
            with self._lock:
                self._open.discard(job)
                self.failed = self.failed or cause is not None
            total = sum(span.length for span in job.spans)
            if cause is None and total >= LARGE_WRITE_BYTES:
                rate = total / max(time.monotonic() - began, 1e-9)
                self.bandwidth = 0.75 * (self.bandwidth or rate) + 0.25 * rate
            job.handle.finish(None if cause is None else self._sentence(job, cause))

    def _sentence(self, job: _Job, cause: str) -> str:
        return f"{describe(self._peer, job.spans)} failed: {cause}"


@functools.cache
def machine() -> str:
    """A name of this boot of this machine and of the process numbers that we see."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"


def parse(session: str) -> tuple[str, int, bytes, int]:
    """Machine, process number, nonce and table address of a session. Raises ValueError."""
    try:
        where, pid, nonce, address = session.split("/")
        return where, int(pid), bytes.fromhex(nonce), int(address, 16)
    except ValueError:
        raise ValueError(f"peer must be 'machine/pid/nonce/address', got {session!r}") from None


def table_of(session: str, read: Callable[[int, int, int], bytes]) -> list[tuple[int, int]] | None:
    """Regions of that process, by address; None when it is another one. Raises OSError."""
    where, pid, nonce, address = parse(session)
    if where != machine():
        return None
    magic, found, count = _HEAD.unpack(read(pid, address, _HEAD.size))
    if magic != _MAGIC or found != nonce or count > MAX_REGIONS:
        return None
    if not count:
        return []
    rows = read(pid, address + _HEAD.size, count * _ROW.size)
    return list(_ROW.iter_unpack(rows))


def _groups(spans: Sequence[Span], limit: int) -> list[list[Span]]:
    """The spans in calls of few enough pieces and `limit` bytes; what is longer is cut."""
    limit = min(limit, _PIECE)
    groups: list[list[Span]] = [[]]
    size = 0
    for span in spans:
        offset = 0
        while offset < span.length:
            if len(groups[-1]) == _MAX_VECTORS or size == limit:
                groups.append([])
                size = 0
            length = min(limit - size, span.length - offset)
            groups[-1].append(Span(span.source + offset, span.destination + offset, length))
            size += length
            offset += length
    return [group for group in groups if group]
