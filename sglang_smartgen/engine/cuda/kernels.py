"""What attends on a device: our Triton operator, or FlashInfer's paged decode.

Both have the interface of `triton_kernels.sparse_decode`. FlashInfer is told every (request, KV
head) as a request of its own, with the group's query heads and pages of one token, so each KV head
may have other entries; the tail, which all heads share, is a second call; `merge_state` joins them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglang_smartgen.config import ConfigError, SmartGenConfig
from sglang_smartgen.select.topk import rank_with
from sglang_smartgen.triton_kernels import sparse_decode

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]
"""query, keys, values, index, tail_keys, tail_values, tail_slots, scaling: see sparse_decode."""

WORK_BYTES = 128 << 20
LATER_COLUMN = 2  # FlashInfer's tie_break: prefer larger indices, which is our total order
HALVES = (torch.bfloat16, torch.float16)


def attention_kernels(config: SmartGenConfig, dtype: torch.dtype, device: torch.device) -> Attend:
    """What the configuration asks for. Raises ConfigError with one sentence where it cannot be."""
    if config.attention_kernels != "flashinfer":
        rank_with(None)
        return sparse_decode
    if dtype not in HALVES:
        raise ConfigError(
            f"attention_kernels is flashinfer, which computes in bfloat16 or float16; the KV pool "
            f"is {str(dtype).removeprefix('torch.')}, for which triton is allowed"
        )
    try:
        module = importlib.import_module("flashinfer")
    except Exception as error:
        raise ConfigError(
            f"attention_kernels is flashinfer, which cannot be imported here ({error}); allowed "
            "are auto and triton"
        ) from None
    kernels = FlashInferKernels(module, device)
    rank_with(kernels.rank)
    return kernels.attend


class FlashInferKernels:
    """FlashInfer's operators behind our interface.

    Its plan is made on the host from counts, so each call waits for the device once. A request or
    head without a row gets one row, whose result is thrown away.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        """module: `flashinfer`, or what stands in for it in a test."""
        self._module = module
        self._device = device
        self._wrappers: dict[tuple[str, bool], Any] = {}

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        index: Tensor,
        tail_keys: Tensor,
        tail_values: Tensor,
        tail_slots: Tensor,
        scaling: float,
    ) -> Tensor:
        """See `sparse_decode`."""
        batch, heads, k = index.shape
        dim, group = query.shape[2], query.shape[1] // heads
        parts = []
        if k:
            present, some = _filled(index >= 0)
            pages = present.flatten().nonzero().flatten()
            grouped = query.reshape(batch * heads, group, dim)
            rows = tuple(part.reshape(batch * heads * k, 1, 1, dim) for part in (keys, values))
            out, weight = self._run(
                "gathered", grouped, rows, pages, present.flatten(0, 1).sum(-1), 1, scaling
            )
            empty = ~some.flatten()[:, None]
            parts.append(
                (
                    out.masked_fill(empty[..., None], 0).view(query.shape),
                    weight.masked_fill(empty, -torch.inf).view(batch, -1),
                )
            )
        if tail_slots.shape[1]:
            inside = (tail_slots >= 0) & (tail_slots < tail_keys.shape[0])
            present, some = _filled(inside)
            slots = torch.where(inside, tail_slots, 0)
            pool = tuple(part[:, None] for part in (tail_keys, tail_values))
            out, weight = self._run(
                "tail", query, pool, slots[present], present.sum(-1), heads, scaling
            )
            empty = ~some[:, None]
            parts.append(
                (
                    out.masked_fill(empty[..., None], 0),
                    weight.masked_fill(empty, -torch.inf),
                )
            )
        if not parts:
            return torch.zeros_like(query)
        if len(parts) == 1:
            return parts[0][0]
        (out, weight), (more, other) = parts
        merged: Tensor = self._module.merge_state(out, weight, more, other)[0]
        nothing = weight.isinf() & other.isinf()
        return merged.masked_fill(nothing[..., None], 0)

    def rank(self, score: Tensor, k: int) -> Tensor:
        """See `select.topk.Ranking`: FlashInfer's radix top-k."""
        best: Tensor = self._module.top_k(score, k, tie_break=LATER_COLUMN)[1]
        return best

    def _run(
        self,
        name: str,
        query: Tensor,
        pages_of: tuple[Tensor, ...],
        pages: Tensor,
        counts: Tensor,
        heads: int,
        scaling: float,
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of requests with `counts` pages of one token each."""
        counts = counts.to("cpu", torch.int32)
        first = torch.zeros(len(counts) + 1, dtype=torch.int32)
        first[1:] = counts.cumsum(0)
        wrapper = self._wrapper(name, query.shape[1] // heads)
        wrapper.plan(
            first,
            pages.to(torch.int32),
            torch.ones_like(counts),
            query.shape[1],
            heads,
            query.shape[2],
            1,
            q_data_type=query.dtype,
            kv_data_type=query.dtype,
            sm_scale=scaling,
        )
        out, weight = wrapper.run(query.contiguous(), pages_of, return_lse=True)
        return out, weight

    def _wrapper(self, name: str, group: int) -> Any:
        """One a segment, since a plan is kept in it; a group of four or more fills tensor cores."""
        key = name, group >= 4
        if key not in self._wrappers:
            work = torch.zeros(WORK_BYTES, dtype=torch.uint8, device=self._device)
            self._wrappers[key] = self._module.BatchDecodeWithPagedKVCacheWrapper(
                work, "NHD", use_tensor_cores=key[1]
            )
        return self._wrappers[key]


def _filled(present: Tensor) -> tuple[Tensor, Tensor]:
    """`present` with the first column set where a row has none, and which rows have some."""
    some = present.any(-1)
    filled = present.clone()
    filled[..., 0] |= ~some
    return filled, some
