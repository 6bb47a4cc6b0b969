"""Checks, allocation and the choice of path that every operator shares.

The CPU paths of index operators compute in numpy on zero-copy views: at some hundred entries a
layer the cost is the number of calls, and a numpy call costs half of a torch one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

# The mask values of `core/mask.py`, repeated because the import order is core -> triton_kernels;
# a test keeps the two equal.
PADDING = 0
LOCAL = 1
REMOTE = 2

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

# Triton reads the variable when it compiles a kernel's decorator, so at import.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def use_triton(tensor: Tensor) -> bool:
    """Tell whether the Triton kernel runs: on CUDA, or on a CPU under Triton's interpreter."""
    return _INTERPRETED or tensor.is_cuda


def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised tensor. Every result of a kernel comes from here.

    Called as `_dispatch.allocate`, so that a test can put canary bytes around each result.
    """
    return torch.empty(tuple(shape), dtype=dtype, device=device)


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """Return the type in which a kernel multiplies matrices of `dtype`: the same.

    Triton's interpreter keeps bfloat16 as raw 16-bit words and would multiply those as integers;
    there it is float32.
    """
    if _INTERPRETED:
        return tl.float32
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}.get(dtype, tl.float16)


def power_of_two(number: int, least: int = 1, most: int = 1 << 30) -> int:
    """Return the smallest power of two that is not below `number`, kept in `least` to `most`."""
    return min(most, max(least, 1 << max(0, number - 1).bit_length()))


def block_size(k: int) -> int:
    """Return the power of two of columns that one program step handles, 16 to 1,024."""
    return power_of_two(k, 16, 1024)


def check(
    field: str,
    tensor: Tensor,
    shape: Sequence[int | str],
    dtypes: Sequence[torch.dtype],
    like: Tensor | None = None,
) -> None:
    """Raise ValueError, in one sentence, unless `tensor` is what the operator can work with.

    `shape` has a number where the size is fixed and a name where it is free. With `like`, the
    tensor must be on the same device.
    """
    fits = len(tensor.shape) == len(shape)
    for wanted, given in zip(shape, tensor.shape, strict=False):
        fits = fits and (wanted == given or isinstance(wanted, str))
    if not fits or tensor.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        sizes = ", ".join(str(size) for size in shape)
        raise ValueError(f"{field} is {describe(tensor)}; it must be {names} [{sizes}]")
    if like is not None:
        check_device(field, tensor, like)


def check_index(index: Tensor) -> None:
    """Raise ValueError unless `index` is int64 `[B, H, k]`."""
    check("index", index, ("B", "H", "k"), (torch.int64,))


def check_index_mask(index: Tensor, index_mask: Tensor) -> None:
    """Raise ValueError unless `index_mask` is int8, shaped like `index` and on its device."""
    check("index_mask", index_mask, index.shape, (torch.int8,), index)


def check_slots(slots: Tensor | None, batch: int, pool: Tensor) -> int:
    """Return N of `slots` int64 `[B, N]`, or of `pool` `[N, ...]` where there are no slots.

    Raises ValueError for a wrong shape, dtype or device, and for no slots with several requests.
    """
    if slots is not None:
        check("slots", slots, (batch, "N"), (torch.int64,), pool)
        return slots.shape[1]
    if batch != 1:
        raise ValueError(f"slots is not given; with {batch} requests it must be int64 [{batch}, N]")
    return pool.shape[0]


def mask_of_heads(mask: Tensor, index: Tensor) -> Tensor:
    """Return `mask` int8 `[B, N]` or `[B, H, N]` as `[B, H, N]`, without a copy.

    Raises ValueError unless it fits `index` `[B, H, k]` and is on its device.
    """
    batch, heads, _ = index.shape
    if mask.dtype != torch.int8 or mask.shape[:-1] not in ((batch,), (batch, heads)):
        raise ValueError(
            f"mask is {describe(mask)}; it must be int8 [{batch}, N] or [{batch}, {heads}, N]"
        )
    check_device("mask", mask, index)
    return mask.unsqueeze(1).expand(-1, heads, -1) if mask.dim() == 2 else mask


def check_device(field: str, tensor: Tensor, like: Tensor) -> None:
    """Raise ValueError unless `tensor` is on the device of `like`."""
    if tensor.device != like.device:
        raise ValueError(
            f"{field} is on {tensor.device}; it must be on {like.device} like the rest"
        )


def describe(tensor: Tensor) -> str:
    """Return dtype and shape in words, such as `int64 [2, 3]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
