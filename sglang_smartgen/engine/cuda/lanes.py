"""The two lanes of a decode step on a device, for all SmartGen requests of a batch at once.

Owner: the forward thread. `start` puts selection, split and local gather on the side stream and
waits for nothing; `ask` waits for what the split lists and sends it; `finish` waits for the answers
and puts their rows among the gathered ones. What is local is decided by the host, in `start`: bytes
whose mask it has read were there before the kernels that read them were launched. What arrives is
copied to the pinned pool by the host, as on a CPU host, and then gathered like everything else, so
rows and order do not depend on the lane that brought them (design.md 2.1).
"""

from __future__ import annotations

from typing import cast

import msgspec
import torch
from torch import Tensor

from sglang_smartgen.core.mask import LOCAL, PADDING
from sglang_smartgen.core.split import SplitIndex, split_index
from sglang_smartgen.engine.cuda.rooms import DeviceRooms
from sglang_smartgen.engine.cuda.streams import Mark, Streams, to_device
from sglang_smartgen.engine.decode_room import DecodeRoom
from sglang_smartgen.engine.decode_side import DecodeSide
from sglang_smartgen.engine.lanes import Lanes, Wanted
from sglang_smartgen.transfer.arena import Slab
from sglang_smartgen.transfer.remote_lane import Ticket
from sglang_smartgen.triton_kernels import gather_rows, mask_gather

Pools = tuple[Tensor, Tensor]
"""K and V of a layer as the device sees them, [slots, kv_heads, head_dim]."""

SERIAL = "the CUDA path has no serial lanes (mode partial, parallel_lanes false); use a CPU host"


class Begun(msgspec.Struct):
    """One layer of a step between `start` and `finish`; n requests, K the most entries of one.

    index: int64 [n, kv_heads, K] on the device, -1 where nothing is attended to. keys, values:
    [n, kv_heads, K, head_dim]. query: read by the side stream, kept until it is joined.
    """

    layer: int
    rooms: list[DecodeRoom]
    pools: Pools
    query: Tensor
    index: Tensor
    keys: Tensor
    values: Tensor
    split: SplitIndex | None
    on_host: SplitIndex | None  # its copy, there when `listed` has passed
    picked: Tensor | None  # the index on the host, for what must be counted entry by entry
    listed: Mark
    gathered: Mark
    remote: list[Wanted] = []
    asked: tuple[Slab, Ticket] | None = None


class DeviceLanes:
    """Selects, splits and gathers on the device; asks and places on the host."""

    def __init__(self, side: DecodeSide, metadata: Tensor, streams: Streams) -> None:
        """metadata: the device's view of `side.metadata`."""
        self._side = side
        self._geometry = side.facts.geometry
        self._host = Lanes(side)
        self._rooms = DeviceRooms(metadata)
        self._streams = streams
        self._table: tuple[list[DecodeRoom], Tensor] = ([], torch.empty(0, 0))

    def start(self, layer: int, rooms: list[DecodeRoom], query: Tensor, pools: Pools) -> Begun:
        """Select, split and gather what is local for these rooms; does not wait.

        query: [n, q_heads, head_dim], of the layer itself or computed one layer early.
        """
        for room in rooms:
            if room.serial:
                room.fail(SERIAL)
            if layer == self._geometry.sparse_layers[0]:
                room.begin_step()
        with self._streams.aside():
            index = self._pick(layer, rooms, query)
            status = self._status(layer, rooms)
            by_entry = self._side.selector.may_use_fewer() or any(
                r.counts is not None for r in rooms
            )
            picked = self._streams.to_host(index) if by_entry else None
            split, on_host, local = None, None, index
            if status is not None:
                known = to_device(status, index.device)
                split = split_index(index, known)
                on_host = SplitIndex(*map(self._streams.to_host, split))
                local = torch.where(mask_gather(known, index) == LOCAL, index, -1)
            listed = self._streams.mark()
            for i, room in enumerate(rooms):
                if room.config.mode == "proactive_only":
                    index[i] = local[i]  # what is not here counts as evicted
            keys, values = gather_rows(*pools, self._slots(rooms, local))
            gathered = self._streams.mark()
        return Begun(
            layer,
            rooms,
            pools,
            query,
            index,
            keys,
            values,
            split,
            on_host,
            picked,
            listed,
            gathered,
        )

    def ask(self, begun: Begun) -> None:
        """Ask each P for what is remote; waits for the split, and only where something may be."""
        if begun.on_host is not None or begun.picked is not None:
            begun.listed.synchronize()
        self._count(begun)
        if begun.on_host is None:
            return
        for i, room in enumerate(begun.rooms):
            split = SplitIndex(*(part[i : i + 1] for part in begun.on_host))
            evicts = room.config.mode == "proactive_only"
            if not evicts and room.machine.may_ask and bool(split.remote.any()):
                want = Wanted(index=i, room=room, positions=split.reordered[0], split=split)
                begun.remote.append(want)
        if begun.remote:
            begun.asked = self._host.ask(begun.layer, begun.remote)

    def finish(self, begun: Begun) -> tuple[Tensor, Tensor, Tensor]:
        """Index, K and V of every request, for the forward stream.

        A room whose fetch failed attends to nothing; the scheduler ends its request.
        """
        most = 0
        if begun.asked is not None:
            slab, ticket = begun.asked
            failures = self._host.collect(begun.remote, ticket)
            for want in begun.remote:
                if want.room.room not in failures:
                    assert want.split is not None
                    self._host.keep(begun.layer, want)
                    most = max(most, int(want.split.remote.max()))
            self._host.return_slab(slab, begun.remote, {*failures, *ticket.late})
        self._streams.join(begun.gathered)
        if most:
            self._gather_front(begun, most)
        for i, room in enumerate(begun.rooms):
            if room.failure is not None:
                begun.index[i] = -1
        return begun.index, begun.keys, begun.values

    def _gather_front(self, begun: Begun, most: int) -> None:
        """Gather the first `most` columns of the reordered index, which hold all that was remote.

        A row with less of it has local entries there, whose bytes are the same as before.
        """
        assert begun.split is not None
        slots = self._slots(begun.rooms, begun.split.reordered[:, :, :most])
        column = begun.split.order[:, :, :most, None].expand(-1, -1, -1, self._geometry.head_dim)
        for rows, arrived in zip(
            (begun.keys, begun.values), gather_rows(*begun.pools, slots), strict=True
        ):
            rows.scatter_(2, column, arrived)

    def _pick(self, layer: int, rooms: list[DecodeRoom], query: Tensor) -> Tensor:
        """int64 [n, kv_heads, K], each request's entries ascending, then -1."""
        heads, selector = self._geometry.kv_heads, self._side.selector
        most = max(min(room.k, room.prompt_len) for room in rooms)
        index = torch.full((len(rooms), heads, most), -1, dtype=torch.int64, device=query.device)
        sparse = self._geometry.sparse_layers.index(layer)
        for i, room in enumerate(rooms):
            if room.selects_all:
                index[i, :, : room.prompt_len] = torch.arange(room.prompt_len, device=query.device)
                continue
            metadata = self._rooms.of(room).metadata(sparse)
            grouped = query[i].view(heads, -1, query.shape[-1])
            picked = selector.pick(selector.score(layer, grouped, metadata), room.k)
            index[i, :, : picked.shape[1]] = picked
        return index

    def _status(self, layer: int, rooms: list[DecodeRoom]) -> Tensor | None:
        """int8 [n, kv_heads, N] in host memory, as it is now; None when all is local."""
        found = [room.status(layer) for room in rooms]
        if all(status is None for status in found):
            return None
        longest = max(room.prompt_len for room in rooms)
        table = torch.full(
            (len(rooms), self._geometry.kv_heads, longest), PADDING, dtype=torch.int8
        )
        for row, room, status in zip(table, rooms, found, strict=True):
            row[:, : room.prompt_len] = LOCAL if status is None else status
        return table

    def _slots(self, rooms: list[DecodeRoom], positions: Tensor) -> Tensor:
        """Pool slots of positions [n, kv_heads, k]; -1 stays -1."""
        if self._table[0] != rooms:
            rows = [self._rooms.of(room).slots for room in rooms]
            self._table = rooms, torch.nn.utils.rnn.pad_sequence(rows, True, -1)
        flat = positions.clamp(min=0).flatten(1)
        slots = self._table[1].gather(1, flat).view(positions.shape)
        return torch.where(positions < 0, -1, slots)

    def _count(self, begun: Begun) -> None:
        sparse = self._geometry.sparse_layers.index(begun.layer)
        for i, room in enumerate(begun.rooms):
            selected = self._geometry.kv_heads * min(room.k, room.prompt_len)
            if begun.picked is not None:
                mine = cast(Tensor, begun.picked)[i]
                selected = int((mine >= 0).sum())
                room.record(sparse, mine)
            self._host.note(room, selected)
