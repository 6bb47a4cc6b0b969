"""What a selector is: it encodes keys to small metadata and scores that metadata for a query.

The metadata of every prompt token is on the decode node before the first step; the keys need not
be. All scores are per KV head: the unit of selection is one token of one KV head of one layer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import msgspec
import torch
from torch import Tensor

from sglang_smartgen.select.topk import top_k

__all__ = ["KVShape", "Selector", "budget", "top_k"]


class KVShape(msgspec.Struct, frozen=True):
    """The attention geometry of one rank. Raises ValueError for numbers that do not fit."""

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    scaling: float  # of the logits, 1 / sqrt(head_dim) on most models

    def __post_init__(self) -> None:
        for field in ("layers", "q_heads", "kv_heads", "head_dim"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be at least 1")
        if self.q_heads % self.kv_heads:
            raise ValueError(
                f"q_heads is {self.q_heads}; it must be a multiple of kv_heads, {self.kv_heads}"
            )

    @property
    def group(self) -> int:
        """Return G, the number of query heads that share a KV head."""
        return self.q_heads // self.kv_heads


class Selector(ABC):
    """Finds the important entries of one layer for one query. Stateless between calls."""

    name: ClassVar[str]
    metadata_dtype: torch.dtype
    metadata_width: int  # elements a token and KV head
    anchor_tokens: int = 0  # encode() needs the keys of the prompt's first tokens, this many

    def __init__(self, shape: KVShape) -> None:
        self.shape = shape

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a text that two nodes share if and only if they encode and score alike."""

    @abstractmethod
    def encode(self, layer: int, keys: Tensor, anchor: Tensor | None) -> Tensor:
        """Encode `keys` [T, Hkv, D], post-RoPE as the pool stores them, to [T, Hkv, width].

        `anchor` is the keys of the first `anchor_tokens` tokens of the same prompt and layer (all
        of them on a shorter prompt); None if `anchor_tokens` is 0. The metadata of a token does
        not depend on the tokens encoded with it, bit for bit.
        Raises ValueError for shapes that do not fit.
        """

    @abstractmethod
    def score(self, layer: int, query: Tensor, metadata: Tensor) -> Tensor:
        """Return float32 [Hkv, N], larger = more important.

        `query` is [Hkv, G, D] post-RoPE, `metadata` [N, Hkv, width]. Raises ValueError for
        shapes that do not fit.
        """

    def _check_keys(self, layer: int, keys: Tensor) -> None:
        self._check("layer", layer, range(self.shape.layers))
        heads, dim = self.shape.kv_heads, self.shape.head_dim
        if keys.dim() != 3 or keys.shape[1:] != (heads, dim):
            raise ValueError(f"keys is {list(keys.shape)}; it must be [T, {heads}, {dim}]")

    def _check_score(self, layer: int, query: Tensor, metadata: Tensor) -> None:
        self._check("layer", layer, range(self.shape.layers))
        wanted = (self.shape.kv_heads, self.shape.group, self.shape.head_dim)
        if query.shape != wanted:
            raise ValueError(f"query is {list(query.shape)}; it must be {list(wanted)}")
        inner = (self.shape.kv_heads, self.metadata_width)
        if metadata.dim() != 3 or metadata.shape[1:] != inner:
            raise ValueError(
                f"metadata is {list(metadata.shape)}; it must be [N, {inner[0]}, {inner[1]}]"
            )
        if metadata.dtype != self.metadata_dtype:
            raise ValueError(f"metadata is {metadata.dtype}; it must be {self.metadata_dtype}")

    @staticmethod
    def _check(field: str, value: int, allowed: range) -> None:
        if value not in allowed:
            raise ValueError(f"{field} is {value}; allowed are 0 to {allowed.stop - 1}")


def budget(prompt_len: int, ratio: float) -> int:
    """Return k, the entries a KV head may use: `ceil(ratio * prompt_len)`, 1 to `prompt_len`.

    Raises ValueError unless `prompt_len >= 1` and `0 < ratio <= 1`.
    """
    if prompt_len < 1:
        raise ValueError(f"prompt_len is {prompt_len}; it must be at least 1")
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio is {ratio}; it must be above 0 and at most 1")
    # A ratio such as 0.1 is a little above its decimal value; without the slack 10 % of 1,000
    # would be 101.
    return min(prompt_len, max(1, math.ceil(ratio * prompt_len - 1e-9 * prompt_len)))
