"""A prefill store that keeps no second copy of what P's hierarchical cache holds in its host tier.

An entry of it may borrow the KV of its first tokens: it reads them from pages of the host tier, a
token a page, and has bytes of its own for the rest only (metadata and mask it has for all). Pages
are borrowed before anything of the entry is captured, and given back when the entry is freed. Who
lends must keep them as they are so long; `Pages.give_back` may be called by any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from sglang_smartgen.transfer.entries import Entries
from sglang_smartgen.transfer.residual import Portion
from sglang_smartgen.transfer.spans import Tokens, spans_for_slots
from sglang_smartgen.transfer.store import PrefillStore, StoreEntry
from sglang_smartgen.transfer.transport import Span


class Pages(msgspec.Struct):
    """Pages of the host tier that hold the first tokens of a prompt.

    memory: [2, layers, pages, kv_heads, head_dim], K and V of the whole tier; of any strides, but a
    page's row in a layer is contiguous. slots: int64 [n], the page of each token, n > 0.
    """

    memory: Tensor
    slots: Tensor
    give_back: Callable[[], None]

    @property
    def count(self) -> int:
        """Tokens that they hold."""
        return self.slots.numel()


class TieredEntry(StoreEntry):
    """A StoreEntry whose first tokens may be in borrowed pages; `kv` holds the others."""

    pages: Pages | None = None

    @property
    def borrowed(self) -> int:
        """How many tokens, from the first on, are in pages of the host tier."""
        return 0 if self.pages is None else self.pages.count

    def own(self, layer: int, side: int, start: int, stop: int) -> Tensor:
        """See StoreEntry; `start` is not below `borrowed`."""
        return super().own(layer, side, start - self.borrowed, stop - self.borrowed)

    def rows(self, layer: int, side: int, start: int, stop: int) -> Tensor:
        """See StoreEntry; a copy, where some are in pages."""
        pages, n = self.pages, self.borrowed
        if pages is None or start >= n:
            return self.own(layer, side, start, stop)
        theirs = pages.memory[side, layer].index_select(0, pages.slots[start : min(stop, n)])
        return theirs if stop <= n else torch.cat((theirs, self.own(layer, side, n, stop)))

    def spans(
        self, layer: int, side: int, row_bytes: int, there: int, tokens: Tokens, slots: Tokens
    ) -> list[Span]:
        """See StoreEntry; tokens ascend."""
        pages = self.pages
        if pages is None:
            return super().spans(layer, side, row_bytes, there, tokens, slots)
        cut = int(np.searchsorted(tokens, pages.count))
        rows = pages.memory[side, layer]
        stride = rows.stride(0) * rows.element_size()
        base, places = rows.data_ptr(), pages.slots.numpy()[tokens[:cut]]
        if stride == row_bytes:
            theirs = spans_for_slots(base, row_bytes, there, places, slots[:cut])
        else:
            pairs = zip(places.tolist(), slots[:cut].tolist(), strict=True)
            theirs = [
                Span(base + page * stride, there + slot * row_bytes, row_bytes)
                for page, slot in pairs
            ]
        own = tokens[cut:] - pages.count
        return theirs + super().spans(layer, side, row_bytes, there, own, slots[cut:])

    def gather(self, layer: int, wanted: Entries, out: Tensor) -> None:
        """See StoreEntry."""
        if self.pages is None:
            super().gather(layer, wanted, out)
            return
        positions = torch.from_numpy(wanted.positions.astype(np.int64))
        layers = torch.full_like(positions, layer)
        heads = torch.arange(len(wanted.bounds) - 1)
        heads = heads.repeat_interleave(torch.from_numpy(np.diff(wanted.bounds)))
        for side in (0, 1):
            self._pick(side, layers, positions, heads, out[:, side])

    def gather_portion(self, portion: Portion, out: Tensor) -> None:
        """See StoreEntry."""
        if self.pages is None:
            super().gather_portion(portion, out)
            return
        heads, dim = self.kv.shape[-2:]
        typed = out.view(self.kv.dtype)
        count = portion.tokens.numel()
        whole = typed[: 2 * count * heads * dim].view(2, count, heads, dim)
        single = portion.entries // heads
        rest = typed[2 * count * heads * dim :].view(-1, 2, dim)
        for side in (0, 1):
            self._pick(side, *self._place(portion.tokens), None, whole[side])
            self._pick(side, *self._place(single), portion.entries % heads, rest[:, side])

    def _place(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Layers and tokens of codes `layer * prompt_len + token`."""
        return codes // self.prompt_len, codes % self.prompt_len

    def _pick(
        self, side: int, layers: Tensor, tokens: Tensor, heads: Tensor | None, out: Tensor
    ) -> None:
        """Copy K or V of these tokens [n] to `out`: all heads of each, or one of each."""
        assert self.pages is not None
        theirs = tokens < self.pages.count
        ours = ~theirs
        places = self.pages.slots[tokens[theirs]]
        mine = tokens[ours] - self.pages.count
        memory, kv = self.pages.memory[side], self.kv[:, side]
        if heads is None:
            out[theirs] = memory[layers[theirs], places]
            out[ours] = kv[layers[ours], mine]
        else:
            out[theirs] = memory[layers[theirs], places, heads[theirs]]
            out[ours] = kv[layers[ours], mine, heads[ours]]


class TieredStore(PrefillStore):
    """A PrefillStore of TieredEntries."""

    entry_type: ClassVar[type[StoreEntry]] = TieredEntry

    @property
    def borrowed_tokens(self) -> int:
        """Tokens of all entries that are in pages of the host tier."""
        with self._lock:
            return sum(_tiered(entry).borrowed for entry in self._entries.values())

    def borrow(self, entry: StoreEntry, pages: Pages) -> None:
        """Let an entry read its first tokens from `pages`, and give back the bytes for them.

        Nothing of it has been captured yet, and of its prompt at least one token is in no page.
        """
        tiered = _tiered(entry)
        assert tiered.pages is None and not any(entry.captured)
        assert 0 < pages.count < entry.prompt_len
        with self._lock:
            start, before = self.offset(entry), self._bytes_of(entry)
            own = entry.prompt_len - pages.count
            entry.kv, entry.metadata, entry.mask = self._layout(start, entry.prompt_len, own)
            tiered.pages = pages
            entry.captured = [pages.count] * len(entry.captured)
            self._ranges.shrink(start, before, self._bytes_of(entry))

    def _bytes_of(self, entry: StoreEntry) -> int:
        borrowed = _tiered(entry).borrowed
        return super()._bytes_of(entry) - borrowed * self.geometry.token_bytes

    def _freed(self, entry: StoreEntry) -> None:
        super()._freed(entry)
        pages = _tiered(entry).pages
        if pages is not None:
            pages.give_back()


def _tiered(entry: StoreEntry) -> TieredEntry:
    assert isinstance(entry, TieredEntry)
    return entry
