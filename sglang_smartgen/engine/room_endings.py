"""When a Release may be answered: no write of its generation is under way, and none can land.

The serve thread asks; what cannot be said at once is settled in the background (settler.py).
"""

from __future__ import annotations

from collections.abc import Callable

from sglang_smartgen.engine.peers import Peers
from sglang_smartgen.engine.prefill_room import PrefillRoom
from sglang_smartgen.transfer.messages import Release
from sglang_smartgen.transfer.settler import Settler

Fence = Callable[[str, int, float], bool]


class RoomEndings:
    """The generations of which a write failed, and the Releases that wait."""

    def __init__(
        self,
        room_of: Callable[[Release], PrefillRoom | None],
        peers: Peers,
        fence: Fence,
        answer: Callable[[Release], None],
        *,
        push_timeout_s: float,
        fence_timeout_s: float,
    ) -> None:
        """room_of: the room of a Release while it pushes; fence: session, scratch, seconds."""
        self._room_of = room_of
        self._peers = peers
        self._fence = fence
        self._push_timeout_s = push_timeout_s
        self._fence_timeout_s = fence_timeout_s
        self._doubtful: set[tuple[int, int]] = set()
        self._settler = Settler(self._settle, answer)

    def doubt(self, room: int, generation: int) -> None:
        """A write for this generation failed: its late bytes must be fenced before a Released."""
        self._doubtful.add((room, generation))

    def settled(self, release: Release) -> bool:
        """True when no write of this generation can land any more; else the settler takes over."""
        room = self._room_of(release)
        key = (release.room, release.generation)
        if (room is None or room.ended.is_set()) and key not in self._doubtful:
            return True
        self._settler.submit(release)
        return False

    def _settle(self, release: Release) -> bool:
        """Wait for the room's last write, and fence when one failed; False at the deadline."""
        room = self._room_of(release)
        if room is not None and not room.ended.wait(self._push_timeout_s):
            return False
        key = (release.room, release.generation)
        peer = self._peers.get(release.session)
        if key in self._doubtful and peer is not None:
            r = peer.registration
            if not self._fence(r.session, r.scratch, self._fence_timeout_s):
                return False
        self._doubtful.discard(key)
        return True
