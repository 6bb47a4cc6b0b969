"""HATA with random rotations: hash codes and a norm a key, scored by Hamming distance.

Source: HATA (ACL 2025), score `norm_n * sum_g (1 - 2 * hamming / r)`. HATA trains its hash
matrix; without training, random orthogonal columns and keys centred on their mean are the best
free choice. `q . mean` is the same for every key, so the centre changes no attention order.
"""

from __future__ import annotations

import hashlib
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from sglang_smartgen.select.base import KVShape, Selector
from sglang_smartgen.select.codes import (
    MAX_HEAD_DIM,
    hash_matrix,
    hash_score,
    pack_bits,
    quantise,
)

SINK_TOKENS = 4  # attention sinks, whose keys are far from all others
SEED = 0x5EED


class HataSelector(Selector):
    """Metadata is `bits / 32` int32 words of code and one word, the bits of the float32 norm."""

    name: ClassVar[str] = "hata"
    metadata_dtype = torch.int32
    anchor_tokens = 128

    def __init__(self, shape: KVShape, bits: int = 128) -> None:
        super().__init__(shape)
        if bits < 32 or bits % 32:
            raise ValueError(f"bits is {bits}; it must be a positive multiple of 32")
        if shape.head_dim > MAX_HEAD_DIM:
            raise ValueError(f"head_dim is {shape.head_dim}; hata allows at most {MAX_HEAD_DIM}")
        self.bits = bits
        self.metadata_width = bits // 32 + 1
        matrix = np.stack(
            [
                [hash_matrix(shape.head_dim, bits, (SEED, layer, h)) for h in range(shape.kv_heads)]
                for layer in range(shape.layers)
            ]
        )
        self._digest = hashlib.sha256(matrix.tobytes()).hexdigest()[:16]
        self._matrix = torch.from_numpy(matrix)  # float32 [L, Hkv, D, bits]

    def fingerprint(self) -> str:
        """Return name, version, anchor rule and a digest of the hash matrices."""
        return f"hata:1:{self.bits}:{self.anchor_tokens}:{SINK_TOKENS}:{self._digest}"

    def encode(self, layer: int, keys: Tensor, anchor: Tensor | None) -> Tensor:
        """Return int32 [T, Hkv, bits / 32 + 1]: the code of `key - centre`, then its norm."""
        self._check_keys(layer, keys)
        if anchor is None or anchor.shape[1:] != keys.shape[1:] or not anchor.shape[0]:
            given = None if anchor is None else list(anchor.shape)
            raise ValueError(f"anchor is {given}; it must be [A, {keys.shape[1]}, {keys.shape[2]}]")
        x, unit = quantise(keys.float() - self._centre(anchor))
        out = keys.new_empty((*keys.shape[:2], self.metadata_width), dtype=torch.int32)
        out[..., :-1] = self._code(layer, x.transpose(0, 1)).transpose(0, 1)
        # At most 512 * 255**2 < 2**26: exact in float64, whatever the order.
        norm = x.square().sum(-1, dtype=torch.float64).sqrt().float() * unit.squeeze(-1)
        out[..., -1] = norm.view(torch.int32)
        return out

    def score(self, layer: int, query: Tensor, metadata: Tensor) -> Tensor:
        """Return `norm_n * sum_g (1 - 2 * hamming(q_g, k_n) / bits)`, float32 [Hkv, N]."""
        self._check_score(layer, query, metadata)
        return hash_score(self._code(layer, quantise(query.float())[0]), metadata, self.bits)

    def _centre(self, anchor: Tensor) -> Tensor:
        """Return the centre, float32 [1, Hkv, D]: the mean key after the attention sinks.

        A prompt with no more tokens than sinks uses the mean of them all. Summed in float64, so
        that the rounded result does not depend on the order of the sum.
        """
        tail = anchor[SINK_TOKENS:] if anchor.shape[0] > SINK_TOKENS else anchor
        return tail.double().mean(0, keepdim=True).float()

    def _code(self, layer: int, x: Tensor) -> Tensor:
        """Hash quantised vectors, [Hkv, T, D] to int32 [Hkv, T, bits / 32]; zero gives bit 0."""
        if self._matrix.device != x.device:
            self._matrix = self._matrix.to(x.device)
        return pack_bits(torch.matmul(x, self._matrix[layer]) > 0)
