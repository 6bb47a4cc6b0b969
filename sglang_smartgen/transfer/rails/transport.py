"""The Transport over several rails.

Owner: the side that made it, together with its rails, which are closed with it unless they are lent
(SGLang's own engine is shared in any case). One thread ticks while something is under way, one a
link heals it when that is needed. A peer is known by its session: a name that came with its card
(`meet`), or the card itself, packed.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from sglang_smartgen.transfer.peer_queue import refuse_overlap
from sglang_smartgen.transfer.rails import heal
from sglang_smartgen.transfer.rails.decide import usable
from sglang_smartgen.transfer.rails.intent import Intent
from sglang_smartgen.transfer.rails.link import Link
from sglang_smartgen.transfer.rails.reach import (
    Card,
    Rail,
    RailAddress,
    Segment,
    Segments,
    links_to,
    same_process,
)
from sglang_smartgen.transfer.rails.sight import Sight
from sglang_smartgen.transfer.rails.spray import Sprayer
from sglang_smartgen.transfer.rails.staging import STAGING_BYTES, Copy, Staging
from sglang_smartgen.transfer.transport import (
    Priority,
    Region,
    Span,
    Transport,
    TransportError,
    all_final,
    checked_spans,
)

TICK_S = 0.02
PACKED = "rails:"


class RailsTransport:
    """Writes over whichever of `rails` (at least one) is predicted to be done first.

    session: the name that peers know us by; None: our card, packed. plain: the rail of peers that
    send no card, whose session is that rail's own; it may be one of `rails`.
    """

    name = "rails"

    def __init__(
        self,
        rails: Sequence[Rail],
        session: str | None = None,
        *,
        plain: Rail | None = None,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        if not rails:
            raise TransportError("no rail can be used on this machine")
        self.rails = list(rails)
        self._plain = plain
        # What comes by it must be registered with it, also when it is none of the rails.
        self._also = None if plain is None or plain in self.rails else plain.transport
        self.sight = Sight()
        self._session = session
        self._staging = Staging(staging_bytes)
        self._segments: dict[int, Segment] = {}
        self._peers: dict[str, Sprayer] = {}
        self._cards: dict[str, Card] = {}
        self._segments_of: dict[str, Segments] = {}
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._closed = threading.Event()
        for transport in self._transports():
            transport.register(self._staging.region)
        self._scratch = self._staging.probe + 64
        threading.Thread(target=self._tick, name="smartgen-rails", daemon=True).start()

    @property
    def session(self) -> str:
        """The name that peers know us by, or our card as it is now."""
        if self._session is not None:
            return self._session
        return PACKED + base64.b64encode(msgspec.msgpack.encode(self.card())).decode()

    def card(self) -> Card:
        """What our peers must know of us."""
        with self._lock:
            segments = merged(sorted(self._segments.values(), key=lambda s: s.address))
        scratch = Segment(self._staging.region.address, self._staging.region.length, self._every())
        addresses = [RailAddress(r.kind, r.host, r.transport.session) for r in self.rails]
        return Card(addresses, [*segments, scratch], self._scratch)

    def meet(self, peer: str, card: Card) -> None:
        """The peer of this session has published a card; a restarted one has another."""
        with self._lock:
            known = self._cards.get(peer)
            self._cards[peer] = card
            same = known is None or same_process(known, card)
            old = None if same else self._peers.pop(peer, None)
            sprayer = self._peers.get(peer)
            if sprayer is not None:  # the same process with other memory
                links, there = links_to(self.rails, card)
                for link, now in zip(sprayer.links, links, strict=True):
                    link.session = now.session
                self._segments_of[peer] = Segments(card.segments, there, sprayer.links)
        if old is not None:
            old.close("the peer was started again")

    def register(self, region: Region, copy: Copy | None = None) -> None:
        """See Transport.register. copy: of device memory, how its bytes get to host memory."""
        self.adopt(region, None, copy, device=copy is not None)

    def adopt(
        self,
        region: Region,
        known_to: Transport | None,
        copy: Copy | None = None,
        *,
        device: bool = False,
    ) -> None:
        """Register with all rails but the one that knows the region already."""
        if region.length <= 0:
            raise TransportError(f"cannot register {region}: its length must be positive")
        with self._lock:
            refuse_overlap(region, ((s.address, s.length) for s in self._segments.values()))
            self._segments[region.address] = Segment(*region, 0, device)
        done: list[Rail] = []
        mask = 0
        try:
            for number, rail in enumerate(self.rails):
                if rail.transport is not known_to:
                    if device and rail.host_only:
                        continue
                    rail.transport.register(region)
                    done.append(rail)
                mask |= 1 << number
            if self._also is not None and self._also is not known_to:
                self._also.register(region)
        except TransportError:
            for rail in done:
                rail.transport.unregister(region)
            with self._lock:
                del self._segments[region.address]
            raise
        self._staging.copied_by(region, copy)
        with self._lock:
            self._segments[region.address] = Segment(*region, mask, device)

    def unregister(self, region: Region) -> None:
        """See Transport.unregister."""
        with self._lock:
            segment = self._segments.pop(region.address, None)
        if segment is None:
            raise TransportError(f"cannot unregister {region}: it is not registered")
        self._staging.copied_by(region, None)
        for number, rail in enumerate(self.rails):
            if segment.rails >> number & 1:
                rail.transport.unregister(region)
        if self._also is not None:
            self._also.unregister(region)

    def write(
        self,
        peer: str,
        spans: Sequence[Span],
        priority: Priority = Priority.PROACTIVE,
        deadline_s: float | None = None,
    ) -> Intent:
        """See Transport.write; the handle also knows its progress and can be cancelled."""
        wanted = checked_spans(spans)
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        intent = Intent(wanted, priority, deadline)
        self._sprayer(peer).submit(intent)
        self._work.set()
        return intent

    def fence(self, peer: str, scratch: int, timeout_s: float) -> bool:
        """See Transport.fence: every rail that was used must pass it."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            sprayer = self._peers.get(peer)
        if sprayer is None:
            return True
        if not all_final(sprayer.pending(), deadline):
            return False
        starting = sprayer.starting()
        while starting & sprayer.starting():  # given to a rail in microseconds
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0005)
        links = [link for link in sprayer.links if link.used]
        for link in sorted(links, key=lambda link: link.paused):
            held = list(link.held)
            left = max(0.0, deadline - time.monotonic())
            if not link.transport.fence(link.session, scratch, left):
                return False
            sprayer.fenced(link, held)
        return True

    def bandwidth(self, peer: str) -> float | None:
        """Return bytes/s of the links that are in use together; None before any was measured."""
        with self._lock:
            sprayer = self._peers.get(peer)
        if sprayer is None:
            return None
        with sprayer.lock:
            rates = [w.speed.bandwidth for w in usable(sprayer.links) if w.speed.measured]
        return sum(rates) if rates else None

    def close(self) -> None:
        """See Transport.close."""
        self._closed.set()
        self._work.set()
        with self._lock:
            sprayers = list(self._peers.values())
        for sprayer in sprayers:
            sprayer.close("the rails transport is closed")
        for transport in self._transports():
            transport.close()

    def links(self) -> dict[str, list[Link]]:
        """Peer -> its links, to look at."""
        with self._lock:
            return {peer: list(sprayer.links) for peer, sprayer in self._peers.items()}

    def snapshot(self) -> list[dict[str, Any]]:
        """What each rail has done, over all peers; for `/server_info`."""
        with self._lock:
            sprayers = list(self._peers.values())
        return self.sight.rails(self.rails, sprayers)

    @property
    def switches(self) -> int:
        """How often a peer's traffic went over to rails of another kind."""
        with self._lock:
            return sum(sprayer.switches for sprayer in self._peers.values())

    def _transports(self) -> list[Transport]:
        """Of every rail, and of the plain one."""
        also = [] if self._also is None else [self._also]
        return [*(rail.transport for rail in self.rails), *also]

    def _every(self) -> int:
        return (1 << len(self.rails)) - 1

    def _sprayer(self, peer: str) -> Sprayer:
        with self._lock:
            if self._closed.is_set():
                raise TransportError("the rails transport is closed")
            sprayer = self._peers.get(peer)
            if sprayer is None:
                sprayer = self._peers[peer] = self._new(peer, self._card_of(peer))
            return sprayer

    def _card_of(self, peer: str) -> Card:
        card = self._cards.get(peer)
        if card is not None:
            return card
        if not peer.startswith(PACKED):
            rail = self._plain or self.rails[0]
            return Card([RailAddress(rail.kind, rail.host, peer)], [])
        try:
            packed = base64.b64decode(peer.removeprefix(PACKED), validate=True)
            card = msgspec.msgpack.decode(packed, type=Card)
        except (ValueError, msgspec.MsgspecError):
            raise ValueError(f"peer must be a packed card, got {peer[:64]!r}") from None
        self._cards[peer] = card
        return card

    def _new(self, peer: str, card: Card) -> Sprayer:
        ours = self.rails
        if self._plain is not None and peer not in self._cards:
            ours = [self._plain]
        links, there = links_to(ours, card)
        if not links:
            kinds = ", ".join(rail.kind for rail in card.rails)
            raise TransportError(f"no rail of ours reaches {peer[:64]}, which has {kinds}")
        self._segments_of[peer] = Segments(card.segments, there, links)
        shown = peer if len(peer) < 64 else f"{peer[:48]}..."

        def begin_healing(sprayer: Sprayer, link: Link) -> None:
            if card.scratch:
                heal.start(sprayer, link, self._staging.probe, card.scratch, self._closed)

        return Sprayer(
            shown if peer.startswith(PACKED) else peer,
            links,
            self._staging,
            heal=begin_healing,
            reach=lambda spans: self._segments_of[peer].reach(spans),
        )

    def _tick(self) -> None:
        while not self._closed.is_set():
            self._work.wait()
            with self._lock:
                sprayers = list(self._peers.values())
            busy = [sprayer for sprayer in sprayers if sprayer.busy()]
            if not busy:
                self._work.clear()
                if any(sprayer.busy() for sprayer in sprayers):
                    self._work.set()
                continue
            time.sleep(TICK_S)
            for sprayer in busy:
                sprayer.tick(TICK_S)


def merged(segments: Sequence[Segment]) -> list[Segment]:
    """Segments, sorted by address, with neighbours joined that differ in nothing else."""
    found: list[Segment] = []
    for s in segments:
        if found:
            last = found[-1]
            joined = last.address + last.length == s.address
            if joined and last.rails == s.rails and last.device == s.device:
                found[-1] = Segment(last.address, last.length + s.length, s.rails, s.device)
                continue
        found.append(s)
    return found
