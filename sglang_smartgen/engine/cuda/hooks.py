"""The hooks that only a decode node on a GPU host needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_smartgen.engine.hooking import Hook

_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator."


def _pool_class(original: Callable[..., Any], configurator: Any, **named: Any) -> Any:
    from sglang_smartgen.engine.cuda.pool import pool_class

    return pool_class(original, configurator, **named)


def _host_budget(original: Callable[..., int], configurator: Any, *args: Any) -> int:
    from sglang_smartgen.engine.cuda.pool import host_budget

    return host_budget(original, configurator, *args)


HOOKS = (
    Hook(
        _CONFIGURATOR + "_resolve_kv_pool_class",
        "around",
        _pool_class,
        ("self", "kind", "default"),
        ("decode",),
        "it puts the KV pool of a decode node in pinned host memory",
    ),
    Hook(
        _CONFIGURATOR + "_profile_available_bytes",
        "around",
        _host_budget,
        ("self", "pre_model_load_memory"),
        ("decode",),
        "it sizes that pool by the host's memory",
    ),
)
