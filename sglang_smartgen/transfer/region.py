"""Host memory that a transport may read and write: zero pages, backed only when touched."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from sglang_smartgen.transfer.transport import Region


class HostRegion:
    """A shared anonymous mapping of `length` bytes, as a tensor and as an address range.

    Shared, so that a server process could be forked on it; anonymous pages cost nothing until used.
    The mapping lives as long as this object or a tensor made from it.
    """

    def __init__(self, length: int) -> None:
        if length <= 0:
            raise ValueError(f"region length is {length} bytes; it must be positive")
        self._map = mmap.mmap(-1, length)
        self.bytes: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)

    @property
    def region(self) -> Region:
        """Address and length, as a transport registers them."""
        return Region(self.bytes.data_ptr(), self.bytes.numel())

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A view at byte `offset` of the region; shares memory with it."""
        length = dtype.itemsize
        for size in shape:
            length *= size
        return self.bytes[offset : offset + length].view(dtype).view(shape)
