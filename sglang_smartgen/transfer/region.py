"""Host memory that a transport may read and write: zero pages, backed only when touched."""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor

from sglang_smartgen.transfer.transport import Region


class HostRegion:
    """A shared anonymous mapping of `length` bytes, as a tensor and as an address range.

    Anonymous pages cost nothing until used. The mapping lives as long as this object or a tensor
    made from it.
    """

    def __init__(self, length: int) -> None:
        self._map = self._mapped(length)
        self.bytes: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)

    def _mapped(self, length: int) -> mmap.mmap:
        return mmap.mmap(-1, _positive(length))

    @property
    def region(self) -> Region:
        """Address and length, as a transport registers them."""
        return Region(self.bytes.data_ptr(), self.bytes.numel())

    def view(self) -> memoryview:
        """All bytes, for single ones that are read often."""
        return memoryview(self._map)

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A view at byte `offset` of the region; shares memory with it."""
        length = dtype.itemsize
        for size in shape:
            length *= size
        return self.bytes[offset : offset + length].view(dtype).view(shape)

    def device_tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The same view where the device reads it: here, the host is the device."""
        return self.tensor(offset, shape, dtype)


class SharedRegion(HostRegion):
    """A HostRegion that another process can map too: it is given the file descriptor `fd`.

    The memory has no name: the kernel frees it when the last process that maps it or holds the
    descriptor has ended, however it ends. The descriptor is not inherited unless it is passed on.
    """

    def __init__(self, length: int, fd: int | None = None) -> None:
        """New memory, or with `fd` the memory of another process, of which `length` bytes.

        With `fd` the descriptor is taken over. Raises OSError when the memory cannot be mapped,
        ValueError when it is shorter than `length`.
        """
        self.fd = -1
        if fd is None:
            # Such memory is not reserved when it is made, so ask for as much first.
            mmap.mmap(-1, _positive(length)).close()
            fd = os.memfd_create("smartgen", os.MFD_CLOEXEC)
            self.fd = fd
            os.ftruncate(fd, length)
        self.fd = fd
        super().__init__(length)

    def _mapped(self, length: int) -> mmap.mmap:
        return mmap.mmap(self.fd, _positive(length))

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _positive(length: int) -> int:
    if length <= 0:
        raise ValueError(f"region length is {length} bytes; it must be positive")
    return length
