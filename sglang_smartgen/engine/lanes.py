"""The two lanes of a decode step in one layer: gather what is local while P sends the rest.

The paper lets remote rows land in the leading columns of the gathered KV itself. Here they land in
an arena of their own, one run a request, and are then put both at their place and into the KV pool:
a request costs one write instead of one a row (65 to 95 us each on Mooncake TCP), a fetched entry
is kept and never fetched again, and the order of the rows, and so the answer's last bits, stays
that of the selector. Fetched entries are kept one by one (`DecodeRoom.held`), not as whole tokens.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator

import msgspec
import torch
from torch import Tensor

from sglang_smartgen.core.counts import counts, step_range
from sglang_smartgen.core.mask import LOCAL
from sglang_smartgen.core.split import SplitIndex, split_index
from sglang_smartgen.engine.decode_room import DecodeRoom
from sglang_smartgen.engine.decode_side import DecodeSide
from sglang_smartgen.transfer.arena import Slab
from sglang_smartgen.transfer.entries import place_entries, words
from sglang_smartgen.transfer.remote_lane import Ask, Ticket
from sglang_smartgen.triton_kernels import gather_rows


class Wanted(msgspec.Struct):
    """What one request of the batch attends to: `positions` int64 [kv_heads, k], ascending.

    absent: bool [kv_heads, k], what must not be attended to: the -1 at the end of a row for which
    the selector chose fewer, and what mode `proactive_only` has evicted; None: nothing.
    """

    index: int
    room: DecodeRoom
    positions: Tensor
    split: SplitIndex | None = None
    absent: Tensor | None = None
    arena_offset: int = 0


class Prepared(msgspec.Struct):
    """One layer's requests after the split; `asked` when P was asked for what is `remote`."""

    layer: int
    wanted: list[Wanted]
    remote: list[Wanted]
    asked: tuple[Slab, Ticket] | None


Gathered = tuple[Wanted, Tensor, Tensor]
"""A request with its K and V, [kv_heads, k, head_dim] in the order of its positions."""


class Lanes:
    """Gathers K and V of wanted entries from the pool and, where needed, from P."""

    def __init__(self, side: DecodeSide) -> None:
        self._side = side
        self._geometry = side.facts.geometry

    def gather(self, layer: int, wanted: list[Wanted]) -> Iterator[Gathered]:
        """Both phases at once: `prepare`, then `finish`."""
        return self.finish(self.prepare(layer, wanted))

    def prepare(self, layer: int, wanted: list[Wanted]) -> Prepared:
        """Split each request's entries by Algorithm 1 and ask for the remote ones; does not wait.

        May run a layer ahead of `finish`. What is local now stays local, and what is remote now is
        placed by `finish` even if a push brings the same bytes in between.
        """
        remote = [want for want in wanted if self._split(layer, want)]
        return Prepared(layer, wanted, remote, self.ask(layer, remote) if remote else None)

    def finish(self, prepared: Prepared) -> Iterator[Gathered]:
        """Each request with its K and V, [kv_heads, k, head_dim] in the order of its positions.

        A room whose fetch failed is marked failed and yields zeros; the scheduler ends its request.
        """
        layer, remote = prepared.layer, prepared.remote
        if prepared.asked is None:
            yield from self._local_lane(layer, prepared.wanted)
            return
        slab, ticket = prepared.asked
        waited = 0.0
        if any(want.room.serial for want in remote):
            # The paper's baseline has no parallel lanes: the fetch first, then the local gather.
            waited += self._wait(ticket)[1]
        gathered = list(self._local_lane(layer, prepared.wanted))
        failures = self.collect(remote, ticket, waited)
        self._place_all(layer, remote, gathered, failures)
        self.return_slab(slab, remote, {*failures, *ticket.late})
        yield from gathered

    def collect(self, remote: list[Wanted], ticket: Ticket, waited: float = 0.0) -> dict[int, str]:
        """Wait for what was asked; the rooms that failed, with their cause.

        waited: seconds that this thread has stood still for the ticket before.
        """
        failures, seconds = self._wait(ticket)
        now = time.monotonic()
        for want in remote:
            assert want.split is not None
            size = int(want.split.remote.sum()) * self._geometry.entry_bytes
            want.room.fetched(waited + seconds, size)
            number, failure = ticket.number_of[want.room.room], failures.get(want.room.room)
            want.room.machine.answered(number, failure, now)
        return failures

    def _wait(self, ticket: Ticket) -> tuple[dict[int, str], float]:
        """Failed rooms with their cause, and the seconds that this thread stood still."""
        began = time.monotonic()
        return self._side.lane.wait(ticket), time.monotonic() - began

    def _local_lane(self, layer: int, wanted: list[Wanted]) -> Iterator[Gathered]:
        for want in wanted:
            yield want, *self._local(layer, want)

    def _split(self, layer: int, want: Wanted) -> bool:
        """Split by Algorithm 1; True when something must be fetched."""
        room = want.room
        self.note(room, int((want.positions >= 0).sum()))
        room.record(self._geometry.sparse_layers.index(layer), want.positions)
        status = room.status(layer)
        if status is None:
            return False
        split = split_index(want.positions[None], status[None])
        if not bool(split.remote.any()):
            return False
        if room.config.mode == "proactive_only":
            # A -1 counts as evicted here too.
            want.absent = (status.gather(1, want.positions.clamp(min=0)) != LOCAL) | (
                want.positions < 0
            )
            return False
        want.split = split
        return room.machine.may_ask

    @staticmethod
    def note(room: DecodeRoom, selected: int) -> None:
        """Count entries that a step of a room selects."""
        room.stats.entries_selected += selected
        counts.selected[step_range(room.stats.steps)] += selected

    def ask(self, layer: int, remote: list[Wanted]) -> tuple[Slab, Ticket] | None:
        """Ask each P for what is remote; None, and the rooms failed, when no slab is safe."""
        slab = self._side.arena.take()
        if slab is None:
            for want in remote:
                want.room.fail("every arena slab is in quarantine after failed fetches")
            return None
        asks: list[Ask] = []
        offset = slab.offset
        for want in remote:
            assert want.split is not None and want.room.peer is not None
            heads = want.split.remote[0].tolist()
            positions = [want.split.reordered[0, head, :count] for head, count in enumerate(heads)]
            want.arena_offset = offset
            asks.append(
                Ask(want.room.room, want.room.generation, want.room.peer, offset, positions)
            )
            entries = sum(heads)
            offset += entries * self._geometry.entry_bytes
            stats = want.room.stats
            stats.entries_fetched += entries
            counts.missed[step_range(stats.steps)] += entries
            counts.bytes["on_demand"] += entries * self._geometry.entry_bytes
            stats.bytes_on_demand += entries * self._geometry.entry_bytes
            if layer not in stats.fetched_layers:
                stats.fetched_layers.append(layer)
        ticket = self._side.lane.ask(layer, asks)
        now = time.monotonic()
        for want in remote:
            want.room.machine.asked(ticket.number_of[want.room.room], now)
        return slab, ticket

    def _local(self, layer: int, want: Wanted) -> tuple[Tensor, Tensor]:
        """Gather every wanted entry from the pool; remote ones are overwritten when they arrive."""
        slots = want.room.slots[want.positions]
        pools = self._side.facts.keys[layer], self._side.facts.values[layer]
        keys, values = (rows[0] for rows in gather_rows(*pools, slots[None]))
        gone = want.absent if want.room.failure is None else torch.ones(slots.shape).bool()
        if gone is not None:
            # Bytes that never arrived may be anything, even NaN, which a mask does not hide.
            keys[gone] = 0
            values[gone] = 0
        return keys, values

    def _place_all(
        self, layer: int, remote: list[Wanted], gathered: list[Gathered], failures: dict[int, str]
    ) -> None:
        """Put what arrived at its place and into the pool; zeros for a room whose fetch failed."""
        by_index = {want.index: (keys, values) for want, keys, values in gathered}
        for want in remote:
            keys, values = by_index[want.index]
            if want.room.room in failures:
                keys.zero_()
                values.zero_()
            else:
                self.keep(layer, want, (keys, values))

    def return_slab(self, slab: Slab, remote: list[Wanted], doubtful: Collection[int]) -> None:
        """The slab is free again, or rests for as long as late bytes may reach it.

        doubtful: rooms of which a write may still land, or land again.
        """
        if doubtful:
            waits = {(w.room.room, w.room.generation) for w in remote if w.room.room in doubtful}
            self._side.arena.quarantine(slab, waits)
        else:
            self._side.arena.give_back(slab)

    def keep(self, layer: int, want: Wanted, out: tuple[Tensor, Tensor] | None = None) -> None:
        """Put what has arrived for a request into the pool, where it is local from now on.

        out: K and V [kv_heads, k, head_dim] of the request, where it is put too, at its columns.
        """
        g = self._geometry
        assert want.split is not None
        found = want.split.remote[0]
        total = int(found.sum())
        run = self._side.arena.memory.tensor(want.arena_offset, (total, 2, g.head_dim), g.dtype)
        nowhere = run.new_empty((g.kv_heads, 0, g.head_dim))
        place_entries(
            words(run),
            found.numpy(),
            want.split.reordered[0].numpy(),
            want.split.order[0].numpy(),
            want.room.slots.numpy(),
            words(self._side.facts.keys[layer]),
            words(self._side.facts.values[layer]),
            want.room.held_of(layer).numpy(),
            *map(words, out or (nowhere, nowhere)),
        )
