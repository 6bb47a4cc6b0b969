"""Geometry and policy: masks, blocks, the index split. Imports torch and our kernels only."""

from __future__ import annotations

from sglang_smartgen.core.blocks import block_bounds, clip_proactive_blocks
from sglang_smartgen.core.mask import LOCAL, PADDING, REMOTE
from sglang_smartgen.core.observe import block_means, observed_importance
from sglang_smartgen.core.orders import ORDERS, mixed_importance, rank_blocks, token_codes
from sglang_smartgen.core.proactive import proactive_blocks
from sglang_smartgen.core.split import SplitIndex, split_index

__all__ = [
    "LOCAL",
    "ORDERS",
    "PADDING",
    "REMOTE",
    "SplitIndex",
    "block_bounds",
    "block_means",
    "clip_proactive_blocks",
    "mixed_importance",
    "observed_importance",
    "proactive_blocks",
    "rank_blocks",
    "split_index",
    "token_codes",
]
