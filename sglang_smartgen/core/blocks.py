"""Blocks (l, m) of a prompt, and the plan of which of them go out during prefill.

A block is the m-th of M token ranges of layer l. A prompt shorter than M tokens has one block a
token, so the number of blocks a layer of this prompt is `min(M, prompt_len)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sglang_smartgen.core.geometry import DENSE_LAYERS


def block_bounds(prompt_len: int, blocks: int) -> list[int]:
    """Return the ascending token bounds of the blocks of one layer.

    The result has `min(blocks, prompt_len) + 1` entries; block m covers the tokens
    `[bounds[m], bounds[m + 1])`, is never empty, and sizes differ by at most one token.
    An empty prompt has no block: `[0]`. Raises ValueError for a negative length or `blocks < 1`.
    """
    _at_least("prompt_len", prompt_len, 0)
    _at_least("blocks", blocks, 1)
    count = min(blocks, prompt_len)
    return [m * prompt_len // count for m in range(count + 1)] if count else [0]


def clip_proactive_blocks(k_r: int, layers: int, blocks: int) -> int:
    """Clip the number of proactively pushed blocks K_r to `[2 * blocks, layers * blocks]`.

    The lower end is the two dense layers (fewer if the model has fewer). Raises ValueError for
    `layers < 1` or `blocks < 0`.
    """
    _at_least("layers", layers, 1)
    _at_least("blocks", blocks, 0)
    return min(max(k_r, min(DENSE_LAYERS, layers) * blocks), layers * blocks)


@dataclass(frozen=True, slots=True)
class PushPlan:
    """The token ranges of every layer that are pushed during prefill.

    `pushed[layer]` holds merged, ascending, non-empty, half-open token ranges `(start, stop)`.
    """

    prompt_len: int
    pushed: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def from_blocks(
        cls, *, prompt_len: int, layers: int, blocks: int, chosen: Iterable[tuple[int, int]]
    ) -> PushPlan:
        """Plan the blocks `chosen`, pairs (layer, m) in any order; neighbours merge to one range.

        Raises ValueError for a block that this prompt does not have.
        """
        bounds = block_bounds(prompt_len, blocks)
        _at_least("layers", layers, 1)
        members: list[set[int]] = [set() for _ in range(layers)]
        for layer, m in chosen:
            if not (0 <= layer < layers and 0 <= m < len(bounds) - 1):
                raise ValueError(
                    f"chosen holds block ({layer}, {m}); allowed are layers 0 to {layers - 1} "
                    f"and blocks 0 to {len(bounds) - 2}"
                )
            members[layer].add(m)
        pushed = tuple(_merge([(bounds[m], bounds[m + 1]) for m in sorted(s)]) for s in members)
        return cls(prompt_len, pushed)

    @classmethod
    def sequential(
        cls,
        *,
        prompt_len: int,
        layers: int,
        blocks: int,
        proactive_blocks: int,
        dense_layers: int = DENSE_LAYERS,
    ) -> PushPlan:
        """Plan `proactive_blocks` (K_r) blocks in the order (l, m) ascending.

        `proactive_blocks` counts blocks of this prompt (`min(blocks, prompt_len)` a layer). The
        layers below `dense_layers` always go out whole, even if K_r is smaller than they are.
        Raises ValueError for negative numbers.
        """
        _at_least("layers", layers, 1)
        _at_least("proactive_blocks", proactive_blocks, 0)
        _at_least("dense_layers", dense_layers, 0)
        bounds = block_bounds(prompt_len, blocks)
        per_layer = len(bounds) - 1
        pushed: list[tuple[tuple[int, int], ...]] = []
        for layer in range(layers):
            left = proactive_blocks - layer * per_layer
            count = per_layer if layer < dense_layers else min(max(left, 0), per_layer)
            pushed.append(((0, bounds[count]),) if count else ())
        return cls(prompt_len, tuple(pushed))

    def ranges(self, layer: int) -> list[tuple[int, int]]:
        """Return the merged ascending token ranges `[start, stop)` pushed for `layer`."""
        if not 0 <= layer < len(self.pushed):
            raise ValueError(f"layer is {layer}; allowed are 0 to {len(self.pushed) - 1}")
        return list(self.pushed[layer])

    def ranges_within(self, layer: int, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the parts of `ranges(layer)` inside the tokens `[start, stop)` of one chunk."""
        clipped = [(max(a, start), min(b, stop)) for a, b in self.ranges(layer)]
        return [(a, b) for a, b in clipped if a < b]

    def tokens(self) -> int:
        """Return the number of (layer, token) pairs that the plan pushes."""
        return sum(stop - start for layer in self.pushed for start, stop in layer)


def _merge(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def _at_least(field: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{field} is {value}; it must be at least {least}")
