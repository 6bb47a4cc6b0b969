"""What the socket transport alone promises: who may write, and to which process."""

from __future__ import annotations

import contextlib
import socket
import struct
import time

import numpy as np
import pytest
from transport_worlds import CANARY, TOKEN, done, failed, make

from sglang_smartgen.transfer import socket as socket_module
from sglang_smartgen.transfer.socket import SocketTransport
from sglang_smartgen.transfer.transport import Region, Span, TransportError


def test_the_socket_knows_the_old_process_by_its_epoch(tmp_path):
    world = make("socket", tmp_path)
    try:
        old = world.peer
        done(world.write((0, 0, 100)))
        world.restart()
        # The first write meets the dead connection, the second the new process.
        errors = [failed(world.write((0, 0, 100), peer=old)) for _ in range(2)]
        assert "restarted" in errors[1]
        assert (world.memory == CANARY).all()
        assert world.sender.fence(old, world.at, 5.0) is True
    finally:
        world.close()


def test_the_socket_ends_the_old_connection_of_a_client_before_it_greets_again():
    receiver, sender = (SocketTransport("127.0.0.1", TOKEN) for _ in range(2))
    memory = np.full(2000, CANARY, np.uint8)
    at = memory.ctypes.data
    receiver.register(Region(at, 2000))
    address = socket_module.parse_session(receiver.session)
    try:
        with socket.create_connection(address[:2], 5.0) as old:
            link = socket_module._Link(sender, receiver.session, address)
            assert link._greet(old) == 0
            old.sendall(struct.pack("!QIQQQ", 1, 1, 2000, at, 2000) + bytes(1000))
            done(sender.write(receiver.session, []))
            done(sender.write(receiver.session, [Span(at, at, 1)]))  # greets with the same id
            with contextlib.suppress(OSError):
                old.sendall(bytes(1000))
            time.sleep(0.2)
            assert (memory[1000:] == CANARY).all()
            link.close()
    finally:
        sender.close()
        receiver.close()


def test_the_socket_refuses_a_wrong_token_and_survives_garbage(tmp_path):
    world = make("socket", tmp_path)
    stranger = SocketTransport("127.0.0.1", b"another token 123")
    try:
        address = ("127.0.0.1", int(world.peer.split("/")[0].rsplit(":", 1)[1]))
        for garbage in (b"", b"GET / HTTP/1.0\r\n\r\n", bytes(4096)):
            with socket.create_connection(address, 2.0) as connection:
                connection.sendall(garbage)
        spans = [Span(world.base, world.at, 100)]
        assert "refused our token" in failed(stranger.write(world.peer, spans))
        assert (world.memory == CANARY).all()
        done(world.write((0, 0, 100)))
    finally:
        stranger.close()
        world.close()


def test_the_socket_refuses_bad_arguments():
    with pytest.raises(ValueError, match="token must have >= 16 bytes, got 5"):
        SocketTransport("127.0.0.1", b"short")
    transport = SocketTransport("127.0.0.1", TOKEN)
    try:
        with pytest.raises(ValueError, match="peer must be 'host:port/epoch', got 'nonsense'"):
            transport.write("nonsense", [])
        port = int(transport.session.split("/")[0].rsplit(":", 1)[1])
        with pytest.raises(TransportError, match="cannot listen"):
            SocketTransport("127.0.0.1", TOKEN, port=port)
    finally:
        transport.close()
