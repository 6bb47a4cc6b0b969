"""SGLang's attention backend `smartgen` on a GPU host.

Prefill runs SGLang's `torch_native` code on the pinned pool. Every decode layer is one Python call
between two stretches of kernels; with `device_path: cuda_graph` SGLang captures the stretches and
replays them around it, since what is local, and for how long to wait, only the host knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import eager_on_graph
from torch import Tensor

from sglang_smartgen.engine import runtime
from sglang_smartgen.engine.cuda.decode import DeviceDecode, LayerCall
from sglang_smartgen.engine.cuda.kernels import attention_kernels
from sglang_smartgen.engine.cuda.lanes import DeviceLanes, Pools
from sglang_smartgen.engine.cuda.step import Step
from sglang_smartgen.engine.cuda.streams import Streams
from sglang_smartgen.engine.lookahead import Lookahead


class CudaAttnBackend(TorchNativeAttnBackend):
    """`torch_native` whose decode runs on SmartGen's device path."""

    def __init__(self, model_runner: Any) -> None:
        """Raises ConfigError for kernels that cannot run here, and for layers of another kind."""
        super().__init__(model_runner)
        facts = runtime.facts()
        self._sparse = facts.geometry.sparse_layers
        table = facts.req_to_token
        self._attend = attention_kernels(runtime.config(), facts.geometry.dtype, table.device)
        self._decode: DeviceDecode | None = None
        self._early: dict[int, Tensor] = {}
        self._lookahead: Lookahead | None = None
        if runtime.config().lookahead:
            self._lookahead = Lookahead(model_runner.model, self._sparse, self._select_ahead)

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
        early = self._early.pop(layer.layer_id + 1, None)
        return self._run(q, k, v, early, layer, forward_batch, save_kv_cache)

    @eager_on_graph
    def _run(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        early: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
    ) -> Tensor:
        """Everything of a layer's attention; between two graphs where there are graphs.

        early: the next layer's query. Its memory is the graph's, which may use it again behind
        this call, so what outlives the call is a copy.
        """
        if save_kv_cache and k is not None and v is not None:
            self.token_to_kv_pool.set_kv_buffer(
                layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v
            )
        query = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
        decode = self._device_decode()
        step = runtime.step().padded(query.shape[0])
        if decode is None:
            return torch.zeros_like(q)  # a warm-up before the KV manager exists
        self._check_lookahead(layer.layer_id, query, step)
        window = layer.sliding_window_size
        call = LayerCall(
            layer.layer_id,
            query,
            self._pools(layer.layer_id),
            layer.scaling,
            window if window > -1 else None,
        )
        if early is not None:
            call.next_query = early.clone()
            call.next_pools = self._pools(layer.layer_id + 1)
        return decode.run(call, step).view(q.shape[0], -1)

    def _select_ahead(self, layer: int, _: Any, query: Callable[[], Tensor]) -> None:
        """The layer before `layer` is entered: its kernels compute the early query."""
        self._early[layer] = query()

    def _check_lookahead(self, layer: int, query: Tensor, step: Step) -> None:
        side = runtime.decode_side()
        if self._lookahead is None or layer not in self._sparse or side is None:
            return
        if not self._lookahead.differs(layer, query):
            return
        for row in step.rows:
            room = side.room_of_row(row) if row else None
            if room is not None and room.config.lookahead:
                room.fail(f"lookahead does not compute the query that layer {layer} has")

    def _pools(self, layer: int) -> Pools:
        pool = self.token_to_kv_pool
        return pool.get_key_buffer(layer), pool.get_value_buffer(layer)

    def _device_decode(self) -> DeviceDecode | None:
        side = runtime.decode_side()
        if self._decode is None and side is not None:
            lanes = DeviceLanes(side, side.device_metadata, Streams())
            self._decode = DeviceDecode(side, lanes, self._attend, runtime.facts().req_to_token)
        return self._decode

    # Nothing of this backend is inside a CUDA graph, so it has no state for one.

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing to set up."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of a row of padding."""
        return 1
