"""A Hugging Face model of which one layer at a time is in memory.

The layers are transformers' own modules, built empty and filled from the safetensors files. Their
attention is a callback of the caller, which sees queries and keys as the KV pool does: after
q-norm, k-norm and RoPE. So nothing of the model's maths is written twice.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from sglang_smartgen.calibrate.errors import CalibrationError
from sglang_smartgen.select.base import KVShape

MODEL_TYPES = ("llama", "qwen3", "gemma3_text")
ATTENTION = "smartgen_layer_walk"  # our name in transformers' table of attention functions


class Attend(Protocol):
    """The attention of one layer over one text."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Return [Hq, T, D] for `query` [Hq, T, D], `key` and `value` [Hkv, T, D], all float32."""


class Layer:
    """One decoder layer with its weights."""

    def __init__(self, index: int, window: int | None, module: Any, rotary: Any, kind: str) -> None:
        self.index = index
        self.window = window
        """Tokens that a query of a sliding-window layer sees, itself included; None: all."""
        self._module, self._rotary, self._kind = module, rotary, kind

    @torch.no_grad()
    def forward(self, hidden: Tensor, attend: Attend, first_position: int = 0) -> Tensor:
        """Run the layer on `hidden` [T, hidden size], the tokens from `first_position` on."""
        x = hidden[None]
        out: Tensor = self._module(
            x, position_embeddings=self._positions(x, first_position), attend=attend
        )
        return out[0]

    @torch.no_grad()
    def query(self, hidden: Tensor, first_position: int = 0) -> Tensor:
        """Return the queries [T, Hq, D] that this layer would ask if `hidden` were its input.

        With the input of the layer before, `hidden` [T, hidden size], these are the lookahead
        queries: the raw residual, this layer's own norm, projection, q-norm and RoPE.
        """
        attention = self._module.self_attn
        normed = self._module.input_layernorm(hidden[None])
        query = attention.q_proj(normed).view(1, len(hidden), -1, attention.head_dim)
        if hasattr(attention, "q_norm"):
            query = attention.q_norm(query)
        query = query.transpose(1, 2)
        cos, sin = self._positions(normed, first_position)
        rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb
        out: Tensor = rotate(query, query, cos, sin)[0]
        return out[0].transpose(0, 1)

    def _positions(self, x: Tensor, first: int) -> Any:
        ids = torch.arange(first, first + x.shape[1])[None]
        if self._kind:  # Gemma-3: one RoPE base a kind of layer
            return self._rotary(x, ids, self._kind)
        return self._rotary(x, ids)


class LayeredModel:
    """The model in `folder`. Raises CalibrationError for one that it cannot read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = _config(folder)
        self._files = _weight_files(folder)
        self._prefix = _prefix(self._files, folder)
        config = self.config
        self.layers: int = config.num_hidden_layers
        self._kinds = [str(kind) for kind in getattr(config, "layer_types", None) or []]
        self._template = self._skeleton(vocabulary=1)
        attention = self._template.layers[0].self_attn
        self.shape = KVShape(
            layers=self.layers,
            q_heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            scaling=attention.scaling,
        )

    def window(self, layer: int) -> int | None:
        """Return the sliding window of `layer` in tokens, None for a full-attention layer."""
        sliding = bool(self._kinds) and self._kinds[layer] == "sliding_attention"
        return int(self.config.sliding_window) if sliding else None

    @torch.no_grad()
    def embed(self, ids: list[int]) -> Tensor:
        """Return the input of layer 0 for the token ids, float32 [T, hidden size]."""
        unique, place = torch.unique(torch.tensor(ids), return_inverse=True)
        if int(unique[-1]) >= self.config.vocab_size or int(unique[0]) < 0:
            raise CalibrationError(f"a token id is outside of the vocabulary of {self.folder}")
        rows = self._tensor("embed_tokens.weight")[unique].float()
        # A model of just these words: Gemma scales its embeddings, and its module knows by what.
        embedding = self._skeleton(vocabulary=len(unique)).embed_tokens
        embedding.weight.data.copy_(rows)
        out: Tensor = embedding(place)
        return out

    def layer(self, index: int) -> Layer:
        """Load layer `index`, in float32; it is freed when the caller drops it."""
        module_type = type(self._template.layers[0])
        with torch.device("meta"):
            module = module_type(self.config, index)
        start = f"{self._prefix}layers.{index}."
        weights: dict[str, Tensor] = {}
        for name in (name for name in self._files if name.startswith(start)):
            weights[name.removeprefix(start)] = self._read(name).float()
        weights = {k: v for k, v in weights.items() if not k.endswith("rotary_emb.inv_freq")}
        try:
            module.load_state_dict(weights, strict=True, assign=True)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise CalibrationError(
                f"layer {index} of {self.folder} does not fit: {reason}"
            ) from None
        # Only Gemma-3 has a RoPE base for each kind of layer.
        kind = self._kinds[index] if self.config.model_type == "gemma3_text" else ""
        return Layer(index, self.window(index), module.eval(), self._template.rotary_emb, kind)

    @torch.no_grad()
    def logits(self, hidden: Tensor, rows: int = 8192) -> Tensor:
        """Return float32 [T, vocabulary] for the last layer's output `hidden` [T, hidden size].

        The head is read `rows` words at a time.
        """
        norm = self._template.norm
        norm.weight.data.copy_(self._tensor("norm.weight").float())
        x = norm(hidden[None])[0]
        own_head = "lm_head.weight" in self._files and not self.config.tie_word_embeddings
        head = self._read("lm_head.weight") if own_head else self._tensor("embed_tokens.weight")
        parts = [x @ head[i : i + rows].float().T for i in range(0, head.shape[0], rows)]
        return torch.cat(parts, dim=-1)

    def _skeleton(self, vocabulary: int) -> Any:
        """Return transformers' model of this config with one layer and few words."""
        from transformers import AttentionInterface, AutoModel

        AttentionInterface.register(ATTENTION, _attention)
        self.config._attn_implementation = ATTENTION
        config = copy.deepcopy(self.config)
        config.vocab_size, config.pad_token_id = vocabulary, None
        config.num_hidden_layers = 1
        if self._kinds:
            # All kinds stay known to the rotary embedding, which looks at the list only.
            config.layer_types = list(self._kinds)
        return AutoModel.from_config(config, dtype=torch.float32).eval()

    def _tensor(self, name: str) -> Tensor:
        return self._read(self._prefix + name)

    def _read(self, name: str) -> Tensor:
        """Read one tensor as stored; its file is mapped only as long as the tensor lives."""
        from safetensors import safe_open

        with safe_open(self._files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **named: Any
) -> tuple[Tensor, None]:
    """Call the callback, as transformers calls an attention function: batch of one, heads first."""
    attend: Attend = named["attend"]
    out = attend(query[0], key[0], value[0], float(module.scaling))
    return out.transpose(0, 1)[None], None


def _config(folder: Path) -> Any:
    if not (folder / "config.json").is_file():
        raise CalibrationError(f"MODEL is {folder}; allowed is a folder with a config.json")
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder).get_text_config()
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CalibrationError(f"the config.json of {folder} cannot be read: {reason}") from None
    if config.model_type not in MODEL_TYPES:
        raise CalibrationError(
            f"the model type of {folder} is {config.model_type}; allowed are "
            f"{', '.join(MODEL_TYPES)}"
        )
    return config


def _weight_files(folder: Path) -> dict[str, Path]:
    """Return the file of every tensor."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            names = json.loads(index.read_text())["weight_map"]
            return {name: folder / file for name, file in names.items()}
        single = folder / "model.safetensors"
        if single.is_file():
            with safe_open(single, framework="pt") as file:
                return dict.fromkeys(file.keys(), single)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CalibrationError(f"the weights in {folder} cannot be read: {error}") from None
    raise CalibrationError(f"{folder} has no model.safetensors and no model.safetensors.index.json")


def _prefix(files: dict[str, Path], folder: Path) -> str:
    """Return what stands before `layers.0.` in the names, such as `model.`."""
    end = "layers.0.input_layernorm.weight"
    for name in files:
        if name.endswith(end):
            return name.removesuffix(end)
    raise CalibrationError(f"the weights in {folder} have no tensor whose name ends with {end}")
