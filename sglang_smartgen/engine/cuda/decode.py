"""Attention of one decode step on a device: SmartGen rooms over their entries, the rest densely.

Owner: the forward thread. Of a layer's work the next layer's selection is queued first, on the
side stream, so that it runs beside this layer's attention; its fetch is sent when that is queued,
and the rest of this layer overlaps it. No SGLang is imported here: `backend.py` is its attention
backend.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from sglang_smartgen.engine.cuda.kernels import Attend
from sglang_smartgen.engine.cuda.lanes import Begun, DeviceLanes, Pools
from sglang_smartgen.engine.cuda.step import Step
from sglang_smartgen.engine.decode_room import DecodeRoom
from sglang_smartgen.engine.decode_side import DecodeSide

Members = list[tuple[int, DecodeRoom]]
"""Rows of the batch with their rooms."""


class LayerCall(msgspec.Struct):
    """What the attention backend is asked for.

    query: [B, q_heads, head_dim]. pools: the layer's K and V on the device, the new token in them.
    window: positions before the query that it may attend to; None: all. next_query: that of the
    layer after this one, computed early, or None. next_pools: that layer's.
    """

    layer: int
    query: Tensor
    pools: Pools
    scaling: float
    window: int | None = None
    next_query: Tensor | None = None
    next_pools: Pools | None = None


class DeviceDecode:
    """Runs the layers of a decode step."""

    def __init__(self, side: DecodeSide, lanes: DeviceLanes, attend: Attend, table: Tensor) -> None:
        """table: req_to_token on the device, int32 [rows, max_len]."""
        self._side = side
        self._sparse = side.facts.geometry.sparse_layers
        self._lanes = lanes
        self._attend = attend
        self._table = table
        self._early: tuple[Step, int, list[int], Begun] | None = None

    def run(self, call: LayerCall, step: Step) -> Tensor:
        """[B, q_heads, head_dim] of one layer; see LayerCall."""
        rooms = [self._side.room_of_row(row) if row else None for row in step.rows]
        smart = [(i, room) for i, room in enumerate(rooms) if room is not None]
        if call.layer not in self._sparse:
            smart = []
        begun = self._take_early(call, step, smart)
        done = {i for members, _ in begun for i in members}
        own = [(i, room) for i, room in smart if i not in done]
        if own:
            begun.append(self._begin(call, own, ask=True))
        # Before this layer's attention is queued, so that it runs beside it.
        ahead = self._look_ahead(call, step, rooms)
        out = torch.zeros_like(call.query)
        dense = [i for i in range(len(rooms)) if i not in {j for j, _ in smart}]
        if dense:
            out[_index(dense, out)] = self._dense(call, step, dense)
        for members, state in begun:
            index, keys, values = self._lanes.finish(state)
            starts = [room.prompt_len for room in state.rooms]
            tail = step.tail(self._table, members, starts)
            out[_index(members, out)] = self._attend(
                call.query[_index(members, out)],
                keys,
                values,
                index,
                *call.pools,
                tail,
                call.scaling,
            )
        if ahead is not None:
            self._lanes.ask(ahead)
        return out

    def _begin(self, call: LayerCall, members: Members, ask: bool) -> tuple[list[int], Begun]:
        numbers = [i for i, _ in members]
        query = call.query[_index(numbers, call.query)]
        begun = self._lanes.start(call.layer, [room for _, room in members], query, call.pools)
        if ask:
            self._lanes.ask(begun)
        return numbers, begun

    def _take_early(
        self, call: LayerCall, step: Step, smart: Members
    ) -> list[tuple[list[int], Begun]]:
        """What was begun for this layer by the one before; and a room it has left out fails."""
        begun: list[tuple[list[int], Begun]] = []
        if self._early is not None:
            of_step, of_layer, members, state = self._early
            self._early = None
            if of_step is step and of_layer == call.layer:
                begun.append((members, state))
            else:
                self._lanes.finish(state)  # a step that was broken off; its slab comes back
        early = {i for members, _ in begun for i in members}
        for i, room in smart:
            if room.config.lookahead and i not in early:
                # Its own query would give another answer than a server that looks ahead.
                room.fail(f"lookahead is on, and this server did not look ahead to {call.layer}")
        return begun

    def _look_ahead(
        self, call: LayerCall, step: Step, rooms: list[DecodeRoom | None]
    ) -> Begun | None:
        if call.next_query is None or call.next_pools is None:
            return None
        members = [(i, r) for i, r in enumerate(rooms) if r is not None and r.config.lookahead]
        if call.layer + 1 not in self._sparse or not members:
            return None
        following = LayerCall(call.layer + 1, call.next_query, call.next_pools, call.scaling)
        numbers, begun = self._begin(following, members, ask=False)
        self._early = (step, call.layer + 1, numbers, begun)
        return begun

    def _dense(self, call: LayerCall, step: Step, members: list[int]) -> Tensor:
        """Attention to all tokens, or to those of a window: a tail and no gathered rows."""
        lengths = [step.lengths[i] for i in members]
        window = call.window
        starts = [0 if window is None else max(0, n - 1 - window) for n in lengths]
        tail = step.tail(self._table, members, starts)
        heads, dim = call.pools[0].shape[1:]
        nothing = call.query.new_empty((len(members), heads, 0, dim))
        index = torch.empty((len(members), heads, 0), dtype=torch.int64, device=nothing.device)
        query = call.query[_index(members, nothing)]
        return self._attend(query, nothing, nothing, index, *call.pools, tail, call.scaling)


def _index(members: list[int], like: Tensor) -> Tensor | slice:
    """Rows of the batch; a slice where they are neighbours, as they mostly are."""
    if members == list(range(members[0], members[-1] + 1)):
        return slice(members[0], members[-1] + 1)
    return torch.tensor(members).to(like.device, non_blocking=True)
