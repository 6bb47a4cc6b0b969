"""When a room of P borrows pages of the hierarchical cache instead of filling its store entry.

Used by the scheduler thread alone. Once, right before the first batch of a room runs: then SGLang
has matched its prompt and has queued what must come back from the host tier. What gets to the host
later, the room's own prompt above all, is not taken over: the entry has its own copy of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from sglang_smartgen.engine.prefill_room import PrefillRoom
from sglang_smartgen.transfer.tiered_store import Pages, TieredStore


class Tier(Protocol):
    """See host_tier.HostTier."""

    def lend(self, node: Any, prefix_len: int) -> Pages | None:
        """The pages of the first tokens of a prefix that ends at `node`."""

    def settle(self) -> None:
        """Take back what is not needed any more."""


class Lending:
    """Brings the rooms of one prefill rank and the host tier together."""

    def __init__(self, tier: Tier, store: TieredStore, rooms: Mapping[int, PrefillRoom]) -> None:
        """rooms: those whose entries may be filled, by room number."""
        self._tier = tier
        self._store = store
        self._rooms = rooms
        self.tokens = 0
        """Tokens of all rooms so far whose KV the store has no copy of."""

    def before_batch(self, number: int | None, node: Any, prefix_len: int) -> None:
        """A request runs next, with `prefix_len` tokens cached, the last of them at `node`."""
        room = self._rooms.get(number) if number is not None else None
        if room is None or room.push is None or not room.scheduler_holds or room.filled:
            return
        if room.began is not None or prefix_len <= 0:
            return
        entry = room.push.entry
        pages = self._tier.lend(node, min(prefix_len, entry.prompt_len - 1))
        if pages is not None:
            self._store.borrow(entry, pages)
            self.tokens += pages.count

    def settle(self) -> None:
        """Give SGLang the pages of entries that are gone."""
        self._tier.settle()

    def snapshot(self) -> dict[str, Any]:
        """State for `/server_info`."""
        return {"tier_tokens": self.tokens, "tier_tokens_now": self._store.borrowed_tokens}
