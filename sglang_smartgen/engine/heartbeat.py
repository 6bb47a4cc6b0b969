"""D's heartbeat: it names the open rooms to every P, and looks whether that P still exists.

Owner: one `Heartbeat` a decode rank, with one thread once `start` was called. It only reads the
rooms; what it finds it posts, and the scheduler thread takes it in. A thread of its own, because a
decode step may wait for a fetch as long as the fetch's deadline, and that must not end a lease.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from sglang_smartgen.engine.decode_rooms import DecodeRooms, PeerEnded
from sglang_smartgen.engine.prefill_peers import PrefillPeers
from sglang_smartgen.transfer.messages import ALIVE_ROOMS, Alive, Endpoint, Message
from sglang_smartgen.transfer.reachable import refuses_connections

logger = logging.getLogger(__name__)

BEAT_S = 2.0
"""P's lease is many times longer, so that lost messages and stalls of seconds do no harm."""


class Heartbeat:
    """Keeps P's leases alive for as long as this process and its rooms are."""

    def __init__(
        self,
        rooms: DecodeRooms,
        peers: PrefillPeers,
        *,
        session: str,
        epoch: int,
        send: Callable[[Endpoint, Message], None],
        lost: Callable[[Endpoint, str], None],
    ) -> None:
        """send: to P itself, not to the server of its store. lost: that P answers nothing more."""
        self._rooms = rooms
        self._peers = peers
        self._session = session
        self._epoch = epoch
        self._send = send
        self._lost = lost

    def start(self) -> None:
        """Beat until the process ends."""
        threading.Thread(target=self._run, name="smartgen-heartbeat", daemon=True).start()

    def beat(self) -> None:
        """Once: see the top of this module."""
        for peer, (open_rooms, newest) in self._rooms.by_peer().items():
            if refuses_connections(peer):
                self._lost(peer, "the prefill node ended")
                self._rooms.post(PeerEnded(peer, newest))
            elif self._peers.is_smart(peer):
                self._name(peer, open_rooms)

    def _name(self, peer: Endpoint, rooms: list[tuple[int, int]]) -> None:
        for start in range(0, len(rooms), ALIVE_ROOMS):
            part = rooms[start : start + ALIVE_ROOMS]
            try:
                self._send(peer, Alive(self._session, self._epoch, part))
            except Exception as error:
                logger.debug("heartbeat to %s:%s: %s", peer.host, peer.port, error)

    def _run(self) -> None:
        while True:
            time.sleep(BEAT_S)
            try:
                self.beat()
            except Exception:
                logger.exception("SmartGen: a heartbeat failed")
