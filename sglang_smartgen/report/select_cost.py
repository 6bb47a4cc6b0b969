"""What a selector costs: metadata bytes a token, and its time a step against the step itself.

The step is one token through every layer of the model over the whole prompt, as full attention
does it, and the head. A selection is, summed over the layers that are selected from, the lookahead
query (where used), the scores and the choice. Both on the same threads, arm after arm in each
layer, the fastest of some repetitions: what else runs on the machine only ever adds time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import msgspec
from torch import Tensor

from sglang_smartgen.calibrate.model import Layer, LayeredModel
from sglang_smartgen.report.decode_steps import PromptAttention, StepAttention
from sglang_smartgen.report.select_arms import Arm
from sglang_smartgen.select.base import Selector, budget

RATIO = 0.1
REPEATS = 7


class Cost(msgspec.Struct):
    """Of one arm."""

    metadata_bytes: int
    """A token, over all layers that are selected from."""
    selection_s: float
    """A decode step."""
    step_s: float
    """The step itself with full attention, the same for every arm."""


def best_s(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the seconds of the fastest of some calls, after one that is not counted."""
    work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def measure_cost(
    model: LayeredModel,
    ids: list[int],
    selectors: Mapping[Arm, Selector],
    layers: list[int],
    advance: Callable[[int], None],
) -> dict[str, Cost]:
    """Return the cost of every arm at a prompt of all but the last of the tokens `ids`."""
    length = len(ids) - 1
    hidden = model.embed(ids)
    prompt, token = hidden[:length], hidden[length:]
    step_s = 0.0
    selection_s = dict.fromkeys(selectors, 0.0)
    before = token
    for index in range(model.layers):
        layer = model.layer(index)
        kept = PromptAttention(layer.window)
        prompt = layer.forward(prompt, kept)
        dense = StepAttention(kept, layer.window)
        step_s += best_s(partial(layer.forward, token, dense, length))
        if index in layers:
            query = layer.query(token, length)
            for arm, selector in selectors.items():
                metadata = _encode(selector, index, kept.keys.transpose(0, 1))
                source = before if arm.lookahead else query

                selection_s[arm] += best_s(
                    partial(_select, layer, source, arm.lookahead, selector, metadata)
                )
        before, token = token, layer.forward(token, dense, length)
        advance(index + 1)
    step_s += best_s(lambda: model.logits(token), repeats=3)
    return {
        arm.name: Cost(
            metadata_bytes=len(layers) * row_bytes(selector),
            selection_s=selection_s[arm],
            step_s=step_s,
        )
        for arm, selector in selectors.items()
    }


def row_bytes(selector: Selector) -> int:
    """Return the metadata bytes of one token in one layer."""
    width = selector.metadata_width * selector.metadata_dtype.itemsize
    return selector.shape.kv_heads * width


def _select(
    layer: Layer, source: Tensor, lookahead: bool, selector: Selector, metadata: Tensor
) -> Tensor:
    """Choose for one step; `source` is the input of the layer before, or else the query."""
    length, heads = metadata.shape[0], selector.shape.kv_heads
    query = layer.query(source, length) if lookahead else source
    score = selector.score(layer.index, query.view(heads, selector.shape.group, -1), metadata)
    return selector.pick(score, budget(length, RATIO))


def _encode(selector: Selector, layer: int, keys: Tensor) -> Tensor:
    anchor = keys[: selector.anchor_tokens] if selector.anchor_tokens else None
    return selector.encode(layer, keys, anchor)
