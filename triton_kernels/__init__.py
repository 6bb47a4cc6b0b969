"""Device operators and their checked wrappers: a torch path for CPU tensors, Triton for CUDA.

The import name is `sglang_smartgen.triton_kernels`; the folder must never be importable from the
top, where SGLang would take it for OpenAI's MoE library of that name.
"""

from __future__ import annotations

from sglang_smartgen.triton_kernels.gather_rows import gather_rows
from sglang_smartgen.triton_kernels.hash_encode import hash_encode
from sglang_smartgen.triton_kernels.hash_score import hash_score
from sglang_smartgen.triton_kernels.mask_gather import mask_gather
from sglang_smartgen.triton_kernels.partial_score import partial_score
from sglang_smartgen.triton_kernels.reorder_descending import Reordered, reorder_descending
from sglang_smartgen.triton_kernels.sparse_decode import sparse_decode
from sglang_smartgen.triton_kernels.split_and_reorder import SplitIndex, split_and_reorder
from sglang_smartgen.triton_kernels.split_index import Lanes, split_index

__all__ = [
    "Lanes",
    "Reordered",
    "SplitIndex",
    "gather_rows",
    "hash_encode",
    "hash_score",
    "mask_gather",
    "partial_score",
    "reorder_descending",
    "sparse_decode",
    "split_and_reorder",
    "split_index",
]
