"""When speculative bytes may use a link: between D's fetches, and only as many as fit.

D asks layer by layer, so the time from an answer to the next request is D's compute for what lies
between, and it repeats from step to step. The pacer learns it per layer and tells how long the link
is free. What it cannot know (a step without a fetch, a D that ended) it treats as free after a
short grace, so that a link never idles while there is something to send.
"""

from __future__ import annotations

import msgspec

SMOOTHING = 0.3
CAUTION = 0.9  # share of the mean gap that is used: a late slice delays a fetch
GRACE = 0.3  # of the gap: how long a request that is due is waited for
MIN_GRACE_S = 0.001


class _Link(msgspec.Struct):
    gaps: dict[int, float] = {}  # seconds from the answer of a layer to the next request
    answered: float | None = None  # when the last answer went out
    layer: int = -1  # of that answer


class Pacer:
    """Gaps between fetches, per peer session. Times are monotonic seconds.

    `asked` may run on another thread than the rest: it only ever takes `answered` away, so the rest
    reads it once.
    """

    def __init__(self) -> None:
        self._links: dict[str, _Link] = {}

    def asked(self, session: str, now: float) -> None:
        """A fetch of this peer arrived."""
        link = self._links.setdefault(session, _Link())
        answered, link.answered = link.answered, None
        if answered is None:
            return
        gap = now - answered
        mean = link.gaps.get(link.layer)
        # A pause between two requests (no decode at all) says nothing about a step.
        if mean is None or gap < 10 * mean:
            link.gaps[link.layer] = gap if mean is None else mean + SMOOTHING * (gap - mean)

    def answered(self, session: str, layer: int, now: float) -> None:
        """Its fetch of `layer` has been answered."""
        link = self._links.setdefault(session, _Link())
        link.answered, link.layer = now, layer

    def wait_s(self, session: str, seconds: float, now: float) -> float:
        """How long to hold back a slice that takes `seconds` on the link; 0: it may go now."""
        link = self._links.get(session)
        answered = None if link is None else link.answered
        if link is None or answered is None:
            return 0.0
        gap = link.gaps.get(link.layer)
        if gap is None or now + seconds <= answered + CAUTION * gap:
            return 0.0
        late = answered + gap + max(MIN_GRACE_S, GRACE * gap)
        return max(0.0, late - now)
