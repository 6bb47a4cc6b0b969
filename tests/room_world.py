"""One P and one D that run the two room machines against each other, over channels that fail.

P's writes go through the fake transport into D's memory; what is told goes through a channel whose
messages the driver delivers in any order, twice or never. Every generation writes a byte of its
own, so a look at D's memory shows whose bytes landed where. Time is the fake network's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from room_pieces import (
    DECODE_LIMITS,
    DROPPED,
    ENTRIES,
    FREE,
    FRESH,
    LOCAL,
    MESSAGE_LIFE_S,
    NOBODY,
    PREFILL_LIMITS,
    RANGES,
    REMOTE,
    ROOM_NUMBERS,
    SIZE,
    SLOTS,
    SLOTS_A_ROOM,
    WRITE_S,
    DRoom,
    Key,
    Memory,
    Message,
    PRoom,
    Write,
    pattern,
)

from sglang_smartgen.core.decode_room import DecodeAction, DecodePhase, DecodeRoom
from sglang_smartgen.core.prefill_room import (
    PrefillAction,
    PrefillPhase,
    PrefillRoom,
    ReleasedRooms,
    Target,
)
from sglang_smartgen.transfer.fake import FakeNetwork, FakeTransport, Fault
from sglang_smartgen.transfer.transport import Span, WriteState


class Decode:
    """D: slots, masks and ranges, each with its owner."""

    MASK = SLOTS * SIZE
    RANGE = MASK + SLOTS
    SCRATCH = RANGE + RANGES * SIZE

    def __init__(self, world: World, epoch: int) -> None:
        self.world, self.epoch = world, epoch
        self.memory = Memory(self.SCRATCH + 64, FREE)
        self.transport = FakeTransport(world.network, "D")
        self.transport.register(self.memory.region)
        self.slots: list[Key | None] = [None] * SLOTS
        self.ranges: list[Key | None] = [None] * RANGES
        self.rooms: dict[Key, DRoom] = {}
        self.numbers = itertools.count(1)

    def send(self, kind: str, key: Key, **more: Any) -> None:
        self.world.send(Message("P", kind, key, self.world.now, epoch=self.epoch, **more))

    def open(self) -> None:
        free = [i for i, owner in enumerate(self.slots) if owner is None]
        if len(free) < SLOTS_A_ROOM:
            return
        generation = next(self.world.generations)
        key, mine = (generation % ROOM_NUMBERS, generation), free[:SLOTS_A_ROOM]
        for slot in mine:
            self.slots[slot] = key
            self.memory.fill(slot * SIZE, SIZE, FRESH)
            self.memory.fill(self.MASK + slot, 1, REMOTE)
        self.rooms[key] = DRoom(
            DecodeRoom(*key, self.world.now, DECODE_LIMITS), mine, self.world.p.epoch
        )
        self.world.p.requests.add(key)
        self.send("open", key, place=mine, base=self.memory.region.address)

    def use_range(self, key: Key, kind: str) -> None:
        room = self.rooms[key]
        may = room.machine.may_ask if kind == "fetch" else room.machine.may_grant
        free = [i for i, owner in enumerate(self.ranges) if owner is None]
        if not may or not free:
            return
        number, at = next(self.numbers), free[0]
        self.ranges[at] = key
        room.ranges[number] = at
        self.memory.fill(self.RANGE + at * SIZE, SIZE, FRESH)
        if kind == "fetch":
            room.machine.asked(number, self.world.now)
        self.send(kind, key, number=number, place=[at])

    def receive(self, message: Message) -> None:
        room = self.rooms.get(message.key)
        if room is None or room.machine.is_stale(message.key[1]):
            return
        machine, now = room.machine, self.world.now
        if message.kind == "started":
            self.act(message.key, machine.started(message.left, now))
        elif message.kind == "failed":
            self.act(message.key, machine.failed(message.failure or "failed"))
        elif message.kind == "released":
            self.act(message.key, machine.released(now))
        elif message.kind == "fetched":
            if message.failure is None:
                self.take(room, message)
            self.act(message.key, machine.answered(message.number, message.failure, now))
        elif message.kind == "filled":
            if message.failure is None and not self.take(room, message):
                return
            self.act(message.key, machine.filled(message.left, message.failure, now))

    def take(self, room: DRoom, message: Message) -> bool:
        """Place what landed in a range and get the range back."""
        at = room.ranges.get(message.number)
        if at is None or not room.machine.may_ask:
            return False
        del room.ranges[message.number]
        landed = self.memory.read(self.RANGE + at * SIZE, SIZE)
        assert landed == bytes([pattern(message.key[1])]) * SIZE, "told of bytes that are not here"
        self.free_range(at)
        return True

    def free_range(self, at: int) -> None:
        self.ranges[at] = None
        self.memory.fill(self.RANGE + at * SIZE, SIZE, FREE)

    def act(self, key: Key, actions: list[DecodeAction]) -> None:
        room = self.rooms[key]
        for action in actions:
            if action is DecodeAction.SEND_RELEASE:
                self.send("release", key)
            elif action is DecodeAction.FAIL:
                assert room.machine.failure
                room.over = True
            elif action is DecodeAction.FREE_SLOTS:
                for slot in room.slots:
                    assert self.slots[slot] == key, "freed twice"
                    self.slots[slot] = None
                    self.memory.fill(slot * SIZE, SIZE, FREE)
                    self.memory.fill(self.MASK + slot, 1, FREE)
            else:
                assert action is DecodeAction.FREE_RANGES
                for at in room.ranges.values():
                    self.free_range(at)
                room.ranges.clear()
        if room.machine.phase is DecodePhase.GONE:
            del self.rooms[key]
            assert key not in self.slots and key not in self.ranges

    def release(self, key: Key) -> None:
        room = self.rooms[key]
        if room.machine.phase is DecodePhase.LOCAL:
            wanted = bytes([pattern(key[1])]) * SIZE
            assert all(self.memory.read(slot * SIZE, SIZE) == wanted for slot in room.slots)
        self.act(key, room.machine.release(self.world.now))

    def tick(self) -> None:
        now = self.world.now
        for key in list(self.rooms):
            if self.rooms[key].p_epoch != self.world.p.epoch:  # the old P refuses connections
                self.act(key, self.rooms[key].machine.peer_gone(now))
        for key in list(self.rooms):
            room = self.rooms[key]
            self.act(key, room.machine.tick(now))
            if room.over and key in self.rooms:
                self.release(key)
            deadline = room.machine.deadline
            assert deadline is None or deadline > now, "a wait outlived its deadline"
        self.send("alive", (0, 0), open=[k for k, r in self.rooms.items() if r.machine.open])

    def check(self) -> None:
        memory = bytes(self.memory.bytes)
        for slot, owner in enumerate(self.slots):
            content, mask = memory[slot * SIZE : (slot + 1) * SIZE], memory[self.MASK + slot]
            if owner is None:
                assert content == NOBODY and mask == FREE, f"a write to the free slot {slot}"
                continue
            mine = content.count(pattern(owner[1]))
            assert mine + content.count(FRESH) == SIZE, f"slot {slot} of {owner} holds {content!r}"
            assert mask in (REMOTE, LOCAL), f"mask of slot {slot} of {owner} is {mask}"
            assert mask == REMOTE or mine == SIZE, "mask before data"
        for at, owner in enumerate(self.ranges):
            content = memory[self.RANGE + at * SIZE : self.RANGE + (at + 1) * SIZE]
            if owner is None:
                assert content == NOBODY, f"a write to the free range {at}"
                continue
            mine = content.count(pattern(owner[1]))
            assert mine + content.count(FRESH) == SIZE, f"range {at} of {owner} holds {content!r}"


class Prefill:
    """P: store entries, pushes, fetches and fills."""

    def __init__(self, world: World, epoch: int) -> None:
        self.world, self.epoch = world, epoch
        self.transport = FakeTransport(world.network, "P")
        self.store = Memory(ENTRIES * SLOTS_A_ROOM * SIZE, DROPPED)
        self.local = Memory(SLOTS, LOCAL)  # the source of mask writes
        self.entries: list[Key | None] = [None] * ENTRIES
        self.rooms: dict[Key, PRoom] = {}
        self.gone_at: dict[Key, float] = {}
        self.requests: set[Key] = set()  # those that the router sent to this process
        self.released = ReleasedRooms(forget_s=60.0)
        self.writes: list[Write] = []
        self.fences: list[Key] = []
        self.d_epoch = 0
        self.d_base = 0

    def send(self, kind: str, key: Key, **more: Any) -> None:
        self.world.send(Message("D", kind, key, self.world.now, **more))

    def receive(self, message: Message) -> None:
        now, key = self.world.now, message.key
        if message.epoch < self.d_epoch:
            return
        if message.epoch > self.d_epoch:
            self.d_epoch = message.epoch
            for old in list(self.rooms):
                if self.rooms[old].machine.epoch != message.epoch:
                    self.act(old, self.rooms[old].machine.peer_replaced(now))
        if message.kind == "alive":
            for name in message.open:
                if name in self.rooms:
                    self.rooms[name].machine.renewed(now)
            return
        room = self.rooms.get(key)
        if message.kind == "open":
            if room is None and not self.released.has(*key, now):
                machine = PrefillRoom(*key, message.epoch, now, PREFILL_LIMITS)
                self.rooms[key] = PRoom(machine, message.place, message.base)
        elif message.kind == "release":
            self.released.add(*key, now)
            if room is None:
                self.send("released", key)
            else:
                self.act(key, room.machine.release(now))
        elif room is None or room.machine.is_stale(key[1], message.epoch):
            if message.kind == "fetch":
                self.send("fetched", key, number=message.number, failure="the room is gone")
        else:
            self.serve(room, message)

    def begin(self, key: Key) -> None:
        room = self.rooms[key]
        if room.machine.phase is not PrefillPhase.ANNOUNCED or key not in self.requests:
            return
        free = [i for i, owner in enumerate(self.entries) if owner is None]
        if not free:
            self.act(key, room.machine.abort("prefill store full", self.world.now))
            return
        room.entry = free[0]
        self.entries[room.entry] = key
        length = SLOTS_A_ROOM * SIZE
        self.store.fill(room.entry * length, length, pattern(key[1]))
        room.machine.begin(self.world.now)

    def push(self, key: Key) -> None:
        """The next write of a push: data, then mask, then the end."""
        room = self.rooms[key]
        if room.stage in ("data?", "mask?", "pushed"):
            return
        if room.stage == "mask":
            room.stage = "pushed"
            self.act(key, room.machine.pushed(True, self.world.now))
            return
        assert room.stage in ("idle", "data")
        now = self.world.now
        if not room.machine.may_write(Target.SLOTS, now) or room.entry is None:
            return
        spans: list[Span] = []
        for i, slot in enumerate(room.slots):
            if room.stage == "idle":
                source = self.source(room) + i * SIZE
                spans.append(Span(source, room.base + slot * SIZE, SIZE))
            else:
                spans.append(Span(self.local.region.address, room.base + Decode.MASK + slot, 1))
        following = {"idle": "data", "data": "mask"}[room.stage]
        room.stage = following + "?"

        def done(complete: bool) -> None:
            if complete:
                room.stage = following

        self.write(room, Target.SLOTS, spans, done)

    def serve(self, room: PRoom, message: Message) -> None:
        """A fetch or a grant: fill the range that it names."""
        key, now, fetch = message.key, self.world.now, message.kind == "fetch"
        reply = "fetched" if fetch else "filled"
        fresh = room.machine.accepts(message.number)
        if not fresh or not room.machine.may_write(Target.ARENA, now):
            if fetch:
                self.send(reply, key, number=message.number, failure="refused")
            return
        at = room.base + Decode.RANGE + message.place[0] * SIZE
        source = self.source(room)
        spans = [Span(source, at, SIZE // 2), Span(source, at + SIZE // 2, SIZE // 2)]

        def done(complete: bool) -> None:
            failure = None if complete else "the write failed"
            if complete and not fetch:
                room.left -= 1
            self.send(reply, key, number=message.number, left=max(room.left, 0), failure=failure)

        self.write(room, Target.ARENA, spans, done)

    def source(self, room: PRoom) -> int:
        assert room.entry is not None
        return self.store.region.address + room.entry * SLOTS_A_ROOM * SIZE

    def write(
        self, room: PRoom, target: Target, spans: list[Span], done: Callable[[bool], None]
    ) -> None:
        room.machine.write_began(target, self.world.now)
        handle = self.transport.write("D", spans)
        self.writes.append(Write(handle, room, self.world.now + WRITE_S, done))

    def poll(self) -> None:
        """Look at the writes and fences under way."""
        for write in list(self.writes):
            state = write.handle.poll()
            if state is WriteState.PENDING and self.world.now < write.deadline:
                continue
            self.writes.remove(write)
            complete = state is WriteState.DONE
            write.done(complete)
            machine = write.room.machine
            self.act(
                (machine.room, machine.generation), machine.write_ended(complete, self.world.now)
            )
        fences, self.fences = self.fences, []
        for key in fences:
            sure = self.transport.fence("D", self.world.scratch(), 0)
            self.act(key, self.rooms[key].machine.fenced(sure, self.world.now))

    def act(self, key: Key, actions: list[PrefillAction]) -> None:
        room = self.rooms[key]
        for action in actions:
            if action is PrefillAction.SEND_STARTED:
                self.send("started", key, left=room.left)
            elif action is PrefillAction.SEND_RELEASED:
                self.send("released", key)
            elif action is PrefillAction.FAIL:
                self.requests.discard(key)
                self.send("failed", key, failure=room.machine.failure)
            elif action is PrefillAction.FENCE:
                self.fences.append(key)
            else:
                assert action is PrefillAction.DROP_ENTRY and room.entry is not None
                assert self.entries[room.entry] == key
                self.entries[room.entry] = None
                length = SLOTS_A_ROOM * SIZE
                self.store.fill(room.entry * length, length, DROPPED)
                room.entry = None
        if room.machine.phase is PrefillPhase.GONE:
            self.gone_at.setdefault(key, self.world.now)

    def tick(self) -> None:
        self.poll()
        now = self.world.now
        for key in list(self.rooms):
            machine = self.rooms[key].machine
            self.act(key, machine.tick(now))
            assert machine.deadline is None or machine.deadline > now, (
                "a wait outlived its deadline"
            )
            assert (machine.deadline is None) == (machine.phase is PrefillPhase.GONE)
            if now > self.gone_at.get(key, now) + 60.0:
                del self.rooms[key], self.gone_at[key]
        self.poll()


class World:
    """Both nodes, the network and the messages under way. Every method keeps the canaries."""

    def __init__(self) -> None:
        self.network = FakeNetwork()
        self.generations = itertools.count(1)
        self.epochs = itertools.count(1)
        self.channel: list[Message] = []
        self.graveyard: list[object] = []  # memory that a dead process may still be written from
        self.lossy = True
        self.p = Prefill(self, next(self.epochs))
        self.d = Decode(self, next(self.epochs))

    @property
    def now(self) -> float:
        return self.network.now

    def scratch(self) -> int:
        return self.d.memory.region.address + Decode.SCRATCH

    def send(self, message: Message) -> None:
        self.channel.append(message)

    def deliver(self, index: int) -> None:
        if self.channel:
            message = self.channel.pop(index % len(self.channel))
            (self.p if message.to == "P" else self.d).receive(message)
            self.p.poll()
            self.check()

    def lose(self, index: int) -> None:
        if self.channel:
            self.channel.pop(index % len(self.channel))

    def deliver_all(self) -> None:
        while self.channel:
            self.deliver(0)

    def repeat(self, index: int) -> None:
        if self.channel:
            self.channel.append(self.channel[index % len(self.channel)])

    def fault(self, fault: Fault | None) -> None:
        """What happens to the next write of P."""
        if fault is not None:
            nth = self.p.transport.writes.get("D", 0) + 1
            self.p.transport.script("D", nth, fault)

    def advance(self, seconds: float) -> None:
        self.network.advance(seconds)
        self.channel = [m for m in self.channel if self.now - m.sent <= MESSAGE_LIFE_S]
        self.p.tick()
        self.d.tick()
        self.check()

    def pick(self, node: Decode | Prefill, index: int) -> Key | None:
        keys = [
            key for key, room in node.rooms.items() if room.machine.phase is not PrefillPhase.GONE
        ]
        return keys[index % len(keys)] if keys else None

    def restart_p(self) -> None:
        self.graveyard.append(self.p)
        self.p.transport.close()  # what a dead process had under way dies with it
        self.p = Prefill(self, next(self.epochs))

    def restart_d(self) -> None:
        self.graveyard.append(self.d)
        self.d = Decode(self, next(self.epochs))

    def settle(self) -> None:
        """The faults end, every request ends, and everything must come back."""
        self.p.transport.script_all("D", None)
        for _ in range(80):
            for key in list(self.d.rooms):
                if self.d.rooms[key].machine.phase is not DecodePhase.RELEASING:
                    self.d.release(key)
            self.deliver_all()
            self.advance(1.0)
            if self._idle():
                break
        assert not self.d.rooms, f"rooms are left on D: {self.d.rooms}"
        assert self.d.slots == [None] * SLOTS and self.d.ranges == [None] * RANGES
        assert self.p.entries == [None] * ENTRIES, "store bytes are left on P"
        assert not self.p.writes and not self.p.fences
        assert all(r.machine.phase is PrefillPhase.GONE for r in self.p.rooms.values())

    def _idle(self) -> bool:
        rooms = self.p.rooms.values()
        gone = all(room.machine.phase is PrefillPhase.GONE for room in rooms)
        return gone and not self.d.rooms and not self.p.writes

    def check(self) -> None:
        self.d.check()
        dead = [node for node in self.graveyard if isinstance(node, Decode)]
        for node in dead:
            node.check()
