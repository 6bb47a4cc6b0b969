"""A prefill store with its server, as a thread or as a process, and a decode node that uses it.

Both nodes are this process: bytes go through two socket transports (the server process makes the
third), messages to a server process and back through ZMQ, as they do in production.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import torch
import zmq

from sglang_smartgen.core.geometry import DENSE_LAYERS, KVGeometry
from sglang_smartgen.select.base import KVShape
from sglang_smartgen.select.exact import ExactSelector
from sglang_smartgen.transfer.messages import (
    VERSION,
    Endpoint,
    Fetch,
    FetchDone,
    Filled,
    Grant,
    GrantItem,
    Message,
    Registration,
    Release,
    Released,
    from_frames,
    to_frames,
)
from sglang_smartgen.transfer.push_room import Peer
from sglang_smartgen.transfer.region import HostRegion
from sglang_smartgen.transfer.remote_lane import Ask, RemoteLane
from sglang_smartgen.transfer.serve_channel import TransportSpec
from sglang_smartgen.transfer.socket import SocketTransport
from sglang_smartgen.transfer.store import PrefillStore, StoreEntry
from sglang_smartgen.transfer.store_server import StoreServer

LAYERS, HEADS, DIM, TOKENS = 4, 2, 8, 30
ROW = 2 * DIM * 4  # bytes of one entry
ARENA_BYTES, FILL_BYTES, CANARY = 64 * 1024, 64 * 1024, 0xAB
TOKEN = b"the tests share this token"
P_BOOTSTRAP = Endpoint("p", 1)  # stands for SGLang's bootstrap socket: messages are handed over
PATIENCE_S = 30.0  # bound of every wait that is expected to end at once


class DecodeNode:
    """Memory, control socket and remote lane of D; `inbox` holds all that P has told it."""

    def __init__(self, to_bootstrap: Callable[[Fetch | Grant | Release], None]) -> None:
        self.transport = SocketTransport("127.0.0.1", TOKEN)
        self.session = self.transport.session
        self.arena, self.fill = HostRegion(ARENA_BYTES), HostRegion(FILL_BYTES)
        self.scratch = HostRegion(4096)
        for memory in (self.arena, self.fill, self.scratch):
            memory.bytes.fill_(CANARY)
            self.transport.register(memory.region)
        self._to_bootstrap = to_bootstrap
        self._context = zmq.Context()
        self._pull = self._context.socket(zmq.PULL)
        port = self._pull.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = Endpoint("127.0.0.1", port)
        self.serve: Endpoint | None = None  # what a Hello has said
        self._pushes: dict[Endpoint, zmq.Socket[bytes]] = {}
        self.lane = RemoteLane(self.session, self.endpoint, self.send, PATIENCE_S)
        self.inbox: queue.Queue[Message] = queue.Queue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def registration(self, epoch: int = 1) -> Registration:
        return Registration(
            version=VERSION,
            session=self.session,
            epoch=epoch,
            fingerprint="",
            layers=LAYERS,
            kv_row_bytes=HEADS * DIM * 4,
            mask=0,
            mask_rows=0,
            mask_width=0,
            metadata=[],
            metadata_row_bytes=0,
            arena=self.arena.region.address,
            arena_bytes=ARENA_BYTES,
            fill=self.fill.region.address,
            fill_bytes=FILL_BYTES,
            scratch=self.scratch.region.address,
            tp_size=1,
        )

    def send(self, _: Endpoint, message: Message) -> None:
        if self.serve is None:
            received = from_frames(to_frames(message))
            assert isinstance(received, Fetch | Grant | Release)
            self._to_bootstrap(received)
            return
        if self.serve not in self._pushes:
            end = self._pushes[self.serve] = self._context.socket(zmq.PUSH)
            end.connect(f"tcp://{self.serve.host}:{self.serve.port}")
        self._pushes[self.serve].send_multipart(to_frames(message))

    def hear(self, message: Message) -> None:
        if isinstance(message, FetchDone):
            self.lane.answered(message)
        self.inbox.put(message)

    def _listen(self) -> None:
        while not self._closing.is_set():
            if self._pull.poll(100):
                self.hear(from_frames(self._pull.recv_multipart()))

    def fetch(self, *asks: Ask, layer: int = 2) -> dict[int, str]:
        return self.lane.wait(self.lane.ask(layer, list(asks)))

    def grant(self, room: int, length: int, offset: int = 0, *, paced: bool = False) -> None:
        items = [GrantItem(room, 1, offset, length)]
        self.send(P_BOOTSTRAP, Grant(self.session, self.endpoint, paced, items))

    def release(self, room: int) -> None:
        self.send(P_BOOTSTRAP, Release(room, 1, self.session, self.endpoint))

    def heard(self) -> Message:
        return self.inbox.get(timeout=PATIENCE_S)

    def heard_filled(self) -> Filled:
        """The next Filled; every FetchDone before it is of no interest."""
        while not isinstance(message := self.heard(), Filled):
            assert isinstance(message, FetchDone)
        return message

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._context.destroy(linger=0)
        self.transport.close()


class ServeBench:
    """The store with the rooms that a test puts into it, and whoever serves it."""

    def __init__(self, as_process: bool) -> None:
        geometry = KVGeometry(LAYERS, HEADS, DIM, torch.float32)
        selector = ExactSelector(KVShape(LAYERS, HEADS, HEADS, DIM, 1.0))
        self.store = PrefillStore(geometry, selector, 1 << 20)
        self.p = SocketTransport("127.0.0.1", TOKEN)
        self.d = DecodeNode(lambda message: self.server.submit(message))
        self.peers: dict[str, Peer] = {}
        self.doubted: set[tuple[int, int]] = set()
        self.held: list[bool] = []  # of the Releases that a process has settled
        self.moves = 0
        self.busy = False
        self.kv: dict[int, torch.Tensor] = {}
        self._made = torch.Generator().manual_seed(1)
        spec = TransportSpec("socket", "127.0.0.1", token=TOKEN)
        self.server = StoreServer(
            self.p,
            self.store,
            process=spec if as_process else None,
            peer_of=self.peers.get,
            reply=lambda _, message: self.d.hear(from_frames(to_frames(message))),
            settle=self._settled,
            released=self._released,
            doubt=lambda room, generation: self.doubted.add((room, generation)),
            moved=self._moved,
            timeout_s=2.0,
            busy=lambda: self.busy,
        )
        self.d.serve = self.server.endpoint
        self.register()

    def register(self, epoch: int = 1) -> None:
        registration = self.d.registration(epoch)
        self.peers[self.d.session] = Peer(registration, [], [])
        self.server.add_peer(registration)

    def entry(self, room: int, tokens: int = TOKENS) -> StoreEntry:
        """A complete entry whose layers 0 and 1 have been pushed."""
        entry = self.store.open(room, 1, tokens)
        assert entry is not None
        self.kv[room] = torch.randn(entry.kv.shape, generator=self._made)
        entry.kv.copy_(self.kv[room])
        entry.captured[:] = [tokens] * LAYERS
        for layer in range(DENSE_LAYERS):
            entry.residual.mark_tokens(layer, torch.arange(tokens))
        entry.residual.set_order(torch.arange(LAYERS * tokens).flip(0))
        return entry

    def open(self, room: int) -> None:
        """A room that is served."""
        self.server.hand_over(self.entry(room))

    def wanted(self, *asks: Ask, layer: int = 2) -> torch.Tensor:
        """The arena after these asks: head after head, K and V of an entry side by side."""
        arena = torch.full_like(self.d.arena.bytes, CANARY)
        for ask in asks:
            kv = self.kv[ask.room][layer]
            rows = [kv[:, p, head].transpose(0, 1) for head, p in enumerate(ask.positions)]
            packed = torch.cat(rows).contiguous().view(torch.uint8).flatten()
            arena[ask.arena_offset : ask.arena_offset + len(packed)] = packed
        return arena

    def wipe(self) -> None:
        for memory in (self.d.arena, self.d.fill):
            memory.bytes.fill_(CANARY)

    def freed(self) -> None:
        """The whole store is free, within a patient while."""
        deadline = time.monotonic() + PATIENCE_S
        while self.store.used_bytes:
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def close(self) -> None:
        self.server.close()
        self.d.close()
        self.p.close()

    # What the prefill side does -------------------------------------------------------------

    def _settled(self, release: Release) -> bool:
        key = (release.room, release.generation)
        if key in self.doubted:
            r = self.peers[release.session].registration
            assert self.server.fence(r.session, r.scratch, PATIENCE_S)
            self.doubted.discard(key)
        return True

    def _released(self, release: Release, held: bool) -> None:
        self.held.append(held)
        self.server.drop(release.room, release.generation)
        if self._settled(release):
            self.d.hear(Released(release.room, release.generation))

    def _moved(self) -> None:
        self.moves += 1
        self.d.serve = self.server.endpoint
        self.d.lane.lost(P_BOOTSTRAP, "the store server has ended")


def ask(room: int, *heads: list[int], offset: int = 0) -> Ask:
    """Positions of each KV head into the arena from `offset` on."""
    positions = [torch.tensor(head, dtype=torch.int64) for head in heads or ([3, 1], [2])]
    return Ask(room, 1, P_BOOTSTRAP, offset, positions)
