"""Texts through a model, layer by layer: what calibration and the accuracy report read.

Between two layers only the hidden states of the texts are kept, so memory holds one layer's
weights and the queries, keys and values of one text, whatever the size of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from sglang_smartgen.calibrate.model import LayeredModel
from sglang_smartgen.select.base import LayerSample

QUERIES_AT_ONCE = 512  # of a sliding-window layer: its scores are [heads, this, this + window]


class WalkStep(NamedTuple):
    """What one layer did. Lists have one item a text."""

    layer: int
    window: int | None  # of a sliding-window layer, in tokens; None: full attention
    samples: list[LayerSample]
    lookahead: list[Tensor]  # float32 [T, Hq, D]; empty unless asked for, and at the first layer
    hidden: list[Tensor]  # the layer's output, float32 [T, hidden size]


def walk(
    model: LayeredModel,
    hidden: list[Tensor],
    *,
    first: int = 0,
    stop: int | None = None,
    lookahead: bool = False,
) -> Iterator[WalkStep]:
    """Run layers `first` to `stop - 1` (None: the last one) on the inputs of layer `first`.

    `hidden` has one float32 [T, hidden size] a text. With `lookahead` a step also has the queries
    of its layer predicted from the input of the layer before: the raw residual, re-normed by this
    layer's own norm.
    """
    before: list[Tensor] = []
    for index in range(first, model.layers if stop is None else stop):
        layer = model.layer(index)
        predicted = [layer.query(x) for x in before]
        captures = [Capture(layer.window) for _ in hidden]
        after = [layer.forward(x, capture) for x, capture in zip(hidden, captures, strict=True)]
        del layer
        samples = [capture.sample() for capture in captures]
        yield WalkStep(index, model.window(index), samples, predicted, after)
        before, hidden = (hidden if lookahead else []), after


class Capture:
    """Causal attention that keeps its queries and keys."""

    def __init__(self, window: int | None) -> None:
        self._window = window
        self._sample: LayerSample | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attend, see `Attend`."""
        self._sample = LayerSample(
            queries=query.transpose(0, 1).float(), keys=key.transpose(0, 1).float()
        )
        return causal_attention(query, key, value, scaling, self._window)

    def sample(self) -> LayerSample:
        """Return queries [T, Hq, D] and keys [T, Hkv, D]. Raises ValueError before a call."""
        if self._sample is None:
            raise ValueError("the layer has not run")
        return self._sample


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None = None
) -> Tensor:
    """Return [Hq, T, D]: token t attends to tokens 0 to t, of them the last `window` if given.

    `query` is [Hq, T, D], `key` and `value` [Hkv, T, D].
    """
    q, k, v = query[None], key[None], value[None]
    length = query.shape[1]
    if window is None or length <= window:
        return functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=True
        )[0]
    parts = []
    for start in range(0, length, QUERIES_AT_ONCE):
        end = min(start + QUERIES_AT_ONCE, length)
        low = max(0, start - window + 1)
        t = torch.arange(start, end)[:, None]
        n = torch.arange(low, end)[None]
        seen = (n <= t) & (n > t - window)
        parts.append(
            functional.scaled_dot_product_attention(
                q[:, :, start:end],
                k[:, :, low:end],
                v[:, :, low:end],
                attn_mask=seen,
                scale=scaling,
                enable_gqa=True,
            )[0]
        )
    return torch.cat(parts, dim=1)
