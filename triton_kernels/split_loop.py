"""The CPU path of `split_and_reorder`: one pass a row, no branch that depends on the mask."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_smartgen.triton_kernels._dispatch import LOCAL, REMOTE
from sglang_smartgen.triton_kernels.compiled import compiled


@compiled("void(int8[:,:,:], int64[:,:,::1], int64[:,:,::1], int64[:,:,::1], int64[:,:,:])")
def split_rows(
    mask: NDArray[np.int8],
    index: NDArray[np.int64],
    reordered: NDArray[np.int64],
    order: NDArray[np.int64],
    counts: NDArray[np.int64],
) -> None:
    """Fill `reordered` and `order` [B, H, k] and `counts` [2, B, H], remote entries and local ones.

    `mask` is [B, H, N], `index` [B, H, k]. Every entry is written to the end of both lanes, and
    only the lane that it belongs to grows: a mask is as good as random, and a wrongly predicted
    branch an entry would cost more than the stores.
    """
    batch, heads, k = index.shape
    length: Any = np.uint64(mask.shape[2])  # as an unsigned number -1 is larger than any length
    position = np.empty(k, np.int64)  # the local lane, until it is known where it begins
    column = np.empty(k, np.int64)
    for b in range(batch):
        for h in range(heads):
            remote, local = 0, 0
            for j in range(k):
                entry = index[b, h, j]
                value = mask[b, h, entry] if np.uint64(entry) < length else np.int8(0)
                reordered[b, h, remote] = entry
                order[b, h, remote] = j
                remote += value == REMOTE
                position[local] = entry
                column[local] = j
                local += value == LOCAL
            padding = remote + local
            if padding < k:
                for j in range(k):
                    entry = index[b, h, j]
                    value = mask[b, h, entry] if np.uint64(entry) < length else np.int8(0)
                    if value not in (LOCAL, REMOTE):
                        reordered[b, h, padding] = -1
                        order[b, h, padding] = j
                        padding += 1
            for j in range(local):
                reordered[b, h, remote + j] = position[j]
                order[b, h, remote + j] = column[j]
            counts[0, b, h] = remote
            counts[1, b, h] = local
