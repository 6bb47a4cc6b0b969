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
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence

from sglang_smartgen.transfer.peer_queue import Job, PeerQueue, Regions
from sglang_smartgen.transfer.socket_bytes import CHUNK, exactly, memory, pieces, read_into
from sglang_smartgen.transfer.transport import (
    Priority,
    Region,
    Span,
    TransportError,
    WriteHandle,
    WriteState,
    all_final,
    checked_spans,
)

MAGIC = b"SMARTGN1"
MAX_FRAME_SPANS = 1 << 20
HANDSHAKE_TIMEOUT_S = 5.0
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
        self._regions = Regions()
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
            self._regions.add(region)

    def unregister(self, region: Region) -> None:
        """See Transport.unregister."""
        with self._lock:
            self._regions.remove(region)

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
        return link.queue.put(wanted)

    def fence(self, peer: str, scratch: int, timeout_s: float) -> bool:
        """See Transport.fence. Pending writes get half of the time, then they are failed."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            link = self._links.get(peer)
        if link is None:
            return True
        if not all_final(link.queue.outstanding(), deadline - timeout_s / 2):
            link.cut("it was cut by a fence")
        if not link.doubtful:
            return True
        # The link's thread greets only after it has left the write it may be in.
        greeting = link.queue.put([], aside=True)
        answered = greeting.wait(deadline - time.monotonic()) is not WriteState.PENDING
        return answered and not link.doubtful

    def bandwidth(self, peer: str) -> float | None:
        """See Transport.bandwidth: moving average over writes >= 64 KiB."""
        with self._lock:
            link = self._links.get(peer)
        return None if link is None else link.queue.rate.value

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
            regions = self._regions.items()
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


class _Link:
    """The sending end: one thread that owns the connection to one peer."""

    def __init__(self, owner: SocketTransport, peer: str, address: tuple[str, int, int]) -> None:
        self.queue = PeerQueue(peer, "socket")
        self._doubts = 0  # writes that failed with bytes that may still be under way
        self._owner = owner
        self._host, self._port, self._epoch = address
        self._socket: socket.socket | None = None
        self._sequence = 0
        self._lock = threading.Lock()
        self.queue.start(self._work, f"smartgen-send-{peer}")

    @property
    def doubtful(self) -> bool:
        """Tell whether bytes of a failed write may still be under way."""
        return self._doubts > 0

    def cut(self, cause: str) -> None:
        """Fail every write that is not final, with the connection that may carry one."""
        jobs = [job for job in self.queue.pending() if not job.aside]
        with self._lock:
            connection = self._socket if jobs else None
            self._doubts += len(jobs)
        for job in jobs:
            self.queue.end(job, cause)
        _hang_up(connection)

    def close(self) -> None:
        """Fail what is pending and end the thread."""
        with self._lock:
            connection = self._socket
        if self.queue.close():
            _hang_up(connection)

    def _work(self) -> None:
        while (job := self.queue.take()) is not None:
            cause: str | None = None
            sending = False
            try:
                if job.aside or self._socket is None:
                    self._connect(fresh=job.aside)
                if not job.aside:
                    sending = True
                    cause = self._send(job)
                    sending = False
            except Exception as error:  # the handle must become final
                cause = str(error) or type(error).__name__
                self._disconnect()
            with self._lock:
                self._doubts += sending
            self.queue.end(job, cause)
        self._disconnect()

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

    def _send(self, job: Job) -> str | None:
        connection = self._socket
        assert connection is not None
        self._sequence += 1
        spans, total = job.spans, job.total
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
        self.queue.rate.add(total, time.monotonic() - started)
        return None


def _hang_up(connection: socket.socket | None) -> None:
    """Wake the thread that is in a write on this connection."""
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


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
