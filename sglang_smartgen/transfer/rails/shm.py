"""Writes to another process of this machine: one copy, by the kernel, past the network stack.

`process_vm_writev` copies from our memory to the other process's. It needs no shared mapping, so
SGLang's own pool can be a destination; it needs the right to trace the other process: the same
user, and where the kernel's yama module restricts that, the other process's leave, which `register`
gives (PR_SET_PTRACER). The peer says what may be written in a table in its own memory:

    MAGIC, nonce (16 bytes), count (u64), count x (address u64, length u64)

It is read before each write, so a span outside of it is refused as a whole, and a process that has
got the number of one that ended is not taken for it. A write that has returned can land no more:
FAILED is a fence here, as long as the peer answers.

Threads: one a peer copies in order; one more takes half of what is large.
"""

from __future__ import annotations

import ctypes
import functools
import os
import secrets
import struct
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from sglang_smartgen.transfer.peer_queue import Job, PeerQueue, Regions
from sglang_smartgen.transfer.transport import (
    Completion,
    Priority,
    Region,
    Span,
    TransportError,
    all_final,
    checked_spans,
)

MAX_REGIONS = 8192
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
        self._regions = Regions()
        self._lanes: dict[str, PeerQueue] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="smartgen-shm-half")
        self._publish()
        address = ctypes.addressof(self._table)
        self.session = f"{machine()}/{os.getpid()}/{self._nonce.hex()}/{address:x}"

    def register(self, region: Region) -> None:
        """See Transport.register."""
        with self._lock:
            if len(self._regions.items()) == MAX_REGIONS:
                raise TransportError(f"cannot register {region}: there are {MAX_REGIONS} already")
            self._regions.add(region)
            self._publish()
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)  # without yama: no effect

    def unregister(self, region: Region) -> None:
        """See Transport.unregister."""
        with self._lock:
            self._regions.remove(region)
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
                lane = self._lanes[peer] = PeerQueue(peer, "shm")
                lane.serve(functools.partial(self._run, lane), "smartgen-shm")
        return lane.put(wanted)

    def fence(self, peer: str, scratch: int, timeout_s: float) -> bool:
        """See Transport.fence: what is pending has to end; then a failed peer has to answer."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            lane = self._lanes.get(peer)
        if lane is None:
            return True
        if not all_final(lane.outstanding(), deadline):
            return False
        failed_at = lane.failed_at
        if failed_at is not None and self.reaches(peer):
            lane.forgive(failed_at)
        return lane.failed_at is None

    def bandwidth(self, peer: str) -> float | None:
        """See Transport.bandwidth: moving average over writes >= 64 KiB."""
        with self._lock:
            lane = self._lanes.get(peer)
        return None if lane is None else lane.rate.value

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

    def _run(self, lane: PeerQueue, job: Job) -> str | None:
        began = time.monotonic()
        cause = self.copy(lane.peer, job.spans)
        if cause is None:
            lane.rate.add(job.total, time.monotonic() - began)
        return cause

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
        regions = self._regions.items()
        rows = b"".join(_ROW.pack(*row) for row in regions)
        ctypes.memmove(at + _HEAD.size, rows, len(rows))
        _HEAD.pack_into(self._table, 0, _MAGIC, self._nonce, len(regions))


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
