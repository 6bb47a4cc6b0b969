"""Hash codes of vectors: signs of a product with integers, packed to words; the same everywhere.

Vector and matrix are integers when they meet, so every partial sum is exact in float32 (see
`select/codes.py`, whose codes these are bit for bit) and a tensor core may do the work.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_smartgen.triton_kernels import _dispatch
from sglang_smartgen.triton_kernels._dispatch import (
    FLOATS,
    check,
    describe,
    power_of_two,
    use_triton,
)

_LEVELS = 255  # of a vector's elements; what `select/codes.py` calls VECTOR_LEVELS
MAX_HEAD_DIM = 512  # 512 * 255 * 127 < 2**24


def hash_encode(
    x: Tensor, matrix: Tensor, centre: Tensor | None = None, norm: bool = False
) -> Tensor:
    """Return the packed codes of `x - centre`, int32 `[T, H, bits / 32]`.

    `x` is float `[T, H, D]`, strided as you like; `matrix` float32 `[H, D, bits]` of integers from
    -127 to 127; `centre` float32 `[H, D]`. Bit i of word w is the sign of column 32 w + i, 1 for
    above zero. With `norm` there is one word more, the bits of the float32 length of the rounded
    `x - centre`. Raises ValueError for wrong shapes, dtypes or devices, D above 512 and `bits`
    that are no multiple of 32.
    """
    check("x", x, ("T", "H", "D"), FLOATS)
    tokens, heads, dim = x.shape
    check("matrix", matrix, (heads, dim, "bits"), (torch.float32,), x)
    if centre is not None:
        check("centre", centre, (heads, dim), (torch.float32,), x)
    bits = matrix.shape[2]
    if bits == 0 or bits % 32 or not 0 < dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"matrix is {describe(matrix)}; D must be 1 to {MAX_HEAD_DIM} and bits a multiple of 32"
        )
    words = bits // 32
    out = _dispatch.allocate((tokens, heads, words + norm), torch.int32, x.device)
    if out.numel() == 0:
        return out
    if not use_triton(x):
        _cpu_path(x, matrix, centre, out, words)
        return out
    matrix = matrix.contiguous()
    centre = None if centre is None else centre.contiguous()
    block = 16
    _hash_encode_kernel[(triton.cdiv(tokens, block), heads)](
        x,
        matrix,
        centre,
        out,
        tokens,
        heads,
        dim,
        *x.stride(),
        LEVELS=_LEVELS,
        NORM=norm,
        WORDS=words,
        BLOCK=block,
        BLOCK_DIM=power_of_two(dim, 16),
    )
    return out


def _cpu_path(x: Tensor, matrix: Tensor, centre: Tensor | None, out: Tensor, words: int) -> None:
    x = x.float() if centre is None else x.float() - centre
    unit = x.abs().amax(-1, keepdim=True) / _LEVELS
    unit = torch.where(unit > 0, unit, 1.0)
    rounded = (x / unit).round_().clamp_(-_LEVELS, _LEVELS)
    above = (torch.matmul(rounded.transpose(0, 1), matrix) > 0).numpy()  # [H, T, bits]
    packed = np.packbits(above, axis=-1, bitorder="little").view("<i4")
    out[..., :words] = torch.from_numpy(packed).transpose(0, 1)
    if out.shape[-1] > words:
        # At most 512 * 255**2 < 2**26: exact in float64, whatever the order.
        length = rounded.square().sum(-1, dtype=torch.float64).sqrt().float() * unit.squeeze(-1)
        out[..., words] = length.view(torch.int32)


@triton.jit
def _hash_encode_kernel(  # type: ignore[no-untyped-def]
    x,
    matrix,
    centre,
    out,
    tokens,
    heads,
    dim,
    stride_t,
    stride_h,
    stride_d,
    LEVELS: tl.constexpr,
    NORM: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK_DIM)
    bit = tl.arange(0, 32)
    inside = (token < tokens)[:, None] & (column < dim)[None, :]
    place = token[:, None] * stride_t + head * stride_h + column[None, :] * stride_d
    vector = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if centre is not None:
        middle = tl.load(centre + head * dim + column, mask=column < dim, other=0.0)
        vector = tl.where(inside, vector - middle[None, :], 0.0)
    largest = tl.max(tl.abs(vector), 1)
    levels = tl.full([BLOCK], LEVELS, tl.float32)
    # `/` may be off by an ulp on a device; div_rn is what torch does.
    unit = tl.div_rn(largest, levels)
    unit = tl.where(unit > 0, unit, 1.0)
    ratio = tl.div_rn(vector, tl.broadcast_to(unit[:, None], [BLOCK, BLOCK_DIM]))
    # Adding 1.5 * 2**23 leaves no bit for a fraction: rounds half to even, as torch does.
    rounded = (ratio + 12582912.0) - 12582912.0
    rounded = tl.minimum(tl.maximum(rounded, -LEVELS), LEVELS)
    half = rounded.to(tl.float16)  # holds integers to 2,048
    row = (token * heads + head) * (WORDS + NORM)
    for word in tl.static_range(WORDS):
        place = (head * dim + column)[:, None] * (32 * WORDS) + 32 * word + bit[None, :]
        tile = tl.load(matrix + place, mask=(column < dim)[:, None], other=0.0).to(tl.float16)
        above = (tl.dot(half, tile, out_dtype=tl.float32) > 0).to(tl.int32)
        # Each bit is in one column only, so the sum is their OR, bit 31 as the sign included.
        packed = tl.sum(above << bit[None, :], 1)
        tl.store(out + row + word, packed, mask=token < tokens)
    if NORM:
        whole = rounded.to(tl.int32)
        squares = tl.sum(whole * whole, 1)
        length = tl.sqrt(squares.to(tl.float64)).to(tl.float32) * unit
        tl.store(out + row + WORDS, length.to(tl.int32, bitcast=True), mask=token < tokens)
