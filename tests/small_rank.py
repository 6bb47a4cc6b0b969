"""A rank of a small model on CPU tensors, as both engine sides see one; needs no SGLang."""

from __future__ import annotations

import functools

import torch

from sglang_smartgen.core.geometry import KVGeometry
from sglang_smartgen.engine.device_path import DevicePath
from sglang_smartgen.engine.model_facts import ModelFacts
from sglang_smartgen.select.base import KVShape, Selector
from sglang_smartgen.select.registry import make_selector

LAYERS, HEADS, DIM, SLOTS, ROWS, WIDTH = 4, 2, 16, 400, 4, 200
SHAPE = KVShape(LAYERS, 2 * HEADS, HEADS, DIM, DIM**-0.5)


@functools.cache
def hata() -> Selector:
    """The selector under test; its hash matrices are made once a process."""
    return make_selector("hata", SHAPE, torch.bfloat16)


class SmallRank:
    """Pools that a transport may write to; `memory` is the region of K and V of all layers.

    device_pool: `pool` where the device of that host reads it.
    """

    def __init__(self, seed: int, path: DevicePath | None = None) -> None:
        """path: of the host whose memory it is; None: a CPU host's."""
        made = torch.Generator().manual_seed(seed)
        shape = (2, LAYERS, SLOTS, HEADS, DIM)
        self.memory = (path or DevicePath()).region(torch.Size(shape).numel() * 2)
        self.device_pool = self.memory.device_tensor(0, shape, torch.bfloat16)
        self.pool = self.memory.tensor(0, shape, torch.bfloat16)
        self.pool.copy_(torch.randn(shape, generator=made))
        self.facts = ModelFacts(
            geometry=KVGeometry(LAYERS, HEADS, DIM, torch.bfloat16),
            shape=SHAPE,
            keys=list(self.pool[0]),
            values=list(self.pool[1]),
            req_to_token=torch.zeros((ROWS, WIDTH), dtype=torch.int32),
            tp_size=1,
        )

    def slots(self, count: int, seed: int = 0) -> torch.Tensor:
        """int64 [count] distinct slots in no order."""
        return torch.randperm(SLOTS, generator=torch.Generator().manual_seed(seed))[:count]
