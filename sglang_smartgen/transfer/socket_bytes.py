"""Memory of this process as the socket transport's bytes, and bytes of a connection."""

from __future__ import annotations

import ctypes
import io
import socket
from collections.abc import Iterator, Sequence

from sglang_smartgen.transfer.transport import Span

CHUNK = 1 << 20
GATHER = 64 << 10  # spans below it are copied together, so that they share a system call


def memory(address: int, length: int) -> memoryview:
    """Bytes of this process at an address."""
    return memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B")


def pieces(spans: Sequence[Span]) -> Iterator[memoryview | bytes]:
    """Yield the payload in order: large spans by reference, neighbours that are small as a copy."""
    small: list[memoryview] = []
    size = 0
    for span in spans:
        view = memory(span.source, span.length)
        if span.length < GATHER and size < CHUNK:
            small.append(view)
            size += span.length
            continue
        if small:
            yield b"".join(small)
            small, size = [], 0
        for offset in range(0, span.length, CHUNK):
            yield view[offset : offset + CHUNK]
    if small:
        yield b"".join(small)


def exactly(connection: socket.socket, length: int) -> bytes:
    """So many bytes of a connection. Raises EOFError when it ends before."""
    data = bytearray()
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            raise EOFError("the peer closed the connection")
        data += part
    return bytes(data)


def read_into(stream: io.BufferedReader, view: memoryview) -> None:
    """Fill `view` from a stream. Raises EOFError when it ends before."""
    if stream.readinto(view) < len(view):
        raise EOFError("the peer closed the connection inside a frame")
