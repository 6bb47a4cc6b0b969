"""Quest: an upper bound of the logits of each page of 16 tokens, from the page's extreme keys.

Source: Quest (ICML 2024), `bound = sum_d max(q_d * min_d, q_d * max_d)`, the minimum and maximum
over the keys of the page. This is a baseline to measure against: it keeps the whole keys as
metadata and forms the bounds when it scores, so that a page may arrive in pieces. Quest itself
stores two vectors a page, `stored_bytes`.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from sglang_smartgen.core.geometry import DENSE_LAYERS
from sglang_smartgen.select.base import KVShape, Selector
from sglang_smartgen.select.logits import sum_in_order

PAGE = 16


class QuestSelector(Selector):
    """Every token of a page has the page's score, so whole pages win, and the last one in part."""

    name: ClassVar[str] = "quest"

    def prepare(self) -> None:
        """Set the metadata to the pool's dtype and the whole key."""
        self.metadata_dtype = self.dtype
        self.metadata_width = self.shape.head_dim

    def fingerprint(self) -> str:
        """Return name, version, page, dtype and shape."""
        return f"quest:1:{PAGE}:{self.metadata_dtype}:{self.shape}"

    def describe(self) -> str:
        """Return the name with the page size."""
        return f"quest (page {PAGE}, whole keys as metadata)"

    def stored_bytes(self, shape: KVShape) -> float:
        """Return the bytes a token that Quest's own layout takes: two keys a page, sparse layers.

        `metadata_bytes` says what this baseline moves.
        """
        row = shape.kv_heads * 2 * shape.head_dim * self.metadata_dtype.itemsize
        return max(0, shape.layers - DENSE_LAYERS) * row / PAGE

    def encode(self, layer: int, keys: Tensor, anchor: Tensor | None = None) -> Tensor:
        """Return a copy of `keys` [T, Hkv, D] in the pool's dtype."""
        self._check_keys(layer, keys)
        return keys.to(self.metadata_dtype, copy=True)

    def score(self, layer: int, query: Tensor, metadata: Tensor) -> Tensor:
        """Return the softmax over the pages of the scaled bounds, summed over the group."""
        self._check_score(layer, query, metadata)
        length = metadata.shape[0]
        pages = -(-length // PAGE)
        # The last key again fills the last page; it changes neither minimum nor maximum.
        filler = metadata[-1:].expand(pages * PAGE - length, -1, -1)
        paged = torch.cat((metadata, filler)).float().view(pages, PAGE, *metadata.shape[1:])
        low, high = paged.amin(1), paged.amax(1)  # [pages, Hkv, D]
        scores = []
        for head in range(self.shape.kv_heads):
            q = query[head].float() * self.shape.scaling
            # max(q * low, q * high) is q * high where q is positive, else q * low.
            bound = torch.matmul(q.clamp(min=0), high[:, head].contiguous().T) + torch.matmul(
                q.clamp(max=0), low[:, head].contiguous().T
            )
            scores.append(sum_in_order(torch.softmax(bound, dim=-1)))
        return torch.stack(scores).repeat_interleave(PAGE, dim=1)[:, :length].contiguous()
