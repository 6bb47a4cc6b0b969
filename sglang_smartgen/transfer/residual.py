"""What of one room's prompt is not on D yet, in the order in which it should go there.

The unit of the order is one token of one layer (blocks are runs of them); the unit of the
bookkeeping is the entry, since a fetch takes single entries. So nothing that a fetch has brought is
sent again, and what is left of a token may be fewer KV heads than it has.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from torch import Tensor

from sglang_smartgen.core.geometry import KVGeometry
from sglang_smartgen.transfer.entries import Entries, mark_entries


class Portion(msgspec.Struct):
    """A piece of the residual, layers ascending.

    tokens: int64 [t], codes `layer * prompt_len + token` of tokens of which every KV head goes.
    entries: int64 [e], codes `(layer * prompt_len + token) * kv_heads + head` of single entries.
    """

    tokens: Tensor
    entries: Tensor

    def count(self, kv_heads: int) -> int:
        """Entries in the portion."""
        return self.tokens.numel() * kv_heads + self.entries.numel()


class Residual:
    """Entries that are still to be sent. One thread takes; marking may come from another."""

    def __init__(self, geometry: KVGeometry, prompt_len: int) -> None:
        self._heads = geometry.kv_heads
        self._prompt_len = prompt_len
        self._sent = torch.zeros(geometry.layers * prompt_len, self._heads, dtype=torch.bool)
        self._order = torch.empty(0, dtype=torch.int64)
        self._next = 0

    def mark_tokens(self, layer: int, tokens: Tensor) -> None:
        """These tokens of a layer are on D, all KV heads; int64 [n]."""
        self._sent[layer * self._prompt_len + tokens] = True

    def mark_entries(self, layer: int, entries: Entries) -> None:
        """These entries of a layer are on D; not checked, see StoreEntry.gather."""
        first = layer * self._prompt_len
        mark_entries(self._sent.numpy(), first, entries.positions, entries.bounds)

    def set_order(self, codes: Tensor) -> None:
        """Order of what is to be sent: int64 [n] codes `layer * prompt_len + token`, best first.

        What is not named is appended in ascending order, so that the residual always ends empty.
        """
        named = torch.zeros(self._sent.shape[0], dtype=torch.bool)
        named[codes] = True
        order = torch.cat((codes, (~named).nonzero().flatten()))
        self._order = order[~self._sent[order].all(1)]
        self._next = 0

    def packed(self) -> tuple[bytes, bytes]:
        """What another process needs to go on from here: `restored` takes it."""
        sent = np.packbits(self._sent.numpy()).tobytes()
        return sent, self._order[self._next :].to(torch.int32).numpy().tobytes()

    @classmethod
    def restored(cls, geometry: KVGeometry, prompt_len: int, sent: bytes, order: bytes) -> Residual:
        """The residual that `packed` described, of the same prompt."""
        self = cls(geometry, prompt_len)
        wanted = self._sent.numel()
        bits = np.unpackbits(np.frombuffer(sent, dtype=np.uint8), count=wanted)
        self._sent = torch.from_numpy(bits.astype(np.bool_)).view(self._sent.shape)
        self._order = torch.from_numpy(np.frombuffer(order, dtype=np.int32).astype(np.int64))
        return self

    @property
    def left(self) -> int:
        """Entries that have not been sent."""
        return self._sent.numel() - int(np.count_nonzero(self._sent.numpy()))

    def take(self, entries: int) -> Portion | None:
        """Up to `entries` entries (at least a token) from the front; None when nothing is left.

        They count as sent from here on: a caller that cannot send them has lost the room anyway.
        """
        tokens = max(1, entries // self._heads)
        while self._next < self._order.numel():
            codes = self._order[self._next : self._next + tokens].sort().values
            self._next += codes.numel()
            missing = ~self._sent[codes]
            whole = missing.all(1)
            partly = codes[~whole][:, None] * self._heads + torch.arange(self._heads)
            singles = partly[missing[~whole]]
            if bool(whole.any()) or singles.numel():
                self._sent[codes] = True
                return Portion(codes[whole], singles)
        return None
