"""D's landing area for fetched entries: a few slabs, one step uses one, a doubtful one rests.

P writes into a slab until its FetchDone. When that never comes, bytes may still land later, so the
slab is quarantined with the rooms that were asked for, and comes back when each of their releases
is settled. Used by the forward thread alone, except `settled`, which the scheduler thread calls too
(the same thread in SGLang); it is not locked.
"""

from __future__ import annotations

from sglang_smartgen.transfer.region import HostRegion
from sglang_smartgen.transfer.transport import Region

SLABS = 4


class Slab:
    """One landing area at byte `offset` of the region."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.waits_for: set[tuple[int, int]] = set()


class Arena:
    """The registered region and its slabs."""

    def __init__(self, slab_bytes: int) -> None:
        self.memory = HostRegion(SLABS * slab_bytes)
        self._free = [Slab(i * slab_bytes) for i in range(SLABS)]
        self._resting: list[Slab] = []

    @property
    def region(self) -> Region:
        """Address and length of all slabs."""
        return self.memory.region

    @property
    def quarantined(self) -> int:
        """Number of slabs that late bytes may still reach."""
        return len(self._resting)

    def take(self) -> Slab | None:
        """A slab nobody can write to, or None when all are in quarantine."""
        return self._free.pop() if self._free else None

    def give_back(self, slab: Slab) -> None:
        """The slab's fetches are all answered."""
        self._free.append(slab)

    def quarantine(self, slab: Slab, rooms: set[tuple[int, int]]) -> None:
        """Keep the slab until `settled` was called for every (room, generation) in `rooms`."""
        slab.waits_for = set(rooms)
        (self._resting if rooms else self._free).append(slab)

    def settled(self, room: int, generation: int) -> None:
        """No write for this generation can land any more."""
        for slab in list(self._resting):
            slab.waits_for.discard((room, generation))
            if not slab.waits_for:
                self._resting.remove(slab)
                self._free.append(slab)
