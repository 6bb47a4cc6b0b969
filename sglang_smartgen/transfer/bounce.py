"""A registered buffer that rows are gathered to before one write sends them.

After a failed write late bytes may still be read from it, so it is set aside until a fence to that
peer has passed, and a fresh one takes its place. Gathering and retiring belong to one thread, the
session's serve thread; `retired` and `fenced` are the fence thread's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_smartgen.transfer.region import HostRegion
from sglang_smartgen.transfer.transport import Transport


class BounceBuffer:
    """One buffer in use, and those that failed writes may still read, by peer session."""

    def __init__(self, transport: Transport, length: int) -> None:
        self._transport = transport
        self._memory = self._new(length)
        self._retired: dict[str, list[HostRegion]] = {}

    @property
    def address(self) -> int:
        """Address of byte 0."""
        return self._memory.region.address

    def close(self) -> None:
        """Give the buffer in use back; no write may be under way."""
        self._transport.unregister(self._memory.region)

    def ensure(self, length: int) -> None:
        """Make it hold at least `length` bytes; no write may be under way."""
        if length > self._memory.bytes.numel():
            small, self._memory = self._memory, self._new(length)
            self._transport.unregister(small.region)

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A view at byte `offset`; shares memory with the buffer."""
        return self._memory.tensor(offset, shape, dtype)

    def retire(self, session: str) -> None:
        """A write to `session` failed: set this buffer aside and take a fresh one."""
        self._retired.setdefault(session, []).append(self._memory)
        self._memory = self._new(self._memory.bytes.numel())

    def retired(self, session: str) -> list[HostRegion]:
        """Buffers that failed writes to this session may still read; ask before a fence."""
        return list(self._retired.get(session, []))

    def fenced(self, session: str, retired: list[HostRegion]) -> None:
        """No write reads these buffers any more; one that failed after the fence is not in here."""
        for memory in retired:
            if memory in self._retired.get(session, []):
                self._retired[session].remove(memory)
                self._transport.unregister(memory.region)

    def _new(self, length: int) -> HostRegion:
        memory = HostRegion(length)
        self._transport.register(memory.region)
        return memory
