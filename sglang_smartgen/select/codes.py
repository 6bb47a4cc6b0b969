"""Hash codes that are equal bit for bit on every machine and for every batch shape.

A sign of a float product depends on the order of its sum, which BLAS changes with the shape. So
vector and matrix are rounded to 8-bit integers first: every partial sum is then an integer below
2**24, which float32 holds exactly, and no order, device or reduced-precision mode (TF32, bfloat16
inputs) can change it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_smartgen.select import code_loops

VECTOR_LEVELS = 255  # both fit the 8 significant bits of bfloat16
MATRIX_LEVELS = 127
MAX_HEAD_DIM = 512  # 512 * 255 * 127 < 2**24


def hash_matrix(dim: int, bits: int, seed: tuple[int, int, int]) -> NDArray[np.float32]:
    """Return a random [dim, bits] matrix of integers -127 to 127, its columns near orthogonal.

    Blocks of `dim` columns are rotations (QR of a Gaussian matrix); more bits than `dim` take
    several. `seed` is (seed, layer, KV head). Built from the raw words of Philox, whose stream
    numpy promises never to change, unlike that of its normal distribution.
    """
    generator = np.random.Philox(np.random.SeedSequence(seed))
    blocks = -(-bits // dim)
    words = np.asarray(generator.random_raw(blocks * dim * dim * 3), dtype=np.uint64)
    # The sum of twelve uniform 16-bit numbers is Gaussian enough, and exact.
    uniform = words.view(np.uint16).reshape(blocks, dim, dim, 12).astype(np.float64)
    gaussian = uniform.sum(-1) - 12 * (2**16 - 1) / 2
    q, r = np.linalg.qr(gaussian)
    q *= np.sign(np.diagonal(r, axis1=-2, axis2=-1))[:, None, :]  # QR leaves the signs open
    w = q.transpose(1, 0, 2).reshape(dim, blocks * dim)[:, :bits]
    rounded: NDArray[np.float32] = np.round(w * (MATRIX_LEVELS / np.abs(w).max())).astype(
        np.float32
    )
    return rounded


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round float32 `x` [..., D] to integers -255 to 255 and return them with their unit [..., 1].

    Each vector has its own unit, its largest magnitude over 255 (1 for the zero vector).
    """
    unit = x.abs().amax(-1, keepdim=True) / VECTOR_LEVELS
    unit = torch.where(unit > 0, unit, 1.0)
    return (x / unit).round_().clamp_(-VECTOR_LEVELS, VECTOR_LEVELS), unit


def pack_bits(bits: Tensor) -> Tensor:
    """Pack bool [..., r] to int32 [..., r / 32]; bit i of word w is column 32 * w + i."""
    if not bits.is_cuda:
        packed = np.packbits(bits.numpy(), axis=-1, bitorder="little")
        return torch.from_numpy(packed.view("<i4"))
    weight = 1 << torch.arange(32, device=bits.device)
    words = bits.view(*bits.shape[:-1], -1, 32) * weight
    return words.sum(-1).to(torch.int32)


def signed_sums(numbers: Tensor, code: Tensor) -> Tensor:
    """Return `sum_j +-numbers_j`, plus where bit j of the code is set, float32 [H, G, N].

    `numbers` is float32 [H, G, r], integers -255 to 255 (`quantise`), `code` int32 [N, H, r / 32].
    All sums are integers below 2**24 (r up to 32,768), so every path gives the same bits.
    """
    if code.is_cuda:
        return device_sums(numbers, code)
    out = numbers.new_empty((*numbers.shape[:2], code.shape[0]))
    octets = (code if code.stride(-1) == 1 else code.contiguous()).numpy().view(np.uint8)
    code_loops.signed_sums(numbers.contiguous().numpy(), octets, out.numpy())
    return out


def device_sums(numbers: Tensor, code: Tensor) -> Tensor:
    """Return what `signed_sums` does, on any device. Unpacks one word of a code at a time."""
    place = torch.arange(32, device=code.device, dtype=torch.int32)
    held = numbers.new_zeros((*numbers.shape[:2], code.shape[0]))
    for word in range(code.shape[2]):
        bits = ((code[:, :, word].T[..., None] >> place) & 1).float()  # [H, N, 32]
        part = numbers[..., 32 * word : 32 * word + 32]
        held += torch.matmul(part, bits.transpose(1, 2))
    return held.mul_(2).sub_(numbers.sum(-1, keepdim=True))
