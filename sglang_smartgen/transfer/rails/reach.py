"""What two peers publish about their memory and rails, and the links that follow from it.

A card lists the addresses at which a process can be written to, one a rail, and its memory
segments with the rails that each is registered with. Nothing is bound when peers meet: which of the
links a slice takes is decided when it is sent, among those that reach its memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from sglang_smartgen.transfer.rails.link import Link
from sglang_smartgen.transfer.rails.speed import Speed
from sglang_smartgen.transfer.transport import Span, Transport

MAX_RAILS = 32
MAX_SEGMENTS = 16384


class RailAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where one rail of a process is reached: its kind, local host address and session."""

    kind: Annotated[str, Meta(max_length=32)]
    host: Annotated[str, Meta(max_length=255)]
    session: Annotated[str, Meta(max_length=1 << 20)]


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """A piece of the owner's memory. rails: bit i set = registered with rail i of the card."""

    address: Annotated[int, Meta(ge=0)]
    length: Annotated[int, Meta(ge=1)]
    rails: Annotated[int, Meta(ge=0)]
    device: bool = False


class Card(msgspec.Struct, frozen=True):
    """What a process publishes. scratch: address of 64 registered bytes that nobody reads."""

    rails: Annotated[list[RailAddress], Meta(max_length=MAX_RAILS)]
    segments: Annotated[list[Segment], Meta(max_length=MAX_SEGMENTS)]
    scratch: Annotated[int, Meta(ge=0)] = 0


@dataclass(frozen=True)
class Rail:
    """A rail of this process. The other fields are as in Link; reaches: whether it can get there.

    bandwidth: bytes/s to expect before anything was measured.
    """

    kind: str
    host: str
    transport: Transport
    tier: int = 1
    settles: bool = False
    host_only: bool = True
    bandwidth: float = 50e6
    reaches: Callable[[str], bool] = lambda session: True

    @property
    def name(self) -> str:
        """As it is shown and configured."""
        return f"{self.kind}@{self.host}"


class Segments:
    """The peer's memory, for the question which of our links reach it."""

    def __init__(self, segments: Sequence[Segment], of_link: Sequence[int], links: list[Link]):
        """of_link: the peer's rail at the other end of each link."""
        self._segments = sorted(segments, key=lambda s: s.address)
        self._starts = [segment.address for segment in self._segments]
        self._may = [
            [
                bool(segment.rails >> rail & 1) and not (segment.device and link.host_only)
                for rail, link in zip(of_link, links, strict=True)
            ]
            for segment in self._segments
        ]
        self._all = all(all(may) for may in self._may)

    def reach(self, spans: Sequence[Span]) -> list[bool] | None:
        """Which links reach every destination; None: all.

        Memory that was not published is left to the rails, which refuse what they do not know.
        """
        if self._all:
            return None
        found: list[bool] | None = None
        for span in spans:
            i = bisect_right(self._starts, span.destination) - 1
            if i < 0 or span.destination >= self._starts[i] + self._segments[i].length:
                continue
            may = self._may[i]
            found = may if found is None else [a and b for a, b in zip(found, may, strict=True)]
        return found


def links_to(rails: Sequence[Rail], card: Card) -> tuple[list[Link], list[int]]:
    """The links to the owner of a card, and the number of its rail at the end of each.

    Rails of one kind are paired by their addresses' common beginning, else in turn; every rail of
    both sides that has a counterpart gets a link.
    """
    pairs: dict[tuple[int, int], None] = {}
    for kind in dict.fromkeys(rail.kind for rail in rails):
        ours = [i for i, rail in enumerate(rails) if rail.kind == kind]
        theirs = [
            i
            for i, rail in enumerate(card.rails)
            if rail.kind == kind and rails[ours[0]].reaches(rail.session)
        ]
        if not theirs:
            continue
        free = list(ours)
        for there in theirs:
            here = max(free or ours, key=lambda i: _alike(rails[i].host, card.rails[there].host))
            pairs[here, there] = None
            if here in free:
                free.remove(here)
        for here in free:
            there = max(theirs, key=lambda i: _alike(rails[here].host, card.rails[i].host))
            pairs[here, there] = None
    links: list[Link] = []
    for here, there in pairs:
        rail, end = rails[here], card.rails[there]
        links.append(
            Link(
                f"{rail.name}>{end.host}",
                rail.transport,
                end.session,
                tier=rail.tier,
                settles=rail.settles,
                host_only=rail.host_only,
                speed=Speed(rail.bandwidth),
            )
        )
    return links, [there for _, there in pairs]


def same_process(one: Card, other: Card) -> bool:
    """Whether both are of one process, which may have registered more in between."""
    return [_address(rail) for rail in one.rails] == [_address(rail) for rail in other.rails]


def _address(rail: RailAddress) -> tuple[str, str, str]:
    # What follows an agent's name tells what it has registered.
    session = rail.session.partition("/")[0] if rail.kind == "nixl" else rail.session
    return rail.kind, rail.host, session


def _alike(one: str, other: str) -> int:
    """Length of the common beginning of two addresses, in parts."""
    count = 0
    for a, b in zip(one.split("."), other.split("."), strict=False):
        if a != b:
            break
        count += 1
    return count
