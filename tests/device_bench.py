"""A decode side whose room decodes on the device path: on CPU tensors, and on CUDA where it is."""

from __future__ import annotations

import torch
from lane_bench import smartgen
from late_streams import LateStreams

from sglang_smartgen.config import SmartGenConfig
from sglang_smartgen.engine.cuda.lanes import Begun, DeviceLanes, Pools
from sglang_smartgen.engine.cuda.streams import Streams
from sglang_smartgen.engine.device_path import DevicePath, device_path


class DeviceBench:
    """A Bench whose room decodes on the device path.

    device: `cpu` runs the index logic on CPU tensors with scripted streams; `cuda` is the real one.
    """

    def __init__(self, device: str = "cpu", **settings: object) -> None:
        self.device = torch.device(device)
        on_gpu = device == "cuda"
        path = device_path(SmartGenConfig(device_path="cuda")) if on_gpu else DevicePath()
        self.bench = smartgen(path, **settings)
        self.bench.encode()
        self.late = LateStreams()
        self.streams = Streams() if on_gpu else self.late
        self.lanes = DeviceLanes(self.bench.side, self.bench.side.device_metadata, self.streams)

    def pools(self, layer: int) -> Pools:
        pool = self.bench.rank.device_pool
        return pool[0, layer], pool[1, layer]

    def start(self, layer: int, query: torch.Tensor) -> Begun:
        begun = self.lanes.start(layer, [self.bench.room], query[None], self.pools(layer))
        self.lanes.ask(begun)
        return begun
