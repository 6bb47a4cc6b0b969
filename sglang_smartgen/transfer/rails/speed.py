"""What a link can do, learned from its own completions: `b0 + b1 * (queued + L) / bandwidth`.

b0 is the time of a request whose bytes cost nothing, bandwidth the bytes a second of a link that is
kept busy, and b1 what the two leave out (measured finish over predicted one). Not thread safe; its
link's owner locks. Times are seconds of a monotonic clock.
"""

from __future__ import annotations

FIRST_BANDWIDTH = 50e6  # bytes/s, before anything was measured: the first slices correct it
FIRST_B0 = 0.5e-3
SMALL_BYTES = 16 << 10  # a request up to it shows b0
SAMPLE_BYTES = 64 << 10  # a shorter busy time says little about bandwidth
SAMPLE_S = 0.008
B1_RANGE = (0.5, 3.0)
_NEW = 0.35  # weight of a new sample
_SLOW_NEW = 0.1


class Speed:
    """The three numbers of one link, and how they change."""

    def __init__(self, bandwidth: float = FIRST_BANDWIDTH, b0: float = FIRST_B0) -> None:
        self.bandwidth = bandwidth  # bytes/s
        self.b0 = b0  # s
        self.b1 = 1.0
        self.best = 0.0  # bytes/s: what the link could do lately
        self.measured = False
        self._since = 0.0  # since then `_bytes` were completed
        self._bytes = 0
        self._from_idle = True

    def finish_s(self, queued: int, length: int) -> float:
        """Predicted seconds until `length` bytes behind `queued` ones are there."""
        return self.b0 + self.b1 * (queued + length) / self.bandwidth

    def began(self, now: float, idle: bool) -> None:
        """A request was handed to the link, which was `idle` before."""
        if idle:
            self._since, self._bytes, self._from_idle = now, 0, True

    def ended(self, now: float, began: float, ahead: int, length: int, idle: bool) -> float:
        """A request with `ahead` bytes before it is complete; the link is `idle` now.

        Returns how long it took as a multiple of the prediction.
        """
        elapsed = max(1e-7, now - began)
        ratio = elapsed / self.finish_s(ahead, length)
        if not ahead and length <= SMALL_BYTES:
            self.b0 += _NEW * (max(1e-6, elapsed - length / self.bandwidth) - self.b0)
        elif self.measured:
            share = min(max(self.b1 * ratio, B1_RANGE[0]), B1_RANGE[1])
            self.b1 += _SLOW_NEW * (share - self.b1)
        self._bytes += length
        busy = now - self._since
        if idle or busy >= SAMPLE_S:
            # Completions that are seen together, as a sleeping rail sees them, are no rate.
            whole = self._from_idle or busy >= SAMPLE_S
            if self._bytes >= SAMPLE_BYTES and whole:
                known = min(self.b0, 0.5 * busy) if self._from_idle else 0.0
                self._learn(self._bytes / max(1e-7, busy - known))
            if idle or self._bytes >= SAMPLE_BYTES:
                self._since, self._bytes, self._from_idle = now, 0, False
        return ratio

    def doubt(self) -> None:
        """The link was silent: what it can do now, its next sample alone will say."""
        self.bandwidth, self.measured = self.bandwidth / 2, False
        self._bytes = 0

    def _learn(self, rate: float) -> None:
        if self.measured:
            self.bandwidth += _NEW * (rate - self.bandwidth)
        else:
            self.bandwidth, self.measured = rate, True
        self.best = max(self.bandwidth, 0.999 * self.best)
