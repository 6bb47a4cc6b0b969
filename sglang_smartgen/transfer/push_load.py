"""What a layer has to send, cut into pieces, and the writes that are made of them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from sglang_smartgen.select.base import Selector
from sglang_smartgen.transfer.push_room import PushRoom
from sglang_smartgen.transfer.spans import spans_for_slots
from sglang_smartgen.transfer.transport import Span


class Piece(msgspec.Struct, frozen=True):
    """The tokens `[first, last)` of a layer: their KV, or their metadata.

    optional: decode can begin without it, because a fetch or the fill can bring it.
    """

    layer: int
    first: int
    last: int
    bytes: int
    metadata: bool = False
    optional: bool = False


class Load:
    """What one write carries, and the mask bytes that follow it."""

    def __init__(self) -> None:
        self.data: list[Span] = []
        self.masks: list[Span] = []
        self.proactive_bytes = 0
        self.metadata_bytes = 0

    @property
    def bytes(self) -> int:
        """Of KV and metadata."""
        return self.proactive_bytes + self.metadata_bytes

    def add(self, room: PushRoom, piece: Piece, ones: int) -> None:
        """Take a piece in. ones: address of a run of mask bytes that say local."""
        entry, peer = room.entry, room.peer
        layer, first, last = piece.layer, piece.first, piece.last
        slots = room.slots[first:last]
        if piece.metadata:
            sparse = entry.sparse_layers.index(layer)
            row_bytes = peer.registration.metadata_row_bytes
            source = entry.metadata[sparse, first:last].data_ptr()
            self.data += spans_for_slots(
                source, row_bytes, peer.registration.metadata[sparse], slots
            )
            self.metadata_bytes += piece.bytes
            return
        entry.residual.mark_tokens(layer, first, last)
        row_bytes = peer.registration.kv_row_bytes
        for side, bases in enumerate((peer.keys, peer.values)):
            source = entry.kv[layer, side, first:last].data_ptr()
            self.data += spans_for_slots(source, row_bytes, bases[layer], slots)
        self.masks.append(Span(ones, peer.mask_address(layer, room.row, first), last - first))
        self.proactive_bytes += piece.bytes


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
        step = max(1, size // row_bytes) if row_bytes else 1
        for at in range(first, last, step):
            end = min(at + step, last)
            yield Piece(layer, at, end, row_bytes * (end - at), metadata=True)
    queries = room.queries.pop(layer, None)
    keys = entry.kv[layer, 0, :stop]
    for first, last in room.plan.ranges(layer, start, stop, queries, keys):
        yield from cut(layer, first, last, size, room)


def cut(layer: int, first: int, last: int, size: int, room: PushRoom) -> Iterator[Piece]:
    """The KV of the tokens `[first, last)` of a layer in pieces of at most `size` bytes."""
    token_bytes = 2 * room.peer.registration.kv_row_bytes
    step = max(1, size // token_bytes)
    optional = layer in room.entry.sparse_layers
    for at in range(first, last, step):
        end = min(at + step, last)
        yield Piece(layer, at, end, token_bytes * (end - at), optional=optional)
