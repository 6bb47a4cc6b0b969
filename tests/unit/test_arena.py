"""Slabs are handed out one by one and come back when nothing can land in them any more."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_smartgen.transfer.arena import SLABS, Arena, Slab

BYTES = 256


def taken(arena: Arena) -> Slab:
    slab = arena.take()
    assert slab is not None
    return slab


def test_slabs_are_disjoint_and_fill_the_region() -> None:
    arena = Arena(BYTES)
    slabs = [taken(arena) for _ in range(SLABS)]
    assert sorted(slab.offset for slab in slabs) == [i * BYTES for i in range(SLABS)]
    assert arena.region.length == SLABS * BYTES
    assert arena.take() is None
    arena.give_back(slabs[2])
    assert arena.take() is slabs[2]


def test_a_slab_rests_until_every_room_is_settled() -> None:
    arena = Arena(BYTES)
    slabs = [taken(arena) for _ in range(SLABS)]
    arena.quarantine(slabs[0], {(1, 1), (2, 1)})
    assert arena.quarantined == 1 and arena.take() is None
    arena.settled(1, 1)
    arena.settled(2, 2)  # another generation
    arena.settled(3, 1)
    arena.settled(1, 1)
    assert arena.quarantined == 1 and arena.take() is None
    arena.settled(2, 1)
    assert arena.quarantined == 0 and arena.take() is slabs[0]
    arena.settled(2, 1)
    assert arena.take() is None  # it came back once


def test_one_room_may_keep_several_slabs() -> None:
    arena = Arena(BYTES)
    slabs = [taken(arena) for _ in range(SLABS)]
    arena.quarantine(slabs[0], {(1, 1)})
    arena.quarantine(slabs[1], {(1, 1), (2, 1)})
    arena.settled(1, 1)
    assert arena.quarantined == 1 and arena.take() is slabs[0]
    arena.settled(2, 1)
    assert arena.take() is slabs[1]


def test_the_caller_may_go_on_with_its_set_of_rooms() -> None:
    arena, rooms = Arena(BYTES), {(1, 1)}
    arena.quarantine(taken(arena), rooms)
    rooms.clear()
    arena.settled(9, 9)
    assert arena.quarantined == 1


ROOMS = st.tuples(st.integers(1, 3), st.integers(1, 2))


class ArenaMachine(RuleBasedStateMachine):
    """Every slab is free, out or at rest, and in one place only."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(BYTES)
        self.out: list[Slab] = []
        self.resting: dict[int, set[tuple[int, int]]] = {}

    @rule()
    def take(self) -> None:
        slab = self.arena.take()
        assert (slab is None) == (len(self.out) + len(self.resting) == SLABS)
        if slab is not None:
            assert slab.offset not in self.resting and slab not in self.out
            self.out.append(slab)

    @precondition(lambda self: self.out)
    @rule()
    def give_back(self) -> None:
        self.arena.give_back(self.out.pop())

    @precondition(lambda self: self.out)
    @rule(rooms=st.sets(ROOMS, min_size=1, max_size=3))
    def quarantine(self, rooms: set[tuple[int, int]]) -> None:
        slab = self.out.pop(0)
        self.resting[slab.offset] = set(rooms)
        self.arena.quarantine(slab, rooms)

    @rule(room=ROOMS)
    def settled(self, room: tuple[int, int]) -> None:
        self.arena.settled(*room)
        left = {at: rooms - {room} for at, rooms in self.resting.items()}
        self.resting = {at: rooms for at, rooms in left.items() if rooms}

    @invariant()
    def as_many_rest_as_should(self) -> None:
        assert self.arena.quarantined == len(self.resting)


ArenaMachine.TestCase.settings = settings(deadline=None, max_examples=30, stateful_step_count=20)
TestArena = ArenaMachine.TestCase
