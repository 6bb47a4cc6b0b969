"""Operators 1 to 5 of Algorithm 1 in one launch: from index and mask to the reordered index.

A row comes out as its remote entries, its local ones, then padding. The lanes of operators 2 and 3
are the two runs at its start and need no array of their own: `remote` and `local` say how long.
"""

from __future__ import annotations

from typing import NamedTuple

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
    mask_of_heads,
    use_triton,
)
from sglang_smartgen.triton_kernels.second_thread import side_by_side

_TWO_THREADS = 1 << 16  # entries from which a CPU splits half of the batch on a second thread


class SplitIndex(NamedTuple):
    """A KV index in two lanes; row `[b, h]` is `remote` entries, then `local` ones, then -1."""

    reordered: Tensor  # int64 [B, H, k]: remote, local, -1; stable inside each group
    order: Tensor  # int64 [B, H, k]: a permutation; reordered = gather(index, -1, order)
    remote: Tensor  # int64 [B, H]: number of remote entries at the start of each row
    local: Tensor  # int64 [B, H]: number of local entries after them


def split_and_reorder(index: Tensor, mask: Tensor) -> SplitIndex:
    """Split `index` by `mask`, remote entries first.

    `index` is int64 `[B, H, k]`, -1 padded anywhere. `mask` is int8 `[B, N]` (shared by the heads)
    or `[B, H, N]`, strided as you like. An index outside `[0, N)`, or one whose mask is neither 1
    nor 2, counts as padding and is -1 in the result. Does not synchronise with the device. Raises
    ValueError for wrong shapes, dtypes or devices.
    """
    check_index(index)
    mask = mask_of_heads(mask, index)
    batch, heads, k = index.shape
    index = index.contiguous()
    reordered = _dispatch.allocate(index.shape, torch.int64, index.device)
    order = _dispatch.allocate(index.shape, torch.int64, index.device)
    counts = _dispatch.allocate((2, batch, heads), torch.int64, index.device)
    if index.numel() == 0:
        counts.zero_()
    elif not use_triton(index):
        _cpu_path(mask, index, reordered, order, counts)
    else:
        _split_and_reorder_kernel[(batch * heads,)](
            mask,
            index,
            reordered,
            order,
            counts,
            heads,
            k,
            mask.shape[-1],
            *mask.stride(),
            LOCAL=LOCAL,
            REMOTE=REMOTE,
            BLOCK=block_size(k),
        )
    return SplitIndex(reordered, order, counts[0], counts[1])


def _cpu_path(
    mask: Tensor, index: Tensor, reordered: Tensor, order: Tensor, counts: Tensor
) -> None:
    from sglang_smartgen.triton_kernels.split_loop import split_rows

    status, entries, placed, columns, found = (
        x.numpy() for x in (mask, index, reordered, order, counts)
    )

    def rows(part: slice) -> None:
        split_rows(status[part], entries[part], placed[part], columns[part], found[:, part])

    half = len(index) // 2
    if half and index.numel() >= _TWO_THREADS:
        side_by_side(lambda: rows(slice(half)), lambda: rows(slice(half, None)))
    else:
        rows(slice(None))


@triton.jit
def _split_and_reorder_kernel(  # type: ignore[no-untyped-def]
    mask,
    index,
    reordered,
    order,
    counts,
    heads,
    k,
    length,
    stride_b,
    stride_h,
    stride_n,
    LOCAL: tl.constexpr,
    REMOTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    mask += (row // heads) * stride_b + (row % heads) * stride_h
    index += row * k
    # First pass: count. Second pass: place, where the next entry of each kind goes.
    remotes = tl.zeros([], dtype=tl.int32)
    locals = tl.zeros([], dtype=tl.int32)
    for start in range(0, k, BLOCK):
        column = start + tl.arange(0, BLOCK)
        position = tl.load(index + column, mask=column < k, other=-1)
        present = (position >= 0) & (position < length)
        value = tl.load(mask + position * stride_n, mask=present, other=0)
        remotes += tl.sum((value == REMOTE).to(tl.int32), 0)
        locals += tl.sum((value == LOCAL).to(tl.int32), 0)
    tl.store(counts + row, remotes.to(tl.int64))
    tl.store(counts + tl.num_programs(0) + row, locals.to(tl.int64))
    remote_at = tl.zeros([], dtype=tl.int32)
    local_at = remotes
    padding_at = remotes + locals
    for start in range(0, k, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < k
        position = tl.load(index + column, mask=inside, other=-1)
        present = (position >= 0) & (position < length)
        value = tl.load(mask + position * stride_n, mask=present, other=0)
        is_remote = (value == REMOTE).to(tl.int32)
        is_local = (value == LOCAL).to(tl.int32)
        is_padding = inside.to(tl.int32) - is_remote - is_local
        target = tl.where(
            is_remote != 0,
            remote_at + tl.cumsum(is_remote, 0),
            tl.where(
                is_local != 0,
                local_at + tl.cumsum(is_local, 0),
                padding_at + tl.cumsum(is_padding, 0),
            ),
        )
        target = row * k + target - 1
        tl.store(reordered + target, tl.where(is_padding != 0, -1, position), mask=inside)
        tl.store(order + target, column.to(tl.int64), mask=inside)
        remote_at += tl.sum(is_remote, 0)
        local_at += tl.sum(is_local, 0)
        padding_at += tl.sum(is_padding, 0)
