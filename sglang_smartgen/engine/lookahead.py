"""The query of a sparse layer, one layer early: from the residual that enters the layer before.

InfiniGen's lookahead: one layer adds little to the residual x, so `x_l`, re-normed by layer l+1's
own input norm and sent through its own q projection, q-norm and RoPE, is nearly the query that
layer l+1 will have. Selection and fetch for layer l+1 then start before attention(l) runs.

Hooks on SGLang's decoder layers, placed from outside, all on the forward thread. SGLang has two
kinds of layers: `staged` ones keep the residual in the batch, written before attention is called;
`paired` ones (Gemma-3) are handed a hidden state and a residual whose sum it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.layer_boundary.residual.batch import written_residual
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import apply_rotary_pos_emb
from torch import Tensor
from torch.nn.functional import cosine_similarity, linear

from sglang_smartgen.config import ConfigError

OnInput = Callable[[int, Any, Callable[[], Tensor]], None]
"""Called with a sparse layer's id, the forward batch, and what computes its early query."""

LIKENESS = 0.99  # cosine of a query and our computation of it from its own layer's residual

_STAGED = ("positions", "hidden_states", "forward_batch")
_PAIRED = (
    "positions",
    "hidden_states",
    "position_embeddings_global",
    "position_embeddings_local",
    "forward_batch",
    "residual",
    "kwargs",
)
# Decoder layer -> (its attention, which of the two forwards is hooked, parameters of that one).
KNOWN: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "LlamaDecoderLayer": ("LlamaAttention", "attention", _STAGED),
    "Qwen2DecoderLayer": ("Qwen2Attention", "attention", _STAGED),
    "Qwen3DecoderLayer": ("Qwen3Attention", "attention", _STAGED),
    "Gemma3DecoderLayer": ("Gemma3Attention", "layer", _PAIRED),
}


class Lookahead:
    """Calls `on_input` for sparse layer l+1 when layer l of a decode step is about to run."""

    def __init__(self, model: Any, sparse_layers: tuple[int, ...], on_input: OnInput) -> None:
        """Place the hooks. Raises ConfigError, and then places none, for layers of another kind."""
        layers = _decoder_layers(model)
        self._queries = {layer: EarlyQuery(layers[layer]) for layer in sparse_layers}
        self._on_input = on_input
        self._unchecked = set(sparse_layers)
        self._own: dict[int, Callable[[], Tensor]] = {}
        for layer_id in sorted({layer for s in sparse_layers for layer in (s - 1, s)}):
            layer = layers[layer_id]
            if KNOWN[type(layer).__name__][1] == "layer":
                layer.register_forward_pre_hook(self._paired(layer_id), with_kwargs=True)
            else:
                layer.self_attn.register_forward_pre_hook(self._staged(layer_id), with_kwargs=True)

    def differs(self, layer: int, query: Tensor) -> bool:
        """Whether the model's query of `layer` is not what we compute from the layer's own input.

        query: [B, q_heads, head_dim]. The first step of a layer is compared and says so; a model
        that passes once passes for good.
        """
        compute = self._own.pop(layer, None)
        if compute is None:
            return False
        own = compute()
        flat = query.reshape(own.shape[0], -1).float()
        if bool((cosine_similarity(flat, own.reshape(flat.shape).float()) < LIKENESS).any()):
            return True
        self._unchecked.discard(layer)
        return False

    def _staged(self, layer: int) -> Callable[..., None]:
        def before(module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            batch = named["forward_batch"]
            if batch.forward_mode.is_decode():
                self._entered(layer, batch, written_residual(batch), named["positions"], None)

        return before

    def _paired(self, layer: int) -> Callable[..., None]:
        def before(module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            batch = named["forward_batch"]
            if batch.forward_mode.is_decode():
                hidden, residual = named["hidden_states"], named["residual"]
                entering = hidden if residual is None else hidden + residual
                angles = named["position_embeddings_global"]
                self._entered(layer, batch, entering, named["positions"], angles)

        return before

    def _entered(
        self, layer: int, batch: Any, residual: Tensor, positions: Tensor, angles: Any
    ) -> None:
        if layer in self._unchecked:
            # Computed by `differs`, in this layer's attention: the residual is the same until then.
            self._own[layer] = partial(self._queries[layer], residual, positions, angles)
        if layer + 1 in self._queries:
            query = partial(self._queries[layer + 1], residual, positions, angles)
            self._on_input(layer + 1, batch, query)


class EarlyQuery:
    """The query of one decoder layer from a residual: its norm, q projection, q-norm and RoPE."""

    def __init__(self, layer: Any) -> None:
        self._norm = layer.input_layernorm
        self._attention = layer.self_attn

    def __call__(self, residual: Tensor, positions: Tensor, angles: Any) -> Tensor:
        """Query [B, q_heads, head_dim] from a residual [B, hidden] at positions, B of them.

        angles: cosines and sines [1, B, head_dim] where the model hands them to its layers.
        """
        attention = self._attention
        query = self._project(self._norm(residual))
        query = query.reshape(-1, attention.num_heads, attention.head_dim)
        if hasattr(attention, "q_norm"):
            query = attention.q_norm(query.reshape(-1, attention.head_dim)).view(query.shape)
        if angles is not None:
            cos, sin = (angle.reshape(-1, angle.shape[-1]) for angle in angles)
            return apply_rotary_pos_emb(query, query[:, :1], cos, sin)[0]
        # RoPE may work in place, and it wants a key.
        query = query.flatten(1).contiguous()
        key = query[:, : attention.head_dim].clone()
        rotated: Tensor = attention.rotary_emb(positions.flatten(), query, key)[0]
        return rotated.view(-1, attention.num_heads, attention.head_dim)

    def _project(self, normed: Tensor) -> Tensor:
        attention, projection = self._attention, self._attention.qkv_proj
        weight = getattr(projection, "weight", None)
        rows = attention.q_size + 2 * attention.kv_size
        plain = (
            type(projection.quant_method).__name__ == "UnquantizedLinearMethod"
            and isinstance(weight, torch.Tensor)
            and tuple(weight.shape) == (rows, normed.shape[-1])
            and not getattr(projection, "use_intel_amx_backend", False)
        )
        if not plain:
            whole: Tensor = projection(normed)[0]
            return whole[..., : attention.q_size]
        bias = getattr(projection, "bias", None)
        size = attention.q_size
        return linear(normed, weight[:size], bias if bias is None else bias[:size])


def _decoder_layers(model: Any) -> dict[int, Any]:
    """The decoder layers by id; ConfigError with one sentence unless all are of a known kind."""
    modules = dict(model.named_modules())
    layers: dict[int, Any] = {}
    for name, module in modules.items():
        if isinstance(module, RadixAttention):
            outer = modules[name.rpartition(".")[0].rpartition(".")[0]]
            layers[module.layer_id] = outer
            if problem := _problem(outer):
                raise ConfigError(
                    f"lookahead is on and SmartGen cannot look ahead in {type(model).__name__}: "
                    f"{problem}; allowed are the layers of Llama, Qwen2, Qwen3 and Gemma-3, or "
                    "lookahead false"
                )
    return layers


def _problem(layer: Any) -> str | None:
    kind, attention = type(layer).__name__, getattr(layer, "self_attn", None)
    if kind not in KNOWN or type(attention).__name__ != KNOWN[kind][0]:
        return f"its layers are {kind} with {type(attention).__name__}"
    _, hooked, wanted = KNOWN[kind]
    target = layer if hooked == "layer" else attention
    names = tuple(inspect.signature(target.forward).parameters)
    if names != wanted:
        return f"{type(target).__name__} takes {', '.join(names)} and not {', '.join(wanted)}"
    return None
