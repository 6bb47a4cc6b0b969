"""K_r, the number of blocks that are pushed during prefill.

K_r counts blocks of all layers; the dense ones (0 and 1, and sliding windows) are always among
them.
"""

from __future__ import annotations

import math

from sglang_smartgen.core.blocks import clip_proactive_blocks
from sglang_smartgen.core.geometry import DENSE_LAYERS


def proactive_blocks(
    *,
    prefill_s: float,
    bandwidth: float,
    metadata_bytes: float,
    block_bytes: float,
    layers: int,
    blocks: int,
    dense_layers: int = DENSE_LAYERS,
) -> int:
    """Return K_r: the blocks whose transfer fits behind the prefill of all layers but the first.

    prefill_s is T_p in seconds, bandwidth in bytes a second (infinite is allowed), metadata_bytes
    what the selector's metadata of the whole prompt takes, block_bytes one block (K and V of its
    tokens in one layer), blocks the blocks a layer of this prompt. The result is
    `((L-1)/L * T_p * bandwidth - metadata_bytes) / block_bytes`, clipped to `[2 * blocks,
    L * blocks]` (the paper's section 4.1; it divides by T_t instead and does not charge metadata).
    Raises ValueError for a negative number or `block_bytes` of 0.
    """
    values = {
        "prefill_s": prefill_s,
        "bandwidth": bandwidth,
        "metadata_bytes": metadata_bytes,
        "block_bytes": block_bytes,
    }
    for field, value in values.items():
        if math.isnan(value) or value < 0 or (field == "block_bytes" and value == 0):
            least = "positive" if field == "block_bytes" else "0 or more"
            raise ValueError(f"{field} is {value}; it must be {least}")
    most = layers * blocks
    budget = (layers - 1) / layers * prefill_s * bandwidth if prefill_s else 0.0
    fits = min(max((budget - metadata_bytes) / block_bytes, 0.0), float(most))
    return clip_proactive_blocks(int(fits), layers, blocks, dense_layers)
