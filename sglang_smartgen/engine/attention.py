"""Attention backend `smartgen` of a decode node: select, split, two lanes, attend.

Prefill, dense layers and short prompts run SGLang's `torch_native` code. For a SmartGen room the
selector picks k entries of the prompt a KV head; those and every new token are attended. Rows go to
`scaled_dot_product_attention` in ascending position whatever lane brought them, so the
floating-point sums, and with them the tokens, do not depend on what was local (design.md 2.1).

With lookahead the entries of a layer are picked, and the remote ones asked for, when the layer
before it starts (`select_ahead`); `forward_decode` then only finishes what was begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sglang_smartgen.engine import runtime
from sglang_smartgen.engine.decode_room import DecodeRoom
from sglang_smartgen.engine.decode_side import DecodeSide
from sglang_smartgen.engine.lanes import Gathered, Lanes, Prepared, Wanted
from sglang_smartgen.engine.lookahead import Lookahead
from sglang_smartgen.triton_kernels import split_loop as split_loop  # compiled before a request


class Begun(msgspec.Struct):
    """What one layer of this step began a layer early, for the rows of this batch.

    late: picked early and asked for by the layer itself, for rooms without parallel lanes.
    """

    rows: list[int]
    prepared: Prepared
    late: list[Wanted]


class SmartGenAttnBackend(TorchNativeAttnBackend):
    """`torch_native` whose decode attends to selected entries of SmartGen rooms."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._sparse = runtime.facts().geometry.sparse_layers
        self._lanes: Lanes | None = None
        self._begun: dict[int, Begun] = {}
        self._lookahead: Lookahead | None = None
        if runtime.config().lookahead:
            self._lookahead = Lookahead(model_runner.model, self._sparse, self.select_ahead)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
    ) -> Tensor:
        """Attention of one decode step in one layer; q [B, q_heads * head_dim], same out."""
        rows, rooms = self._rooms(forward_batch)
        if layer.layer_id not in self._sparse or not any(rooms):
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        if save_kv_cache and k is not None and v is not None:
            self.token_to_kv_pool.set_kv_buffer(
                layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v
            )
        query = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
        out = torch.empty_like(query)
        self._dense(query, out, layer, forward_batch, [i for i, r in enumerate(rooms) if r is None])
        lengths = forward_batch.seq_lens.tolist()
        for want, keys, values in self._gathered(layer.layer_id, rows, rooms, query):
            tail = self.req_to_token_pool.req_to_token[
                rows[want.index], want.room.prompt_len : lengths[want.index]
            ]
            out[want.index] = self._attend(query[want.index], keys, values, tail, layer, want)
        return out.view(q.shape[0], -1)

    def select_ahead(self, layer: int, forward_batch: Any, query: Callable[[], Tensor]) -> None:
        """Layer `layer` comes next: pick the entries of its lookahead rooms and ask for them.

        query: computes [B, q_heads, head_dim]; not called when no room of the batch selects.
        """
        rows, rooms = self._rooms(forward_batch)
        early = [(i, r) for i, r in enumerate(rooms) if r is not None and r.config.lookahead]
        if not early:
            return
        selects = any(not room.selects_all for _, room in early)
        queries = query() if selects else None
        wanted = [
            self._select(i, room, layer, None if queries is None else queries[i])
            for i, room in early
        ]
        late = [want for want in wanted if want.room.serial]
        now = [want for want in wanted if not want.room.serial]
        self._begun[layer] = Begun(rows, self._lanes_of().prepare(layer, now), late)

    def _rooms(self, forward_batch: Any) -> tuple[list[int], list[DecodeRoom | None]]:
        """Row and room of each request of a batch; None: not SmartGen's."""
        side = runtime.decode_side()
        rows = forward_batch.req_pool_indices.tolist()
        return rows, [side.room_of_row(row) if side is not None else None for row in rows]

    def _lanes_of(self) -> Lanes:
        if self._lanes is None:
            self._lanes = Lanes(self._side())
        return self._lanes

    @staticmethod
    def _side() -> DecodeSide:
        side = runtime.decode_side()
        assert side is not None
        return side

    def _gathered(
        self, layer: int, rows: list[int], rooms: list[DecodeRoom | None], query: Tensor
    ) -> Iterator[Gathered]:
        """Every SmartGen request of the batch with its K and V, in no order."""
        begun = self._begun.pop(layer, None)
        if begun is not None and begun.rows != rows:
            raise RuntimeError(f"SmartGen: layer {layer} runs other rows than it was begun for")
        picked = [] if begun is None else [*begun.prepared.wanted, *begun.late]
        if self._lookahead is not None and self._lookahead.differs(layer, query):
            for want in picked:
                want.room.fail(f"lookahead does not compute the query that layer {layer} has")
        early = {want.index for want in picked}
        wanted = [] if begun is None else list(begun.late)
        for i, room in enumerate(rooms):
            if room is not None and i not in early:
                if room.config.lookahead:
                    # Its own query would give another answer than a server that looks ahead.
                    room.fail(f"lookahead is on, and this server did not look ahead to {layer}")
                wanted.append(self._select(i, room, layer, query[i]))
        lanes = self._lanes_of()
        if wanted:
            yield from lanes.gather(layer, wanted)
        if begun is not None:
            yield from lanes.finish(begun.prepared)

    def _dense(
        self, query: Tensor, out: Tensor, layer: Any, forward_batch: Any, picked: list[int]
    ) -> None:
        """SGLang's own decode attention for the rows that are not SmartGen's."""
        if not picked:
            return
        index = torch.tensor(picked)
        part = torch.empty_like(query[index])
        self._run_sdpa_forward_decode(
            query[index],
            part,
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            self.req_to_token_pool.req_to_token,
            forward_batch.req_pool_indices[index],
            forward_batch.seq_lens[index],
            scaling=layer.scaling,
            enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
        )
        out[index] = part

    def _select(self, index: int, room: DecodeRoom, layer: int, query: Tensor | None) -> Wanted:
        """The room's entries for this step; positions int64 [kv_heads, k], ascending."""
        side, heads = self._side(), room.geometry.kv_heads
        if layer == self._sparse[0]:
            room.begin_step()
        if room.selects_all:
            positions = torch.arange(room.prompt_len).expand(heads, -1)
        else:
            assert query is not None
            metadata = side.metadata[self._sparse.index(layer)].index_select(0, room.slots)
            grouped = query.view(heads, -1, query.shape[-1])
            positions = side.selector.pick(side.selector.score(layer, grouped, metadata), room.k)
        padding = positions < 0
        absent = padding if bool(padding.any()) else None
        return Wanted(index=index, room=room, positions=positions, absent=absent)

    def _attend(
        self, query: Tensor, keys: Tensor, values: Tensor, tail: Tensor, layer: Any, want: Wanted
    ) -> Tensor:
        """query [q_heads, head_dim]; keys, values [kv_heads, k, head_dim]; tail: new slots."""
        new_keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)[tail].movedim(0, 1)
        new_values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)[tail].movedim(0, 1)
        mask = None
        if want.absent is not None:
            seen = torch.ones(keys.shape[0], tail.shape[0], dtype=torch.bool)
            visible = torch.cat((~want.absent, seen), dim=1)
            mask = visible.repeat_interleave(query.shape[0] // keys.shape[0], dim=0)[None, :, None]
        out = scaled_dot_product_attention(
            query[None, :, None],
            torch.cat((keys, new_keys), dim=1)[None],
            torch.cat((values, new_values), dim=1)[None],
            attn_mask=mask,
            scale=layer.scaling,
            enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
        )
        return out[0, :, 0]
