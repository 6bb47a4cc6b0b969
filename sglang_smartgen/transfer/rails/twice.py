"""What holds up an intent: links that have fallen silent, slices that are worth a second attempt.

Called under the lock of the links' sprayer (see spray.py).
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from sglang_smartgen.transfer.rails.decide import usable
from sglang_smartgen.transfer.rails.health import State
from sglang_smartgen.transfer.rails.intent import Attempt, Slice
from sglang_smartgen.transfer.rails.link import Link
from sglang_smartgen.transfer.transport import Priority

BULK = (Priority.METADATA, Priority.PROACTIVE)
TWICE_RATIO, TWICE_S = 2.0, 0.01  # how much sooner a second attempt of a bulk slice must end


def silent_links(links: list[Link], now: float) -> list[Link]:
    """Links to give up, as long as another one is there to take over."""
    silent = [link for link in links if link.is_silent(now)]
    others = [link for link in links if not link.paused and link not in silent]
    return silent if others else []


def worth_twice(
    links: list[Link], starting: Container[Attempt], now: float
) -> Iterator[tuple[Slice, Link]]:
    """Bulk slices that hold up the end of their intent on a link that got slow, and a better one.

    starting: attempts that are being handed to their rail, which must be let be.
    """
    for link in links:
        if link.paused or link.state(now) is not State.DEGRADED:
            continue
        for attempt in list(link.attempts):
            slice_ = attempt.slice
            if attempt in starting or attempt.buffer is None or not _last(slice_):
                continue
            left = link.speed.finish_s(attempt.ahead, slice_.length) - (now - attempt.began)
            left = max(left, link.silent_s(now))
            for other in usable(links, slice_.intent.may):
                if other is link or other.attempts:
                    continue
                if left > TWICE_RATIO * other.finish_s(slice_.length, now) + TWICE_S:
                    yield slice_, other
                    break


def _last(slice_: Slice) -> bool:
    """Whether nothing of its bulk intent waits any more, and it is on one link only."""
    intent = slice_.intent
    return (
        intent.priority in BULK
        and intent.cause is None
        and not (slice_.done or slice_.attempts > 1 or intent.uncut or intent.again)
    )
