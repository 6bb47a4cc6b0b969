"""One rank's model and pools as SmartGen sees them, read from SGLang's model runner."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor

from sglang_smartgen.config import ConfigError
from sglang_smartgen.core.geometry import KVGeometry
from sglang_smartgen.select.base import KVShape

POOLS = ("MHATokenToKVPool", "PinnedMHATokenToKVPool")
"""SGLang's pool of plain attention, and ours of a decode node on a GPU host."""


class ModelFacts(msgspec.Struct, frozen=True):
    """One rank's model and pools, read from SGLang's model runner.

    keys, values: one pool buffer a layer, [slots, kv_heads, head_dim]; on D always host memory,
    which P and CPU threads write to. req_to_token: int32 [rows, max_len], the slot of every
    position of a row. tp_size, tp_rank: of the ranks that share the KV heads; this one has as many
    as `shape` says, from `first_kv_head`. loaded: waits, on the stream that it is called on, until
    a layer's buffers hold what SGLang brings back from its host tier for the batch that runs.
    """

    geometry: KVGeometry
    shape: KVShape
    keys: list[Tensor]
    values: list[Tensor]
    req_to_token: Tensor
    tp_size: int
    tp_rank: int = 0
    loaded: Callable[[int], None] = lambda layer: None

    @property
    def first_kv_head(self) -> int:
        """The model's number of this rank's first KV head."""
        return self.tp_rank * self.shape.kv_heads


def read_model(runner: Any) -> ModelFacts:
    """Read the facts of a model runner.

    Raises ConfigError with one sentence for a model that SmartGen cannot serve.
    """
    pool = runner.token_to_kv_pool
    name = type(runner.model).__name__
    if type(pool).__name__ not in POOLS:
        raise ConfigError(
            f"SmartGen cannot serve {name}: its KV pool is {type(pool).__name__}; "
            "allowed is plain multi-head or grouped-query attention (MHATokenToKVPool)"
        )
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    check_heads(name, runner.model_config.get_total_num_kv_heads(), parallel.attn_tp_size)
    layers = sorted(
        (m for m in runner.model.modules() if isinstance(m, RadixAttention)),
        key=lambda m: m.layer_id,
    )
    if len(layers) != len(pool.k_buffer):
        raise ConfigError(
            f"SmartGen cannot serve {name}: {len(layers)} attention layers on "
            f"{len(pool.k_buffer)} KV buffers; allowed is one buffer a layer"
        )
    for layer in layers:
        if (
            layer.is_cross_attention
            or layer.attn_type != AttentionType.DECODER
            or layer.qk_head_dim != layer.v_head_dim
            or layer.logit_cap
        ):
            raise ConfigError(
                f"SmartGen cannot serve {name}: layer {layer.layer_id} has cross or bidirectional "
                "attention, a logit cap or unequal K and V; allowed is plain causal attention"
            )
    first = layers[0]
    sliding = frozenset(layer.layer_id for layer in layers if layer.sliding_window_size > -1)
    geometry = KVGeometry(
        len(layers), first.tp_k_head_num, first.head_dim, pool.k_buffer[0].dtype, sliding
    )
    if sliding and not geometry.sparse_layers:
        raise ConfigError(
            f"SmartGen cannot serve {name}: every layer from 2 on has a sliding window; it needs "
            "layers with full attention to select from"
        )
    shape = KVShape(
        layers=len(layers),
        q_heads=first.tp_q_head_num,
        kv_heads=first.tp_k_head_num,
        head_dim=first.head_dim,
        scaling=first.scaling,
    )
    if geometry.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(
            f"--kv-cache-dtype is {geometry.dtype}; SmartGen allows float32, bfloat16 and float16"
        )
    return ModelFacts(
        geometry=geometry,
        shape=shape,
        keys=list(getattr(pool, "host_keys", pool.k_buffer)),
        values=list(getattr(pool, "host_values", pool.v_buffer)),
        req_to_token=runner.req_to_token_pool.req_to_token,
        tp_size=parallel.attn_tp_size,
        tp_rank=parallel.attn_tp_rank,
        loaded=functools.partial(wait_loaded, pool),
    )


def wait_loaded(pool: Any, layer: int) -> None:
    """As SGLang's attention does before it reads the pool, which not every backend does for us."""
    counter = pool.layer_transfer_counter
    if counter is not None:
        counter.wait_until(layer - pool.start_layer)


def check_heads(name: str, kv_heads: int, ranks: int) -> None:
    """Raises ConfigError when a KV head of the model would be on more than one rank."""
    if kv_heads < ranks:
        raise ConfigError(
            f"--tp-size is {ranks}; SmartGen cannot serve {name} so, since its {kv_heads} KV "
            f"heads would be on several ranks each; allowed is at most {kv_heads}"
        )
