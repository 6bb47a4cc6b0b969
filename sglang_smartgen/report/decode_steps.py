"""Decode steps of a model that is read layer by layer: the prompt is prefilled densely, and each
new token attends to chosen entries of the prompt and to all new tokens up to itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import Tensor

from sglang_smartgen.calibrate.walk import causal_attention

Choose = Callable[[Tensor], Tensor]
"""From queries float32 [T, Hq, D] to bool [Hkv, T, N], the prompt entries that may be used."""


class PromptAttention:
    """Dense attention over the prompt of one layer, which keeps its keys and values."""

    def __init__(self, window: int | None) -> None:
        self._window = window
        self.keys = self.values = torch.empty(0)
        """float32 [Hkv, N, D], post-RoPE."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attend, see `calibrate.model.Attend`."""
        self.keys, self.values = key, value
        return causal_attention(query, key, value, scaling, self._window)


class StepAttention:
    """Attention of T new tokens behind a prompt of N tokens in one layer.

    `chosen` is bool [Hkv, T, N], the prompt entries that each token may use; None is all of them
    (within the window of a sliding-window layer).
    """

    def __init__(
        self, prompt: PromptAttention, window: int | None, chosen: Tensor | None = None
    ) -> None:
        self._prompt, self._window, self._chosen = prompt, window, chosen

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attend, see `calibrate.model.Attend`."""
        new, length = query.shape[1], self._prompt.keys.shape[1]
        seen = visible(length, new, self._window)[None].expand(query.shape[0], -1, -1)
        if self._chosen is not None:
            group = query.shape[0] // key.shape[0]
            seen = seen.clone()
            seen[:, :, :length] &= self._chosen.repeat_interleave(group, dim=0)
        return functional.scaled_dot_product_attention(
            query[None],
            torch.cat((self._prompt.keys, key), dim=1)[None],
            torch.cat((self._prompt.values, value), dim=1)[None],
            attn_mask=seen[None],
            scale=scaling,
            enable_gqa=True,
        )[0]


class SelectingAttention:
    """As StepAttention, choosing by a callback from the true queries float32 [T, Hq, D]."""

    def __init__(self, prompt: PromptAttention, choose: Choose) -> None:
        self._prompt, self._choose = prompt, choose

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attend, see `calibrate.model.Attend`."""
        chosen = self._choose(query.transpose(0, 1))
        return StepAttention(self._prompt, None, chosen)(query, key, value, scaling)


def visible(length: int, new: int, window: int | None = None) -> Tensor:
    """Return bool [new, length + new]: what each of `new` tokens behind a prompt may see."""
    t = torch.arange(length, length + new)[:, None]
    n = torch.arange(length + new)[None]
    seen = n <= t
    return seen if window is None else seen & (n > t - window)
