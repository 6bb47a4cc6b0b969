"""Selection for a padded, ragged batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_smartgen.select.base import Selector

PADDING = -1


def select_batch(
    selector: Selector,
    layer: int,
    queries: Tensor,
    metadata: Tensor,
    lengths: Sequence[int],
    counts: Sequence[int],
) -> Tensor:
    """Return int64 [B, Hkv, max(counts)]: each request's entries ascending, then -1.

    `queries` is [B, Hkv, G, D], `metadata` [B, N, Hkv, width], of which request b has the first
    `lengths[b]` tokens; it may use `counts[b]` entries a KV head. What is behind a request's
    length is never read: a request gets here what it gets alone, bit for bit.
    Raises ValueError for batch sizes or lengths that do not fit.
    """
    batch = queries.shape[0]
    if not batch or not metadata.shape[0] == len(lengths) == len(counts) == batch:
        raise ValueError(
            f"the batch has {batch} queries, {metadata.shape[0]} metadata rows, {len(lengths)} "
            f"lengths and {len(counts)} counts; they must be equal and at least 1"
        )
    index = torch.full(
        (batch, queries.shape[1], max(counts)), PADDING, dtype=torch.int64, device=queries.device
    )
    for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        if not 1 <= length <= metadata.shape[1]:
            raise ValueError(f"length is {length}; allowed are 1 to {metadata.shape[1]}")
        picked = selector.pick(selector.score(layer, queries[b], metadata[b, :length]), count)
        index[b, :, : picked.shape[1]] = picked
    return index
