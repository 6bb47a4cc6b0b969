"""The main loop of the server process, run inside the test."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest
import zmq

from sglang_smartgen.transfer.messages import (
    VERSION,
    Endpoint,
    Fetch,
    FetchDone,
    FetchItem,
    Registration,
    from_frames,
    to_frames,
)
from sglang_smartgen.transfer.region import SharedRegion
from sglang_smartgen.transfer.seal import TOKEN_ENV, sealer_from_env
from sglang_smartgen.transfer.serve_channel import (
    STATUS_BYTES,
    AddPeer,
    ChannelClosed,
    Setup,
    ToScheduler,
    ToServer,
    TransportSpec,
)
from sglang_smartgen.transfer.serve_process import ServeLoop

PATIENCE_MS = 30_000
NOWHERE = Registration(
    version=VERSION,
    session="d",
    epoch=1,
    fingerprint="",
    layers=3,
    kv_row_bytes=0,
    mask=0,
    mask_rows=0,
    mask_width=0,
    metadata=[],
    metadata_row_bytes=0,
    arena=0,
    arena_bytes=0,
    fill=0,
    fill_bytes=0,
    scratch=0,
    tp_size=1,
)


class ScriptedChannel:
    """Empty when first read; `between` runs right after that read, and then `line` is in it."""

    def __init__(self, line: list[ToServer]) -> None:
        self.between: Callable[[], None] = lambda: None
        self.over = threading.Event()
        self._line = line
        self._reads = 0
        self._never = os.pipe()[0]

    def fileno(self) -> int:
        return self._never

    def send(self, message: ToServer | ToScheduler) -> None:
        """What is told to the scheduler process does not matter here."""

    def receive(self, timeout_s: float) -> list[ToServer]:
        if self.over.is_set():
            raise ChannelClosed
        self._reads += 1
        if self._reads == 1:
            self.between()
            return []
        line, self._line = self._line, []
        return line


@pytest.mark.parametrize("token", ["", "a token of a cluster"])
def test_what_was_said_before_d_could_ask_counts(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler process speaks, D asks because of it, and the loop meets both in one turn."""
    monkeypatch.setenv(TOKEN_ENV, token)
    sealer = sealer_from_env()
    assert (sealer is None) == (token == "")
    channel = ScriptedChannel([AddPeer(NOWHERE)])
    store, status = SharedRegion(1 << 16), SharedRegion(STATUS_BYTES)
    setup = Setup(
        TransportSpec("socket", "127.0.0.1", token=bytes(16)),
        os.dup(store.fd),
        1 << 16,
        os.dup(status.fd),
        3,
        2,
        4,
        "float32",
        [],
        1.0,
    )
    loop = ServeLoop(setup, channel)  # type: ignore[arg-type]
    context = zmq.Context()
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    push.connect(f"tcp://{loop.endpoint.host}:{loop.endpoint.port}")
    here = Endpoint("127.0.0.1", pull.bind_to_random_port("tcp://127.0.0.1"))

    def ask() -> None:
        fetch = Fetch(5, "d", here, 1, [FetchItem(9, 1, 0, [b"", b""])])
        if token:  # without a seal it is not answered
            push.send_multipart(to_frames(Fetch(4, "d", here, 1, fetch.items)))
        push.send_multipart(to_frames(fetch, sealer, loop.endpoint))
        assert loop._inbound.poll(PATIENCE_MS)

    channel.between = ask
    ended: list[BaseException] = []

    def run() -> None:
        try:
            loop.run()
        except ChannelClosed as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert pull.poll(PATIENCE_MS)
    answer = from_frames(pull.recv_multipart(), sealer, here)
    # Not "decode session d is not registered here".
    assert answer == FetchDone(5, [(9, "its prefill store entry is gone")])
    channel.over.set()
    thread.join(PATIENCE_MS / 1000)
    assert len(ended) == 1
    context.destroy(linger=0)
