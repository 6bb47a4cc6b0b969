"""FlashInfer's three operators in float32 torch, with what its documentation says of each.

The log-sum-exp is to base 2, as FlashInfer's is: whoever merges with another base is found out.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

calls: list[str] = []


class BatchDecodeWithPagedKVCacheWrapper:
    """Paged decode: `indptr` on the host, `indices` pages, every page of page_size 1 full."""

    def __init__(self, work: Tensor, layout: str, *, use_tensor_cores: bool) -> None:
        assert layout == "NHD" and work.dtype == torch.uint8
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **named: Any,
    ) -> None:
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        assert indptr.device.type == "cpu" and page_size == 1
        assert len(indptr) == len(last_page_len) + 1 and int(indptr[-1]) == len(indices)
        assert bool((indptr.diff() > 0).all()), "a request without a page"
        assert bool((last_page_len == 1).all())
        self._plan = (indptr.tolist(), indices.long(), num_qo_heads, num_kv_heads, head_dim)
        self._scale = named["sm_scale"]
        assert named["q_data_type"] == named["kv_data_type"]

    def run(self, query: Tensor, cache: tuple[Tensor, Tensor], *, return_lse: bool) -> Any:
        calls.append("run")
        indptr, pages, q_heads, kv_heads, dim = self._plan
        assert query.shape == (len(indptr) - 1, q_heads, dim) and return_lse
        assert all(part.shape[1:] == (1, kv_heads, dim) for part in cache)
        out, weight = torch.empty_like(query), torch.empty(query.shape[:2])
        for b, (first, last) in enumerate(itertools.pairwise(indptr)):
            keys, values = (
                part[pages[first:last], 0].float().repeat_interleave(q_heads // kv_heads, 1)
                for part in cache
            )
            logits = self._scale * torch.einsum("hd,nhd->hn", query[b].float(), keys)
            out[b] = torch.einsum("hn,nhd->hd", logits.softmax(-1), values).to(out.dtype)
            weight[b] = logits.logsumexp(-1) / math.log(2)
        return out, weight


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [n, heads, dim] with base-2 log-sum-exps [n, heads]."""
    calls.append("merge_state")
    top = torch.maximum(s_a, s_b)
    a, b = torch.exp2(s_a - top), torch.exp2(s_b - top)
    merged = (a[..., None] * v_a + b[..., None] * v_b) / (a + b)[..., None]
    return merged.to(v_a.dtype), top + torch.log2(a + b)


def top_k(score: Tensor, k: int, *, tie_break: int) -> tuple[Tensor, Tensor]:
    """Unordered; tie_break 2 prefers the larger index."""
    calls.append("top_k")
    assert tie_break == 2
    mirrored = torch.flip(score, (-1,))
    order = torch.argsort(mirrored, dim=-1, descending=True, stable=True)[:, :k]
    index = score.shape[-1] - 1 - order
    return score.gather(-1, index), index[:, torch.randperm(k)]
