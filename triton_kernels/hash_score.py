"""HATA's score of every key: XOR with the codes of the query heads, popcount, norm, group sum.

All sums are integers and the two float operations are correctly rounded, so every path gives the
bits of `select/codes.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from sglang_smartgen.triton_kernels import _dispatch
from sglang_smartgen.triton_kernels._dispatch import check, check_slots, power_of_two, use_triton


def hash_score(code: Tensor, metadata: Tensor, bits: int, slots: Tensor | None = None) -> Tensor:
    """Return `norm_n * sum_g (1 - 2 * hamming(code_g, code_n) / bits)`, float32 `[B, H, N]`.

    `code` is int32 `[B, H, G, bits / 32]`. `metadata` is int32 `[S, H, bits / 32 + 1]`, whose last
    word is the bits of the float32 norm. `slots` int64 `[B, N]` says which rows of it belong to a
    request; a slot outside `[0, S)` scores -inf. Without it the metadata is that of the one
    request, N = S. Raises ValueError for wrong shapes, dtypes or devices.
    """
    check("code", code, ("B", "H", "G", bits // 32), (torch.int32,))
    if bits < 32 or bits % 32:
        raise ValueError(f"bits is {bits}; it must be a positive multiple of 32")
    batch, heads, group, words = code.shape
    check("metadata", metadata, ("S", heads, words + 1), (torch.int32,), code)
    length = check_slots(slots, batch, metadata)
    out = _dispatch.allocate((batch, heads, length), torch.float32, code.device)
    if out.numel() == 0:
        return out
    if not use_triton(code):
        for b in range(batch):
            _cpu_path(code[b], metadata, bits, None if slots is None else slots[b], out[b])
        return out
    block = power_of_two(length, 16, 256)
    _hash_score_kernel[(batch * heads, triton.cdiv(length, block))](
        code.contiguous(),
        metadata.contiguous(),
        None if slots is None else slots.contiguous(),
        out,
        heads,
        length,
        metadata.shape[0],
        GROUP=group,
        BITS=bits,
        WORDS=words,
        BLOCK_WORDS=power_of_two(words),
        BLOCK=block,
    )
    return out


def _cpu_path(code: Tensor, metadata: Tensor, bits: int, slots: Tensor | None, out: Tensor) -> None:
    """Score one request: `code` [H, G, w], `out` [H, N]."""
    group, size = code.shape[1], metadata.shape[0]
    outside = None
    if slots is not None:
        if size == 0:
            out.fill_(-torch.inf)
            return
        outside = (slots < 0) | (slots >= size)
        metadata = metadata.index_select(0, slots.clamp(0, size - 1))
    # One transposed copy lets all work run over contiguous rows of N.
    words = np.ascontiguousarray(metadata.numpy().transpose(1, 2, 0)).view(np.uint32)
    unlike = words[:, None, :-1] ^ code.contiguous().numpy().view(np.uint32)[..., None]
    distance = _popcount(unlike).reshape(words.shape[0], -1, words.shape[-1]).sum(1, dtype=np.int32)
    similarity = (group * bits - 2 * distance).astype(np.float32)
    np.multiply(words[:, -1].view(np.float32), similarity / np.float32(bits), out=out.numpy())
    if outside is not None:
        out.masked_fill_(outside, -torch.inf)


def _popcount(x: NDArray[Any]) -> NDArray[Any]:
    if hasattr(np, "bitwise_count"):
        count: NDArray[Any] = np.bitwise_count(x)
        return count
    # numpy before 2.0: the sum of neighbouring 1-, 2- and 4-bit fields.
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return (x * 0x01010101) >> 24


@triton.jit
def _hash_score_kernel(  # type: ignore[no-untyped-def]
    code,
    metadata,
    slots,
    out,
    heads,
    length,
    size,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = row % heads
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < length
    if slots is not None:
        slot = tl.load(slots + (row // heads) * length + column, mask=inside, other=-1)
    else:
        slot = column
    present = inside & (slot >= 0) & (slot < size)
    word = tl.arange(0, BLOCK_WORDS)
    entry = (slot * heads + head) * (WORDS + 1)
    place = entry[:, None] + word[None, :]
    is_code = present[:, None] & (word < WORDS)[None, :]
    key = tl.load(metadata + place, mask=is_code, other=0)
    distance = tl.zeros([BLOCK], dtype=tl.int32)
    for g in tl.static_range(GROUP):
        query = tl.load(code + (row * GROUP + g) * WORDS + word, mask=word < WORDS, other=0)
        x = (key ^ query[None, :]).to(tl.uint32, bitcast=True)
        # Popcount: the sum of neighbouring 1-, 2- and 4-bit fields.
        x = x - ((x >> 1) & 0x55555555)
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F
        x = ((x & 0x00FF00FF) + ((x >> 8) & 0x00FF00FF)) & 0x01FF01FF
        count = ((x & 0xFFFF) + (x >> 16)).to(tl.int32)
        distance += tl.sum(tl.where(is_code, count, 0), 1)
    norm = tl.load(metadata + entry + WORDS, mask=present, other=0).to(tl.float32, bitcast=True)
    similarity = (GROUP * BITS - 2 * distance).to(tl.float32)
    score = norm * tl.div_rn(similarity, tl.full([BLOCK], BITS, tl.float32))
    score = tl.where(present, score, float("-inf"))
    tl.store(out + row * length + column, score, mask=inside)
