"""What D holds back until P has promised that nothing of a generation can land any more.

The scheduler thread puts a room in with the action that frees it, and drains on every turn of its
loop; SGLang's decode thread only marks rooms acknowledged. A room leaves by P's Released, by P's
port refusing connections (its process is gone and writes nothing; a silent P proves nothing), or,
so that nothing is held for ever, `limit_s` after it went in. The last is logged: a P that was cut
off for so long could in theory still write when it comes back.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from sglang_smartgen.core.counts import counts
from sglang_smartgen.transfer.messages import Endpoint

logger = logging.getLogger(__name__)

RESEND_S = 1.0


def refuses_connections(endpoint: Endpoint, timeout_s: float = 0.05) -> bool:
    """True when nothing listens there any more, which only the end of P's process brings about."""
    try:
        with socket.create_connection((endpoint.host, endpoint.port), timeout_s):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False


class Held(msgspec.Struct):
    """One room in quarantine."""

    room: int
    generation: int
    free: Callable[[], None]
    resend: Callable[[], None]
    cannot_write: Callable[[], bool]
    since: float
    last_sent: float
    slots: int = 0
    acknowledged: bool = False


class Quarantine:
    """Rooms whose slots are not yet free for a new owner."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._held: dict[tuple[int, int], Held] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def slots(self) -> int:
        """KV slots that are held back."""
        with self._lock:
            return sum(held.slots for held in self._held.values())

    def hold(
        self,
        room: int,
        generation: int,
        *,
        free: Callable[[], None],
        resend: Callable[[], None],
        cannot_write: Callable[[], bool],
        slots: int = 0,
    ) -> None:
        """Keep the room's `slots`; `resend` sends the Release, `free` runs once at the end."""
        now = time.monotonic()
        held = Held(room, generation, free, resend, cannot_write, now, now, slots)
        with self._lock:
            self._held[room, generation] = held
        resend()

    def acknowledge(self, room: int, generation: int) -> None:
        """P answered Released for this generation; unknown ones are late repeats."""
        with self._lock:
            held = self._held.get((room, generation))
            if held is not None:
                held.acknowledged = True

    def drain(self) -> list[tuple[int, int]]:
        """Free every room that is safe, resend for the others; the (room, generation) freed."""
        freed: list[tuple[int, int]] = []
        now = time.monotonic()
        with self._lock:
            everyone = list(self._held.values())
        for held in everyone:
            late = now - held.since > self._limit_s
            due = now - held.last_sent > RESEND_S
            if held.acknowledged or late or (due and held.cannot_write()):
                if late and not held.acknowledged:
                    counts.unacknowledged += 1
                    logger.warning(
                        "room %s generation %s: prefill did not acknowledge the release within "
                        "%.0f s; freeing its slots",
                        held.room,
                        held.generation,
                        self._limit_s,
                    )
                with self._lock:
                    del self._held[held.room, held.generation]
                held.free()
                freed.append((held.room, held.generation))
            elif due:
                held.last_sent = now
                held.resend()
        return freed
