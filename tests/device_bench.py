"""A decode side whose room decodes on the device path, on CPU tensors."""

from __future__ import annotations

import torch
from lane_bench import smartgen
from late_streams import LateStreams

from sglang_smartgen.engine.cuda.lanes import Begun, DeviceLanes


class DeviceBench:
    """A Bench whose room decodes on the device path."""

    def __init__(self, **settings: object) -> None:
        self.bench = smartgen(**settings)
        self.bench.encode()
        self.streams = LateStreams()
        self.lanes = DeviceLanes(self.bench.side, self.bench.side.device_metadata, self.streams)

    def start(self, layer: int, query: torch.Tensor) -> Begun:
        pool = self.bench.rank.pool
        begun = self.lanes.start(
            layer, [self.bench.room], query[None], (pool[0, layer], pool[1, layer])
        )
        self.lanes.ask(begun)
        return begun
