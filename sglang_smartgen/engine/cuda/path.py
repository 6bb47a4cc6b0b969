"""What a GPU host needs in place of `device_path.DevicePath`."""

from __future__ import annotations

from typing import Any

import torch

from sglang_smartgen.config import SmartGenConfig
from sglang_smartgen.engine.cuda.copies import DeviceCopies
from sglang_smartgen.engine.cuda.mapped import MappedRegion, register
from sglang_smartgen.engine.cuda.streams import Streams
from sglang_smartgen.engine.device_path import Copies, DevicePath, Stored
from sglang_smartgen.select.base import Selector
from sglang_smartgen.transfer.region import HostRegion


class CudaPath(DevicePath):
    """Pinned memory, side streams, and the attention backend of the device."""

    def __init__(self, config: SmartGenConfig) -> None:
        self.graphs = config.device_path == "cuda_graph"

    def region(self, length: int) -> HostRegion:
        """See DevicePath. Raises ConfigError when CUDA cannot pin it."""
        return MappedRegion(length, torch.device("cuda", torch.cuda.current_device()))

    def pin(self, region: HostRegion) -> None:
        """See DevicePath. Raises ConfigError when CUDA cannot pin it."""
        register(region)

    def copies(self, stored: Stored, selector: Selector) -> Copies:
        """See DevicePath."""
        return DeviceCopies(Streams(), stored, selector)

    def attention(self, runner: Any) -> Any:
        """See DevicePath. Raises ConfigError for kernels that cannot run here."""
        from sglang_smartgen.engine.cuda.backend import CudaAttnBackend

        return CudaAttnBackend(runner)
