"""D's KV pool in pinned host memory, and the hooks that put it in place of SGLang's.

SGLang's pool keeps its shape, its slots and its code: the buffers are device faces of host memory,
so its own kernels store through them, and their addresses are host addresses, so Mooncake registers
host memory. How many tokens fit is then a matter of host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.runtime_context import get_disagg
from torch import Tensor

from sglang_smartgen.engine import runtime

HOST_SHARE = 0.7
"""Of the memory that is free on the host; the rest is for arenas, metadata and SGLang."""


class PinnedMHATokenToKVPool(MHATokenToKVPool):
    """MHATokenToKVPool whose `k_buffer` and `v_buffer` lie in pinned host memory.

    host_keys, host_values: the same bytes for CPU threads, [slots, kv_heads, head_dim] a layer.
    """

    host_keys: list[Tensor]
    host_values: list[Tensor]

    def _create_buffers_normal(self) -> None:
        path, dtype = runtime.path(), self.store_dtype
        self.host_keys, self.host_values, self.k_buffer, self.v_buffer = [], [], [], []
        faces = (self.host_keys, self.k_buffer), (self.host_values, self.v_buffer)
        for _ in range(self.layer_num):
            for shape, (host, device) in zip(self._kv_buffer_shapes(), faces, strict=True):
                length = dtype.itemsize
                for size in shape:
                    length *= size
                region = path.region(length)
                host.append(region.tensor(0, shape, dtype))
                device.append(region.device_tensor(0, shape, dtype))


def pool_class(original: Callable[..., Any], configurator: Any, *, kind: str, default: type) -> Any:
    """Around `_resolve_kv_pool_class` on D: the pinned pool for plain multi-head attention."""
    found = original(configurator, kind=kind, default=default)
    return PinnedMHATokenToKVPool if found is MHATokenToKVPool and _decodes() else found


def host_budget(original: Callable[..., int], configurator: Any, *args: Any) -> int:
    """Around `_profile_available_bytes` on D: bytes of host memory that the pool may take."""
    return int(available_bytes() * HOST_SHARE) if _decodes() else original(configurator, *args)


def _decodes() -> bool:
    return bool(get_disagg().disaggregation_mode == "decode")


def available_bytes(file: Path = Path("/proc/meminfo")) -> int:
    """Memory that a process can get without swapping, in bytes."""
    for line in file.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    raise OSError(f"{file} does not say MemAvailable")
