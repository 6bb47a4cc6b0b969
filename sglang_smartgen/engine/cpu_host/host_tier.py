"""Obstacle 7: the hierarchical cache copies to and from its host tier with CUDA kernels only.

Here both tiers are host memory, and a copy is an indexed one. It is done when it returns, and with
it SGLang's events, which on a CPU are always complete. Only with `--enable-hierarchical-cache`.
"""

from __future__ import annotations

from typing import Any

from . import arguments
from .hook import Hook

NAME = "hierarchical cache"
FLAG = "--enable-hierarchical-cache"
LAYOUTS = ("layer_first", "page_first", "page_first_direct")
_POOL = "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost."


def prepare(argv: list[str]) -> tuple[list[str], str]:
    """The arguments as they are, and whether the hooks are wanted."""
    return argv, "applied" if arguments.given(argv, FLAG) else "not needed"


def load_layer(
    pool: Any,
    device_pool: Any,
    host_indices: Any,
    device_indices: Any,
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    """Copy a layer's tokens from the host tier to the KV pool."""
    if not is_draft and not 0 <= layer_id < pool.target_layer_num:
        return
    for device, host in _sides(pool, layer_id):
        device[device_indices] = host[_rows(host, host_indices)]


def backup_layers(
    pool: Any, device_pool: Any, host_indices: Any, device_indices: Any, _: str
) -> None:
    """Copy tokens of every layer from the KV pool to the host tier."""
    for layer in range(pool.layer_num):
        for device, host in _sides(pool, layer):
            host[_rows(host, host_indices)] = device[device_indices]


def _sides(pool: Any, layer: int) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """K and V of a layer, in the KV pool and in the host tier."""
    if pool.layout not in LAYOUTS:  # SGLang's own views of a layer are not right for the others
        allowed = " or ".join(LAYOUTS)
        raise ValueError(f"--hicache-mem-layout is {pool.layout}; a CPU host allows {allowed}")
    return (
        (pool.device_k_buffers[layer], pool.k_data_refs[layer]),
        (pool.device_v_buffers[layer], pool.v_data_refs[layer]),
    )


def _rows(host: Any, tokens: Any) -> Any:
    """The tokens' index in a layer of the host tier: [slots, H, D], or [pages, page, H, D]."""
    if host.dim() == 3:
        return tokens
    return tokens // host.shape[1], tokens % host.shape[1]


HOOKS = (
    Hook(_POOL + "load_to_device_per_layer", load_layer, "replace"),
    Hook(_POOL + "backup_from_device_all_layer", backup_layers, "replace"),
)
