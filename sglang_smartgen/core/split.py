"""Algorithm 1 of the SmartGen paper: split a KV index into a remote and a local lane.

Five operators, all in `triton_kernels`: (1) look the mask up for every selected entry, (2, 3) find
the local and the remote entries of each row, (4) order each row by mask descending, (5) apply the
order to the index. Attention does not care about the order of the gathered entries, so after it
the remote ones are contiguous at the start of each row and land there in one write. One fused
operator does all five.
"""

from __future__ import annotations

from torch import Tensor

from sglang_smartgen.triton_kernels import SplitIndex, split_and_reorder

__all__ = ["SplitIndex", "split_index"]


def split_index(index: Tensor, mask: Tensor) -> SplitIndex:
    """Split `index` by `mask`, remote entries first: `triton_kernels.split_and_reorder`.

    `index` is int64 `[B, H, k]`, -1 padded anywhere. `mask` is int8 `[B, N]` (shared by the heads)
    or `[B, H, N]`. An index outside `[0, N)`, or one whose mask is PADDING, counts as padding and
    is -1 in the result. Does not synchronise with the device. Raises ValueError for wrong shapes,
    dtypes or devices.
    """
    return split_and_reorder(index, mask)
