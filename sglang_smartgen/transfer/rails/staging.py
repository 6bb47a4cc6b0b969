"""Host memory that slices are copied to before a rail that may read them late gets them.

A failed write of such a rail may be sent long after another rail has delivered the slice, from the
source as it is then. From here it is sent with the bytes it had: a buffer is not used again before
the rail is known to be done with it. Device memory reaches a rail that cannot read it the same way.
Not thread safe; the sprayers share one and each call is made under `lock`.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence

from sglang_smartgen.core.ranges import RangeAllocator
from sglang_smartgen.transfer.transport import Region, Span

STAGING_BYTES = 64 << 20
Copy = Callable[[int, int, int], object]
"""Copy to a host address from an address, so many bytes."""


class Staging:
    """A pool of buffers in one registered region; its last bytes are the source of probes."""

    def __init__(self, length: int = STAGING_BYTES) -> None:
        self.lock = threading.Lock()
        self.size = length
        # Pages are backed when they are touched. Not HostRegion: rails do without torch.
        self._memory = mmap.mmap(-1, length + 4096)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.probe = self._base + length
        self._ranges = RangeAllocator(length, alignment=4096)
        self._starts: list[int] = []
        self._copies: dict[int, tuple[int, Copy]] = {}

    @property
    def region(self) -> Region:
        """What the rails must be able to read."""
        return Region(self._base, self.size + 4096)

    @property
    def used(self) -> int:
        """Bytes that are in use."""
        with self.lock:
            return self._ranges.used

    def allocate(self, length: int) -> tuple[int, int] | None:
        """Offset and length of a buffer, or None while none is free."""
        with self.lock:
            offset = self._ranges.allocate(length)
        return None if offset is None else (offset, length)

    def free(self, buffer: tuple[int, int]) -> None:
        """Nobody reads the buffer any more."""
        with self.lock:
            self._ranges.free(*buffer)

    def copied_by(self, region: Region, copy: Copy | None) -> None:
        """Sources in `region` are device memory, copied by `copy`; None: they are host memory."""
        with self.lock:
            self._copies.pop(region.address, None)
            if copy is not None:
                self._copies[region.address] = (region.length, copy)
            self._starts = sorted(self._copies)

    def has_device(self, spans: Sequence[Span]) -> bool:
        """Whether a source is device memory."""
        if not self._starts:
            return False
        return any(self._copy_of(span.source) is not ctypes.memmove for span in spans)

    def fill(self, buffer: tuple[int, int], spans: Sequence[Span]) -> list[Span]:
        """Copy the spans to the buffer, one behind the other; the spans that send them from it."""
        at = self._base + buffer[0]
        found = []
        for span in spans:
            copy = self._copy_of(span.source) if self._starts else ctypes.memmove
            copy(at, span.source, span.length)
            found.append(Span(at, span.destination, span.length))
            at += span.length
        return found

    def _copy_of(self, address: int) -> Copy:
        i = bisect_right(self._starts, address) - 1
        if i >= 0:
            length, copy = self._copies[self._starts[i]]
            if address < self._starts[i] + length:
                return copy
        return ctypes.memmove
