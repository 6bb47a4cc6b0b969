"""Generated schedules of slow, failing, cut and returning rails: every byte right, none lost, none
late without a word, nothing past its deadline, memory bounded.

SMARTGEN_RAILS_SCHEDULES sets how many are run; the default is a share that fits continuous tests.
"""

from __future__ import annotations

import os
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from rails_sim import SimWorld

from sglang_smartgen.transfer.rails.intent import Intent
from sglang_smartgen.transfer.transport import Priority, Span, WriteState

SCHEDULES = int(os.environ.get("SMARTGEN_RAILS_SCHEDULES", "40"))
STAGING = 4 << 20
DEADLINE_S = 120.0  # of the simulated clock: the slowest rail alone carries all in less
CANARY = 0xC5


class Sent:
    """One intent of a schedule, with its own source and destination."""

    def __init__(self, world: SimWorld, seed: int) -> None:
        random = Random(seed)
        large = random.random() < 0.4
        size = random.randrange(200_000, 3_000_000) if large else random.randrange(1, 60_000)
        self.source = np.random.default_rng(seed).integers(0, 255, size, dtype=np.uint8)
        self.bytes = self.source.copy()
        self.memory = np.full(size, CANARY, np.uint8)
        pieces = sorted({0, size, *(random.randrange(size) for _ in range(random.randrange(5)))})
        spans = [
            Span(self.source.ctypes.data + a, self.memory.ctypes.data + a, b - a)
            for a, b in pairwise(pieces)
        ]
        random.shuffle(spans)
        self.handle = Intent(spans, random.choice(list(Priority)), world.now + DEADLINE_S)
        self.began = world.now
        self.reused = False
        world.sprayer.submit(self.handle)

    def look(self, now: float) -> None:
        """The caller's view: what is DONE is right, and its memory is used again."""
        if self.reused:
            return
        if self.handle.poll() is WriteState.PENDING:
            assert now < self.began + DEADLINE_S + 0.1
            return
        self.reused = True
        if self.handle.poll() is WriteState.DONE:
            assert np.array_equal(self.memory, self.bytes)
            assert self.handle.progress == 1.0
            self.source[:] = 0x11
            if not self.handle.late:
                self.memory[:] = CANARY

    def check_at_the_end(self) -> None:
        """After everything has landed that ever could."""
        if self.handle.poll() is WriteState.DONE:
            expected = self.bytes if self.handle.late else np.full_like(self.bytes, CANARY)
            assert np.array_equal(self.memory, expected)


def change(world: SimWorld, random: Random, safe: int | None) -> None:
    """Something happens to a rail; `safe` is only ever made slow."""
    number = random.randrange(len(world.rails))
    rail = world.rails[number]
    match random.choice(["slow", "fast", "cut", "fail", "whole"]):
        case "slow":
            rail.bandwidth = rail.whole / random.choice([2, 5, 10])
        case "fast":
            rail.bandwidth = rail.whole * 2
        case "cut" if number != safe:
            rail.bandwidth = 0.0
        case "fail" if number != safe:
            rail.fails = random.choice([0.05, 0.5, 1.0])
        case "whole":
            rail.bandwidth, rail.fails = rail.whole, 0.0


@pytest.mark.parametrize("block", range(4))
def test_generated_schedules(block: int) -> None:
    for seed in range(block, SCHEDULES, 4):
        run(seed)


def run(seed: int) -> None:
    random = Random(seed)
    rates = [random.choice([3e6, 12e6, 40e6]) for _ in range(random.choice([2, 2, 3]))]
    world = SimWorld(seed, rates, STAGING)
    # In most schedules one rail never breaks; then nothing may fail.
    safe = random.randrange(len(rates)) if random.random() < 0.75 else None
    sent: list[Sent] = []
    for number in range(random.randrange(4, 12)):
        sent.append(Sent(world, 1000 * seed + number))
        if random.random() < 0.6:
            change(world, random, safe)
        for _ in range(random.choice([1, 10, 60])):
            world.step()
            for one in sent:
                one.look(world.now)
    cancelled = sent[-1] if random.random() < 0.3 else None
    if cancelled is not None:
        cancelled.handle.cancel()
    while any(one.handle.poll() is WriteState.PENDING for one in sent):
        world.step()
        for one in sent:
            one.look(world.now)
    for rail in world.rails:
        rail.bandwidth, rail.fails = rail.whole, 0.0
    for _ in range(2000):
        world.step()
        for one in sent:
            one.look(world.now)
        idle = not any(rail.queue or rail.ghosts for rail in world.rails)
        if idle and not world.staging.used and not world.healing:
            break
    assert world.staging.used == 0 and world.most_staged <= STAGING
    assert not any(link.attempts or link.queued or link.paused for link in world.sprayer.links)
    assert world.sprayer._backlog == [0] * 4
    for one in sent:
        one.look(world.now)
        one.check_at_the_end()
        if safe is not None and one is not cancelled:
            done = one.handle.poll() is WriteState.DONE
            # Without staging memory a slice goes out unsaved, and its failure is the write's.
            assert done or "failure" in str(one.handle.error), one.handle.error
