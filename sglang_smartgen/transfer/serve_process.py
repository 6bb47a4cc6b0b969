"""The store's server as a process of its own.

It runs as `python -P -m sglang_smartgen.transfer.serve_process`, maps the prefill store of the
scheduler process that started it, has a transport and bounce buffers of its own, and serves fetches
and speculative fill with the same `FetchServers` as the thread does. It knows no model and imports
no SGLang.

Threads: the main thread alone receives, D's messages from a ZMQ PULL socket and the scheduler
process's from the channel. It empties the channel after it has taken a message of D and before it
hands it to the serve thread, so what the scheduler process said before D could know of it counts.
The serve thread answers D and, with the threads of the fences, tells the scheduler process what is
over.

A Release is settled here first (nothing of this process can land any more, the entry is let go) and
then by the scheduler process, which answers D. It ends when its parent does: by the kernel's signal
for that, and when the channel is closed.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
import zmq

from sglang_smartgen.core.counts import counts
from sglang_smartgen.core.geometry import KVGeometry
from sglang_smartgen.transfer.fences import Fencer
from sglang_smartgen.transfer.fetch_servers import FetchServers
from sglang_smartgen.transfer.limited_log import LimitedLog
from sglang_smartgen.transfer.messages import (
    Endpoint,
    Fetch,
    Grant,
    Message,
    MessageError,
    Release,
    from_frames,
    to_frames,
)
from sglang_smartgen.transfer.push_room import Peer
from sglang_smartgen.transfer.rails.introduce import introduce
from sglang_smartgen.transfer.rails.transport import RailsTransport
from sglang_smartgen.transfer.region import SharedRegion
from sglang_smartgen.transfer.residual import Residual
from sglang_smartgen.transfer.seal import Sealer, sealer_from_env
from sglang_smartgen.transfer.serve_channel import (
    STATUS_BYTES,
    AddPeer,
    Beat,
    Channel,
    ChannelClosed,
    Drop,
    Forward,
    Gone,
    Refused,
    Serving,
    Settled,
    Setup,
    Take,
    ToScheduler,
    ToServer,
    TransportSpec,
)
from sglang_smartgen.transfer.store import EntryTable, StoreEntry
from sglang_smartgen.transfer.transport import Transport, TransportError

logger = logging.getLogger(__name__)

BEAT_S = 1.0
FENCE_TIMEOUT_S = 30.0
SWITCH_INTERVAL_S = 0.0005  # as in the scheduler: Python's default of 5 ms is a whole fetch
MESSAGES_A_TURN = 64
UNUSED_S = 600.0  # after it the socket to a decode node is closed
PR_SET_PDEATHSIG = 1


class ServedTable(EntryTable):
    """The entries that this process serves, in memory that the scheduler process owns."""

    def __init__(
        self, geometry: KVGeometry, memory: SharedRegion, gone: Callable[[int, int], None]
    ) -> None:
        super().__init__(geometry)
        self._memory = memory
        self._gone = gone
        self.let_go: set[tuple[int, int]] = set()  # dropped, and nobody was told so yet

    def take(self, message: Take) -> None:
        """Serve an entry from now on."""
        g, length = self.geometry, message.prompt_len
        shape = (g.layers, 2, length, g.kv_heads, g.head_dim)
        entry = StoreEntry(
            message.room,
            message.generation,
            length,
            self._memory.tensor(message.offset, shape, g.dtype),
            torch.empty((0, length, g.kv_heads, 0), dtype=g.dtype),  # D has its metadata
            torch.empty((0, length), dtype=torch.uint8),  # nothing is pushed from here
            g.sparse_layers,
            Residual.restored(g, length, message.sent, message.order),
        )
        entry.captured = [length] * g.layers
        with self._lock:
            self._entries[message.room, message.generation] = entry
            self._users[message.room, message.generation] = 0

    def drop(self, room: int, generation: int) -> None:
        """See EntryTable.drop."""
        with self._lock:
            if (room, generation) in self._entries:
                self.let_go.add((room, generation))
        super().drop(room, generation)

    def _freed(self, entry: StoreEntry) -> None:
        self._gone(entry.room, entry.generation)


class Replies:
    """Sockets to the decode nodes; the serve threads share them.

    A node that does not read loses messages instead of stopping the others; its fetches have a
    deadline.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], sealer: Sealer | None = None
    ) -> None:
        self._context = context
        self._sealer = sealer
        self._sockets: dict[Endpoint, tuple[zmq.Socket[bytes], float]] = {}
        self._lock = threading.Lock()  # a socket is not for two threads at a time

    def send(self, endpoint: Endpoint, message: Message) -> None:
        """Queue a message for a decode node."""
        now = time.monotonic()
        frames = to_frames(message, self._sealer, endpoint)
        with self._lock:
            known = self._sockets.get(endpoint)
            end = self._connect(endpoint, now) if known is None else known[0]
            self._sockets[endpoint] = (end, now)
            try:
                end.send_multipart(frames, zmq.DONTWAIT)
            except zmq.Again:
                logger.warning("%s does not read; a message for it is lost", address(endpoint))

    def _connect(self, endpoint: Endpoint, now: float) -> zmq.Socket[bytes]:
        for other, (end, used) in list(self._sockets.items()):
            if now - used > UNUSED_S:
                end.close(linger=0)
                del self._sockets[other]
        end = self._context.socket(zmq.PUSH)
        end.setsockopt(zmq.LINGER, 0)
        end.setsockopt(zmq.IPV6, ":" in endpoint.host)
        end.connect(address(endpoint))
        return end


class ServeLoop:
    """What the process consists of."""

    def __init__(self, setup: Setup, channel: Channel) -> None:
        """Raises TransportError or OSError with what is missing."""
        self._channel = channel
        self._sealer = sealer_from_env()
        self._refused = LimitedLog(logger)
        geometry = KVGeometry(
            setup.layers,
            setup.kv_heads,
            setup.head_dim,
            getattr(torch, setup.dtype),
            frozenset(setup.sliding_layers),
        )
        self._peers: dict[str, Peer] = {}
        self._doubtful: set[tuple[int, int]] = set()
        status = SharedRegion(STATUS_BYTES, setup.status_fd).view()
        memory = SharedRegion(setup.store_bytes, setup.store_fd)
        self._table = ServedTable(geometry, memory, lambda r, g: channel.send(Gone(r, g)))
        self._transport = make_transport(setup.transport)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbound = context.socket(zmq.PULL)
        self._inbound.setsockopt(zmq.IPV6, ":" in setup.transport.host)
        host = setup.transport.host
        self._inbound.bind(address(Endpoint(host, 0)))
        bound = self._inbound.getsockopt_string(zmq.LAST_ENDPOINT)
        self.endpoint = Endpoint(host, int(bound.rpartition(":")[2]))
        self._server = FetchServers(
            self._transport,
            self._table,
            peer_of=self._peers.get,
            reply=Replies(context, self._sealer).send,
            settle=self._settled,
            doubt=lambda room, generation: self._doubtful.add((room, generation)),
            timeout_s=setup.timeout_s,
            busy=lambda: bool(status[0]),
        )
        self._waiting: dict[tuple[int, int], Release] = {}  # for a fence
        self._fencer = Fencer(self._fence, self._fenced)
        self._beaten = time.monotonic()

    def run(self) -> None:
        """Serve until the channel is closed, which raises ChannelClosed."""
        poller = zmq.Poller()
        poller.register(self._inbound, zmq.POLLIN)
        poller.register(self._channel.fileno(), zmq.POLLIN)
        while True:
            due = self._beaten + BEAT_S - time.monotonic()
            poller.poll(max(1, int(1000 * due)))
            messages = self._from_decode()
            for order in self._channel.receive(0):
                self._obey(order)
            for message in messages:
                self._server.submit(message)
            if time.monotonic() >= self._beaten + BEAT_S:
                self._beat()

    def _from_decode(self) -> list[Fetch | Grant | Release]:
        messages: list[Fetch | Grant | Release] = []
        while len(messages) < MESSAGES_A_TURN:
            try:
                frames = self._inbound.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            try:
                message = from_frames(frames, self._sealer, self.endpoint)
                if not isinstance(message, Fetch | Grant | Release):
                    raise MessageError(f"{type(message).__name__} is not for a store server")
                messages.append(message)
            except MessageError as error:
                self._refused.warning("ignored a message: %s", error)
        return messages

    def _obey(self, order: ToServer | ToScheduler) -> None:
        match order:
            case Take():
                self._table.take(order)
            case Drop(room=room, generation=generation):
                self._table.drop(room, generation)
            case AddPeer(registration=registration):
                introduce(self._transport, registration)
                self._peers[registration.session] = Peer(registration, [], [])
            case Forward(message=message):
                self._server.submit(message)
            case _:
                logger.warning("unexpected %s", type(order).__name__)

    def _beat(self) -> None:
        self._beaten = time.monotonic()
        self._channel.send(self._counters())

    def _counters(self) -> Beat:
        s = self._server
        return Beat(
            s.fetches,
            s.bytes_on_demand,
            s.bytes_speculative,
            s.slices,
            counts.descriptors,
            counts.post_s,
            self._transport.snapshot() if isinstance(self._transport, RailsTransport) else [],
        )

    # Serve and fence threads ----------------------------------------------------------------

    def _settled(self, release: Release) -> bool:
        """Never True: the scheduler process answers D, once it has settled its part too."""
        # First the counters, so that they are right whenever a request has ended.
        self._channel.send(self._counters())
        key = (release.room, release.generation)
        if key in self._doubtful:
            self._waiting[key] = release
            self._fencer.submit(release.session, key)
        else:
            self._tell(release)
        return False

    def _fence(self, session: str) -> bool:
        peer = self._peers.get(session)
        if peer is None:
            return True
        return self._server.fence(session, peer.registration.scratch, FENCE_TIMEOUT_S)

    def _fenced(self, key: tuple[int, int], sure: bool) -> None:
        release = self._waiting.pop(key, None)
        if sure and release is not None:  # else it is asked again
            self._doubtful.discard(key)
            self._tell(release)

    def _tell(self, release: Release) -> None:
        key = (release.room, release.generation)
        held = key in self._table.let_go
        self._table.let_go.discard(key)
        self._channel.send(Settled(release, held))


def address(endpoint: Endpoint) -> str:
    """ZMQ's name of an endpoint."""
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    return f"tcp://{host}:{endpoint.port}"


def make_transport(spec: TransportSpec) -> Transport:
    """A transport of this process. Raises TransportError."""
    if spec.name == "mooncake":
        from sglang_smartgen.transfer.mooncake import MooncakeTransport

        return MooncakeTransport.create(spec.host, spec.protocol, spec.devices)
    if spec.name == "rails":
        from sglang_smartgen.transfer.rails.make import make_rails

        return make_rails(spec.rails, spec.host, spec.protocol, spec.devices)
    from sglang_smartgen.transfer.socket import SocketTransport

    return SocketTransport(spec.host, spec.token)


def end_with_parent(parent: int) -> None:
    """Be killed when the thread that started this process ends; exit if it has already."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def use_all_cores() -> None:
    """Leave the core that SGLang pinned the scheduler to; the kernel keeps to our cpuset."""
    cores = range(os.sysconf("SC_NPROCESSORS_CONF"))
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            os.sched_setaffinity(int(task.name), cores)


def main() -> int:
    """Serve what the first message on the channel names, until the channel is closed."""
    parser = argparse.ArgumentParser(description="the store server of a SmartGen prefill node")
    parser.add_argument("--channel-fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    args = parser.parse_args()
    end_with_parent(args.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's; the scheduler process decides
    use_all_cores()
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s store server] %(message)s")
    channel = Channel(socket.socket(fileno=args.channel_fd))
    try:
        return _serve(channel)
    except ChannelClosed as error:
        logger.info("SmartGen: the store server ends: %s", error)
        return 0


def _serve(channel: Channel) -> int:
    received: list[ToServer | ToScheduler] = []
    while not received:
        received = channel.receive(BEAT_S)
    setup = received[0]
    assert isinstance(setup, Setup) and len(received) == 1
    try:
        server = ServeLoop(setup, channel)
    except (TransportError, OSError, ValueError, zmq.ZMQError) as error:
        channel.send(Refused(str(error)))
        return 1
    channel.send(Serving(server.endpoint))
    server.run()
    return 0


if __name__ == "__main__":
    code = main()
    # Threads of the transport may be in a write that nobody can cancel.
    os._exit(code)
