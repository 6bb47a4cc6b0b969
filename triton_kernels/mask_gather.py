"""Operator 1 of Algorithm 1: the mask value of every selected entry."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from sglang_smartgen.triton_kernels import _dispatch
from sglang_smartgen.triton_kernels._dispatch import (
    block_size,
    check_index,
    mask_of_heads,
    use_triton,
)


def mask_gather(mask: Tensor, index: Tensor) -> Tensor:
    """Return int8 `[B, H, k]`: `mask` at every position of `index`, 0 where there is none.

    `mask` is int8 `[B, N]`, shared by the heads, or `[B, H, N]`, strided as you like. `index` is
    int64 `[B, H, k]`; -1 and every other position outside `[0, N)` reads as padding (0).
    Raises ValueError for wrong shapes, dtypes or devices.
    """
    check_index(index)
    mask = mask_of_heads(mask, index)
    batch, heads, k = index.shape
    if index.numel() == 0 or mask.shape[-1] == 0:
        return torch.zeros_like(index, dtype=torch.int8)
    if not use_triton(index):
        return _cpu_path(mask, index)
    index = index.contiguous()
    out = _dispatch.allocate(index.shape, torch.int8, index.device)
    block = block_size(k)
    _mask_gather_kernel[(batch * heads, triton.cdiv(k, block))](
        mask, index, out, heads, k, mask.shape[-1], *mask.stride(), BLOCK=block
    )
    return out


def _cpu_path(mask: Tensor, index: Tensor) -> Tensor:
    values, position = mask.numpy(), index.numpy()
    batch, heads, length = values.shape
    present = (position >= 0) & (position < length)
    row, head = np.arange(batch)[:, None, None], np.arange(heads)[:, None]
    found: NDArray[np.int8] = values[row, head, np.where(present, position, 0)] * present
    return torch.from_numpy(found)


@triton.jit
def _mask_gather_kernel(  # type: ignore[no-untyped-def]
    mask, index, out, heads, k, length, stride_b, stride_h, stride_n, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < k
    position = tl.load(index + row * k + column, mask=inside, other=-1)
    present = (position >= 0) & (position < length)
    base = (row // heads) * stride_b + (row % heads) * stride_h
    value = tl.load(mask + base + position * stride_n, mask=present, other=0)
    tl.store(out + row * k + column, value, mask=inside)
