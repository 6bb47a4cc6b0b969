"""Operators 4 and 5 of Algorithm 1: order each row by mask descending and apply it to the index.

There are three mask values only, so the kernel is a counting sort: one pass counts, one places.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_smartgen.triton_kernels import _dispatch
from sglang_smartgen.triton_kernels._dispatch import (
    LOCAL,
    REMOTE,
    block_size,
    check_index,
    check_index_mask,
    use_triton,
)


class Reordered(NamedTuple):
    """Rows with the remote entries first, then the local ones, then padding; stable in each."""

    reordered: Tensor  # int64 [B, H, k], -1 for padding
    order: Tensor  # int64 [B, H, k], column of each entry in the row that was given


def reorder_descending(index: Tensor, index_mask: Tensor) -> Reordered:
    """Move the remote entries of `index` int64 `[B, H, k]` to the front of each row.

    `index_mask` is int8 `[B, H, k]`: 2 remote, 1 local, anything else padding, which becomes -1.
    Raises ValueError for wrong shapes, dtypes or devices.
    """
    check_index(index)
    check_index_mask(index, index_mask)
    batch, heads, k = index.shape
    if index.numel() == 0:
        return Reordered(index.clone(), index.clone())
    if not use_triton(index):
        return _cpu_path(index, index_mask)
    index, index_mask = index.contiguous(), index_mask.contiguous()
    out = _dispatch.allocate(index.shape, torch.int64, index.device)
    order = _dispatch.allocate(index.shape, torch.int64, index.device)
    _reorder_descending_kernel[(batch * heads,)](
        index, index_mask, out, order, k, LOCAL=LOCAL, REMOTE=REMOTE, BLOCK=block_size(k)
    )
    return Reordered(out, order)


def _cpu_path(index: Tensor, index_mask: Tensor) -> Reordered:
    entries, values = index.numpy(), index_mask.numpy()
    present = (values == LOCAL) | (values == REMOTE)
    order = np.where(present, -values, 0).argsort(-1, kind="stable")
    entries = np.take_along_axis(np.where(present, entries, -1), order, -1)
    return Reordered(torch.from_numpy(entries), torch.from_numpy(order))


@triton.jit
def _reorder_descending_kernel(  # type: ignore[no-untyped-def]
    index,
    index_mask,
    out,
    order,
    k,
    LOCAL: tl.constexpr,
    REMOTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    # Where the next remote, local and padding entry of this row goes.
    remote_at = tl.zeros([], dtype=tl.int64)
    local_at = tl.zeros([], dtype=tl.int64)
    padding_at = tl.zeros([], dtype=tl.int64)
    for start in range(0, k, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(index_mask + row * k + column, mask=column < k, other=0)
        remotes = tl.sum((value == REMOTE).to(tl.int64), 0)
        local_at += remotes
        padding_at += remotes + tl.sum((value == LOCAL).to(tl.int64), 0)
    for start in range(0, k, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < k
        value = tl.load(index_mask + row * k + column, mask=inside, other=0)
        entry = tl.load(index + row * k + column, mask=inside, other=-1)
        is_remote = (value == REMOTE) & inside
        is_local = (value == LOCAL) & inside
        is_padding = inside & ~is_remote & ~is_local
        target = tl.where(
            is_remote,
            remote_at + tl.cumsum(is_remote.to(tl.int64), 0),
            tl.where(
                is_local,
                local_at + tl.cumsum(is_local.to(tl.int64), 0),
                padding_at + tl.cumsum(is_padding.to(tl.int64), 0),
            ),
        )
        entry = tl.where(is_padding, -1, entry)
        tl.store(out + row * k + target - 1, entry, mask=inside)
        tl.store(order + row * k + target - 1, column.to(tl.int64), mask=inside)
        remote_at += tl.sum(is_remote.to(tl.int64), 0)
        local_at += tl.sum(is_local.to(tl.int64), 0)
        padding_at += tl.sum(is_padding.to(tl.int64), 0)
