"""Which link takes the next slice: the one that is predicted to finish it first.

A slice is bound to a link only when the link can take it. Until then it waits in front of all of
them, so nothing has to be stolen back from a slow one: near the end of an intent a slow link gets
no further slice as soon as the others together would be done sooner.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_smartgen.transfer.rails.link import Link
from sglang_smartgen.transfer.transport import Priority

TRIAL_BACKLOG = 1 << 20
"""With more than that waiting, a link that has not been used lately gets a slice: what it can do
now is not known, and one that is thought slow would never show that it no longer is."""


def usable(links: list[Link], may: Sequence[bool] | None = None) -> list[Link]:
    """The links that a slice may take: of the lowest tier, not paused.

    may: which links can reach the memory at all. When every one is paused, all are tried: a peer
    that is dead must fail its writes, not keep them.
    """
    if may is None:
        tier = links[0].tier
        for link in links:
            if link.health.paused or link.tier != tier:
                break
        else:
            return links
    reach = [link for i, link in enumerate(links) if may is None or may[i]]
    live = [link for link in reach if not link.health.paused]
    if not live:
        return reach
    tier = live[0].tier
    if all(link.tier == tier for link in live):
        return live
    tier = min(link.tier for link in live)
    return [link for link in live if link.tier == tier]


def pick(
    links: Sequence[Link], priority: Priority, backlog: int, length: int | None, now: float
) -> Link | None:
    """The link that takes a slice now, or None to wait for a better one.

    links: the usable ones. backlog: bytes that wait in front of the links up to this priority, the
    slice included. length: of the slice, None where it is still to be cut to the link's own length.
    """
    best: Link | None = None
    best_s = 0.0
    closed = False
    trial = backlog > TRIAL_BACKLOG and priority > Priority.ON_DEMAND
    for link in links:
        if link.is_open(priority):
            if trial and link.is_stale(now):
                return link
            size = link.slice_bytes(priority) if length is None else length
            finish = link.finish_s(size if size < backlog else backlog, now)
            if best is None or finish < best_s:
                best, best_s = link, finish
        else:
            closed = True
    if best is None or not closed:
        return best
    # A busy link may still be the better one: it decides again when it has completed something.
    rate, queued, b0 = 0.0, 0, 0.0
    for link in links:
        if link is not best:
            speed = link.speed
            rate += speed.bandwidth / speed.b1
            queued += link.queued
            b0 = max(b0, speed.b0)
    return best if best_s <= b0 + (queued + backlog) / rate else None
