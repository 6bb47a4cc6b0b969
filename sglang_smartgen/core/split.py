"""Algorithm 1 of the SmartGen paper: split a KV index into a remote and a local lane.

Five operators, all in `triton_kernels`: (1) look the mask up for every selected entry, (2, 3) find
the local and the remote entries of each row, (4) order each row by mask descending, (5) apply the
order to the index. Attention does not care about the order of the gathered entries, so after it
the remote ones are contiguous at the start of each row and land there in one write.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sglang_smartgen.triton_kernels import mask_gather, reorder_descending
from sglang_smartgen.triton_kernels import split_index as split_lanes


class SplitIndex(NamedTuple):
    """A KV index in two lanes; row `[b, h]` is `remote` entries, then `local` ones, then -1."""

    reordered: Tensor  # int64 [B, H, k]: remote, local, -1; stable inside each group
    order: Tensor  # int64 [B, H, k]: a permutation; reordered = gather(index, -1, order)
    remote: Tensor  # int64 [B, H]: number of remote entries at the start of each row
    local: Tensor  # int64 [B, H]: number of local entries after them


def split_index(index: Tensor, mask: Tensor) -> SplitIndex:
    """Split `index` by `mask`, remote entries first.

    `index` is int64 `[B, H, k]`, -1 padded anywhere. `mask` is int8 `[B, N]` (shared by the heads)
    or `[B, H, N]`. An index outside `[0, N)`, or one whose mask is PADDING, counts as padding and
    is -1 in the result. Does not synchronise with the device. Raises ValueError for wrong shapes,
    dtypes or devices.
    """
    index_mask = mask_gather(mask, index)
    lanes = split_lanes(index, index_mask)
    reordered, order = reorder_descending(index, index_mask)
    return SplitIndex(reordered, order, lanes.remote_count, lanes.local_count)
