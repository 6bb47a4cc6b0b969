"""The tensor-parallel ranks of this server, over SGLang's own group for small CPU tensors.

Used by the scheduler thread alone, which is the one that SGLang itself uses the group from: so the
collectives of both come in one order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from sglang_smartgen.core.agreement import Agreement


class GlooRanks:
    """See core.agreement.Ranks."""

    def __init__(self, group: Any) -> None:
        """group: a torch process group of CPU tensors."""
        self._group = group
        self.size: int = dist.get_world_size(group)

    def least(self, numbers: list[int]) -> list[int]:
        """See Ranks."""
        tensor = torch.tensor(numbers, dtype=torch.int32)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._group)
        return [int(number) for number in tensor.tolist()]

    def texts(self, text: str) -> list[str]:
        """See Ranks."""
        length = torch.tensor([len(text.encode())], dtype=torch.int64)
        lengths = [torch.empty_like(length) for _ in range(self.size)]
        dist.all_gather(lengths, length, group=self._group)
        longest = max(int(each) for each in lengths)
        own = torch.zeros(longest, dtype=torch.uint8)
        own[: int(length)] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        parts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(parts, own, group=self._group)
        return [
            bytes(part[: int(each)].tolist()).decode()
            for part, each in zip(parts, lengths, strict=True)
        ]


def agreement_of_server() -> Agreement:
    """How the ranks of this scheduler process agree: those of its attention, as SGLang's do."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if parallel.attn_tp_size == 1:
        return Agreement()
    return Agreement(GlooRanks(parallel.attn_tp_group.cpu_group))
