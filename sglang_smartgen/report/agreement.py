"""Does a selector change what the model says next?

A prompt is prefilled densely; then the text itself goes on, token by token (teacher-forced), and
at each token the most likely next one is compared with that of full attention. As on a decode
node, layers 0 and 1 and all new tokens are dense, and a step uses a share of the prompt's entries.
All steps run at once, since the tokens are known: the layers are read once for all arms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from sglang_smartgen.calibrate.model import Layer, LayeredModel
from sglang_smartgen.report.captured_mass import prompt_metadata
from sglang_smartgen.report.decode_steps import PromptAttention, SelectingAttention, StepAttention
from sglang_smartgen.report.select_arms import Arm
from sglang_smartgen.select.base import Selector, budget

RATIO = 0.2


class _Text:
    """One text on its way through the layers."""

    def __init__(
        self, model: LayeredModel, ids: list[int], new: int, arms: Mapping[Arm, Selector]
    ) -> None:
        hidden = model.embed(ids)
        self.length = len(ids) - new
        self.prompt = hidden[: self.length]
        self.full = hidden[self.length :]
        self.arms = dict.fromkeys(arms, self.full)
        self.before: dict[Arm, Tensor] = {}

    def run(self, layer: Layer, selectors: Mapping[Arm, Selector], selects: bool) -> None:
        """Run one layer for the prompt, for full attention and for every arm."""
        kept = PromptAttention(layer.window)
        self.prompt = layer.forward(self.prompt, kept)
        dense = StepAttention(kept, layer.window)
        self.full = layer.forward(self.full, dense, self.length)
        metadata: dict[int, Tensor] = {}
        after: dict[Arm, Tensor] = {}
        for arm, hidden in self.arms.items():
            if not selects:
                after[arm] = layer.forward(hidden, dense, self.length)
                continue
            selector = selectors[arm]
            if id(selector) not in metadata:
                keys = kept.keys.transpose(0, 1)
                metadata[id(selector)] = prompt_metadata(selector, layer.index, keys)
            entries = metadata[id(selector)]
            predicted = (
                layer.query(self.before[arm], self.length)
                if arm.lookahead and arm in self.before
                else None
            )

            def choose(
                queries: Tensor,
                selector: Selector = selector,
                entries: Tensor = entries,
                predicted: Tensor | None = predicted,
            ) -> Tensor:
                asked = queries if predicted is None else predicted
                return choose_entries(selector, layer.index, asked, entries)

            attend = SelectingAttention(kept, choose)
            after[arm] = layer.forward(hidden, attend, self.length)
        self.before, self.arms = self.arms, after


def choose_entries(
    selector: Selector, layer: int, queries: Tensor, metadata: Tensor, ratio: float = RATIO
) -> Tensor:
    """Return bool [Hkv, T, N]: the prompt entries that each of T steps uses.

    `queries` is float32 [T, Hq, D], `metadata` of the N prompt tokens.
    """
    length, heads = metadata.shape[0], selector.shape.kv_heads
    k = budget(length, ratio)
    chosen = torch.zeros(heads, len(queries), length + 1, dtype=torch.bool)
    for t, query in enumerate(queries):
        score = selector.score(layer, query.reshape(heads, selector.shape.group, -1), metadata)
        index = selector.pick(score, k)
        # -1, no entry, goes to a column behind the last one.
        chosen[:, t].scatter_(1, torch.where(index < 0, length, index), True)
    return chosen[:, :, :length]


def measure_agreement(
    model: LayeredModel,
    sequences: list[list[int]],
    selectors: Mapping[Arm, Selector],
    layers: list[int],
    new: int,
    advance: Callable[[int], None],
) -> dict[str, list[float]]:
    """Return by arm, one number a text: the share of `new` steps that agree with full attention.

    The last `new` tokens of a sequence are the steps, those before them its prompt. `layers` are
    those that are selected from.
    """
    texts = [_Text(model, ids, new, selectors) for ids in sequences]
    for index in range(model.layers):
        layer = model.layer(index)
        for text in texts:
            text.run(layer, selectors, index in layers)
        advance(index + 1)
    out: dict[str, list[float]] = {arm.name: [] for arm in selectors}
    for text in texts:
        expected = model.logits(text.full).argmax(-1)
        for arm, hidden in text.arms.items():
            same = model.logits(hidden).argmax(-1) == expected
            out[arm.name].append(float(same.float().mean()))
    return out
