"""Generated schedules on real sockets: rails that are slowed, cut, broken and returned by a relay.

SMARTGEN_RAILS_SOCKETS sets how many are run; the default is a share that fits continuous tests.
"""

from __future__ import annotations

import os
import time
from random import Random

import numpy as np
import pytest
from rails_relay import Relay

from sglang_smartgen.transfer.rails.intent import Intent
from sglang_smartgen.transfer.rails.reach import Card, Rail, RailAddress, Segment
from sglang_smartgen.transfer.rails.transport import RailsTransport
from sglang_smartgen.transfer.socket import SocketTransport
from sglang_smartgen.transfer.transport import Priority, Region, Span, WriteState

SCHEDULES = int(os.environ.get("SMARTGEN_RAILS_SOCKETS", "3"))
TOKEN = b"a token of a test"
SIZE = 6 << 20
DEADLINE_S = 20.0


class World:
    """Two rails of one process to memory of its own, each through a relay."""

    def __init__(self) -> None:
        self.memory = np.zeros(SIZE, np.uint8)
        self.at = self.memory.ctypes.data
        self.receivers = [SocketTransport("127.0.0.1", TOKEN) for _ in range(2)]
        self.relays: list[Relay] = []
        addresses = []
        for number, receiver in enumerate(self.receivers):
            receiver.register(Region(self.at, SIZE))
            where, epoch = receiver.session.split("/")
            relay = Relay(("127.0.0.1", int(where.rsplit(":", 1)[1])))
            self.relays.append(relay)
            addresses.append(RailAddress("socket", str(number), f"127.0.0.1:{relay.port}/{epoch}"))
        senders = [SocketTransport("127.0.0.1", TOKEN, progress_timeout_s=1.0) for _ in range(2)]
        self.rails = RailsTransport(
            [Rail("socket", str(i), sender) for i, sender in enumerate(senders)], "p"
        )
        card = Card(addresses, [Segment(self.at, SIZE, 0b11)], self.at + SIZE - 64)
        self.rails.meet("d", card)

    def close(self) -> None:
        self.rails.close()
        for relay in self.relays:
            relay.close()
        for receiver in self.receivers:
            receiver.close()


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_generated_schedules_on_sockets(seed: int) -> None:
    random = Random(seed)
    world = World()
    try:
        schedule(world, random)
    finally:
        world.close()


def schedule(world: World, random: Random) -> None:
    """Writes side by side while one rail after the other is hurt; the other one is only slow."""
    hurt = random.randrange(2)
    source = np.random.default_rng(random.randrange(1000)).integers(0, 255, SIZE, dtype=np.uint8)
    right = source.copy()
    open_: list[tuple[Intent, int, int]] = []
    place = 0
    for _ in range(random.randrange(4, 8)):
        size = random.choice([500, 40_000, 700_000])
        spans = [Span(source.ctypes.data + place, world.at + place, size)]
        handle = world.rails.write("d", spans, random.choice(list(Priority)), DEADLINE_S)
        open_.append((handle, place, size))
        place += size
        match random.choice(["slow", "cut", "reset", "whole", "other"]):
            case "slow":
                world.relays[hurt].rate = random.choice([3e5, 3e6])
            case "cut":
                world.relays[hurt].cut = True
            case "reset":
                world.relays[hurt].reset()
            case "whole":
                world.relays[hurt].cut, world.relays[hurt].rate = False, None
            case "other":
                world.relays[1 - hurt].rate = random.choice([3e6, 2e7])
        time.sleep(random.choice([0.0, 0.02, 0.2]))
    for handle, at, size in open_:
        assert handle.wait(DEADLINE_S) is WriteState.DONE, handle.error
        assert np.array_equal(world.memory[at : at + size], right[at : at + size])
    source[:] = 1  # all DONE: the sources are used again
    for relay in world.relays:
        relay.cut, relay.rate = False, None
    deadline = time.monotonic() + DEADLINE_S
    while not world.rails.fence("d", world.at + SIZE - 64, 3.0):
        assert time.monotonic() < deadline
    assert np.array_equal(world.memory[:place], right[:place])  # late copies were the same
    if any(handle.late for handle, _, _ in open_):
        world.memory[:place] = 9
        time.sleep(0.3)
        assert (world.memory[:place] == 9).all()  # and after the fence there are none
    while any(link.paused for link in world.rails.links()["d"]) or world.rails._staging.used:
        assert time.monotonic() < deadline
        time.sleep(0.02)
