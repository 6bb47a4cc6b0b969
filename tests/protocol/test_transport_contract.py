"""The promises of transport.py, kept by every transport: fake, socket, Mooncake over TCP, shm, and
two sockets as rails.

The peer of all but the fake is a process of its own, so that it can be killed, stopped and
restarted; its memory is a file that both processes map.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

# Mooncake reads its environment when the first engine of the process starts.
os.environ["MC_FORCE_TCP"] = "1"
os.environ["MC_TCP_PROGRESS_TIMEOUT_SEC"] = "2"
os.environ["MC_TCP_STATUS_TIMEOUT_SEC"] = "2"

from sglang_smartgen.transfer import mooncake
from sglang_smartgen.transfer import socket as socket_module
from sglang_smartgen.transfer.fake import FakeNetwork, FakeTransport
from sglang_smartgen.transfer.mooncake import MooncakeTransport, engine_progress_timeout_s
from sglang_smartgen.transfer.rails import nixl as nixl_module
from sglang_smartgen.transfer.rails.reach import Card, Rail
from sglang_smartgen.transfer.rails.shm import ShmTransport
from sglang_smartgen.transfer.rails.transport import RailsTransport
from sglang_smartgen.transfer.socket import SocketTransport
from sglang_smartgen.transfer.transport import Region, Span, TransportError, WriteState

TOKEN = b"a token of a test"
SIZE = 8 << 20
SCRATCH = SIZE - 4096  # offset of the bytes that fences may write
CANARY = 0xC5
NIXL = [
    pytest.param(
        "nixl",
        marks=pytest.mark.skipif(
            not any(importlib.util.find_spec(name.split(".")[0]) for name in nixl_module.MODULES),
            reason="NIXL is not installed",
        ),
    )
]
KINDS = ["fake", "socket", "mooncake", "shm", "rails", *NIXL]
REAL = KINDS[1:]
LONG = "mooncake, as it sends what takes long"
STOPPABLE = ["socket", "mooncake", "rails", *NIXL]  # shm writes into a stopped process too

PEER = """
import json, sys
import numpy as np
from sglang_smartgen.transfer.transport import Region
kind, path, port, token = sys.argv[1:]
memory = np.memmap(path, np.uint8, "r+")
if kind == "mooncake":
    from sglang_smartgen.transfer.mooncake import MooncakeTransport
    transport = MooncakeTransport.create("127.0.0.1")
elif kind == "nixl":
    from sglang_smartgen.transfer.rails.nixl import NixlTransport
    transport = NixlTransport("127.0.0.1")
elif kind == "shm":
    from sglang_smartgen.transfer.rails.shm import ShmTransport
    transport = ShmTransport()
else:
    from sglang_smartgen.transfer.socket import SocketTransport
    transport = SocketTransport("127.0.0.1", token.encode(), port=int(port))
    if kind == "rails":
        from sglang_smartgen.transfer.rails.reach import Rail
        from sglang_smartgen.transfer.rails.transport import RailsTransport
        other = SocketTransport("127.0.0.2", token.encode())
        rails = [Rail("socket", "127.0.0.1", transport), Rail("socket", "127.0.0.2", other)]
        transport = RailsTransport(rails)
transport.register(Region(memory.ctypes.data, memory.nbytes))
print(json.dumps([transport.session, memory.ctypes.data]), flush=True)
sys.stdin.read()
"""


class World:
    """A sender with a source buffer, and a peer whose memory the test can read."""

    peer: str  # the peer's session
    at: int  # the peer's address of memory[0]
    memory: np.ndarray  # uint8 [SIZE]

    def __init__(self, sender) -> None:
        self.sender = sender
        self.source = np.random.default_rng(0).integers(0, 255, SIZE, dtype=np.uint8)
        self.base = self.source.ctypes.data
        sender.register(Region(self.base, SIZE))

    def write(
        self,
        *pieces: tuple[int, int, int],
        peer: str | None = None,
        deadline_s: float | None = None,
    ):
        """Start a write of (source offset, destination offset, length) pieces."""
        spans = [Span(self.base + s, self.at + d, n) for s, d, n in pieces]
        return self.sender.write(peer or self.peer, spans, deadline_s=deadline_s)

    def fence(self, timeout_s: float) -> bool:
        return self.sender.fence(self.peer, self.at + SCRATCH, timeout_s)

    def kill(self) -> None:
        raise NotImplementedError

    def restart(self) -> None:
        """A new peer with its memory cleared, at the same network address (not Mooncake's: its
        port is random, and the old one is blocked for a minute by connections in TIME_WAIT)."""
        raise NotImplementedError

    def close(self) -> None:
        self.sender.close()


class FakeWorld(World):
    def __init__(self) -> None:
        self.network = FakeNetwork()
        super().__init__(FakeTransport(self.network, "p"))
        self.peer = "d"
        self.restart()

    def kill(self) -> None:
        self.network.kill("d")

    def restart(self) -> None:
        self.memory = np.full(SIZE, CANARY, np.uint8)
        self.at = self.memory.ctypes.data
        FakeTransport(self.network, "d").register(Region(self.at, SIZE))


class ProcessWorld(World):
    def __init__(self, kind: str, path: Path) -> None:
        super().__init__(sender_of(kind))
        self._kind, self._path, self._port = kind, path, 0
        self.memory = np.memmap(path, np.uint8, "w+", shape=(SIZE,))
        self._start()

    def _start(self) -> None:
        self.memory[:] = CANARY
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        arguments = [self._kind, str(self._path), str(self._port), TOKEN.decode()]
        self.process = subprocess.Popen(
            [sys.executable, "-c", PEER, *arguments],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.peer, self.at = json.loads(self.process.stdout.readline())
        if self._kind == "rails":  # as P and D do it: a card for a name
            card = self.peer.removeprefix("rails:")
            self.peer = f"peer-{self.process.pid}"
            self.sender.meet(self.peer, msgspec.msgpack.decode(base64.b64decode(card), type=Card))
        elif self._kind not in ("shm", "nixl"):
            self._port = int(self.peer.split("/")[0].rsplit(":", 1)[1])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()

    def restart(self) -> None:
        self.kill()
        self._start()

    def close(self) -> None:
        super().close()
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()


def sender_of(kind: str):
    if kind == "mooncake":
        return MooncakeTransport.create("127.0.0.1")
    if kind == "shm":
        return ShmTransport()
    if kind == "nixl":
        return nixl_module.NixlTransport("127.0.0.1")
    if kind == "socket":
        return SocketTransport("127.0.0.1", TOKEN, progress_timeout_s=2.0)
    hosts = ("127.0.0.1", "127.0.0.2")
    return RailsTransport(
        [
            Rail("socket", host, SocketTransport(host, TOKEN, progress_timeout_s=1.0))
            for host in hosts
        ]
    )


def make(kind: str, tmp_path: Path) -> World:
    return FakeWorld() if kind == "fake" else ProcessWorld(kind, tmp_path / "memory")


@pytest.fixture(scope="module", params=[*KINDS, LONG])
def shared_world(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        if request.param == LONG:
            patch.setattr(mooncake, "_WATCH_S", -1.0)
        made = make(request.param.partition(",")[0], tmp_path_factory.mktemp("world"))
        yield made
        made.close()


@pytest.fixture
def world(shared_world):
    """A peer for tests that leave it alive; without failures to remember and with clean memory."""
    assert shared_world.fence(10.0)
    shared_world.memory[:] = CANARY
    return shared_world


@pytest.fixture(params=KINDS)
def own_world(request, tmp_path):
    made = make(request.param, tmp_path)
    yield made
    made.close()


@pytest.fixture(params=REAL)
def real_world(request, tmp_path):
    made = make(request.param, tmp_path)
    yield made
    made.close()


@pytest.fixture(params=STOPPABLE)
def stoppable_world(request, tmp_path):
    made = make(request.param, tmp_path)
    yield made
    made.close()


def done(handle, timeout_s: float = 10.0) -> None:
    assert handle.wait(timeout_s) is WriteState.DONE, handle.error
    assert handle.error is None


def failed(handle, timeout_s: float = 5.0) -> str:
    assert handle.wait(timeout_s) is WriteState.FAILED
    return handle.error


def test_bytes_land_exactly_and_neither_neighbour_is_touched(world):
    done(world.write((5, 4097, 1001)))
    expected = np.full(SIZE, CANARY, np.uint8)
    expected[4097 : 4097 + 1001] = world.source[5 : 5 + 1001]
    assert np.array_equal(world.memory, expected)


def test_scattered_spans_of_all_sizes_land_in_their_places(world):
    rng = random.Random(1)
    pieces, offset = [], 0
    for length in [1, 7, 4096, 65536, 65537, (1 << 20) + 3, 100, 3 << 20, 1]:
        pieces.append((rng.randrange(SIZE - length), offset, length))
        offset += length + rng.randrange(1, 500)
    rng.shuffle(pieces)
    expected = np.full(SIZE, CANARY, np.uint8)
    for source, destination, length in pieces:
        expected[destination : destination + length] = world.source[source : source + length]
    done(world.write(*pieces))
    assert np.array_equal(world.memory, expected)


def test_done_means_that_every_byte_is_visible(world):
    for value in range(30):
        world.source[: 1 << 20] = value
        done(world.write((0, 0, 1 << 19), (1 << 19, 1 << 19, 1 << 19)))
        assert (world.memory[: 1 << 20] == value).all()


def test_more_spans_than_a_mooncake_queue_takes(world):
    count = 5000
    done(world.write(*[(i * 16, i * 32, 16) for i in range(count)]), 20.0)
    rows = np.asarray(world.memory[: count * 32]).reshape(count, 32)
    assert np.array_equal(rows[:, :16], world.source[: count * 16].reshape(count, 16))
    assert (rows[:, 16:] == CANARY).all()


def test_an_empty_write_is_done_and_a_negative_span_is_refused(world):
    done(world.write(), 0.0)
    done(world.write((0, 0, 0)), 0.0)
    with pytest.raises(ValueError, match="must be >= 0"):
        world.write((0, 0, -1))


@pytest.mark.parametrize("offset", [SIZE - 99, SIZE + (64 << 20)], ids=["over the end", "outside"])
def test_a_bad_address_fails_and_the_sentence_names_the_peer(world, offset):
    error = failed(world.write((0, offset, 100)))
    assert world.peer[:60] in error and "1 span, 100 bytes" in error
    assert (world.memory == CANARY).all()
    done(world.write((0, 0, 100)))  # and the next good one works


def test_two_writers_do_not_disturb_each_other(world):
    errors: list[str] = []

    def writer(first: int) -> None:
        for turn in range(20):
            handle = world.write((first + turn, first, 65536), (turn, first + (1 << 20), 700))
            if handle.wait(10.0) is not WriteState.DONE:
                errors.append(str(handle.error))
            for source, destination, length in ((first + turn, 0, 65536), (turn, 1 << 20, 700)):
                got = world.memory[first + destination :][:length]
                if not np.array_equal(got, world.source[source:][:length]):
                    errors.append(f"turn {turn}: wrong bytes at {first + destination}")

    threads = [threading.Thread(target=writer, args=(i * (3 << 20),)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert errors == [] and not any(thread.is_alive() for thread in threads)


def test_a_fence_without_failure_is_true_at_once(world):
    assert world.fence(0.0) is True
    done(world.write((0, 0, 1 << 20)))
    start = time.monotonic()
    assert world.fence(5.0) is True
    assert time.monotonic() - start < 0.1


def test_a_fence_passes_after_a_failure_and_costs_its_time_once(world):
    failed(world.write((0, SIZE, 100), (0, 0, 64)))
    start = time.monotonic()
    assert world.fence(10.0) is True
    if isinstance(world.sender, MooncakeTransport):
        assert time.monotonic() - start > 1.9  # the engine's progress timeout
    start = time.monotonic()
    assert world.fence(10.0) is True
    assert time.monotonic() - start < 0.1
    assert (world.memory[64:SCRATCH] == CANARY).all()
    done(world.write((0, 0, 100)))


def test_registration_mistakes_say_what_they_are(world):
    region = Region(world.base, SIZE)
    with pytest.raises(TransportError, match="overlaps"):
        world.sender.register(Region(world.base + 100, 100))
    world.sender.unregister(region)
    with pytest.raises(TransportError, match="not registered"):
        world.sender.unregister(region)
    world.sender.register(region)


def test_writes_to_a_dead_peer_fail_in_time_and_no_fence_passes(own_world):
    world = own_world
    done(world.write((0, 0, 100)))
    world.kill()
    for _ in range(2):
        assert world.peer[:60] in failed(world.write((0, 0, 1 << 20)))
    start = time.monotonic()
    assert world.fence(0.5) is False
    assert time.monotonic() - start < 1.5


def test_a_restarted_peer_is_reached_again_and_the_old_one_is_not_mixed_up_with_it(own_world):
    world = own_world
    done(world.write((0, 0, 100)))
    old_peer, old_address = world.peer, world.at
    world.restart()
    if isinstance(world.sender, SocketTransport | FakeTransport):
        assert world.peer.split("/")[0] == old_peer.split("/")[0]
    failed(world.sender.write(old_peer, [Span(world.base, old_address, 100)]))
    done(world.write((0, 200, 100)))
    assert np.array_equal(world.memory[200:300], world.source[:100])
    assert (world.memory[:200] == CANARY).all()


def test_nothing_lands_after_the_fence_of_a_peer_that_hung(stoppable_world):
    world = stoppable_world
    done(world.write((0, 0, 100)))
    world.source[:] = 1
    world.process.send_signal(signal.SIGSTOP)
    start = time.monotonic()
    handle = world.write((0, 0, SCRATCH), deadline_s=5.0)
    assert time.monotonic() - start < 0.5  # write() waits for no byte
    assert handle.wait(0.05) is WriteState.PENDING
    assert world.fence(0.2) is False
    failed(handle, 8.0)
    assert world.fence(0.2) is False
    world.source[:] = 2  # what a caller that took FAILED for a fence would do
    world.process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + 20.0
    while not world.fence(5.0):
        assert time.monotonic() < deadline
    world.memory[:SCRATCH] = CANARY
    time.sleep(0.5)
    assert (world.memory[:SCRATCH] == CANARY).all()
    done(world.write((0, 0, 100)))


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


def test_bandwidth_is_measured_on_large_writes_only(real_world):
    assert real_world.sender.bandwidth(real_world.peer) is None
    done(real_world.write((0, 0, 100)))
    assert real_world.sender.bandwidth(real_world.peer) is None
    done(real_world.write((0, 0, 4 << 20)))
    assert 1e6 < real_world.sender.bandwidth(real_world.peer) < 1e12


def test_close_fails_what_is_pending_and_refuses_more(stoppable_world):
    done(stoppable_world.write((0, 0, 100)))
    stoppable_world.process.send_signal(signal.SIGSTOP)
    handles = [stoppable_world.write((0, 0, SCRATCH)) for _ in range(3)]
    start = time.monotonic()
    stoppable_world.sender.close()
    assert time.monotonic() - start < 2.0
    assert all("closed" in failed(handle, 0.0) for handle in handles)
    with pytest.raises(TransportError, match="closed"):
        stoppable_world.write((0, 0, 100))
    stoppable_world.sender.close()


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


@pytest.mark.parametrize(
    ("progress", "status", "seconds"),
    [(None, None, 30), ("2", "3", 3), ("4", None, 30), ("0", "2", 30), ("x", "2", 30)],
)
def test_the_fence_reads_the_engines_own_timeouts(monkeypatch, progress, status, seconds):
    names = ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC")
    for name, value in zip(names, (progress, status), strict=True):
        if value is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, value)
    assert engine_progress_timeout_s() == seconds


class StubEngine:
    """Answers each submitted batch with the next code; single requests are done at once."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)
        self.batches: list[int] = []

    def batch_transfer_async_write(self, peer, sources, destinations, lengths) -> int:
        self.batches.append(len(sources))
        return len(self.batches)

    def get_batch_transfer_status(self, batches) -> int:
        code = self.codes[batches[0] - 1]
        if code == 99:
            raise RuntimeError("engine broken")
        return code

    def transfer_submit_write(self, peer, source, destination, length) -> int:
        self.batches[-1] += 1
        return 1000

    def transfer_check_status(self, request) -> int:
        return 1


@pytest.mark.parametrize(
    ("codes", "batches", "error"),
    [
        ((0, 0, 0), [480, 480, 40], None),
        ((0, -1, 0), [480, 480], "Mooncake returned -1"),
        ((99,), [480], "engine broken"),
    ],
)
def test_mooncake_chunks_go_out_in_turn_and_the_first_failure_ends_the_write(codes, batches, error):
    engine = StubEngine(*codes)
    transport = MooncakeTransport(engine, "here:1")
    handle = transport.write("there:2", [Span(i, i, 1) for i in range(1000)])
    if error is None:
        done(handle)
    else:
        assert error in failed(handle)
    assert engine.batches == batches
    transport.close()


def test_a_long_write_to_a_peer_that_dies_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(mooncake, "_WATCH_S", -1.0)
    world = make("mooncake", tmp_path)
    try:
        done(world.write(*[(i * 64, i * 64, 64) for i in range(20)]))
        world.kill()
        assert world.peer in failed(world.write((0, 0, 1 << 20), (1 << 20, 1 << 20, 64)), 40.0)
    finally:
        world.close()
