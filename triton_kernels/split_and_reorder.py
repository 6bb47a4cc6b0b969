"""Operators 1 to 5 of Algorithm 1 in one launch: from index and mask to the reordered index.

A row comes out as its remote entries, its local ones, then padding. The lanes of operators 2 and 3
are the two runs at its start and need no array of their own: `remote` and `local` say how long.

The CPU path writes one flag an entry and mask value, `[rows, values, columns]`; the positions of
the set flags, in memory order, are then the stable partition of every row, without a sort.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from sglang_smartgen.triton_kernels import _dispatch
from sglang_smartgen.triton_kernels._dispatch import (
    LOCAL,
    PADDING,
    REMOTE,
    block_size,
    check_index,
    mask_of_heads,
    power_of_two,
    use_triton,
)

_LONG_ROW = 1024  # from this k on a call a row costs less than one more pass over all rows


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
    if index.numel() and not use_triton(index):
        return _cpu_path(mask.numpy(), index.numpy())
    reordered = _dispatch.allocate(index.shape, torch.int64, index.device)
    order = _dispatch.allocate(index.shape, torch.int64, index.device)
    counts = _dispatch.allocate((2, batch, heads), torch.int64, index.device)
    if index.numel() == 0:
        counts.zero_()
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


def _cpu_path(mask: NDArray[np.int8], index: NDArray[np.int64]) -> SplitIndex:
    batch, heads, k = index.shape
    rows, width = batch * heads, power_of_two(k)
    value = _mask_values(mask, index).reshape(rows, k)
    flags = _flags(value, width, (REMOTE, LOCAL))
    padded = np.count_nonzero(flags) < rows * k
    if padded:
        # What is neither remote nor local becomes a third value, behind them.
        np.copyto(value, PADDING, where=(value != REMOTE) & (value != LOCAL))
        flags = _flags(value, width, (REMOTE, LOCAL, PADDING))
    values = flags.shape[1]
    # A flag's position is (row * values + value) * width + column.
    place = flags.reshape(-1).nonzero()[0]
    ends = place.searchsorted(np.arange(rows * values + 1) * width)
    found = np.diff(ends).reshape(batch, heads, values)
    place &= width - 1
    order = place.reshape(index.shape)
    reordered = np.empty_like(index)
    if k >= _LONG_ROW:
        for b in range(batch):
            for h in range(heads):
                index[b, h].take(order[b, h], out=reordered[b, h], mode="clip")
    else:
        first = np.arange(0, rows * k, k).reshape(batch, heads, 1)
        index.reshape(-1).take(order + first, out=reordered, mode="clip")
    if padded:
        reordered[np.arange(k) >= found[..., :2].sum(-1)[..., None]] = -1
    results = (reordered, order, found[..., 0], found[..., 1])
    return SplitIndex(*(torch.from_numpy(result) for result in results))


def _flags(value: NDArray[np.int8], width: int, wanted: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return [rows, wanted, width]: which columns of `value` [rows, k] have which value."""
    rows, k = value.shape
    make = np.empty if width == k else np.zeros
    flags = make((rows, len(wanted), width), dtype=np.bool_)
    for at, number in enumerate(wanted):
        np.equal(value, number, out=flags[:, at, :k])
    return flags


def _mask_values(mask: NDArray[np.int8], index: NDArray[np.int64]) -> NDArray[np.int8]:
    """Return the mask of every entry, 0 outside it."""
    value = np.zeros(index.shape, dtype=np.int8)
    length = mask.shape[-1]
    if length == 0:
        return value
    shared = mask.strides[1] == 0
    for b in range(index.shape[0]):
        if shared:
            mask[b, 0].take(index[b], out=value[b], mode="clip")
        else:
            for h in range(index.shape[1]):
                mask[b, h].take(index[b, h], out=value[b, h], mode="clip")
    position = index.view(np.uint64)  # -1 is larger than any length
    if position.max() >= length:
        value *= position < length
    return value


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
