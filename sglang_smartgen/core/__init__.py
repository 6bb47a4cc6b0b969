"""Geometry and policy: masks, blocks, the index split. Imports torch and our kernels only."""

from __future__ import annotations

from sglang_smartgen.core.blocks import PushPlan, block_bounds, clip_proactive_blocks
from sglang_smartgen.core.mask import LOCAL, PADDING, REMOTE
from sglang_smartgen.core.split import SplitIndex, split_index

__all__ = [
    "LOCAL",
    "PADDING",
    "REMOTE",
    "PushPlan",
    "SplitIndex",
    "block_bounds",
    "clip_proactive_blocks",
    "split_index",
]
