"""What a layer has to send, cut into pieces, and the writes that are made of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import torch

from sglang_smartgen.core.mask import LOCAL
from sglang_smartgen.select.base import Selector
from sglang_smartgen.transfer.push_room import PushRoom
from sglang_smartgen.transfer.spans import Tokens, spans_for_slots
from sglang_smartgen.transfer.transport import Span


class Piece(msgspec.Struct, frozen=True):
    """Some tokens of a layer, ascending: their KV, or their metadata.

    optional: decode can begin without it, because a fetch or the fill can bring it.
    """

    layer: int
    tokens: Tokens
    bytes: int
    metadata: bool = False
    optional: bool = False


class Load:
    """What one write carries."""

    def __init__(self) -> None:
        self.data: list[Span] = []
        self.kv: list[Piece] = []
        self.proactive_bytes = 0
        self.metadata_bytes = 0

    @property
    def bytes(self) -> int:
        """Of KV and metadata."""
        return self.proactive_bytes + self.metadata_bytes

    def add(self, room: PushRoom, piece: Piece) -> None:
        """Take a piece in; its KV counts as sent from here on."""
        entry, peer, layer = room.entry, room.peer, piece.layer
        slots = room.slots[piece.tokens]
        if piece.metadata:
            sparse = entry.sparse_layers.index(layer)
            source, there = entry.metadata[sparse].data_ptr(), peer.registration.metadata[sparse]
            row_bytes = peer.registration.metadata_row_bytes
            self.data += spans_for_slots(source, row_bytes, there, piece.tokens, slots)
            self.metadata_bytes += piece.bytes
            return
        entry.residual.mark_tokens(layer, torch.from_numpy(piece.tokens))
        row_bytes = peer.registration.kv_row_bytes
        for side, bases in enumerate((peer.keys, peer.values)):
            there = bases[layer]
            self.data += entry.spans(layer, side, row_bytes, there, piece.tokens, slots)
        self.kv.append(piece)
        self.proactive_bytes += piece.bytes

    def arrived(self, room: PushRoom) -> list[Span]:
        """Its write is complete: say local in the room's mask; the spans that tell D.

        A span covers all that lies between a piece's first and last token, with what is known of
        it: one request instead of one a run. Another write may read the same bytes meanwhile, and
        what it then says is true as well.
        """
        spans = []
        for piece in self.kv:
            row = room.entry.mask[piece.layer]
            row[torch.from_numpy(piece.tokens)] = LOCAL
            first, last = int(piece.tokens[0]), int(piece.tokens[-1])
            there = room.peer.mask_address(piece.layer, room.row, first)
            spans.append(Span(row.data_ptr() + first, there, last + 1 - first))
        return spans


def pieces_of(room: PushRoom, layer: int, selector: Selector, size: int) -> Iterator[Piece]:
    """What the layer has new since it was last asked for: metadata first, then planned blocks.

    size: bytes that a piece has at most, unless a single token has more.
    """
    entry = room.entry
    start, stop = room.pushed[layer], entry.captured[layer]
    room.pushed[layer] = stop
    if room.with_metadata and layer in entry.sparse_layers:
        row_bytes = room.peer.registration.metadata_row_bytes
        first, last = entry.encode(layer, selector)
        if row_bytes:
            for tokens in _cut(np.arange(first, last), size // row_bytes):
                yield Piece(layer, tokens, row_bytes * len(tokens), metadata=True)
    queries = room.queries.pop(layer, None)
    keys = entry.rows(layer, 0, 0, 0 if queries is None else stop)
    yield from kv_pieces(room, layer, room.plan.ranges(layer, start, stop, queries, keys), size)


def kv_pieces(
    room: PushRoom, layer: int, ranges: Sequence[tuple[int, int]], size: int
) -> Iterator[Piece]:
    """The KV of these token ranges of a layer, ascending, in pieces of at most `size` bytes."""
    if not ranges:
        return
    token_bytes = 2 * room.peer.registration.kv_row_bytes
    optional = layer in room.entry.sparse_layers
    tokens = np.concatenate([np.arange(first, last) for first, last in ranges])
    for some in _cut(tokens, size // token_bytes):
        yield Piece(layer, some, token_bytes * len(some), optional=optional)


def _cut(tokens: Tokens, count: int) -> Iterator[Tokens]:
    step = max(1, count)
    for at in range(0, len(tokens), step):
        yield tokens[at : at + step]
