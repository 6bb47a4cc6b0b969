"""Device operators and their checked wrappers: a torch path for CPU tensors, Triton for CUDA.

The import name is `sglang_smartgen.triton_kernels`; the folder must never be importable from the
top, where SGLang would take it for OpenAI's MoE library of that name.
"""

from __future__ import annotations

from sglang_smartgen.triton_kernels.mask_gather import mask_gather
from sglang_smartgen.triton_kernels.reorder_descending import Reordered, reorder_descending
from sglang_smartgen.triton_kernels.split_index import Lanes, split_index

__all__ = ["Lanes", "Reordered", "mask_gather", "reorder_descending", "split_index"]
