"""Checks and the choice of path that every operator shares.

The CPU paths compute in numpy on zero-copy views: at some hundred entries a layer the cost is the
number of calls, and a numpy call costs half of a torch one.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

# The mask values of `core/mask.py`, repeated because the import order is core -> triton_kernels;
# a test keeps the two equal.
LOCAL = 1
REMOTE = 2

# Triton reads the variable when it compiles a kernel's decorator, so at import.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def use_triton(tensor: Tensor) -> bool:
    """Tell whether the Triton kernel runs: on CUDA, or on a CPU under Triton's interpreter."""
    return _INTERPRETED or tensor.is_cuda


def block_size(k: int) -> int:
    """Return the power of two of columns that one program step handles, 16 to 1,024."""
    return min(1024, max(16, 1 << (k - 1).bit_length()))


def check_index(index: Tensor) -> None:
    """Raise ValueError unless `index` is int64 `[B, H, k]`."""
    if index.dtype != torch.int64 or index.dim() != 3:
        raise ValueError(f"index is {describe(index)}; it must be int64 [B, H, k]")


def check_index_mask(index: Tensor, index_mask: Tensor) -> None:
    """Raise ValueError unless `index_mask` is int8, shaped like `index` and on its device."""
    if index_mask.dtype != torch.int8 or index_mask.shape != index.shape:
        raise ValueError(
            f"index_mask is {describe(index_mask)}; it must be int8 {list(index.shape)} like index"
        )
    check_device("index_mask", index_mask, index)


def check_device(field: str, tensor: Tensor, index: Tensor) -> None:
    """Raise ValueError unless `tensor` is on the device of `index`."""
    if tensor.device != index.device:
        raise ValueError(f"{field} is on {tensor.device}; it must be on {index.device} like index")


def describe(tensor: Tensor) -> str:
    """Return dtype and shape in words, such as `int64 [2, 3]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
