"""The upper bound: metadata is every key, the score is the true attention of the group."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from sglang_smartgen.select.base import Selector
from sglang_smartgen.select.logits import group_softmax


class ExactSelector(Selector):
    """True top-k. The metadata is the keys themselves, width D in the pool's dtype."""

    name: ClassVar[str] = "exact"

    def prepare(self) -> None:
        """Set the metadata to the pool's dtype and the whole key."""
        self.metadata_dtype = self.dtype
        self.metadata_width = self.shape.head_dim

    def fingerprint(self) -> str:
        """Return name, version, dtype and shape."""
        return f"exact:2:{self.metadata_dtype}:{self.shape}"

    def encode(self, layer: int, keys: Tensor, anchor: Tensor | None = None) -> Tensor:
        """Return a copy of `keys` [T, Hkv, D] in the pool's dtype."""
        self._check_keys(layer, keys)
        return keys.to(self.metadata_dtype, copy=True)

    def score(self, layer: int, query: Tensor, metadata: Tensor) -> Tensor:
        """Return the softmax of the scaled logits, summed over the query heads of each KV head."""
        self._check_score(layer, query, metadata)
        return group_softmax(query, metadata, self.shape.scaling)
