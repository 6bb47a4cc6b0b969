"""Plain loops for the operators of Algorithm 1, slow and obvious."""

from __future__ import annotations

import torch
from torch import Tensor

LOCAL, REMOTE = 1, 2


def mask_gather(mask: Tensor, index: Tensor) -> Tensor:
    """int8 [B, H, k]: the mask of every entry, 0 outside it."""
    out = torch.zeros(index.shape, dtype=torch.int8)
    batch, heads, k = index.shape
    for b in range(batch):
        for h in range(heads):
            row = mask[b] if mask.dim() == 2 else mask[b, h]
            for j in range(k):
                position = int(index[b, h, j])
                if 0 <= position < len(row):
                    out[b, h, j] = row[position]
    return out


def lane(index: Tensor, index_mask: Tensor, value: int) -> tuple[Tensor, Tensor]:
    """The entries whose mask is `value`, at the front of -1 padded rows, and their count."""
    out = torch.full_like(index, -1)
    count = torch.zeros(index.shape[:2], dtype=torch.int64)
    batch, heads, k = index.shape
    for b in range(batch):
        for h in range(heads):
            for j in range(k):
                if index_mask[b, h, j] == value:
                    out[b, h, count[b, h]] = index[b, h, j]
                    count[b, h] += 1
    return out, count


def reorder_descending(index: Tensor, index_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Remote, then local, then padding (-1), each in the order given; and that order's columns."""
    out = torch.full_like(index, -1)
    order = torch.zeros_like(index)
    batch, heads, k = index.shape
    for b in range(batch):
        for h in range(heads):
            values = [int(v) for v in index_mask[b, h]]
            columns = [j for j in range(k) if values[j] == REMOTE]
            columns += [j for j in range(k) if values[j] == LOCAL]
            columns += [j for j in range(k) if values[j] not in (LOCAL, REMOTE)]
            for at, j in enumerate(columns):
                order[b, h, at] = j
                if values[j] in (LOCAL, REMOTE):
                    out[b, h, at] = index[b, h, j]
    return out, order
