"""Notices to strangers wait for nobody and keep few sockets."""

from __future__ import annotations

import time

import zmq

from sglang_smartgen.transfer.notices import MAX_SOCKETS, Notices

PATIENCE_MS = 30_000


def test_who_listens_is_told() -> None:
    notices = Notices()
    pull = zmq.Context.instance().socket(zmq.PULL)
    try:
        port = pull.bind_to_random_port("tcp://127.0.0.1")
        for word in (b"one", b"two"):
            notices.send(f"tcp://127.0.0.1:{port}", [b"7", word])
            assert pull.poll(PATIENCE_MS)
            assert pull.recv_multipart() == [b"7", word]
    finally:
        notices.close()
        pull.close(linger=0)


def test_nobody_is_waited_for_and_no_address_is_an_error() -> None:
    notices = Notices()
    began = time.monotonic()
    for number in range(3000):
        notices.send("tcp://127.0.0.1:1", [b"x" * 100])
        notices.send(f"tcp://127.0.0.1:{2 + number % 500}", [b"x"])
    for address in ("", "tcp://", "tcp://no such host:1", "udp://x", "tcp://127.0.0.1:99999"):
        notices.send(address, [b"x"])
    assert time.monotonic() - began < 20
    assert len(notices._sockets) <= MAX_SOCKETS
    notices.close()
