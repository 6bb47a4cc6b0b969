"""HATA: hash codes and one number a key, scored against the query's hash or against the query.

`hamming` is the score of HATA (ACL 2025), `norm_n * sum_g (1 - 2 * hamming / bits)`. `estimate` is
ours, after QJL: the query is projected but not hashed, so the code gives an estimate of each
query head's logit, and the score is the softmax of these, summed over the group. The metadata has
the same size. With an artifact the matrices and the key centre are made for the model. Without one
the columns are random rotations and keys are centred on the mean of the prompt's first tokens.
`q . centre` is the same for every key, so a centre changes no attention order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from sglang_smartgen.select.base import LayerSample, Selector
from sglang_smartgen.select.codes import (
    MAX_HEAD_DIM,
    pack_bits,
    quantise,
    signed_sums,
)
from sglang_smartgen.select.hash_estimate import train_estimator
from sglang_smartgen.select.hash_objectives import OBJECTIVES
from sglang_smartgen.select.hash_training import random_matrices, train
from sglang_smartgen.select.logits import group_softmax_of
from sglang_smartgen.select.shape import KVShape, check_samples
from sglang_smartgen.triton_kernels import hash_score

SINK_TOKENS = 4  # attention sinks, whose keys are far from all others
ANCHOR_TOKENS = 128
MATRIX, CENTRE = "hash", "centre"
KEY_SCALE, QUERY, QUERY_SCALE = "key_scale", "query", "query_scale"  # of score `estimate`
SCORES = {"estimate": ("listwise",), "hamming": tuple(OBJECTIVES)}  # and their objectives


class _Maps(NamedTuple):
    """What one layer encodes and scores with. Matrices are float32 [Hkv, D, bits] of integers."""

    key: Tensor
    query: Tensor
    centre: Tensor | None  # float32 [Hkv, D]; None: the anchor's mean
    key_scale: Tensor | None  # float32 [Hkv, D], before `key`
    query_scale: Tensor | None  # float32 [Hkv, D], before `query`; makes the estimate a logit


class HataSelector(Selector):
    """Metadata is `bits / 32` int32 words of code and one word, the bits of a float32.

    The float is the key's norm, or with score `estimate` the mean magnitude of its projections.
    Options, all the artifact's: `bits`, a multiple of 32; `score`; `objective`
    (`hash_estimate.py`, `hash_objectives.py`), `steps` and `seed` of the training. Without an
    artifact only `bits` and `score` matter.
    """

    name: ClassVar[str] = "hata"
    metadata_dtype = torch.int32
    defaults: ClassVar[Mapping[str, object]] = MappingProxyType(
        {"bits": 128, "score": "estimate", "objective": "listwise", "steps": 150, "seed": 0}
    )
    calibrated: ClassVar[frozenset[str]] = frozenset(defaults)

    def prepare(self) -> None:
        """Take this rank's heads of the artifact, or make random matrices."""
        if self.artifact is not None and "score" not in self.artifact.manifest.parameters:
            raise ValueError(
                "the artifact does not say for which score it was made; "
                "make it anew with `smartgen calibrate`"
            )
        self.bits = _checked(self.options, self.shape)[0]
        self.estimates = self.options["score"] == "estimate"
        self.metadata_width = self.bits // 32 + 1
        if self.artifact is None:
            self.anchor_tokens = ANCHOR_TOKENS
            self._maps = {layer: self._random(layer) for layer in range(self.shape.layers)}
        else:
            self._maps = {layer: self._trained(layer) for layer in self.artifact.layers()}
        digest = hashlib.sha256()
        for layer, maps in self._maps.items():
            digest.update(f"{layer}:".encode())
            for matrix in maps[:2]:
                digest.update(matrix.to(torch.int8).numpy().tobytes())
            for scale in maps[2:]:
                digest.update(b"-" if scale is None else scale.numpy().tobytes())
        self._digest = digest.hexdigest()[:16]

    @classmethod
    def calibrate(
        cls,
        shape: KVShape,
        layer: int,
        samples: list[LayerSample],
        options: Mapping[str, object],
    ) -> dict[str, Tensor]:
        """Return `hash` int8 [Hkv, D, bits] and `centre` float32 [Hkv, D] of one layer.

        For score `estimate` also `query`, shaped as `hash`, and `key_scale` and `query_scale`,
        shaped as `centre`.
        """
        check_samples(shape, samples)
        chosen = cls.resolve(options)
        bits, steps, seed = _checked(chosen, shape)
        if chosen["score"] == "estimate":
            made = train_estimator(shape, layer, samples, bits=bits, steps=steps, seed=seed)
            return {
                MATRIX: made.key.matrix,
                KEY_SCALE: made.key.scale,
                QUERY: made.query.matrix,
                QUERY_SCALE: made.query.scale,
                CENTRE: made.centre,
            }
        objective = OBJECTIVES[str(chosen["objective"])]
        learned = train(objective, shape, layer, samples, bits=bits, steps=steps, seed=seed)
        return {MATRIX: learned.matrix, CENTRE: learned.centre}

    def fingerprint(self) -> str:
        """Return name, version, bits, score, the source of the codes and a digest of them."""
        if self.artifact is not None:
            source = "trained"
        else:
            source = f"random:{self.anchor_tokens}:{SINK_TOKENS}"
        score = self.options["score"]
        return f"hata:3:{self.bits}:{score}:{source}:{self.first_kv_head}:{self._digest}"

    def describe(self) -> str:
        """Return the name with the source of the codes and the score."""
        about = f"r={self.bits}, score {self.options['score']}"
        if self.artifact is None:
            return f"hata (orthogonal random codes, not trained, {about})"
        return f"hata (trained, {about}, {self.options['objective']} objective)"

    def encode(self, layer: int, keys: Tensor, anchor: Tensor | None) -> Tensor:
        """Return int32 [T, Hkv, bits / 32 + 1]: the code of `key - centre`, then its size."""
        self._check_keys(layer, keys)
        maps = self._of(layer, keys.device)
        centre = _prompt_centre(anchor, keys) if maps.centre is None else maps.centre
        centred = keys.float() - centre
        if maps.key_scale is not None:
            centred = centred * maps.key_scale
        x, unit = quantise(centred)
        projected = torch.matmul(x.transpose(0, 1), maps.key)  # [Hkv, T, bits]
        out = keys.new_empty((*keys.shape[:2], self.metadata_width), dtype=torch.int32)
        out[..., :-1] = pack_bits(projected > 0).transpose(0, 1)
        # Sums of integers, at most bits * 2**24 and 512 * 255**2: exact in float64.
        if self.estimates:
            size = projected.abs().sum(-1, dtype=torch.float64).T / self.bits
        else:
            size = x.square().sum(-1, dtype=torch.float64).sqrt()
        out[..., -1] = (size.float() * unit.squeeze(-1)).view(torch.int32)
        return out

    def score(self, layer: int, query: Tensor, metadata: Tensor) -> Tensor:
        """Return float32 [Hkv, N].

        Score `hamming`: `norm_n * sum_g (1 - 2 * hamming(q_g, k_n) / bits)`. Score `estimate`:
        the softmax of `size_n * sum_j (query_map q_g)_j * sign_nj`, summed over the group.
        """
        self._check_score(layer, query, metadata)
        maps = self._of(layer, query.device)
        if maps.query_scale is None:
            code = pack_bits(torch.matmul(quantise(query.float())[0], maps.query) > 0)
            return hash_score(code[None], metadata, self.bits)[0]
        x, unit = quantise(query.float() * maps.query_scale[:, None])
        # Rounded once more, which is nothing beside the key's single bit: the sums stay exact.
        numbers, step = quantise(torch.matmul(x, maps.query))
        sums = signed_sums(numbers, metadata[..., :-1])
        size = metadata[..., -1].T.contiguous().view(torch.float32)
        return group_softmax_of(sums * (unit * step) * size[:, None])

    def _random(self, layer: int) -> _Maps:
        heads = range(self.first_kv_head, self.first_kv_head + self.shape.kv_heads)
        matrix = random_matrices(self.shape.head_dim, self.bits, layer, heads)
        scale = None
        if self.estimates:
            # Columns of mean square length `d * square`; the sizes have it in them as well.
            square = matrix.double().square().mean((1, 2))
            scale = (self.shape.scaling / (self.bits * square)).float()
            scale = scale[:, None].repeat(1, self.shape.head_dim)
        return _Maps(matrix, matrix, None, None, scale)

    def _trained(self, layer: int) -> _Maps:
        matrix = self._part(MATRIX, layer, self.bits).float()
        centre = self._part(CENTRE, layer).contiguous()
        if not self.estimates:
            return _Maps(matrix, matrix, centre, None, None)
        return _Maps(
            matrix,
            self._part(QUERY, layer, self.bits).float(),
            centre,
            self._part(KEY_SCALE, layer).contiguous(),
            self._part(QUERY_SCALE, layer).contiguous(),
        )

    def _of(self, layer: int, device: torch.device) -> _Maps:
        maps = self._maps.get(layer)
        if maps is None:
            made = ", ".join(map(str, self._maps))
            raise ValueError(f"layer is {layer}; the artifact has layers {made}")
        if maps.key.device != device:
            moved = (None if x is None else x.to(device) for x in maps)
            maps = self._maps[layer] = _Maps(*moved)  # type: ignore[arg-type]
        return maps

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
    if options["score"] not in SCORES:
        raise ValueError(f"score is {options['score']!r}; allowed are {', '.join(SCORES)}")
    least = 0 if options["score"] == "estimate" else 1
    if steps < least:
        raise ValueError(f"steps is {steps}; it must be at least {least}")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed}; allowed are 0 to {2**32 - 1}")
    objectives = SCORES[str(options["score"])]
    if options["objective"] not in objectives:
        raise ValueError(
            f"objective is {options['objective']!r}; with score {options['score']} allowed are "
            f"{', '.join(objectives)}"
        )
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
