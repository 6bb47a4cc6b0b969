"""The line between the scheduler process and the store's server process: a pair of Unix sockets.

A message is its length (u32, big-endian) and a msgpack payload. A plain socket, because what `send`
has returned from is in the other end's kernel buffer: whoever hears of it by another way, and then
reads the line, finds it. Any thread may send; one thread of each process receives. When a process
ends, however it ends, the other one reads the end of the line.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from typing import Literal, TypeAlias

import msgspec

from sglang_smartgen.transfer.messages import (
    Endpoint,
    Fetch,
    Grant,
    Registration,
    Release,
)

SEND_TIMEOUT_S = 30.0
MAX_MESSAGE_BYTES = 1 << 30
STATUS_BYTES = 4096
"""Of the shared status page; its byte 0 says whether the scheduler process is pushing."""
_CHUNK = 1 << 20
_LENGTH = struct.Struct("!I")


class TransportSpec(msgspec.Struct, frozen=True):
    """The transport that the server process makes for itself.

    protocol, devices: Mooncake's own; token: the socket transport's; rails: as configured.
    """

    name: Literal["mooncake", "socket", "rails"]
    host: str
    protocol: str = "tcp"
    devices: str = ""
    token: bytes = b""
    rails: list[str] = []


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """The first message: what the server process is to serve. `*_fd` were passed to it."""

    transport: TransportSpec
    store_fd: int
    store_bytes: int
    status_fd: int
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    sliding_layers: list[int]
    timeout_s: float


class AddPeer(msgspec.Struct, frozen=True, tag="peer"):
    """A decode rank has registered, perhaps again."""

    registration: Registration


class Take(msgspec.Struct, frozen=True, tag="take"):
    """An entry is complete and is served from now on; it begins at byte `offset` of the store.

    sent: bits of bool [layers * prompt_len, kv_heads], padded to bytes; order: int32 token codes.
    """

    room: int
    generation: int
    prompt_len: int
    offset: int
    sent: bytes
    order: bytes


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """Let go of an entry; answered by Gone when the server has it."""

    room: int
    generation: int


class Forward(msgspec.Struct, frozen=True, tag="forward"):
    """A message of D that came to the scheduler process."""

    message: Fetch | Grant | Release


class Serving(msgspec.Struct, frozen=True, tag="serving"):
    """The server process listens there for D's messages."""

    serve: Endpoint


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The server process cannot start, and why."""

    cause: str


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """The server process reads this entry's bytes no more."""

    room: int
    generation: int


class Settled(msgspec.Struct, frozen=True, tag="settled"):
    """No write of the server process for this generation can land any more.

    held: it has let go of the entry. False: it had none, but one may be on its way to it.
    """

    release: Release
    held: bool


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """A sign of life with the counters.

    slices: writes of speculative fill; descriptors, post_s: as in core.counts; rails: as in
    `RailsTransport.snapshot`.
    """

    fetches: int
    bytes_on_demand: int
    bytes_speculative: int
    slices: int = 0
    descriptors: int = 0
    post_s: float = 0.0
    rails: list[dict[str, int | float | str]] = []


ToServer: TypeAlias = Setup | AddPeer | Take | Drop | Forward
ToScheduler: TypeAlias = Serving | Refused | Gone | Settled | Beat

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[ToServer | ToScheduler] = msgspec.msgpack.Decoder(
    ToServer | ToScheduler
)


class ChannelClosed(ConnectionError):
    """The other process has ended, or does not read."""


class Channel:
    """One end of the line; takes the socket over."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._readable = select.poll()
        self._readable.register(end, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(end, select.POLLOUT)
        self._received = bytearray()
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """The socket's descriptor, for a poller."""
        return self._socket.fileno()

    def send(self, message: ToServer | ToScheduler, timeout_s: float = SEND_TIMEOUT_S) -> None:
        """Put a message into the line. ChannelClosed when that is not possible in time."""
        payload = _encoder.encode(message)
        deadline = time.monotonic() + timeout_s
        with self._lock:
            left = memoryview(_LENGTH.pack(len(payload)) + payload)
            while left:
                try:
                    left = left[self._socket.send(left) :]
                except BlockingIOError:
                    wait_ms = int(1000 * (deadline - time.monotonic()))
                    if wait_ms <= 0 or not self._writable.poll(wait_ms):
                        # Half a message may be in the line: nothing can follow it.
                        self._shutdown()
                        raise ChannelClosed(f"the line was full for {timeout_s:.0f} s") from None
                except OSError as error:
                    raise ChannelClosed(f"the line is closed: {error}") from None

    def receive(self, timeout_s: float) -> list[ToServer | ToScheduler]:
        """All messages that are in the line, waited for at most `timeout_s`; maybe none.

        ChannelClosed once the other end is closed and everything it sent has been received.
        """
        if timeout_s > 0:
            self._readable.poll(int(1000 * timeout_s))
        ended = False
        while True:
            try:
                part = self._socket.recv(_CHUNK)
            except BlockingIOError:
                break
            except OSError:
                part = b""
            if not part:
                ended = True
                break
            self._received += part
        messages = self._complete()
        if ended and not messages:
            raise ChannelClosed("the other process has closed the line")
        return messages

    def close(self) -> None:
        """Let the other process read the end of the line; this one's reader too."""
        self._shutdown()

    def _complete(self) -> list[ToServer | ToScheduler]:
        messages = []
        start = 0
        with memoryview(self._received) as view:
            while len(view) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(view, start)
                if length > MAX_MESSAGE_BYTES:
                    raise ChannelClosed(f"a message of {length} bytes")
                stop = start + _LENGTH.size + length
                if len(view) < stop:
                    break
                try:
                    messages.append(_decoder.decode(view[start + _LENGTH.size : stop]))
                except (msgspec.MsgspecError, RecursionError) as error:
                    # Nothing that follows can be believed either.
                    raise ChannelClosed(f"a malformed message: {error}") from None
                start = stop
        del self._received[:start]
        return messages

    def _shutdown(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
