"""Rails in virtual time, that get slow, fail, are cut and return, below a real `Sprayer`.

A rail works off its requests one after the other. One that fails, or waits too long on a cut rail,
is FAILED as Mooncake's is: the rest of it lands when the rail works again, read from its source as
that is then.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from random import Random

import numpy as np

from sglang_smartgen.transfer.rails.link import Link
from sglang_smartgen.transfer.rails.spray import Sprayer
from sglang_smartgen.transfer.rails.staging import Staging
from sglang_smartgen.transfer.transport import Completion, Priority, Region, Span, WriteState

STEP_S = 0.004
TIMEOUT_S = 0.6


class SimRail:
    """One rail: bytes/s now (0 = cut), chance that a request fails."""

    name = "sim"
    session = "sim"

    def __init__(self, world: SimWorld, bandwidth: float) -> None:
        self.world = world
        self.bandwidth = self.whole = bandwidth
        self.fails = 0.0
        self.queue: deque[tuple[Completion, list[Span], float]] = deque()
        self.ghosts: list[list[Span]] = []  # of FAILED requests: may still land
        self.budget = 0.0
        self.moved = 0

    def write(
        self,
        peer: str,
        spans: Sequence[Span],
        priority: Priority = Priority.PROACTIVE,
        deadline_s: float | None = None,
    ) -> Completion:
        handle = Completion()
        self.queue.append((handle, list(spans), self.world.now))
        return handle

    def step(self) -> None:
        """Let one step of time pass on this rail."""
        if self.bandwidth == 0:
            while self.queue and self.world.now - self.queue[0][2] > TIMEOUT_S:
                handle, spans, _ = self.queue.popleft()
                self.ghosts.append(spans)
                handle.finish("scripted failure: timeout; parts of it may still land")
            return
        if self.ghosts and self.world.random.random() < 0.3:
            land(self.ghosts.pop())
        self.budget = min(self.budget, 0) + self.bandwidth * STEP_S
        while self.queue and self.budget > 0:
            handle, spans, _ = self.queue.popleft()
            self.budget -= sum(span.length for span in spans)
            if self.world.random.random() < self.fails:
                land(spans[:1])
                self.ghosts.append(spans[1:] or spans)
                handle.finish("scripted failure")
            else:
                self.moved += sum(span.length for span in spans)
                land(spans)
                handle.finish()

    def fence(self, peer: str, scratch: int, timeout_s: float) -> bool:
        """All that was FAILED lands before it passes."""
        if self.bandwidth == 0 or self.queue:
            return False
        for spans in self.ghosts:
            land(spans)
        self.ghosts.clear()
        return True

    def register(self, region: Region) -> None: ...
    def unregister(self, region: Region) -> None: ...
    def bandwidth_of(self, peer: str) -> None: ...
    def close(self) -> None: ...


class SimWorld:
    """Rails to one peer, their clock, and the sprayer above them."""

    def __init__(self, seed: int, rates: Sequence[float], staging_bytes: int = 8 << 20) -> None:
        self.random = Random(seed)
        self.now = 100.0
        self.rails = [SimRail(self, rate) for rate in rates]
        links = [Link(f"sim{i}", rail, "d") for i, rail in enumerate(self.rails)]
        self.staging = Staging(staging_bytes)
        self.healing: dict[Link, float] = {}
        self.sprayer = Sprayer("d", links, self.staging, heal=self.heal, clock=lambda: self.now)
        self.scratch = np.zeros(64, np.uint8)
        self.probes: dict[Link, Completion] = {}
        self.most_staged = 0

    def heal(self, sprayer: Sprayer, link: Link) -> None:
        self.healing[link] = self.now

    def step(self) -> None:
        """Let STEP_S pass for everything."""
        self.now += STEP_S
        for rail in self.rails:
            rail.step()
        for link, due in list(self.healing.items()):
            if self.now >= due:
                self.healing[link] = self.now + 0.05
                self._heal(link)
        if round(self.now / STEP_S) % 5 == 0:
            self.sprayer.tick(5 * STEP_S)
        self.most_staged = max(self.most_staged, self.staging.used)

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while self.now < end:
            self.step()

    def _heal(self, link: Link) -> None:
        if link.paused:
            probe = self.probes.get(link)
            if probe is None:
                span = Span(self.staging.probe, self.scratch.ctypes.data, 1)
                self.probes[link] = link.transport.write("d", [span])
            elif probe.poll() is not WriteState.PENDING:
                del self.probes[link]
                if probe.poll() is WriteState.DONE:
                    self.sprayer.answered(link)
        else:
            held = list(link.held)
            if link.transport.fence("d", 0, 0.0):
                self.sprayer.fenced(link, held)
        if self.sprayer.healed(link):
            del self.healing[link]


def land(spans: Sequence[Span]) -> None:
    """The bytes are there."""
    for span in spans:
        ctypes.memmove(span.destination, span.source, span.length)
