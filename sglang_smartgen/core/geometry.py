"""Sizes of one rank's KV cache, shared by everything that addresses it."""

from __future__ import annotations

import msgspec
import torch

DENSE_LAYERS = 2
"""Layers 0 and 1 are always sent whole and never selected from (InfiniGen, HATA and the paper)."""


class KVGeometry(msgspec.Struct, frozen=True):
    """Layers, KV heads and head size of one rank, with the dtype that the pool stores."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

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
    def sparse_layers(self) -> int:
        """Number of layers that are selected from."""
        return max(0, self.layers - DENSE_LAYERS)
