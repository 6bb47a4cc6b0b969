"""One way to one peer: a rail of ours, what that rail calls the peer, and what is known of it."""

from __future__ import annotations

from sglang_smartgen.transfer.rails.health import Health, State
from sglang_smartgen.transfer.rails.intent import SLICE_BYTES, Attempt, Slice
from sglang_smartgen.transfer.rails.speed import Speed
from sglang_smartgen.transfer.transport import Priority, Transport

SLICE_S = (0.008, 0.008, 0.008, 0.005)  # of a link's time, by priority: what others wait for it
WINDOW_S = 0.016  # of a link's time that may be under way, in urgent and bulk traffic
MOST_WINDOW_S = 0.048  # the same on a link that has run dry, because completions came late
MOST_AHEAD = 16 << 20  # bytes under way, however fast it is
LARGEST_SLICE = 1 << 20
LARGEST_UNCOPIED = 8 << 20  # of a slice that needs no staging memory
STALE_S = 0.5
SILENCE_S = 0.35  # nothing completes for so long, and several times the prediction: cut
SILENCE_RATIO = 6.0


class Link:
    """Guarded by its sprayer's lock. `tier`: links of the lowest one that has any left are used.

    settles: a failed write of this rail lands no more, and reads its source no more.
    host_only: its rail cannot reach device memory, at either end.
    """

    def __init__(
        self,
        name: str,
        transport: Transport,
        session: str,
        *,
        tier: int = 1,
        settles: bool = False,
        host_only: bool = True,
        speed: Speed | None = None,
    ) -> None:
        self.name = name
        self.transport = transport
        self.session = session
        self.tier = tier
        self.settles = settles
        self.host_only = host_only
        self.speed = speed or Speed()
        self.health = Health()
        self.attempts: dict[Attempt, None] = {}  # in the order they began
        self.queued = 0  # bytes of them
        self.by_priority = [0] * len(Priority)
        self.last_done = 0.0
        self.held: list[tuple[int, int]] = []  # staging that a failed write may still read
        self.largest = LARGEST_SLICE
        self.window_s = WINDOW_S
        self.healing = False
        self.used = False
        # What has happened, for those who look.
        self.bytes = 0
        self.slices = 0
        self.errors = 0
        self.retries = 0
        self.predicted_s = 0.0
        self.real_s = 0.0

    @property
    def paused(self) -> bool:
        """Gets probes only."""
        return self.health.paused

    def state(self, now: float) -> State:
        """Healthy, degraded or paused."""
        return self.health.state(now, self.speed.bandwidth, self.speed.best)

    def slice_bytes(self, priority: Priority) -> int:
        """Length of the next slice for this link."""
        if not self.speed.measured:
            return SLICE_BYTES
        wanted = int(self.speed.bandwidth * SLICE_S[priority])
        if wanted < SLICE_BYTES:
            return SLICE_BYTES
        return wanted if wanted < self.largest else self.largest

    def is_open(self, priority: Priority) -> bool:
        """Whether a slice of this priority may be handed to the rail now.

        What is under way cannot be called back, so little of it is: a speculative slice only when
        the link has run dry, else as much as keeps it busy.
        """
        if not self.queued:
            return True
        speed = self.speed
        if priority is Priority.SPECULATIVE:
            return self.queued <= speed.bandwidth * speed.b0
        before = sum(self.by_priority[: priority + 1])
        if before == 0:
            return True
        if not speed.measured:
            return before < SLICE_BYTES
        return before < MOST_AHEAD and before < speed.bandwidth * (self.window_s + speed.b0)

    def finish_s(self, length: int, now: float) -> float:
        """Predicted seconds until a slice of `length` bytes is there, if it is sent now."""
        alone = self.speed.finish_s(self.queued, length)
        return alone + self._lag(now) if self.attempts else alone

    def is_stale(self, now: float) -> bool:
        """Idle, and nothing has completed on it for a while."""
        return not self.attempts and now - self.last_done > STALE_S

    def silent_s(self, now: float) -> float:
        """Seconds in which nothing has completed although something is under way."""
        oldest = next(iter(self.attempts), None)
        return 0.0 if oldest is None else now - max(oldest.began, self.last_done)

    def is_silent(self, now: float) -> bool:
        """True when it must be taken for cut."""
        oldest = next(iter(self.attempts), None)
        if oldest is None:
            return False
        alone = self.speed.finish_s(0, oldest.slice.length)
        return self.silent_s(now) > max(SILENCE_S, SILENCE_RATIO * alone)

    def begin(self, slice_: Slice, now: float) -> Attempt:
        """Account for an attempt that is about to be made."""
        attempt = Attempt(
            slice_, self, self.queued, self.speed.finish_s(self.queued, slice_.length)
        )
        attempt.began = now
        self.speed.began(now, not self.attempts)
        self.attempts[attempt] = None
        self.queued += slice_.length
        self.by_priority[slice_.intent.priority] += slice_.length
        self.used = True
        return attempt

    def end(self, attempt: Attempt, error: str | None, now: float) -> None:
        """Account for one that is final, or was (see `drop`)."""
        self._take_off(attempt)
        if error is not None:
            self.errors += 1
            self.health.error(now, error)
            return
        length = attempt.slice.length
        idle = not self.attempts
        if not idle:
            self.window_s = max(WINDOW_S, 0.99 * self.window_s)
        ratio = self.speed.ended(now, attempt.began, attempt.ahead, length, idle)
        self.health.completed(ratio)
        self.last_done = now
        self.bytes += length
        self.slices += 1
        self.predicted_s += attempt.expected_s
        self.real_s += now - attempt.began

    def ran_dry(self) -> None:
        """All that was under way is complete while more waited: have more under way for a while."""
        if self.speed.measured:
            self.window_s = min(MOST_WINDOW_S, 1.25 * self.window_s)

    def drop(self, attempt: Attempt) -> None:
        """It is not counted as under way any more, although its rail has not said its end."""
        self._take_off(attempt)

    def _take_off(self, attempt: Attempt) -> None:
        if attempt in self.attempts:
            del self.attempts[attempt]
            self.queued -= attempt.slice.length
            self.by_priority[attempt.slice.intent.priority] -= attempt.slice.length

    def _lag(self, now: float) -> float:
        """What the oldest slice has had of its time already, or how much longer it has taken."""
        oldest = next(iter(self.attempts), None)
        if oldest is None:
            return 0.0
        alone = self.speed.b1 * oldest.slice.length / self.speed.bandwidth
        elapsed = self.silent_s(now)
        return max(0.0, elapsed - alone) - min(elapsed, alone)
