"""P: tell our side right after a layer has written its KV.

In a patched SGLang RadixAttention calls `layer_ready` itself. Else every attention backend factory
is wrapped, and the backend it builds gets its `forward_extend` rebound on the instance: models that
write KV in a fused kernel call it too, so it sees every layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_smartgen.engine import runtime


def layer_ready(layer: Any, batch: Any, q: Any) -> None:
    """A layer has written the KV of an extend batch; q holds the queries of its real tokens."""
    side = runtime.prefill_side()
    if side is not None:
        new = batch.extend_seq_lens_cpu
        stops = [p + n for p, n in zip(batch.extend_prefix_lens_cpu, new, strict=True)]
        side.on_layer(layer.layer_id, batch.req_pool_indices, stops, new, q)


def wrap_backend_factories() -> None:
    """Replace every factory in SGLang's registry by one that adds the layer callback."""
    from sglang.srt.layers.attention import attention_registry

    for name, factory in list(attention_registry.ATTENTION_BACKENDS.items()):
        attention_registry.ATTENTION_BACKENDS[name] = _with_callback(factory)


def _with_callback(factory: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def build(runner: Any) -> Any:
        runtime.remember_model(runner)
        backend = factory(runner)
        original = backend.forward_extend

        def forward_extend(
            q: Any, k: Any, v: Any, layer: Any, batch: Any, *a: Any, **kw: Any
        ) -> Any:
            out = original(q, k, v, layer, batch, *a, **kw)
            layer_ready(layer, batch, q)
            return out

        backend.forward_extend = forward_extend
        return backend

    return build
