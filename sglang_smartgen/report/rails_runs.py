"""The measurements of `smartgen bench rails`: what two shaped rails carry, whatever befalls them.

All of one process, the sending one. Its main thread submits and samples; rates are those of the
wire's payload, in Mbit/s of bytes that have landed.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sglang_smartgen.report.rails_net import RailsNet
from sglang_smartgen.transfer.rails.intent import Intent
from sglang_smartgen.transfer.rails.link import Link
from sglang_smartgen.transfer.rails.make import make_rails
from sglang_smartgen.transfer.rails.transport import RailsTransport
from sglang_smartgen.transfer.transport import (
    Priority,
    Region,
    Span,
    Transport,
    WriteHandle,
    WriteState,
)

MEMORY = 256 << 20
PIECE = 4 << 20  # one write of the stream, as a push makes it
AHEAD = 3  # writes of the stream that are open at a time
SAMPLE_S = 0.02
FETCH = 8 << 10
PATIENCE_S = 60.0


class Sample(NamedTuple):
    """Bytes landed by rail at one time, and whether each is paused."""

    at: float
    bytes: list[int]
    paused: list[bool]


class Ends:
    """A sender here and a receiver there, over the same rails."""

    def __init__(self, transport: RailsTransport, peer: str, at: int, memory: Any) -> None:
        self.transport = transport
        self.peer = peer
        self.at = at
        self.memory = memory  # of the receiver, uint8 [MEMORY]
        self.source = np.random.default_rng(0).integers(0, 255, PIECE, dtype=np.uint8)
        transport.register(Region(self.source.ctypes.data, PIECE))
        self._next = 0
        self.failures: list[str] = []

    @property
    def links(self) -> list[Link]:
        """In the order of their names."""
        found = self.transport.links().get(self.peer, [])
        return sorted(found, key=lambda link: link.name)

    def send(self, size: int, priority: Priority = Priority.PROACTIVE) -> Intent:
        """Write `size` bytes to the next free place."""
        place = self._next
        if place + size > MEMORY:
            place = 0
        self._next = place + size
        span = Span(self.source.ctypes.data, self.at + place, size)
        return self.transport.write(self.peer, [span], priority, PATIENCE_S)

    def sample(self) -> Sample:
        """What has landed so far."""
        links = self.links
        return Sample(
            time.monotonic(), [link.bytes for link in links], [link.paused for link in links]
        )

    def stream(
        self,
        seconds: float,
        events: list[tuple[float, Callable[[], None]]] | None = None,
        priority: Priority = Priority.PROACTIVE,
    ) -> list[Sample]:
        """Keep the rails full for so long; events: (after seconds, what to do then)."""
        waiting = list(events or [])
        began = time.monotonic()
        samples = [self.sample()]
        open_: list[Intent] = []
        while (now := time.monotonic()) < began + seconds:
            while waiting and now >= began + waiting[0][0]:
                waiting.pop(0)[1]()
            open_ = [intent for intent in open_ if not self._over(intent)]
            while len(open_) < AHEAD:
                open_.append(self.send(PIECE, priority))
            time.sleep(SAMPLE_S)
            samples.append(self.sample())
        for intent in open_:
            intent.cancel()
        for intent in open_:
            intent.wait(PATIENCE_S)
        return samples

    def right(self) -> bool:
        """Whether the receiver has, at the start of its memory, what was sent there."""
        self._next = 0
        intent = self.send(PIECE)
        return intent.wait(PATIENCE_S) is WriteState.DONE and bool(
            np.array_equal(self.memory[:PIECE], self.source)
        )

    def _over(self, intent: Intent) -> bool:
        state = intent.poll()
        if state is WriteState.FAILED:
            self.failures.append(intent.error or "failed")
        return state is not WriteState.PENDING


@contextlib.contextmanager
def ends(kind: str, net: RailsNet | None, ours: list[str], theirs: list[str]) -> Iterator[Ends]:
    """Both ends over these rails; net None: on this machine's own network."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = None if net is None else Path(folder) / "memory"
        memory = None if path is None else np.memmap(path, np.uint8, "w+", shape=(MEMORY,))
        with receiver(path, net, theirs) as (session, at):
            transport = make_rails(ours, "127.0.0.1")
            try:
                yield Ends(transport, session, at, memory)
            finally:
                transport.close()


@contextlib.contextmanager
def receiver(
    path: Path | None, net: RailsNet | None, rails: list[str]
) -> Iterator[tuple[str, int]]:
    """A receiving process; its session and the address of its memory (path None: its own)."""
    where = "-" if path is None else str(path)
    module = [sys.executable, "-P", "-m", "sglang_smartgen.report.rails_peer", where, *rails]
    command = module if net is None else net.inside(module)
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"},
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("the receiver of bench rails did not start")
        session, at = json.loads(line)
        yield session, at
    finally:
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def rate_mbit(samples: list[Sample], start_s: float, stop_s: float) -> float:
    """Mbit/s landed between two times after the first sample."""
    zero = samples[0].at
    inside = [s for s in samples if start_s <= s.at - zero <= stop_s]
    moved = sum(inside[-1].bytes) - sum(inside[0].bytes)
    return moved * 8e-6 / (inside[-1].at - inside[0].at)


def striped_mbit(end: Ends, size: int) -> float:
    """Mbit/s of `size` bytes of which every rail gets the same share, whatever it can do."""
    links = end.links
    share = min(size // len(links), 256 << 10)
    rounds = size // len(links) // share
    began = time.monotonic()
    for _ in range(rounds):
        handles = []
        for number, link in enumerate(links):
            span = Span(end.source.ctypes.data, end.at + number * share, share)
            handles.append(link.transport.write(link.session, [span]))
        for handle in handles:
            if handle.wait(PATIENCE_S) is not WriteState.DONE:
                raise RuntimeError(handle.error)
    return rounds * share * len(links) * 8e-6 / (time.monotonic() - began)


def dip_ms(samples: list[Sample], detected: float, floor_mbit: float) -> float:
    """Milliseconds from `detected` (a time of a sample) until 100 ms carry at least the floor."""
    for i, sample in enumerate(samples):
        if sample.at < detected:
            continue
        for later in samples[i + 1 :]:
            if later.at - sample.at >= 0.1:
                moved = sum(later.bytes) - sum(sample.bytes)
                if moved * 8e-6 / (later.at - sample.at) >= floor_mbit:
                    return (sample.at - detected) * 1e3
                break
    return float("inf")


def fetch_ms(end: Ends, count: int, priority: Priority, load: Priority | None) -> list[float]:
    """Milliseconds of fetches of 8 KiB, one after the other, beside a load of both rails."""
    times: list[float] = []
    open_: list[Intent] = []
    for _ in range(count):
        if load is not None:
            open_ = [intent for intent in open_ if intent.poll() is WriteState.PENDING]
            while len(open_) < AHEAD:
                open_.append(end.send(1 << 20, load))
        time.sleep(0.007)
        began = time.monotonic()
        handle = end.send(FETCH, priority)
        if handle.wait(PATIENCE_S) is not WriteState.DONE:
            raise RuntimeError(handle.error)
        times.append((time.monotonic() - began) * 1e3)
    for intent in open_:
        intent.cancel()
    for intent in open_:
        intent.wait(PATIENCE_S)
    return times


def blocks_s(
    transport: Transport, peer: str, source: int, at: int, size: int, count: int, rounds: int
) -> list[float]:
    """Seconds a write of `count` blocks of `size` bytes, `AHEAD` of them under way, in `rounds`."""
    spans = [Span(source + i * size, at + 2 * i * size, size) for i in range(count)]
    open_: deque[WriteHandle] = deque()
    times = []
    before = time.monotonic()
    for turn in range(rounds + AHEAD):
        if len(open_) == AHEAD or turn >= rounds:
            handle = open_.popleft()
            if handle.wait(PATIENCE_S) is not WriteState.DONE:
                raise RuntimeError(handle.error)
            now = time.monotonic()
            times.append(now - before)
            before = now
        if turn < rounds:
            open_.append(transport.write(peer, spans))
    return times
