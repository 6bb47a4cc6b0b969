"""The reference transport: one framed TCP connection a peer, ordered and authenticated.

It is slow and simple on purpose: what the protocol promises can be read here.

Wire, all integers big-endian:

    server -> client   MAGIC, server nonce (16 bytes)
    client -> server   client id (16), epoch (8), client nonce (16), HMAC-SHA256 (32)
    server -> client   verdict (1 byte), HMAC-SHA256 (32)
    frame              sequence (u64), spans (u32), payload bytes (u64),
                       spans x (address u64, length u64), payload
    answer to a frame  sequence (u64), verdict (1 byte), message length (u32), message

Both ends prove that they know the token; the payload itself is not encrypted. A frame is checked as
a whole before a byte of it is applied, so a refused frame leaves nothing behind.

Epoch: a random number of one SocketTransport, part of its ``session`` (``host:port/epoch``). A
restarted peer at the same address has another one and refuses writes meant for its predecessor.

Fence: every connection names its client. A server that greets a client again first ends the old
connection of that client and waits for its thread, so after a greeting no byte of an earlier write
can land.

Threads. Sending: each peer has one ``_Link`` thread; it owns the connection and takes jobs from the
link's queue in order. Receiving: the listener thread accepts, each connection has a thread that
reads frames straight into registered memory. ``SocketTransport._lock`` guards the tables and is
never held while bytes move.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import io
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence

from sglang_smartgen.transfer.socket_bytes import CHUNK, exactly, memory, pieces, read_into
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

MAGIC = b"SMARTGN1"
MAX_FRAME_SPANS = 1 << 20
HANDSHAKE_TIMEOUT_S = 5.0
LARGE_WRITE_BYTES = 64 << 10
_HELLO = struct.Struct("!16sQ16s32s")
_FRAME = struct.Struct("!QIQ")
_ROW = struct.Struct("!QQ")
_ANSWER = struct.Struct("!QBI")
_OK, _BAD_TOKEN, _OTHER_EPOCH, _BUSY, _REFUSED = range(5)


class SocketTransport:
    """A Transport over plain TCP. All nodes of a cluster share ``token`` (>= 16 bytes).

    ``port`` 0 takes a free one. ``progress_timeout_s`` bounds each step of a write: connecting,
    sending 1 MiB, waiting for the answer. TransportError when the port cannot be had.
    """

    name = "socket"

    def __init__(
        self, host: str, token: bytes, *, port: int = 0, progress_timeout_s: float = 30.0
    ) -> None:
        if len(token) < 16:
            raise ValueError(f"token must have >= 16 bytes, got {len(token)}")
        self.epoch = secrets.randbits(64)
        self.client_id = secrets.token_bytes(16)
        self.token = token
        self.progress_timeout_s = progress_timeout_s
        self._lock = threading.Lock()
        self._regions: dict[int, int] = {}
        self._links: dict[str, _Link] = {}
        self._inbound: dict[bytes, _Inbound] = {}
        self._greeting: set[_Inbound] = set()
        self._closed = False
        try:
            self._listener = socket.create_server((host, port), backlog=64)
        except OSError as error:
            raise TransportError(f"cannot listen on {host}:{port}: {error}") from error
        bound = self._listener.getsockname()[1]
        self.session = f"{host}:{bound}/{self.epoch:016x}"
        threading.Thread(target=self._accept, name="smartgen-accept", daemon=True).start()

    def register(self, region: Region) -> None:
        """See Transport.register."""
        with self._lock:
            for address, length in self._regions.items():
                if region.address < address + length and address < region.address + region.length:
                    raise TransportError(f"cannot register {region}: it overlaps a registered one")
            self._regions[region.address] = region.length

    def unregister(self, region: Region) -> None:
        """See Transport.unregister."""
        with self._lock:
            if self._regions.pop(region.address, None) is None:
                raise TransportError(f"cannot unregister {region}: it is not registered")

    def write(
        self,
        peer: str,
        spans: Sequence[Span],
        priority: Priority = Priority.PROACTIVE,
        deadline_s: float | None = None,
    ) -> WriteHandle:
        """See Transport.write. ValueError when ``peer`` is not ``host:port/epoch``."""
        wanted = checked_spans(spans)
        if len(wanted) > MAX_FRAME_SPANS:
            raise ValueError(f"spans must be <= {MAX_FRAME_SPANS} a write, got {len(wanted)}")
        address = parse_session(peer)
        with self._lock:
            if self._closed:
                raise TransportError("the socket transport is closed")
            link = self._links.get(peer)
            if link is None:
                link = self._links[peer] = _Link(self, peer, address)
        return link.put(wanted)

    def fence(self, peer: str, scratch: int, timeout_s: float) -> bool:
        """See Transport.fence. Pending writes get half of the time, then they are failed."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            link = self._links.get(peer)
        if link is None:
            return True
        patience = time.monotonic() + timeout_s / 2
        for handle in link.outstanding():
            if handle.wait(patience - time.monotonic()) is WriteState.PENDING:
                link.cut("it was cut by a fence")
                break
        if not link.doubtful:
            return True
        # The link's thread greets only after it has left the write it may be in.
        greeting = link.put(None)
        answered = greeting.wait(deadline - time.monotonic()) is not WriteState.PENDING
        return answered and not link.doubtful

    def bandwidth(self, peer: str) -> float | None:
        """See Transport.bandwidth: moving average over writes >= 64 KiB."""
        with self._lock:
            link = self._links.get(peer)
        return None if link is None else link.bandwidth

    def close(self) -> None:
        """See Transport.close."""
        with self._lock:
            self._closed = True
            links = list(self._links.values())
            inbound = [*self._inbound.values(), *self._greeting]
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept(), which close() does not
        self._listener.close()
        for link in links:
            link.close()
        for connection in inbound:
            connection.end(timeout_s=1.0)

    def refusal(self, spans: Sequence[tuple[int, int]]) -> str | None:
        """Say which of the (address, length) pairs no region covers; None when all are covered."""
        with self._lock:
            regions = list(self._regions.items())
        for address, length in spans:
            if not any(r <= address and address + length <= r + size for r, size in regions):
                return f"the peer has not registered {length} bytes at {address:#x}"
        return None

    def take_over(self, client_id: bytes, connection: _Inbound) -> bool:
        """Make ``connection`` the client's only one, after the old one has drained."""
        with self._lock:
            old = self._inbound.get(client_id)
            self._inbound[client_id] = connection
            self._greeting.discard(connection)
        return old is None or old.end(timeout_s=self.progress_timeout_s)

    def forget(self, client_id: bytes | None, connection: _Inbound) -> None:
        """Drop a connection that has ended from the tables."""
        with self._lock:
            self._greeting.discard(connection)
            if client_id is not None and self._inbound.get(client_id) is connection:
                del self._inbound[client_id]

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            inbound = _Inbound(self, connection)
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._greeting.add(inbound)
            inbound.thread.start()


class _Inbound:
    """The receiving end of one connection: greets, then applies frames until the socket ends."""

    def __init__(self, owner: SocketTransport, connection: socket.socket) -> None:
        self.thread = threading.Thread(target=self._run, name="smartgen-receive", daemon=True)
        self._owner = owner
        self._socket = connection

    def end(self, timeout_s: float) -> bool:
        """Cut the connection and wait for its thread; False when it is still busy."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self.thread.join(timeout_s)
        return not self.thread.is_alive()

    def _run(self) -> None:
        client_id = None
        try:
            self._socket.settimeout(HANDSHAKE_TIMEOUT_S)
            client_id = self._greet()
            if client_id is not None:
                self._socket.settimeout(None)
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                with self._socket.makefile("rb") as stream:
                    while self._frame(stream):
                        pass
        except (OSError, EOFError):
            pass  # the sender learns of it: its write is FAILED
        finally:
            self._socket.close()
            self._owner.forget(client_id, self)

    def _greet(self) -> bytes | None:
        nonce = secrets.token_bytes(16)
        self._socket.sendall(MAGIC + nonce)
        client_id, epoch, client_nonce, proof = _HELLO.unpack(exactly(self._socket, _HELLO.size))
        token = self._owner.token
        wanted = _proof(token, b"client", nonce, client_nonce, client_id, epoch)
        if not hmac.compare_digest(proof, wanted):
            self._socket.sendall(bytes([_BAD_TOKEN]) + bytes(32))
            return None
        verdict = _OK
        if epoch != self._owner.epoch:
            verdict = _OTHER_EPOCH
        elif not self._owner.take_over(client_id, self):
            verdict = _BUSY
        answer = _proof(token, b"server%d" % verdict, nonce, client_nonce, client_id, epoch)
        self._socket.sendall(bytes([verdict]) + answer)
        return client_id if verdict == _OK else None

    def _frame(self, stream: io.BufferedReader) -> bool:
        header = stream.read(_FRAME.size)
        if len(header) < _FRAME.size:
            return False
        sequence, count, payload = _FRAME.unpack(header)
        if count > MAX_FRAME_SPANS:
            return False
        table = stream.read(count * _ROW.size)
        if len(table) < count * _ROW.size:
            return False
        rows = list(_ROW.iter_unpack(table))
        refusal = self._owner.refusal(rows)
        if sum(length for _, length in rows) != payload:
            return False
        if refusal is None:
            for address, length in rows:
                read_into(stream, memory(address, length))
        else:
            waste = memoryview(bytearray(min(payload, CHUNK)))
            for offset in range(0, payload, CHUNK):
                read_into(stream, waste[: min(CHUNK, payload - offset)])
        message = (refusal or "").encode()
        verdict = _OK if refusal is None else _REFUSED
        self._socket.sendall(_ANSWER.pack(sequence, verdict, len(message)) + message)
        return True


class _Job:
    """One write of a link; ``spans`` None is a fence's request for a new greeting."""

    def __init__(self, spans: list[Span] | None) -> None:
        self.spans = spans
        self.handle = Completion()


class _Link:
    """The sending end: one thread that owns the connection to one peer."""

    def __init__(self, owner: SocketTransport, peer: str, address: tuple[str, int, int]) -> None:
        self.bandwidth: float | None = None
        self._doubts = 0  # writes that failed with bytes that may still be under way
        self._owner = owner
        self._peer = peer
        self._host, self._port, self._epoch = address
        self._socket: socket.socket | None = None
        self._sequence = 0
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._open: set[_Job] = set()
        self._closed = False
        self._lock = threading.Lock()
        threading.Thread(target=self._work, name=f"smartgen-send-{peer}", daemon=True).start()

    @property
    def doubtful(self) -> bool:
        """Tell whether bytes of a failed write may still be under way."""
        return self._doubts > 0

    def put(self, spans: list[Span] | None) -> Completion:
        """Queue a write; an empty one is DONE at once. None asks for a new greeting."""
        job = _Job(spans)
        if spans is not None and not spans:
            job.handle.finish()
            return job.handle
        with self._lock:
            if self._closed:
                raise TransportError("the socket transport is closed")
            self._open.add(job)
            self._jobs.put(job)
        return job.handle

    def outstanding(self) -> list[Completion]:
        """Return the handles of the writes that are not final."""
        with self._lock:
            return [job.handle for job in self._open if job.spans is not None]

    def cut(self, cause: str) -> None:
        """Fail every write that is not final, with the connection that may carry one."""
        with self._lock:
            jobs = [job for job in self._open if job.spans is not None]
            connection = self._socket if jobs else None
            self._doubts += len(jobs)
            self._open.difference_update(jobs)
        for job in jobs:
            job.handle.finish(self._sentence(job, cause))
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Fail what is pending and end the thread."""
        with self._lock:
            self._closed = True
        self.cut("the transport was closed")
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if job.handle.poll() is not WriteState.PENDING:
                continue
            cause: str | None = None
            sending = False
            try:
                if job.spans is None or self._socket is None:
                    self._connect(fresh=job.spans is None)
                if job.spans is not None:
                    sending = True
                    cause = self._send(job.spans)
                    sending = False
            except Exception as error:  # the handle must become final
                cause = str(error) or type(error).__name__
                self._disconnect()
            with self._lock:
                self._open.discard(job)
                self._doubts += sending
            job.handle.finish(None if cause is None else self._sentence(job, cause))
        self._disconnect()

    def _sentence(self, job: _Job, cause: str) -> str:
        return f"{describe(self._peer, job.spans or [])} failed: {cause}"

    def _connect(self, fresh: bool) -> None:
        # Only a fence's greeting clears the doubts: a write that `cut` failed between our look at
        # its handle and now is still going to be sent.
        self._disconnect()
        limit = self._owner.progress_timeout_s
        connection = socket.create_connection((self._host, self._port), timeout=limit)
        try:
            verdict = self._greet(connection)
        except BaseException:
            connection.close()
            raise
        if fresh and verdict in (_OK, _OTHER_EPOCH):
            # The old connection has drained, or the process that had it is gone.
            with self._lock:
                self._doubts = 0
        if verdict == _OTHER_EPOCH:
            connection.close()
            raise ConnectionError("the peer has restarted: its addresses are void")
        if verdict != _OK:
            connection.close()
            raise ConnectionError("the peer is still busy with our old connection")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._socket = connection

    def _greet(self, connection: socket.socket) -> int:
        challenge = exactly(connection, len(MAGIC) + 16)
        if not challenge.startswith(MAGIC):
            raise ConnectionError("the peer's port does not speak this protocol")
        token, client_id = self._owner.token, self._owner.client_id
        nonce, mine = challenge[len(MAGIC) :], secrets.token_bytes(16)
        proof = _proof(token, b"client", nonce, mine, client_id, self._epoch)
        connection.sendall(_HELLO.pack(client_id, self._epoch, mine, proof))
        answer = exactly(connection, 33)
        verdict = answer[0]
        if verdict == _BAD_TOKEN:
            raise ConnectionError("the peer refused our token")
        wanted = _proof(token, b"server%d" % verdict, nonce, mine, client_id, self._epoch)
        if not hmac.compare_digest(answer[1:], wanted):
            raise ConnectionError("the peer does not know the token")
        return verdict

    def _disconnect(self) -> None:
        with self._lock:
            connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()

    def _send(self, spans: list[Span]) -> str | None:
        connection = self._socket
        assert connection is not None
        self._sequence += 1
        total = sum(span.length for span in spans)
        started = time.monotonic()
        table = b"".join(_ROW.pack(span.destination, span.length) for span in spans)
        connection.sendall(_FRAME.pack(self._sequence, len(spans), total) + table)
        for piece in pieces(spans):
            connection.sendall(piece)
        sequence, verdict, length = _ANSWER.unpack(exactly(connection, _ANSWER.size))
        message = exactly(connection, length).decode(errors="replace")
        if sequence != self._sequence:
            raise ConnectionError(f"answer to frame {sequence}, but {self._sequence} was sent")
        if verdict != _OK:
            return message
        if total >= LARGE_WRITE_BYTES:
            rate = total / max(time.monotonic() - started, 1e-9)
            self.bandwidth = 0.75 * (self.bandwidth or rate) + 0.25 * rate
        return None


def parse_session(peer: str) -> tuple[str, int, int]:
    """Return (host, port, epoch) of ``host:port/epoch``; ValueError for anything else."""
    try:
        address, epoch = peer.split("/")
        host, port = address.rsplit(":", 1)
        return host, int(port), int(epoch, 16)
    except ValueError:
        raise ValueError(f"peer must be 'host:port/epoch', got {peer!r}") from None


def _proof(token: bytes, role: bytes, nonce: bytes, mine: bytes, who: bytes, epoch: int) -> bytes:
    text = b"|".join((role, nonce, mine, who, b"%d" % epoch))
    return hmac.new(token, text, hashlib.sha256).digest()
