"""Whether a link is to be trusted: healthy, degraded or paused. Not thread safe.

Degraded: an error lately, or it is far slower than predicted or than it was. It is still used, as
far as its predicted finish allows, and what it keeps an intent waiting for may be sent twice.
Paused: errors one after another, or silence. It gets probes only, until one of them is answered.
"""

from __future__ import annotations

import enum
from collections import deque

WINDOW_S = 5.0  # errors in it count
ERRORS = 2  # so many pause the link
SLOW_RATIO = 3.0  # finish over prediction, averaged
SLOW_SHARE = 0.5  # of the bandwidth that it had


class State(enum.Enum):
    """Of one link."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    PAUSED = "paused"


class Health:
    """State of one link and what it was learned from."""

    def __init__(self) -> None:
        self.paused = False
        self.ratio = 1.0
        self.pauses = 0
        self.cause = ""
        self._errors: deque[float] = deque(maxlen=ERRORS)

    def state(self, now: float, bandwidth: float, best: float) -> State:
        """The state at this moment; bandwidth and what it was at its best, bytes/s."""
        if self.paused:
            return State.PAUSED
        slow = self.ratio > SLOW_RATIO or bandwidth < SLOW_SHARE * best
        recent = bool(self._errors) and now - self._errors[-1] < WINDOW_S
        return State.DEGRADED if slow or recent else State.HEALTHY

    def completed(self, ratio: float) -> None:
        """A request took `ratio` times what was predicted."""
        self.ratio += 0.2 * (min(ratio, 10.0) - self.ratio)

    def error(self, now: float, cause: str) -> None:
        """A request failed; `ERRORS` within the window pause the link."""
        self._errors.append(now)
        if len(self._errors) == ERRORS and now - self._errors[0] < WINDOW_S:
            self.pause(cause)

    def pause(self, cause: str) -> None:
        """Only probes from now on."""
        if not self.paused:
            self.pauses += 1
        self.paused, self.cause = True, cause

    def answered(self) -> None:
        """A probe came through: the link is used again."""
        self.paused, self.ratio = False, 1.0
        self._errors.clear()
