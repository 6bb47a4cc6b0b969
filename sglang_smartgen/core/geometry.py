"""Sizes of one rank's KV cache, shared by everything that addresses it, and its sparse layers."""

from __future__ import annotations

from functools import lru_cache

import msgspec
import torch

DENSE_LAYERS = 2
"""Layers 0 and 1 are always sent whole and never selected from (InfiniGen, HATA and the paper)."""


class KVGeometry(msgspec.Struct, frozen=True):
    """Layers, KV heads and head size of one rank, with the dtype that the pool stores.

    sliding_layers: layers that attend to a window only; SGLang's own attention serves them, so
    they are sent whole and never selected from, like the layers 0 and 1.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    sliding_layers: frozenset[int] = frozenset()

    @property
    def row_bytes(self) -> int:
        """Bytes of K (or of V) of one token in one layer."""
        return self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def entry_bytes(self) -> int:
        """Bytes of K and V of one entry: one token, one KV head, one layer."""
        return 2 * self.head_dim * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in all layers."""
        return 2 * self.layers * self.row_bytes

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Ascending ids of the layers that are selected from.

        A layer's place in this tuple is its index in everything that only sparse layers have:
        selector metadata and the entries that D holds.
        """
        return _sparse_layers(self.layers, self.sliding_layers)

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Ascending ids of all other layers; their KV is whole on D before decode starts."""
        sparse = self.sparse_layers
        return tuple(layer for layer in range(self.layers) if layer not in sparse)


@lru_cache
def _sparse_layers(layers: int, sliding: frozenset[int]) -> tuple[int, ...]:
    return tuple(layer for layer in range(DENSE_LAYERS, layers) if layer not in sliding)
