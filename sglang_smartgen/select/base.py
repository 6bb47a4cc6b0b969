"""What a selector is: it encodes keys to small metadata and scores that metadata for a query.

The metadata of every prompt token is on the decode node before the first step; the keys need not
be. All scores are per KV head: the unit of selection is one token of one KV head of one layer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from sglang_smartgen.core.geometry import DENSE_LAYERS
from sglang_smartgen.select.artifact import Artifact
from sglang_smartgen.select.options import resolve_options
from sglang_smartgen.select.shape import KVShape, LayerSample
from sglang_smartgen.select.topk import top_k

__all__ = ["KVShape", "LayerSample", "Selector", "budget", "top_k"]


class Selector(ABC):
    """Finds the important entries of one layer for one query. Stateless between calls.

    Class attributes: `name` in the registry; `needs_artifact`, True when it cannot be made
    without one; `defaults`, every option it knows and its default; `calibrated`, those options
    that are fixed when an artifact is made (the others are free at run time).
    """

    name: ClassVar[str]
    needs_artifact: ClassVar[bool] = False
    defaults: ClassVar[Mapping[str, object]] = MappingProxyType({})
    calibrated: ClassVar[frozenset[str]] = frozenset()

    metadata_dtype: torch.dtype
    metadata_width: int  # elements a token and KV head
    anchor_tokens: int = 0  # encode() needs the keys of the prompt's first tokens, this many

    def __init__(
        self,
        shape: KVShape,
        dtype: torch.dtype = torch.float32,
        *,
        artifact: Artifact | None = None,
        first_kv_head: int = 0,
        options: Mapping[str, object] | None = None,
    ) -> None:
        """Make the selector of one rank.

        `shape` is the rank's, `dtype` the pool's, `first_kv_head` the model's number of the
        rank's first KV head. Raises ValueError when an artifact is missing, is another
        selector's or lacks a head, or when an option is not known or contradicts the artifact.
        """
        if first_kv_head < 0:
            raise ValueError(f"first_kv_head is {first_kv_head}; it must be at least 0")
        if artifact is None and self.needs_artifact:
            raise ValueError(
                f"selector {self.name} needs an artifact of this model and none was given; "
                "`smartgen calibrate` makes one"
            )
        if artifact is not None and artifact.manifest.selector != self.name:
            raise ValueError(
                f"the artifact is for selector {artifact.manifest.selector}; "
                f"this selector is {self.name}"
            )
        self.shape = shape
        self.dtype = dtype
        self.artifact = artifact
        self.first_kv_head = first_kv_head
        fixed = artifact.manifest.parameters if artifact is not None else {}
        self.options = resolve_options(
            self.name,
            self.defaults,
            options or {},
            {key: fixed[key] for key in sorted(self.calibrated) if key in fixed},
        )
        self.prepare()

    @abstractmethod
    def prepare(self) -> None:
        """Set `metadata_dtype`, `metadata_width` and what else the selector needs.

        Called once, at the end of `__init__`. Raises ValueError for options that do not fit.
        """

    @classmethod
    def resolve(cls, options: Mapping[str, object] | None = None) -> dict[str, object]:
        """Return the options that `calibrate` fixes, complete: what a manifest records.

        Raises ValueError for an option that is not known or not one of calibration, and for a
        value of another type.
        """
        given = dict(options or {})
        known = {key: cls.defaults[key] for key in sorted(cls.calibrated)}
        return resolve_options(cls.name, known, given, {})

    @classmethod
    def calibrate(
        cls,
        shape: KVShape,
        layer: int,
        samples: list[LayerSample],
        options: Mapping[str, object],
    ) -> dict[str, Tensor]:
        """Return the artifact's tensors of one layer, each with the model's KV heads first.

        `shape` is the whole model's; `samples` has one item a text. The same input gives the
        same tensors. Raises ValueError when the selector has nothing to calibrate, there is no
        sample, or an option is not known.
        """
        raise ValueError(f"selector {cls.name} has nothing to calibrate")

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a text that two nodes share if and only if they encode and score alike."""

    def describe(self) -> str:
        """Return the name for reports, with what the quality depends on."""
        return self.name

    def metadata_bytes(self, shape: KVShape, sparse_layers: int | None = None) -> int:
        """Return the metadata bytes of one token of a model or rank of geometry `shape`.

        `sparse_layers` is the number of layers that are selected from; None: all but the dense
        ones. P must send this before the first step, on top of the dense layers' KV.
        """
        if sparse_layers is None:
            sparse_layers = max(0, shape.layers - DENSE_LAYERS)
        row = shape.kv_heads * self.metadata_width * self.metadata_dtype.itemsize
        return sparse_layers * row

    def pick(self, score: Tensor, k: int) -> Tensor:
        """Return the entries of a step, int64 [Hkv, min(k, N)] ascending, from `score` [Hkv, N].

        A count policy may use fewer than `k`: the end of such a row is -1.
        """
        return top_k(score, k)

    def may_use_fewer(self) -> bool:
        """Tell whether `pick` may end a row with -1, which only its result then says."""
        return False

    @abstractmethod
    def encode(self, layer: int, keys: Tensor, anchor: Tensor | None) -> Tensor:
        """Encode `keys` [T, Hkv, D], post-RoPE as the pool stores them, to [T, Hkv, width].

        `anchor` is the keys of the first `anchor_tokens` tokens of the same prompt and layer (all
        of them on a shorter prompt); None if `anchor_tokens` is 0. The metadata of a token does
        not depend on the tokens encoded with it, bit for bit.
        Raises ValueError for shapes that do not fit.
        """

    @abstractmethod
    def score(self, layer: int, query: Tensor, metadata: Tensor) -> Tensor:
        """Return float32 [Hkv, N], larger = more important.

        `query` is [Hkv, G, D] post-RoPE, `metadata` [N, Hkv, width]. Raises ValueError for
        shapes that do not fit.
        """

    def _check_keys(self, layer: int, keys: Tensor) -> None:
        self._check("layer", layer, range(self.shape.layers))
        heads, dim = self.shape.kv_heads, self.shape.head_dim
        if keys.dim() != 3 or keys.shape[1:] != (heads, dim):
            raise ValueError(f"keys is {list(keys.shape)}; it must be [T, {heads}, {dim}]")

    def _check_score(self, layer: int, query: Tensor, metadata: Tensor) -> None:
        self._check("layer", layer, range(self.shape.layers))
        wanted = (self.shape.kv_heads, self.shape.group, self.shape.head_dim)
        if query.shape != wanted:
            raise ValueError(f"query is {list(query.shape)}; it must be {list(wanted)}")
        inner = (self.shape.kv_heads, self.metadata_width)
        if metadata.dim() != 3 or metadata.shape[1:] != inner:
            raise ValueError(
                f"metadata is {list(metadata.shape)}; it must be [N, {inner[0]}, {inner[1]}]"
            )
        if metadata.dtype != self.metadata_dtype:
            raise ValueError(f"metadata is {metadata.dtype}; it must be {self.metadata_dtype}")

    @staticmethod
    def _check(field: str, value: int, allowed: range) -> None:
        if value not in allowed:
            raise ValueError(f"{field} is {value}; allowed are 0 to {allowed.stop - 1}")


def budget(prompt_len: int, ratio: float) -> int:
    """Return k, the entries a KV head may use: `ceil(ratio * prompt_len)`, 1 to `prompt_len`.

    Raises ValueError unless `prompt_len >= 1` and `0 < ratio <= 1`.
    """
    if prompt_len < 1:
        raise ValueError(f"prompt_len is {prompt_len}; it must be at least 1")
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio is {ratio}; it must be above 0 and at most 1")
    # A ratio such as 0.1 is a little above its decimal value; without the slack 10 % of 1,000
    # would be 101.
    return min(prompt_len, max(1, math.ceil(ratio * prompt_len - 1e-9 * prompt_len)))
