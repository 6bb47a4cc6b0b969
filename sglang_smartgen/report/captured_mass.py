"""How much of the true attention a selector's choice holds.

A query at position t sees the prompt entries 0 to t - 1, as the first decode step of a prompt of t
tokens does; its own entry is always at hand and not counted. The captured mass of one KV head is
the true softmax over those entries, summed over the chosen ones and averaged over the query heads
of its group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_smartgen.calibrate.model import LayeredModel
from sglang_smartgen.calibrate.walk import walk
from sglang_smartgen.report.select_arms import Arm
from sglang_smartgen.select.base import KVShape, LayerSample, Selector, budget

RATIOS = (0.05, 0.10, 0.20)
LATE = 512  # the queries are spread over this many last tokens

Masses = dict[tuple[str, float, int, int], float]
"""Mean mass over queries and KV heads, by (arm, ratio, text number, layer)."""


class Entry(NamedTuple):
    """The keys of one layer and text as every arm's metadata sees them."""

    sample: LayerSample
    lookahead: Tensor | None  # float32 [T, Hq, D]


def late_positions(tokens: int, queries: int) -> list[int]:
    """Return `queries` positions, evenly spread over the last tokens; the last one is the last.

    Raises ValueError when there are fewer than two tokens a query.
    """
    span = min(LATE, tokens // 2)
    if not 1 <= queries <= span:
        raise ValueError(f"queries is {queries}; with {tokens} tokens 1 to {span} are allowed")
    step = span // queries
    return [tokens - 1 - step * i for i in reversed(range(queries))]


def prompt_metadata(selector: Selector, layer: int, keys: Tensor) -> Tensor:
    """Return what `selector` encodes of a whole prompt's `keys` [N, Hkv, D]: [N, Hkv, width].

    Laid out so that the rows of a KV head are contiguous, which scores copy otherwise: with one
    query after the other over the same prompt that is most of their time. The values are equal.
    """
    anchor = keys[: selector.anchor_tokens] if selector.anchor_tokens else None
    metadata = selector.encode(layer, keys, anchor)
    if metadata.dtype == torch.int32:  # words of codes, scored word by word
        return metadata.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    return metadata.transpose(0, 1).contiguous().transpose(0, 1)


def true_weights(shape: KVShape, query: Tensor, keys: Tensor) -> Tensor:
    """Return the attention of each KV head's group over the keys, float32 [Hkv, N], sum 1.

    `query` is [Hq, D], `keys` [N, Hkv, D], both float32.
    """
    grouped = query.view(shape.kv_heads, shape.group, shape.head_dim)
    logits = torch.matmul(grouped, keys.permute(1, 2, 0)) * shape.scaling
    return torch.softmax(logits, dim=-1).mean(1)


def captured(weights: Tensor, chosen: Tensor) -> float:
    """Return the mean over KV heads of the mass of `chosen` [Hkv, k]; -1 is no entry.

    `weights` is [Hkv, N].
    """
    held = weights.gather(-1, chosen.clamp(min=0)) * (chosen >= 0)
    return float(held.sum(-1).mean())


def layer_masses(
    selectors: Mapping[Arm, Selector], layer: int, entry: Entry, positions: list[int]
) -> dict[tuple[str, float], float]:
    """Return the mean mass over the positions by (arm, ratio), for one layer of one text."""
    shape = next(iter(selectors.values())).shape
    keys = entry.sample.keys
    totals: dict[tuple[str, float], float] = {}
    metadata: dict[int, Tensor] = {}  # arms may share a selector
    for selector in selectors.values():
        if id(selector) not in metadata:
            metadata[id(selector)] = prompt_metadata(selector, layer, keys)
    for position in positions:
        weights = true_weights(shape, entry.sample.queries[position], keys[:position])
        for arm, selector in selectors.items():
            source = entry.lookahead if arm.lookahead else entry.sample.queries
            if source is None:
                raise ValueError(f"arm {arm.name} needs the lookahead queries of layer {layer}")
            query = source[position].view(shape.kv_heads, shape.group, -1)
            score = selector.score(layer, query, metadata[id(selector)][:position])
            for ratio in RATIOS:
                chosen = selector.pick(score, budget(position, ratio))
                key = arm.name, ratio
                totals[key] = totals.get(key, 0.0) + captured(weights, chosen)
    return {key: total / len(positions) for key, total in totals.items()}


def measure_mass(
    model: LayeredModel,
    sequences: list[list[int]],
    selectors: Mapping[Arm, Selector],
    layers: list[int],
    queries: int,
    advance: Callable[[int], None],
) -> Masses:
    """Return the masses of every arm, ratio, text and layer in `layers`."""
    out: Masses = {}
    hidden = [model.embed(ids) for ids in sequences]
    for step in walk(model, hidden, stop=layers[-1] + 1, lookahead=True):
        if step.layer in layers:
            for text, sample in enumerate(step.samples):
                entry = Entry(sample, step.lookahead[text] if step.lookahead else None)
                positions = late_positions(len(sequences[text]), queries)
                masses = layer_masses(selectors, step.layer, entry, positions)
                for (arm, ratio), mass in masses.items():
                    out[arm, ratio, text, step.layer] = mass
        advance(step.layer + 1)
    return out


def mean_mass(masses: Masses, arm: str, ratio: float) -> float:
    """Return the mean of an arm over texts and layers."""
    values = [m for (a, r, _, _), m in masses.items() if (a, r) == (arm, ratio)]
    return sum(values) / len(values)
