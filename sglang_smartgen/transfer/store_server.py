"""Who serves the prefill store: this process's serve thread, or a process of its own.

Both are the same `FetchServers`; `store_server` in the configuration chooses. In process mode D
sends its messages to `endpoint`, and what still comes to this process is passed on.

When the process dies, the thread takes its place for good, and `moved` is called so that every D
learns where to send from now on. Nothing is lost with it but the fetches under way, which D fails
when it hears of the move: the bytes are in the store, which this process owns, and so is the
residual as it was when the entry was handed over (speculative bytes that were sent since go out
once more). What the dead process wrote last may still be in the kernel and land a little later, so
a release of a room that it served is answered no sooner than a stalled write could last.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from sglang_smartgen.core.counts import counts
from sglang_smartgen.transfer.fetch_server import Reply
from sglang_smartgen.transfer.fetch_servers import FetchServers
from sglang_smartgen.transfer.messages import Endpoint, Fetch, Grant, Registration, Release
from sglang_smartgen.transfer.mooncake import engine_progress_timeout_s
from sglang_smartgen.transfer.push_room import Peer
from sglang_smartgen.transfer.serve_channel import TransportSpec
from sglang_smartgen.transfer.serve_parent import Key, ServerProcess
from sglang_smartgen.transfer.store import PrefillStore, StoreEntry
from sglang_smartgen.transfer.transport import Transport

logger = logging.getLogger(__name__)

SWAP_S = 5.0


class StoreServer:
    """The server of one prefill rank's store. Any thread may call it."""

    def __init__(
        self,
        transport: Transport,
        store: PrefillStore,
        *,
        process: TransportSpec | None,
        peer_of: Callable[[str], Peer | None],
        reply: Reply,
        settle: Callable[[Release], bool],
        released: Callable[[Release, bool], None],
        doubt: Callable[[int, int], None],
        moved: Callable[[], None],
        timeout_s: float,
        busy: Callable[[], bool],
    ) -> None:
        """Start it, with `process` as a process with that transport. Raises ServeError.

        settle: see FetchServer; released: a Release that the process has settled on its side, and
        whether it has let go of the entry. doubt: a write for this generation may land late.
        """
        self._transport = transport
        self._store = store
        self._released = released
        self._doubt = doubt
        self._moved = moved
        self._serving: set[Key] = set()  # what the process may write for
        self._quiet_at = 0.0  # when nothing of a dead process can land any more
        self._swapped = threading.Event()
        self._process: ServerProcess | None = None
        self._thread: FetchServers | None = None

        def serve_here() -> FetchServers:
            return FetchServers(transport, store, peer_of, reply, settle, doubt, timeout_s, busy)

        self._serve_here = serve_here
        if process is None:
            self._thread = serve_here()
        else:
            self._process = ServerProcess(
                process, store, timeout_s, settled=self._settled, died=self._on_death
            )

    @property
    def endpoint(self) -> Endpoint | None:
        """Where D is to send Fetch, Grant and Release; None: where it sends everything else."""
        return None if self._thread is not None else self._live().endpoint

    def add_peer(self, registration: Registration) -> None:
        """A decode rank has registered; the thread asks for it when it needs it."""
        if self._thread is None:
            self._live().add_peer(registration)

    def submit(self, message: Fetch | Grant | Release) -> None:
        """A message of D that came to this process."""
        if self._thread is not None:
            self._thread.submit(message)
        else:
            self._live().forward(message)

    def pushing(self, busy: bool) -> None:
        """The push thread has begun or ended to send."""
        if self._process is not None:
            self._process.pushing(busy)

    def hand_over(self, entry: StoreEntry) -> None:
        """The entry is complete, its residual in order: serve it. Call it before D may ask."""
        if self._thread is None:
            self._serving.add((entry.room, entry.generation))
        if self._thread is None and not self._live().hand_over(entry):
            # D must hear of the move before it hears of this room.
            self._swapped.wait(SWAP_S)

    def drop(self, room: int, generation: int) -> None:
        """Drop an entry from the store, and stop serving it."""
        self._store.drop(room, generation)
        if self._process is not None:
            self._process.drop(room, generation)

    def fence(self, session: str, scratch: int, timeout_s: float) -> bool:
        """True when no failed write of the server, past ones included, can land on this peer."""
        deadline = time.monotonic() + timeout_s
        quiet_at = self._quiet_at
        time.sleep(max(0.0, min(quiet_at, deadline) - time.monotonic()))
        if quiet_at >= deadline:
            return False
        left = deadline - time.monotonic()
        if self._thread is not None:
            return self._thread.fence(session, scratch, left)
        return self._transport.fence(session, scratch, left)

    def snapshot(self) -> dict[str, Any]:
        """Counters of both, and which of the two serves; for `/server_info`."""
        served: dict[str, Any] = {
            "fetches": 0,
            "bytes_on_demand": 0,
            "bytes_speculative": 0,
            "slices": 0,
            "descriptors": counts.descriptors,
            "post_s": counts.post_s,
        }
        if self._process is not None:
            for name in served:
                served[name] += getattr(self._process.served, name)
        if self._thread is not None:
            for name in ("fetches", "bytes_on_demand", "bytes_speculative", "slices"):
                served[name] += getattr(self._thread, name)
        where = {"store_server": "thread" if self._thread is not None else "process"}
        if self._process is not None:
            where["store_server_pid"] = str(self._process.pid)
        return {**served, **where}

    def rails(self) -> list[dict[str, Any]]:
        """The rails of the server process, named as such; for `/server_info`."""
        if self._process is None:
            return []
        return [
            {**row, "rail": f"{row['rail']} of the server"} for row in self._process.served.rails
        ]

    def close(self) -> None:
        """End the server; what is queued in the thread is served first."""
        if self._process is not None:
            self._process.close()
        if self._thread is not None:
            self._thread.close()

    def _live(self) -> ServerProcess:
        assert self._process is not None
        return self._process

    # The process's thread -------------------------------------------------------------------

    def _settled(self, release: Release, held: bool) -> None:
        if held:
            self._serving.discard((release.room, release.generation))
        self._released(release, held)

    def _on_death(self, cause: str, lost: list[Key]) -> None:
        logger.error(
            "SmartGen: %s. The serve thread of the scheduler process takes over; fetches under "
            "way fail. It served %d rooms: %s",
            cause,
            len(lost),
            [room for room, _ in lost],
        )
        self._quiet_at = time.monotonic() + engine_progress_timeout_s()
        for key in {*lost, *self._serving}:
            self._doubt(*key)
        self._thread = self._serve_here()
        try:
            self._moved()
        finally:
            self._swapped.set()
