"""Both room machines against each other under faults: nobody's bytes land in another's memory.

`room_world` is checked after every step: bytes in a slot or range are of its owner or nobody, a
mask follows its data, no wait outlives its deadline, and at the end everything is free.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from room_pieces import LATE_S
from room_world import World

from sglang_smartgen.core.decode_room import DecodePhase
from sglang_smartgen.transfer.fake import Fault, FaultKind

SCHEDULES = 1000
STEPS = 120
FAULTS = (
    Fault(FaultKind.DELAY, delay_s=1.0),
    Fault(FaultKind.DELAY, delay_s=4.0),
    Fault(FaultKind.NEVER),
    Fault(FaultKind.FAIL),
    Fault(FaultKind.FAIL, delay_s=2.0),
    Fault(FaultKind.PARTIAL, spans=1),
    Fault(FaultKind.LATE, delay_s=1.0),
    Fault(FaultKind.LATE, delay_s=LATE_S, spans=1),
)
WEIGHTS = {
    "open": 8, "begin": 12, "push": 36, "deliver": 10, "deliver_all": 12, "lose": 3, "repeat": 3,
    "fetch": 12, "grant": 12, "release": 1.5, "abort": 0.3, "fault": 2, "advance": 5,
    "restart_p": 0.1, "restart_d": 0.1,
}  # fmt: skip


def step(world: World, name: str, index: int) -> None:
    """One event of a schedule; `index` picks the room, message or fault."""
    key = world.pick(world.d if name in ("fetch", "grant", "release") else world.p, index)
    if name == "open":
        world.d.open()
    elif name in ("deliver", "lose", "repeat"):
        getattr(world, name)(index)
    elif name == "fault":
        world.fault(FAULTS[index % len(FAULTS)])
    elif name == "advance":
        world.advance((0.5, 1.0, 2.0)[index % 3])
    elif name in ("restart_p", "restart_d", "deliver_all"):
        getattr(world, name)()
    elif key is None:
        return
    elif name in ("fetch", "grant"):
        world.d.use_range(key, name)
    elif name == "release":
        world.d.release(key)
    elif name == "begin":
        world.p.begin(key)
    elif name == "push":
        world.p.push(key)
        world.p.poll()
    else:
        room = world.p.rooms[key]
        world.p.act(key, room.machine.abort("aborted", world.now))
    world.check()


def run_schedule(seed: int) -> World:
    """A schedule of its own for every seed, then the end of all faults."""
    chance = random.Random(seed)
    world = World()
    names, weights = list(WEIGHTS), list(WEIGHTS.values())
    for name in chance.choices(names, weights, k=STEPS):
        step(world, name, chance.randrange(1000))
    world.settle()
    return world


def test_a_thousand_fault_schedules() -> None:
    written = 0
    for seed in range(SCHEDULES):
        try:
            written += sum(run_schedule(seed).p.transport.writes.values())
        except Exception as error:
            error.add_note(f"schedule {seed}")
            raise
    assert written > 3 * SCHEDULES  # the schedules do get to writing


def test_a_quiet_schedule_gets_fully_local_and_its_end_waits_for_nobody() -> None:
    world = World()
    world.d.open()
    (key,) = world.d.rooms

    world.deliver_all()
    world.p.begin(key)
    for _ in range(3):
        step(world, "push", 0)
    world.deliver_all()
    machine = world.d.rooms[key].machine
    assert machine.phase is DecodePhase.PARTIAL and not machine.slots_reachable
    world.d.use_range(key, "fetch")
    world.deliver_all()
    assert machine.failure is None
    for _ in range(2):
        world.d.use_range(key, "grant")
        world.deliver_all()
    assert machine.phase is DecodePhase.LOCAL and machine.settled and machine.deadline is None
    assert world.p.entries == [None] * 4
    world.d.release(key)
    assert not world.d.rooms and not world.channel


class Rooms(RuleBasedStateMachine):
    """Hypothesis chooses the schedule, and shortens one that fails."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @rule(name=st.sampled_from(sorted(WEIGHTS)), index=st.integers(0, 23))
    def any_event(self, name: str, index: int) -> None:
        step(self.world, name, index)

    @rule(index=st.integers(0, 3))
    def start_a_room(self, index: int) -> None:
        self.world.d.open()
        self.world.deliver_all()
        for name in ("begin", "push", "push", "push"):
            if key := self.world.pick(self.world.p, index):
                getattr(self.world.p, name)(key)
                self.world.p.poll()

    @rule(index=st.integers(0, 3))
    def use_a_room(self, index: int) -> None:
        if key := self.world.pick(self.world.d, index):
            self.world.d.use_range(key, "fetch" if index % 2 else "grant")

    @invariant()
    def canaries(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.settle()


Rooms.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestRooms = pytest.mark.timeout(120)(Rooms.TestCase)
