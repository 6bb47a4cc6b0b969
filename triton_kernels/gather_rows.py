"""The rows of selected entries, copied from a KV pool to contiguous K and V buffers.

K and V go in one launch. The kernel moves bytes, not numbers, so every dtype is exact. The pool may
lie in pinned host memory: CUDA maps it into the device's address space, and the kernel then reads
it over the bus row by row, without a staging copy.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from sglang_smartgen.triton_kernels import _dispatch
from sglang_smartgen.triton_kernels._dispatch import (
    check,
    describe,
    power_of_two,
    use_triton,
)
from sglang_smartgen.triton_kernels.second_thread import side_by_side

_WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)
_TILE = 4096  # words a program moves
# Bytes of K from which a CPU gathers V at the same time: reading rows all over a pool waits for
# memory rather than for bandwidth. Below, waking the second thread would take as long as the work.
_TWO_THREADS = 1 << 20


def gather_rows(
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return K and V of every slot, each `[B, H, k, D]`, contiguous.

    `keys` and `values` are pools `[S, H, D]` of one dtype, contiguous, on the device of `slots` or,
    for a CUDA `slots`, in pinned host memory. `slots` is int64 `[B, H, k]`; head h of a row reads
    head h of the pool. A slot outside `[0, S)`, such as -1, gives a row of zeros. `out` are two
    contiguous buffers to write to instead of new ones. Does not synchronise with the device.
    Raises ValueError for wrong shapes, dtypes, layouts or devices.
    """
    check("slots", slots, ("B", "H", "k"), (torch.int64,))
    batch, heads, k = slots.shape
    _check_pools(keys, values, slots)
    shape = (batch, heads, k, keys.shape[2])
    if out is None:
        out = (
            _dispatch.allocate(shape, keys.dtype, slots.device),
            _dispatch.allocate(shape, keys.dtype, slots.device),
        )
    else:
        for tensor in out:
            check("out", tensor, shape, (keys.dtype,), slots)
            if not tensor.is_contiguous():
                raise ValueError(f"out has the strides {tensor.stride()}; it must be contiguous")
    if out[0].numel() == 0:
        return out
    if not use_triton(slots):
        _cpu_path((keys, values), slots.contiguous(), out)
        return out
    word = _word(keys)
    words = keys.shape[2] * keys.element_size() // word.itemsize
    block_words = power_of_two(words)
    block_rows = max(1, _TILE // block_words)
    total = batch * heads * k
    _gather_rows_kernel[(triton.cdiv(total, block_rows), 2)](
        keys.view(word),
        values.view(word),
        slots.contiguous(),
        out[0].view(word),
        out[1].view(word),
        total,
        heads,
        k,
        keys.shape[0],
        WORDS=words,
        BLOCK_WORDS=block_words,
        BLOCK_ROWS=block_rows,
    )
    return out


def _check_pools(keys: Tensor, values: Tensor, slots: Tensor) -> None:
    heads = slots.shape[1]
    if keys.dim() != 3 or keys.shape[1] != heads:
        raise ValueError(f"keys is {describe(keys)}; it must be [S, {heads}, D]")
    check("values", values, keys.shape, (keys.dtype,))
    for field, pool in (("keys", keys), ("values", values)):
        pinned = slots.is_cuda and pool.device.type == "cpu" and pool.is_pinned()
        if pool.device != slots.device and not pinned:
            raise ValueError(
                f"{field} is on {pool.device}; it must be on {slots.device} like slots"
                + (", or in pinned memory" if slots.is_cuda else "")
            )
        if not pool.is_contiguous():
            raise ValueError(f"{field} has the strides {pool.stride()}; it must be contiguous")


def _cpu_path(pools: tuple[Tensor, Tensor], slots: Tensor, out: tuple[Tensor, Tensor]) -> None:
    size, heads = pools[0].shape[:2]
    given = slots.numpy()
    flat = (given * heads + np.arange(heads)[:, None]).reshape(-1)
    # As unsigned numbers -1 is larger than any slot: one pass tells whether all are inside.
    outside = bool(given.view(np.uint64).max() >= size)
    if size and out[0].nbytes < _TWO_THREADS:
        _take(pools[0], flat, out[0])
        _take(pools[1], flat, out[1])
    elif size:
        side_by_side(lambda: _take(pools[0], flat, out[0]), lambda: _take(pools[1], flat, out[1]))
    if outside:
        gone = (slots < 0) | (slots >= size)
        for rows in out:
            rows[gone] = 0


def _take(pool: Tensor, flat: NDArray[np.int64], out: Tensor) -> None:
    """Copy rows `flat` of a pool `[S, H, D]`, seen as `[S * H, D]`, to `out`, `[len(flat), D]`."""
    # As integers of the same size: numpy does not know bfloat16 or float8. It copies a row with
    # one memmove and without the interpreter's lock, faster than torch's index_select.
    number = next(word for word in _WORDS if word.itemsize == pool.element_size())
    source = pool.view(number).numpy().reshape(-1, pool.shape[2])
    source.take(flat, 0, out.view(number).numpy().reshape(len(flat), -1), "clip")


def _word(rows: Tensor) -> torch.dtype:
    """Return the widest integer of which a row is a whole number: bytes are what is moved."""
    row_bytes = rows.shape[-1] * rows.element_size()
    return next(word for word in _WORDS if row_bytes % word.itemsize == 0)


@triton.jit
def _gather_rows_kernel(  # type: ignore[no-untyped-def]
    keys,
    values,
    slots,
    keys_out,
    values_out,
    total,
    heads,
    k,
    size,
    WORDS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    word = tl.arange(0, BLOCK_WORDS)
    slot = tl.load(slots + row, mask=row < total, other=-1)
    head = (row // k) % heads
    source = ((slot * heads + head) * WORDS)[:, None] + word[None, :]
    target = (row * WORDS)[:, None] + word[None, :]
    present = ((slot >= 0) & (slot < size))[:, None] & (word < WORDS)[None, :]
    inside = (row < total)[:, None] & (word < WORDS)[None, :]
    if tl.program_id(1) == 0:
        tl.store(keys_out + target, tl.load(keys + source, mask=present, other=0), mask=inside)
    else:
        tl.store(values_out + target, tl.load(values + source, mask=present, other=0), mask=inside)
