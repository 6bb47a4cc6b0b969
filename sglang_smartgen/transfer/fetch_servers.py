"""One serve thread a decode session, so that a D that hangs holds up no other's fetches.

Any thread may submit. A session's `FetchServer` is made by its first message and ended when D has
sent nothing for a while; messages of a session that is not registered share one, which refuses
them. Within a session what D asks still goes before speculative fill.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from sglang_smartgen.transfer.fetch_server import FetchServer, Reply, Served
from sglang_smartgen.transfer.messages import Release
from sglang_smartgen.transfer.push_room import Peer
from sglang_smartgen.transfer.store import EntryTable
from sglang_smartgen.transfer.transport import Transport

UNUSED_S = 600.0
STRANGERS = ""


class FetchServers:
    """The serve threads of one store. Arguments and meaning as for FetchServer."""

    def __init__(
        self,
        transport: Transport,
        store: EntryTable,
        peer_of: Callable[[str], Peer | None],
        reply: Reply,
        settle: Callable[[Release], bool],
        doubt: Callable[[int, int], None],
        timeout_s: float,
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._transport = transport
        self._peer_of = peer_of

        def make() -> FetchServer:
            return FetchServer(transport, store, peer_of, reply, settle, doubt, timeout_s, busy)

        self._make = make
        self._servers: dict[str, FetchServer] = {}
        self._used: dict[str, float] = {}
        self._ended = [0, 0, 0, 0]  # counters of the servers that were ended
        self._lock = threading.Lock()

    def submit(self, message: Served) -> None:
        """Queue a message for its session's thread."""
        known = self._peer_of(message.session) is not None
        session = message.session if known else STRANGERS
        now = time.monotonic()
        with self._lock:
            server = self._servers.get(session)
            if server is None:
                self._end_unused(now)
                server = self._servers[session] = self._make()
            self._used[session] = now
            server.submit(message)

    def fence(self, session: str, scratch: int, timeout_s: float) -> bool:
        """See FetchServer.fence."""
        with self._lock:
            server = self._servers.get(session)
        if server is None:
            return self._transport.fence(session, scratch, timeout_s)
        return server.fence(session, scratch, timeout_s)

    @property
    def fetches(self) -> int:
        """Fetch messages served."""
        return self._counts()[0]

    @property
    def bytes_on_demand(self) -> int:
        """Bytes that fetches brought to D."""
        return self._counts()[1]

    @property
    def bytes_speculative(self) -> int:
        """Bytes that the fill brought to D."""
        return self._counts()[2]

    @property
    def slices(self) -> int:
        """Writes of the fill."""
        return self._counts()[3]

    def close(self) -> None:
        """Stop after what is queued."""
        with self._lock:
            servers = list(self._servers.values())
        for server in servers:
            server.close()

    def _counts(self) -> list[int]:
        with self._lock:
            counts = list(self._ended)
            for server in self._servers.values():
                for i, count in enumerate(server.counts):
                    counts[i] += count
            return counts

    def _end_unused(self, now: float) -> None:
        for session, used in list(self._used.items()):
            server = self._servers[session]
            if now - used > UNUSED_S and server.idle(session):
                self._ended = [a + b for a, b in zip(self._ended, server.counts, strict=True)]
                del self._servers[session], self._used[session]
                server.end()
