"""The baseline without metadata: attention sinks and the most recent tokens.

Source: StreamingLLM (ICLR 2024). The query is not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, cast

import torch
from torch import Tensor

from sglang_smartgen.select.base import Selector


class StreamingSelector(Selector):
    """The first `sinks` tokens, then the latest ones. Metadata has width 0."""

    name: ClassVar[str] = "streaming"
    defaults: ClassVar[Mapping[str, object]] = MappingProxyType({"sinks": 4})

    def prepare(self) -> None:
        """Read the number of sinks."""
        self.metadata_dtype = self.dtype
        self.metadata_width = 0
        self.sinks = cast(int, self.options["sinks"])
        if self.sinks < 0:
            raise ValueError(f"sinks is {self.sinks}; it must be at least 0")

    def fingerprint(self) -> str:
        """Return name, version and the number of sinks."""
        return f"streaming:1:{self.sinks}"

    def encode(self, layer: int, keys: Tensor, anchor: Tensor | None = None) -> Tensor:
        """Return nothing for each token: [T, Hkv, 0]."""
        self._check_keys(layer, keys)
        return keys.new_empty((*keys.shape[:2], 0), dtype=self.metadata_dtype)

    def score(self, layer: int, query: Tensor, metadata: Tensor) -> Tensor:
        """Return the position of each token, sinks above all others, the first one highest."""
        self._check_score(layer, query, metadata)
        length = metadata.shape[0]
        score = torch.arange(length, device=query.device, dtype=torch.float32)
        score[: self.sinks] = 2.0 * length - score[: self.sinks]
        return score.repeat(self.shape.kv_heads, 1)
