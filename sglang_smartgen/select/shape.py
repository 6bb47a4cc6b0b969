"""The attention geometry of a model or rank, and one layer's calibration input."""

from __future__ import annotations

import msgspec
from torch import Tensor


class KVShape(msgspec.Struct, frozen=True):
    """The attention geometry of one rank. Raises ValueError for numbers that do not fit."""

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    scaling: float  # of the logits, 1 / sqrt(head_dim) on most models

    def __post_init__(self) -> None:
        for field in ("layers", "q_heads", "kv_heads", "head_dim"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be at least 1")
        if self.q_heads % self.kv_heads:
            raise ValueError(
                f"q_heads is {self.q_heads}; it must be a multiple of kv_heads, {self.kv_heads}"
            )

    @property
    def group(self) -> int:
        """Return G, the number of query heads that share a KV head."""
        return self.q_heads // self.kv_heads


class LayerSample(msgspec.Struct):
    """What one layer sees of one calibration text, T tokens in order.

    queries: float32 [T, Hq, D], keys: float32 [T, Hkv, D]; both post-RoPE (and after q-norm and
    k-norm where the model has them). Query heads `h * G` to `h * G + G - 1` belong to KV head h.
    """

    queries: Tensor
    keys: Tensor


def check_samples(shape: KVShape, samples: list[LayerSample]) -> None:
    """Raise ValueError unless there is a sample and every one fits the whole model's `shape`."""
    if not samples:
        raise ValueError("samples is empty; calibration needs at least one text")
    for sample in samples:
        tokens = sample.keys.shape[0] if sample.keys.dim() else 0
        for field, value, heads in (
            ("queries", sample.queries, shape.q_heads),
            ("keys", sample.keys, shape.kv_heads),
        ):
            if value.shape != (tokens, heads, shape.head_dim) or not tokens:
                raise ValueError(
                    f"{field} is {list(value.shape)}; it must be [T, {heads}, {shape.head_dim}] "
                    "with one T of at least 1 for queries and keys"
                )
