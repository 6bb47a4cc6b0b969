"""HATA: hash codes and a norm a key, scored by Hamming distance.

Source: HATA (ACL 2025), score `norm_n * sum_g (1 - 2 * hamming / bits)`. With an artifact the hash
matrix and the key centre are trained for the model. Without one the columns are random rotations
and keys are centred on the mean of the prompt's first tokens. `q . centre` is the same for every
key, so a centre changes no attention order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, cast

import torch
from torch import Tensor

from sglang_smartgen.select.base import LayerSample, Selector
from sglang_smartgen.select.codes import MAX_HEAD_DIM, hash_score, pack_bits, quantise
from sglang_smartgen.select.hash_objectives import OBJECTIVES
from sglang_smartgen.select.hash_training import random_matrices, train
from sglang_smartgen.select.shape import KVShape, check_samples

SINK_TOKENS = 4  # attention sinks, whose keys are far from all others
ANCHOR_TOKENS = 128
MATRIX, CENTRE = "hash", "centre"


class HataSelector(Selector):
    """Metadata is `bits / 32` int32 words of code and one word, the bits of the float32 norm.

    Options, all the artifact's: `bits`, a multiple of 32; `objective` (`hash_objectives.py`),
    `steps` and `seed` of the training. Without an artifact only `bits` matters.
    """

    name: ClassVar[str] = "hata"
    metadata_dtype = torch.int32
    defaults: ClassVar[Mapping[str, object]] = MappingProxyType(
        {"bits": 128, "objective": "listwise", "steps": 150, "seed": 0}
    )
    calibrated: ClassVar[frozenset[str]] = frozenset(defaults)

    def prepare(self) -> None:
        """Take this rank's heads of the artifact, or make random matrices."""
        self.bits = _checked(self.options, self.shape)[0]
        self.metadata_width = self.bits // 32 + 1
        self._matrix: dict[int, Tensor] = {}  # float32 [Hkv, D, bits] of integers
        self._centre: dict[int, Tensor] = {}  # float32 [Hkv, D], with an artifact
        if self.artifact is None:
            self.anchor_tokens = ANCHOR_TOKENS
            heads = range(self.first_kv_head, self.first_kv_head + self.shape.kv_heads)
            for layer in range(self.shape.layers):
                self._matrix[layer] = random_matrices(self.shape.head_dim, self.bits, layer, heads)
        else:
            for layer in self.artifact.layers():
                self._matrix[layer] = self._part(MATRIX, layer, self.bits).float()
                self._centre[layer] = self._part(CENTRE, layer).contiguous()
        digest = hashlib.sha256()
        for layer, matrix in self._matrix.items():
            digest.update(f"{layer}:".encode() + matrix.to(torch.int8).numpy().tobytes())
            if layer in self._centre:
                digest.update(self._centre[layer].numpy().tobytes())
        self._digest = digest.hexdigest()[:16]

    @classmethod
    def calibrate(
        cls,
        shape: KVShape,
        layer: int,
        samples: list[LayerSample],
        options: Mapping[str, object],
    ) -> dict[str, Tensor]:
        """Return `hash` int8 [Hkv, D, bits] and `centre` float32 [Hkv, D] of one layer."""
        check_samples(shape, samples)
        chosen = cls.resolve(options)
        bits, steps, seed = _checked(chosen, shape)
        objective = OBJECTIVES[str(chosen["objective"])]
        learned = train(objective, shape, layer, samples, bits=bits, steps=steps, seed=seed)
        return {MATRIX: learned.matrix, CENTRE: learned.centre}

    def fingerprint(self) -> str:
        """Return name, version, bits, the source of the codes and a digest of them."""
        if self.artifact is not None:
            source = "trained"
        else:
            source = f"random:{self.anchor_tokens}:{SINK_TOKENS}"
        return f"hata:2:{self.bits}:{source}:{self.first_kv_head}:{self._digest}"

    def describe(self) -> str:
        """Return the name with the source of the codes."""
        if self.artifact is None:
            return f"hata (orthogonal random codes, not trained, r={self.bits})"
        return f"hata (trained, r={self.bits}, {self.options['objective']} objective)"

    def encode(self, layer: int, keys: Tensor, anchor: Tensor | None) -> Tensor:
        """Return int32 [T, Hkv, bits / 32 + 1]: the code of `key - centre`, then its norm."""
        self._check_keys(layer, keys)
        matrix = self._of(layer, keys.device)
        if self.artifact is None:
            centre = _prompt_centre(anchor, keys)
        else:
            centre = self._centre[layer] = self._centre[layer].to(keys.device)
        x, unit = quantise(keys.float() - centre)
        out = keys.new_empty((*keys.shape[:2], self.metadata_width), dtype=torch.int32)
        out[..., :-1] = _code(x.transpose(0, 1), matrix).transpose(0, 1)
        # At most 512 * 255**2 < 2**26: exact in float64, whatever the order.
        norm = x.square().sum(-1, dtype=torch.float64).sqrt().float() * unit.squeeze(-1)
        out[..., -1] = norm.view(torch.int32)
        return out

    def score(self, layer: int, query: Tensor, metadata: Tensor) -> Tensor:
        """Return `norm_n * sum_g (1 - 2 * hamming(q_g, k_n) / bits)`, float32 [Hkv, N]."""
        self._check_score(layer, query, metadata)
        code = _code(quantise(query.float())[0], self._of(layer, query.device))
        return hash_score(code, metadata, self.bits)

    def _of(self, layer: int, device: torch.device) -> Tensor:
        matrix = self._matrix.get(layer)
        if matrix is None:
            made = ", ".join(map(str, self._matrix))
            raise ValueError(f"layer is {layer}; the artifact has layers {made}")
        if matrix.device != device:
            matrix = self._matrix[layer] = matrix.to(device)
        return matrix

    def _part(self, name: str, layer: int, *columns: int) -> Tensor:
        """Return this rank's heads of a tensor of the artifact. Raises ValueError for its shape."""
        assert self.artifact is not None
        part = self.artifact.tensor(name, layer, self.first_kv_head, self.shape.kv_heads)
        wanted = (self.shape.kv_heads, self.shape.head_dim, *columns)
        if part.shape != wanted:
            raise ValueError(
                f"the artifact's {name} of layer {layer} is {list(part.shape)}; "
                f"it must be {list(wanted)}"
            )
        return part


def _checked(options: Mapping[str, object], shape: KVShape) -> tuple[int, int, int]:
    """Return bits, steps and seed. Raises ValueError for a value that is not allowed."""
    bits, steps, seed = (cast(int, options[key]) for key in ("bits", "steps", "seed"))
    if bits < 32 or bits % 32:
        raise ValueError(f"bits is {bits}; it must be a positive multiple of 32")
    if steps < 1:
        raise ValueError(f"steps is {steps}; it must be at least 1")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed}; allowed are 0 to {2**32 - 1}")
    if options["objective"] not in OBJECTIVES:
        allowed = ", ".join(OBJECTIVES)
        raise ValueError(f"objective is {options['objective']!r}; allowed are {allowed}")
    if shape.head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {shape.head_dim}; hata allows at most {MAX_HEAD_DIM}")
    return bits, steps, seed


def _prompt_centre(anchor: Tensor | None, keys: Tensor) -> Tensor:
    """Return the centre, float32 [1, Hkv, D]: the mean of the anchor's keys after the sinks.

    A prompt with no more tokens than sinks uses the mean of them all. Summed in float64, so
    that the rounded result does not depend on the order of the sum.
    """
    if anchor is None or anchor.shape[1:] != keys.shape[1:] or not anchor.shape[0]:
        given = None if anchor is None else list(anchor.shape)
        raise ValueError(f"anchor is {given}; it must be [A, {keys.shape[1]}, {keys.shape[2]}]")
    tail = anchor[SINK_TOKENS:] if anchor.shape[0] > SINK_TOKENS else anchor
    return tail.double().mean(0, keepdim=True).float()


def _code(x: Tensor, matrix: Tensor) -> Tensor:
    """Hash quantised vectors, [Hkv, T, D] to int32 [Hkv, T, bits / 32]; zero gives bit 0."""
    return pack_bits(torch.matmul(x, matrix) > 0)
