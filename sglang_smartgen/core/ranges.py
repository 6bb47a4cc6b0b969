"""First-fit allocation of byte ranges in one region."""

from __future__ import annotations

from bisect import bisect_left


class RangeAllocator:
    """Hands out aligned, disjoint ranges of `[0, capacity)`; freed neighbours merge.

    Not thread safe; its owner locks. First fit is enough: entries are few and large.
    """

    def __init__(self, capacity: int, alignment: int = 64) -> None:
        self.capacity = capacity
        self.alignment = alignment
        self._starts: list[int] = [0]
        self._stops: list[int] = [capacity]

    @property
    def used(self) -> int:
        """Bytes handed out, padding included."""
        free = sum(stop - start for start, stop in zip(self._starts, self._stops, strict=True))
        return self.capacity - free

    def _padded(self, length: int) -> int:
        return -(-length // self.alignment) * self.alignment

    def allocate(self, length: int) -> int | None:
        """Start of a free range of `length` bytes (> 0), or None when none is large enough."""
        if length <= 0:
            raise ValueError(f"length is {length}; it must be positive")
        need = self._padded(length)
        for i, (start, stop) in enumerate(zip(self._starts, self._stops, strict=True)):
            if stop - start >= need:
                if stop - start == need:
                    del self._starts[i], self._stops[i]
                else:
                    self._starts[i] = start + need
                return start
        return None

    def shrink(self, start: int, length: int, kept: int) -> None:
        """Give the end of a range of `allocate` back: it has `kept` bytes (> 0) from now on."""
        first, stop = self._padded(kept), self._padded(length)
        if first < stop:
            self.free(start + first, stop - first)

    def free(self, start: int, length: int) -> None:
        """Give a range of `allocate` back. Raises ValueError if part of it is free already."""
        stop = start + self._padded(length)
        i = bisect_left(self._starts, start)
        if (i > 0 and self._stops[i - 1] > start) or (
            i < len(self._starts) and self._starts[i] < stop
        ):
            raise ValueError(f"range [{start}, {stop}) is already free in part")
        if i < len(self._starts) and self._starts[i] == stop:
            self._starts[i] = start
        else:
            self._starts.insert(i, start)
            self._stops.insert(i, stop)
        if i > 0 and self._stops[i - 1] == start:
            self._stops[i - 1] = self._stops[i]
            del self._starts[i], self._stops[i]
