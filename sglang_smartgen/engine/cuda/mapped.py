"""Host memory with two faces: bytes that CPU threads and a transport see, a tensor on the device.

The pages are registered with CUDA, which pins them and maps them into the device's address space at
the host's own address (unified virtual addressing). Whoever writes through the host face must do so
before it launches the kernel that reads: that, and nothing in the memory itself, is what orders a
write and a read. The host must not read what a kernel writes before it has waited for the kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_smartgen.config import ConfigError
from sglang_smartgen.transfer.region import HostRegion

_PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped
_PROBE = 64


def register(region: HostRegion, cuda: Any = torch.cuda) -> None:
    """Pin a region's pages and map them for the device.

    They stay so until the process ends, as its pools do. Raises ConfigError when CUDA refuses.
    """
    span = region.region
    result = cuda.cudart().cudaHostRegister(span.address, span.length, _PORTABLE_AND_MAPPED)
    if int(result) != 0:
        raise ConfigError(
            f"CUDA cannot pin {span.length} bytes of host memory (error {int(result)}); give D "
            "fewer tokens (--max-total-tokens), P a smaller store_gb, or raise `ulimit -l`"
        )


class MappedRegion(HostRegion):
    """A HostRegion that the device reads and writes in place."""

    def __init__(self, length: int, device: torch.device, cuda: Any = torch.cuda) -> None:
        """Raises ConfigError when the memory cannot be pinned or the device sees other bytes."""
        super().__init__(length)
        register(self, cuda)
        self.device_bytes: Tensor = face(self.bytes, device)
        self._probe()

    def device_tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """As `tensor`, on the device: the same bytes."""
        length = torch.Size(shape).numel() * dtype.itemsize
        return self.device_bytes[offset : offset + length].view(dtype).view(shape)

    def _probe(self) -> None:
        """Write on one face and read on the other, before anybody relies on it."""
        size = min(_PROBE, self.bytes.numel())
        pattern = torch.arange(1, size + 1, dtype=torch.uint8)
        self.bytes[:size] = pattern
        seen = torch.equal(self.device_bytes[:size].cpu(), pattern)
        self.device_bytes[:size] = 0
        self.device_bytes[:size].cpu()  # waits for the write
        if not seen or bool(self.bytes[:size].any()):
            raise ConfigError(
                "this GPU does not see pinned host memory at the host's own address; SmartGen's "
                "CUDA path needs that"
            )


def face(memory: Tensor, device: torch.device) -> Tensor:
    """The uint8 [n] host tensor `memory` as a tensor on `device`; shares its bytes.

    On a CPU device, as in tests, it is the tensor itself.
    """
    if device.type == "cpu":
        return memory
    return torch.as_tensor(_Interface(memory), device=device)


class _Interface:
    """The CUDA array interface of host memory: PyTorch wraps its address without a copy."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": tuple(memory.shape),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "strides": None,
            "version": 3,
        }
