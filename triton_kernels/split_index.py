"""Operators 2 and 3 of Algorithm 1: the local and the remote index of every row."""

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
    REMOTE,
    block_size,
    check_index,
    check_index_mask,
    use_triton,
)


class Lanes(NamedTuple):
    """The two lanes of an index, each compacted to the front of its row in the index's order."""

    local_index: Tensor  # int64 [B, H, k], -1 padded
    remote_index: Tensor  # int64 [B, H, k], -1 padded
    local_count: Tensor  # int64 [B, H]
    remote_count: Tensor  # int64 [B, H]


def split_index(index: Tensor, index_mask: Tensor) -> Lanes:
    """Split `index` int64 `[B, H, k]` by `index_mask` int8 `[B, H, k]` (1 local, 2 remote).

    Entries of any other mask value are in neither lane. Raises ValueError for wrong shapes,
    dtypes or devices.
    """
    check_index(index)
    check_index_mask(index, index_mask)
    batch, heads, k = index.shape
    if index.numel() == 0:
        none = index.new_zeros(batch, heads)
        return Lanes(index.clone(), index.clone(), none, none.clone())
    if not use_triton(index):
        entries, values = index.numpy(), index_mask.numpy()
        local_index, local_count = _compact(entries, values == LOCAL)
        remote_index, remote_count = _compact(entries, values == REMOTE)
        return Lanes(local_index, remote_index, local_count, remote_count)
    lanes = _dispatch.allocate((2, batch, heads, k), torch.int64, index.device)
    counts = _dispatch.allocate((2, batch, heads), torch.int64, index.device)
    _split_index_kernel[(batch * heads, 2)](
        index.contiguous(),
        index_mask.contiguous(),
        lanes,
        counts,
        k,
        FIRST_VALUE=LOCAL,
        BLOCK=block_size(k),
    )
    return Lanes(lanes[0], lanes[1], counts[0], counts[1])


def _compact(entries: NDArray[np.int64], chosen: NDArray[np.bool_]) -> tuple[Tensor, Tensor]:
    count = chosen.sum(-1)
    lane = np.full(entries.shape, -1)
    lane[np.arange(entries.shape[-1]) < count[..., None]] = entries[chosen]
    return torch.from_numpy(lane), torch.from_numpy(count)


@triton.jit
def _split_index_kernel(  # type: ignore[no-untyped-def]
    index, index_mask, lanes, counts, k, FIRST_VALUE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1)  # 0 local, 1 remote: the mask values are neighbours
    target_row = lane * tl.num_programs(0) + row
    found = tl.zeros([], dtype=tl.int64)
    for start in range(0, k, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < k
        value = tl.load(index_mask + row * k + column, mask=inside, other=0)
        chosen = (value == FIRST_VALUE + lane).to(tl.int64)
        target = found + tl.cumsum(chosen, 0) - 1
        entry = tl.load(index + row * k + column, mask=inside, other=-1)
        tl.store(lanes + target_row * k + target, entry, mask=chosen != 0)
        found += tl.sum(chosen, 0)
    for start in range(0, k, BLOCK):
        column = start + tl.arange(0, BLOCK)
        tl.store(lanes + target_row * k + column, -1, mask=(column < k) & (column >= found))
    tl.store(counts + target_row, found)
