"""What each layer of a prefill batch adds to the store, and with it to the push.

Used by the scheduler thread alone. A room's entry may be filled for as long as the scheduler holds
it (`PrefillRoom.scheduler_holds`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from sglang_smartgen.core.observe import WINDOW
from sglang_smartgen.engine.device_path import Copies
from sglang_smartgen.engine.model_facts import ModelFacts
from sglang_smartgen.engine.prefill_room import PrefillRoom

logger = logging.getLogger(__name__)


class LayerCapture:
    """Copies what a layer wrote from the KV pool to the store and wakes the push."""

    def __init__(self, facts: ModelFacts, copies: Copies, rooms: Mapping[int, PrefillRoom]) -> None:
        """rooms: those that are captured, by room number; the caller keeps it up to date."""
        self._facts = facts
        self._copies = copies
        self._rooms = rooms
        self._batch: list[int | None] = []
        self._batch_slots: list[Tensor] | None = None
        self.layers_swept = 0

    def set_batch(self, rooms: list[int | None]) -> None:
        """The rooms of the batch that runs next, in the order of its rows."""
        self._batch = rooms if any(room in self._rooms for room in rooms) else []
        self._batch_slots = None

    def on_layer(
        self, layer: int, rows: Tensor, stops: list[int], new: list[int], queries: Tensor
    ) -> None:
        """See PrefillSide.on_layer."""
        if not self._batch:
            return
        if self._batch_slots is None:
            table = self._facts.req_to_token
            self._batch_slots = [
                table[row, :stop].to(torch.int64)
                for row, stop in zip(rows.tolist()[: len(stops)], stops, strict=True)
            ]
        end = 0
        for number, slots, count in zip(self._batch, self._batch_slots, new, strict=True):
            end += count
            room = self._rooms.get(number) if number is not None else None
            if room is not None and room.scheduler_holds and not room.filled:
                assert room.push is not None
                room.began = room.began or time.monotonic()
                last = None
                if len(slots) >= room.push.entry.prompt_len and room.push.plan.looks:
                    last = queries[max(end - count, end - WINDOW) : end]
                    shape = self._facts.shape
                    last = last.reshape(-1, shape.q_heads, shape.head_dim)
                self._capture(room, layer, slots, last)

    def sweep(self, room: PrefillRoom, slots: Tensor) -> None:
        """Capture what the layer hook has missed of a prompt that is whole in the pool."""
        assert room.push is not None
        entry = room.push.entry
        layers = range(len(entry.captured))
        swept = [n for n in layers if self._copies.taken(room.push, n) < entry.prompt_len]
        for layer in swept:
            self._capture(room, layer, slots, None)
        if swept:
            self.layers_swept += len(swept)
            logger.warning("room %s: the layer hook missed layers %s", entry.room, swept)

    def behind(self, call: Callable[[], None]) -> None:
        """Run `call` when all that was captured so far is in the store."""
        self._copies.behind(call)

    def _capture(
        self, room: PrefillRoom, layer: int, slots: Tensor, queries: Tensor | None
    ) -> None:
        assert room.push is not None
        # A cached prefix may still be on its way from the host tier.
        self._facts.loaded(layer)
        pools = self._facts.keys[layer], self._facts.values[layer]
        self._copies.copy(room.push, layer, slots, pools, queries)
