"""Attention backend `smartgen` of a decode node: select, split, two lanes, attend.

Prefill, dense layers and short prompts run SGLang's `torch_native` code. For a SmartGen room the
selector picks k entries of the prompt a KV head; those and every new token are attended. Rows go to
`scaled_dot_product_attention` in ascending position whatever lane brought them, so the
floating-point sums, and with them the tokens, do not depend on what was local (design.md 2.1).
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sglang_smartgen.core.geometry import DENSE_LAYERS
from sglang_smartgen.engine import runtime
from sglang_smartgen.engine.decode_room import DecodeRoom
from sglang_smartgen.engine.lanes import Lanes, Wanted
from sglang_smartgen.select.base import top_k


class SmartGenAttnBackend(TorchNativeAttnBackend):
    """`torch_native` whose decode attends to selected entries of SmartGen rooms."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._lanes: Lanes | None = None

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
        side = runtime.decode_side()
        rows = forward_batch.req_pool_indices.tolist()
        rooms = [side.room_of_row(row) if side is not None else None for row in rows]
        if layer.layer_id < DENSE_LAYERS or not any(rooms):
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        if save_kv_cache and k is not None and v is not None:
            self.token_to_kv_pool.set_kv_buffer(
                layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v
            )
        query = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
        out = torch.empty_like(query)
        self._dense(query, out, layer, forward_batch, [i for i, r in enumerate(rooms) if r is None])
        wanted = [
            self._select(i, room, layer.layer_id, query[i])
            for i, room in enumerate(rooms)
            if room is not None
        ]
        if self._lanes is None:
            self._lanes = Lanes(side)
        lengths = forward_batch.seq_lens.tolist()
        for want, keys, values in self._lanes.gather(layer.layer_id, wanted):
            tail = self.req_to_token_pool.req_to_token[
                rows[want.index], want.room.prompt_len : lengths[want.index]
            ]
            out[want.index] = self._attend(query[want.index], keys, values, tail, layer, want)
        return out.view(q.shape[0], -1)

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

    def _select(self, index: int, room: DecodeRoom, layer: int, query: Tensor) -> Wanted:
        """The room's entries for this step; positions int64 [kv_heads, k], ascending."""
        side = runtime.decode_side()
        assert side is not None
        heads = room.geometry.kv_heads
        if layer == DENSE_LAYERS:
            room.stats.steps += 1
        if room.selects_all:
            positions = torch.arange(room.prompt_len).expand(heads, -1)
        else:
            metadata = side.metadata[layer - DENSE_LAYERS].index_select(0, room.slots)
            grouped = query.view(heads, -1, query.shape[-1])
            positions = top_k(side.selector.score(layer, grouped, metadata), room.k)
        return Wanted(index=index, room=room, positions=positions)

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
