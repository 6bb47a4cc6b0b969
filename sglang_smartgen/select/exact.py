"""The upper bound: metadata is every key, the score is the true attention of the group."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from sglang_smartgen.select.base import KVShape, Selector


class ExactSelector(Selector):
    """True top-k. `dtype` is the pool's; the metadata is the keys themselves, width D."""

    name: ClassVar[str] = "exact"

    def __init__(self, shape: KVShape, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(shape)
        self.metadata_dtype = dtype
        self.metadata_width = shape.head_dim

    def fingerprint(self) -> str:
        """Return name, version, dtype and shape."""
        return f"exact:1:{self.metadata_dtype}:{self.shape}"

    def encode(self, layer: int, keys: Tensor, anchor: Tensor | None = None) -> Tensor:
        """Return a copy of `keys` [T, Hkv, D] in the pool's dtype."""
        self._check_keys(layer, keys)
        return keys.to(self.metadata_dtype, copy=True)

    def score(self, layer: int, query: Tensor, metadata: Tensor) -> Tensor:
        """Return the softmax of the scaled logits, summed over the query heads of each KV head.

        The group softmax-sum keeps more attention mass at the same k than the maximum or the sum
        of raw logits, since each query head counts by how much it really attends.
        """
        self._check_score(layer, query, metadata)
        keys = metadata.float().permute(1, 2, 0)  # [Hkv, D, N]
        logits = torch.matmul(query.float() * self.shape.scaling, keys)
        return torch.softmax(logits, dim=-1).sum(dim=1)
