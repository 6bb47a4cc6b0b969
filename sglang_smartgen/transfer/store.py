"""Prefill's host store: a copy of each SmartGen room's KV that outlives the GPU copy.

One mapping of `budget_bytes`, which a server process can map too, holds every entry. An entry is
laid out `[layers, 2, tokens, kv_heads, head_dim]`, so that a token range of K or of V in a layer is
contiguous for a push and a token's row is contiguous for a fetch; the selector's metadata follows
as `[sparse_layers, tokens, kv_heads, width]`, and D's mask as the push has made it, `[layers,
tokens]` bytes. The scheduler thread opens and fills entries, the
push and fetch threads read them, and the last of them to let go frees the range (reference count
under the store's lock).
"""

from __future__ import annotations

import threading
from typing import ClassVar

import torch
from torch import Tensor

from sglang_smartgen.core.checksums import layer_checksums
from sglang_smartgen.core.geometry import KVGeometry
from sglang_smartgen.core.mask import REMOTE
from sglang_smartgen.core.ranges import RangeAllocator
from sglang_smartgen.select.base import Selector
from sglang_smartgen.transfer.entries import Entries, gather_entries, words
from sglang_smartgen.transfer.region import SharedRegion
from sglang_smartgen.transfer.residual import Portion, Residual
from sglang_smartgen.transfer.spans import Tokens, spans_for_slots
from sglang_smartgen.transfer.transport import Region, Span


class StoreEntry:
    """KV and metadata of one room and generation, filled layer by layer and range by range."""

    def __init__(
        self,
        room: int,
        generation: int,
        prompt_len: int,
        kv: Tensor,
        metadata: Tensor,
        mask: Tensor,
        sparse_layers: tuple[int, ...],
        residual: Residual,
    ) -> None:
        self.room = room
        self.generation = generation
        self.prompt_len = prompt_len
        self.kv = kv
        self.metadata = metadata
        self.mask = mask
        self.sparse_layers = sparse_layers
        self.residual = residual
        self.captured = [0] * kv.shape[0]
        self.encoded = [0] * metadata.shape[0]
        # Tokens from the start whose metadata was written by whoever captured them.
        self.encoded_before = [0] * metadata.shape[0]

    def capture(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor, stop: int) -> bool:
        """Copy tokens `[captured, stop)` of a layer from the pool; True when there were any.

        slots: int64 [>= stop] pool slot of every token of the prompt so far. keys, values: the
        layer's pool buffers [pool_slots, kv_heads, head_dim]. What a radix hit or an earlier chunk
        left out is simply the start of the range.
        """
        start = self.captured[layer]
        if start >= stop:
            return False
        wanted = slots[start:stop]
        for side, pool in enumerate((keys, values)):
            torch.index_select(pool, 0, wanted, out=self.own(layer, side, start, stop))
        self.captured[layer] = stop
        return True

    def own(self, layer: int, side: int, start: int, stop: int) -> Tensor:
        """Where K (side 0) or V (1) of these tokens of a layer is kept, [n, kv_heads, head_dim]."""
        return self.kv[layer, side, start:stop]

    def rows(self, layer: int, side: int, start: int, stop: int) -> Tensor:
        """K (side 0) or V (1) of these tokens of a layer, to read: [n, kv_heads, head_dim]."""
        return self.kv[layer, side, start:stop]

    def spans(
        self, layer: int, side: int, row_bytes: int, there: int, tokens: Tokens, slots: Tokens
    ) -> list[Span]:
        """What puts K or V of these tokens into their slots; see `spans_for_slots`."""
        source = self.kv[layer, side].data_ptr()
        return spans_for_slots(source, row_bytes, there, tokens, slots)

    def encode(self, layer: int, selector: Selector) -> tuple[int, int]:
        """Encode what is captured of a sparse layer and not yet encoded; the range, maybe empty."""
        if layer not in self.sparse_layers or self.metadata.shape[-1] == 0:
            return (0, 0)
        sparse = self.sparse_layers.index(layer)
        start, stop = self.encoded[sparse], self.captured[layer]
        anchor_len = min(selector.anchor_tokens, self.prompt_len)
        if start >= stop or stop < anchor_len:
            return (stop, stop)
        first = max(start, self.encoded_before[sparse])
        if first < stop:
            anchor = self.rows(layer, 0, 0, anchor_len) if anchor_len else None
            keys = self.rows(layer, 0, first, stop)
            self.metadata[sparse, first:stop] = selector.encode(layer, keys, anchor)
        self.encoded[sparse] = stop
        return (start, stop)

    def checksums(self) -> bytes:
        """uint32 [layers, stretches] of the whole prompt (core/checksums.py)."""
        whole = [
            [self.rows(layer, side, 0, self.prompt_len) for side in (0, 1)]
            for layer in range(len(self.captured))
        ]
        return b"".join(layer_checksums(*sides).tobytes() for sides in whole)

    def gather(self, layer: int, wanted: Entries, out: Tensor) -> None:
        """Copy entries of a layer to `out` [n, 2, head_dim], K and V side by side.

        Not checked here: each position is in `[0, prompt_len)`, and the KV heads are the model's.
        """
        gather_entries(words(self.kv[layer]), wanted.positions, wanted.bounds, words(out))

    def gather_portion(self, portion: Portion, out: Tensor) -> None:
        """Copy a portion of the residual to the bytes `out`: K of its tokens, V, then entries.

        out: uint8 of exactly the portion's size; the layout is that of `messages.Filled`.
        """
        layers, _, length, heads, dim = self.kv.shape
        rows = self.kv.view(layers * 2 * length, heads * dim)
        typed = out.view(self.kv.dtype)
        count = portion.tokens.numel()
        # Code layer * length + token is row (layer * 2 + side) * length + token of `rows`.
        first = portion.tokens + portion.tokens // length * length
        whole = typed[: 2 * count * heads * dim].view(2, count, heads * dim)
        torch.index_select(rows, 0, first, out=whole[0])
        torch.index_select(rows, 0, first + length, out=whole[1])
        token = portion.entries // heads
        single = (token + token // length * length) * heads + portion.entries % heads
        flat = self.kv.view(-1, dim)
        rest = typed[2 * count * heads * dim :].view(-1, 2, dim)
        rest[:, 0] = flat.index_select(0, single)
        rest[:, 1] = flat.index_select(0, single + length * heads)


class EntryTable:
    """Entries by (room, generation), each kept while somebody uses it."""

    def __init__(self, geometry: KVGeometry) -> None:
        self.geometry = geometry
        self._entries: dict[tuple[int, int], StoreEntry] = {}
        self._users: dict[tuple[int, int], int] = {}
        self._dropped: set[tuple[int, int]] = set()
        self._lock = threading.Lock()

    @property
    def rooms(self) -> int:
        """Number of entries that are held."""
        with self._lock:
            return len(self._entries)

    def acquire(self, room: int, generation: int) -> StoreEntry | None:
        """The entry, kept from being freed until `release`; None when there is none (any more)."""
        key = (room, generation)
        with self._lock:
            if key not in self._entries or key in self._dropped:
                return None
            self._users[key] += 1
            return self._entries[key]

    def release(self, entry: StoreEntry) -> None:
        """Let go of an acquired entry."""
        key = (entry.room, entry.generation)
        with self._lock:
            self._users[key] -= 1
            self._free_if_unused(key)

    def drop(self, room: int, generation: int) -> None:
        """Forget an entry; its bytes are freed when the last reader lets go. Unknown: no effect."""
        key = (room, generation)
        with self._lock:
            if key in self._entries:
                self._dropped.add(key)
                self._free_if_unused(key)

    def _free_if_unused(self, key: tuple[int, int]) -> None:
        if key in self._dropped and self._users[key] == 0:
            entry = self._entries.pop(key)
            self._dropped.discard(key)
            del self._users[key]
            self._freed(entry)

    def _freed(self, entry: StoreEntry) -> None:
        """Nobody uses the dropped entry any more; called under the lock."""
        raise NotImplementedError


class PrefillStore(EntryTable):
    """The table that owns the memory: entries within a byte budget."""

    entry_type: ClassVar[type[StoreEntry]] = StoreEntry

    def __init__(self, geometry: KVGeometry, selector: Selector, budget_bytes: int) -> None:
        super().__init__(geometry)
        self.selector = selector
        self.memory = SharedRegion(budget_bytes)
        self._ranges = RangeAllocator(budget_bytes)

    @property
    def region(self) -> Region:
        """The whole store, for registration with a transport that needs it."""
        return self.memory.region

    @property
    def used_bytes(self) -> int:
        """Bytes held by entries, dropped ones that are still being read included."""
        with self._lock:
            return self._ranges.used

    def entry_bytes(self, prompt_len: int) -> int:
        """Bytes that a prompt of `prompt_len` tokens takes."""
        mask_bytes = self.geometry.layers
        return prompt_len * (self.geometry.token_bytes + self._metadata_bytes() + mask_bytes)

    def _metadata_bytes(self) -> int:
        per_head = self.selector.metadata_width * self.selector.metadata_dtype.itemsize
        return len(self.geometry.sparse_layers) * self.geometry.kv_heads * per_head

    def open(
        self, room: int, generation: int, prompt_len: int, users: int = 0
    ) -> StoreEntry | None:
        """A new entry, or None when the budget does not allow it (the room then goes stock).

        It is acquired for `users` from the start: a `drop` may follow at once on another thread.
        """
        g = self.geometry
        length = self.entry_bytes(prompt_len)
        with self._lock:
            if (room, generation) in self._entries:
                return None
            start = self._ranges.allocate(length)
            if start is None:
                return None
            entry = self.entry_type(
                room,
                generation,
                prompt_len,
                *self._layout(start, prompt_len, prompt_len),
                g.sparse_layers,
                Residual(g, prompt_len),
            )
            self._entries[room, generation] = entry
            self._users[room, generation] = users
            return entry

    def _layout(self, start: int, prompt_len: int, own: int) -> tuple[Tensor, Tensor, Tensor]:
        """KV of `own` tokens, metadata and mask of an entry that begins at byte `start`."""
        g = self.geometry
        kv = self.memory.tensor(start, (g.layers, 2, own, g.kv_heads, g.head_dim), g.dtype)
        at = start + own * g.token_bytes
        metadata = self.memory.tensor(
            at,
            (len(g.sparse_layers), prompt_len, g.kv_heads, self.selector.metadata_width),
            self.selector.metadata_dtype,
        )
        at += prompt_len * self._metadata_bytes()
        mask = self.memory.tensor(at, (g.layers, prompt_len), torch.uint8)
        mask.fill_(REMOTE)
        return kv, metadata, mask

    def offset(self, entry: StoreEntry) -> int:
        """Byte of the store where an entry begins."""
        return entry.kv.data_ptr() - self.memory.region.address

    def _bytes_of(self, entry: StoreEntry) -> int:
        """Bytes that an entry holds."""
        return self.entry_bytes(entry.prompt_len)

    def _freed(self, entry: StoreEntry) -> None:
        self._ranges.free(self.offset(entry), self._bytes_of(entry))
