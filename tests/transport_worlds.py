"""What the tests of a transport write to: a peer that can be killed, stopped and restarted.

The peer of all but the fake is a process of its own; its memory is a file that both processes map.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from sglang_smartgen.transfer.fake import FakeNetwork, FakeTransport
from sglang_smartgen.transfer.mooncake import MooncakeTransport
from sglang_smartgen.transfer.rails import nixl_agent
from sglang_smartgen.transfer.rails.nixl import NixlTransport
from sglang_smartgen.transfer.rails.reach import Card, Rail
from sglang_smartgen.transfer.rails.shm import ShmTransport
from sglang_smartgen.transfer.rails.transport import RailsTransport
from sglang_smartgen.transfer.socket import SocketTransport
from sglang_smartgen.transfer.transport import Region, Span, WriteState

TOKEN = b"a token of a test"
SIZE = 8 << 20
SCRATCH = SIZE - 4096  # offset of the bytes that fences may write
CANARY = 0xC5
without_nixl = pytest.mark.skipif(
    not any(importlib.util.find_spec(name.split(".")[0]) for name in nixl_agent.MODULES),
    reason="NIXL is not installed",
)
NIXL = [pytest.param("nixl", marks=without_nixl)]
NEAR = pytest.param("nixl, in shared memory", marks=without_nixl)
KINDS = ["fake", "socket", "mooncake", "shm", "rails", *NIXL, NEAR]
REAL = KINDS[1:]
STOPPABLE = ["socket", "mooncake", "rails", *NIXL]  # what is near writes into a stopped process

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
    shown: str  # what sentences call the peer
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
        self.peer = self.shown = "d"
        self.restart()

    def kill(self) -> None:
        self.network.kill("d")

    def restart(self) -> None:
        self.memory = np.full(SIZE, CANARY, np.uint8)
        self.at = self.memory.ctypes.data
        FakeTransport(self.network, "d").register(Region(self.at, SIZE))


class ProcessWorld(World):
    def __init__(self, kind: str, path: Path) -> None:
        # UCX takes shared memory where it may, and what is near cannot be tested as a network.
        network = {"UCX_TLS": "tcp"} if kind == "nixl" else {}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in network.items():
                patch.setenv(name, value)
            super().__init__(sender_of(kind.partition(",")[0]))
        self._environment = {**os.environ, **network}
        self._kind, self._path, self._port = kind.partition(",")[0], path, 0
        self.memory = np.memmap(path, np.uint8, "w+", shape=(SIZE,))
        self._start()

    def _start(self) -> None:
        self.memory[:] = CANARY
        environment = {**self._environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
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
        if self._kind in ("socket", "mooncake"):
            self._port = int(self.peer.split("/")[0].rsplit(":", 1)[1])
        self.shown = self.peer.partition("/")[0] if self._kind == "nixl" else self.peer

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
        return NixlTransport("127.0.0.1")
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


def done(handle, timeout_s: float = 10.0) -> None:
    assert handle.wait(timeout_s) is WriteState.DONE, handle.error
    assert handle.error is None


def failed(handle, timeout_s: float = 5.0) -> str:
    assert handle.wait(timeout_s) is WriteState.FAILED
    return handle.error
