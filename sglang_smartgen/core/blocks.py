"""Blocks (l, m) of a prompt, and the bounds of K_r.

A block is the m-th of M token ranges of layer l. A prompt shorter than M tokens has one block a
token, so the number of blocks a layer of this prompt is `min(M, prompt_len)`.
"""

from __future__ import annotations

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


def clip_proactive_blocks(
    k_r: int, layers: int, blocks: int, dense_layers: int = DENSE_LAYERS
) -> int:
    """Clip the number of proactively pushed blocks K_r to `[2 * blocks, layers * blocks]`.

    The lower end is the dense layers, which are always sent whole: layers 0 and 1 (fewer if the
    model has fewer), or `dense_layers` of a model with sliding windows. Raises ValueError for
    `layers < 1` or `blocks < 0`.
    """
    _at_least("layers", layers, 1)
    _at_least("blocks", blocks, 0)
    return min(max(k_r, min(dense_layers, layers) * blocks), layers * blocks)


def _at_least(field: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{field} is {value}; it must be at least {least}")
