"""Checksums of stretches of a prompt's KV: does D hold what P computed?"""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

STRETCH = 64
"""Tokens that one checksum covers, K and V of all heads of one layer."""


def layer_checksums(keys: Tensor, values: Tensor) -> npt.NDArray[np.uint32]:
    """CRC-32 of every stretch of one layer: uint32 [ceil(T / STRETCH)].

    keys, values: [T, kv_heads, head_dim] of any dtype, on the CPU; a stretch is the bytes of its
    keys, then those of its values.
    """
    rows = [_bytes(side) for side in (keys, values)]
    sums = []
    for start in range(0, keys.shape[0], STRETCH):
        crc = 0
        for side in rows:
            crc = zlib.crc32(side[start : start + STRETCH].tobytes(), crc)
        sums.append(crc)
    return np.array(sums, dtype=np.uint32)


def whole_stretches(local: Tensor) -> npt.NDArray[np.bool_]:
    """Which stretches are local with every token: bool [ceil(T / STRETCH)] of bool `local` [T]."""
    return np.array([bool(part.all()) for part in torch.split(local, STRETCH)], dtype=np.bool_)


def _bytes(side: Tensor) -> npt.NDArray[np.uint8]:
    """uint8 [T, bytes of a row]."""
    found: npt.NDArray[np.uint8] = side.contiguous().flatten(1).view(torch.uint8).numpy()
    return found
