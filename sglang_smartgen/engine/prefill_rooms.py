"""P's rooms by number and generation, and the one place where their actions are done.

The life of a room is `core.prefill_room.PrefillRoom`; this table hands it its events and does what
it answers. Owner: one table a prefill rank. Scheduler, push, serve, fence and SGLang's bootstrap
thread bring events, and one thread of its own brings time. One lock guards every machine and is
never held while an action is done.

A room is announced under its number, is active under its number while scheduler or push thread hold
its bytes, and is kept under its generation until nothing of it can land any more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from sglang_smartgen.core.prefill_room import (
    PrefillAction,
    PrefillLimits,
    PrefillPhase,
    ReleasedRooms,
    Target,
)
from sglang_smartgen.core.prefill_room import PrefillRoom as Machine
from sglang_smartgen.engine.prefill_room import Outcome, PrefillRoom
from sglang_smartgen.transfer.fences import Fencer, Key
from sglang_smartgen.transfer.messages import Alive, MessageError, Release
from sglang_smartgen.transfer.push_room import PushRoom

logger = logging.getLogger(__name__)

TICK_S = 0.25
STALL_S = 2.0
FORGET_S = 240.0
"""Longer than any message lives, and than D waits for an answer."""

MAX_ANNOUNCED = 16384
"""Rooms that wait for their request. Far more than any D has slots for; a bound on memory."""


class PrefillRooms:
    """The table."""

    def __init__(
        self,
        limits: PrefillLimits,
        outcome: Outcome,
        *,
        fence: Callable[[str], bool],
        stop: Callable[[Release], None],
        answer: Callable[[Release], None],
        drop: Callable[[Key], None],
        finish: Callable[[PrefillRoom], None],
        start: Callable[[PrefillRoom], None],
    ) -> None:
        """fence: a session. stop: let the server end a room, after which it calls `stopped`.
        answer: with Released. drop: the room's store entry. finish: end its pushes behind what is
        queued. start: tell D that it may start.
        """
        self._limits = limits
        self._outcome = outcome
        self._stop = stop
        self._answer = answer
        self._drop = drop
        self._finish = finish
        self._start = start
        self._fencer = Fencer(fence, self._fenced)
        self._lock = threading.Lock()
        self._announced: dict[int, PrefillRoom] = {}
        self.active: dict[int, PrefillRoom] = {}
        self._rooms: dict[Key, PrefillRoom] = {}
        self._released = ReleasedRooms(FORGET_S)
        threading.Thread(target=self._run, name="smartgen-rooms", daemon=True).start()

    # Coming ---------------------------------------------------------------------------------

    def announce(self, room: PrefillRoom) -> None:
        """D opened a room; one whose Release came first never begins.

        Raises MessageError when too many wait.
        """
        now = time.monotonic()
        with self._lock:
            before = self._announced.get(room.message.room)
            if before is None and len(self._announced) >= MAX_ANNOUNCED:
                raise MessageError(
                    f"{MAX_ANNOUNCED} rooms are announced and wait for their requests; "
                    "no more are taken"
                )
            if before is not None:  # D has given it up, or it would not use the number again
                self._rooms.pop(before.key, None)
            self._announced[room.message.room] = room
            self._rooms[room.key] = room
            released = self._released.has(*room.key, now)
        if released:
            self._happen(room, lambda machine: machine.release(now))

    def announced(self, number: int) -> PrefillRoom | None:
        """The room that D opened last under a number, unless it has begun."""
        with self._lock:
            return self._announced.get(number)

    def forget_announced(self, number: int) -> None:
        """D uses a number again, without SmartGen; a room that ended under it is of no concern."""
        with self._lock:
            room = self._announced.get(number)
            if room is not None and room.machine.phase is PrefillPhase.GONE:
                del self._announced[number]

    def begin(self, room: PrefillRoom, push: PushRoom) -> bool:
        """Its request begins to prefill, with a store entry; False when the room has ended."""
        with self._lock:
            if not self._take(room):
                return False
            room.machine.begin(time.monotonic())
            room.push = push
            room.scheduler_holds = room.push_holds = True
            self.active[room.message.room] = room
            return True

    def go_stock(self, room: PrefillRoom) -> bool:
        """Its request gets a stock transfer; False when the room has ended, so that it must not."""
        with self._lock:
            if not self._take(room):
                return False
            del self._rooms[room.key]
            return True

    def _take(self, room: PrefillRoom) -> bool:
        current = self._announced.get(room.message.room) is room
        if current:
            del self._announced[room.message.room]
        return current and room.machine.phase is PrefillPhase.ANNOUNCED

    # Writes ---------------------------------------------------------------------------------

    def write_began(self, room: PrefillRoom) -> bool:
        """Leave for one write to D's slots or mask; if given, `write_ended` must follow."""
        now = time.monotonic()
        with self._lock:
            if not room.machine.may_write(Target.SLOTS, now):
                return False
            room.machine.write_began(Target.SLOTS, now)
            return True

    def write_ended(self, room: PrefillRoom, done: bool) -> None:
        """It is complete, or its bytes may still land."""
        self._happen(room, lambda machine: machine.write_ended(done, time.monotonic()))

    def write_late(self, room: PrefillRoom) -> None:
        """It is complete, but a copy of some of its bytes may still land."""
        with self._lock:
            room.machine.doubt()

    def pushed(self, room: PrefillRoom, keep: bool, hand_over: Callable[[], None]) -> bool:
        """Every planned write is complete: let the room be served, then let D start.

        False when the room has ended meanwhile.
        """
        now = time.monotonic()
        with self._lock:
            actions = room.machine.pushed(keep, now)
            if not actions:
                return False
            if keep and room.machine.may_write(Target.ARENA, now):
                room.machine.write_began(Target.ARENA, now)
                room.served = room.handing_over = True
        if room.served:
            try:
                hand_over()
            finally:
                with self._lock:
                    room.handing_over = False
        self._act(room, actions)
        return True

    def doubt(self, number: int, generation: int) -> None:
        """A write of the server for this generation failed; its bytes may still land."""
        with self._lock:
            room = self._rooms.get((number, generation))
            if room is not None:
                room.doubtful = True

    def stopped(self, number: int, generation: int) -> bool:
        """The server makes no write for this generation any more, and none is under way.

        True when the room was served and had been ended here.
        """
        with self._lock:
            room = self._rooms.get((number, generation))
            if room is None or not room.served:
                return False
            room.served = False
            sure = not room.doubtful
            ended_here = room.machine.phase is not PrefillPhase.SERVING
        self._happen(room, lambda machine: machine.write_ended(sure, time.monotonic()))
        return ended_here

    # Ends -----------------------------------------------------------------------------------

    def abort(self, room: PrefillRoom, cause: str) -> None:
        """The request ended here before D could start."""
        self._happen(room, lambda machine: machine.abort(cause, time.monotonic()))

    def start_failed(self, room: PrefillRoom, cause: str) -> None:
        """The push has ended, and D was not told to start."""

        def event(machine: Machine) -> list[PrefillAction]:
            now = time.monotonic()
            return machine.abort(cause, now) + machine.start_failed(cause, now)

        self._happen(room, event)

    def release(self, message: Release) -> None:
        """D wants the promise that nothing of this generation can land any more."""
        key, now = (message.room, message.generation), time.monotonic()
        with self._lock:
            self._released.add(*key, now)
            room = self._rooms.get(key)
        if room is None:
            self._answer(message)  # nothing was ever written for it, or the promise was given
        else:
            self._happen(room, lambda machine: machine.release(now))

    def renew(self, message: Alive) -> None:
        """D still holds these generations open."""
        now = time.monotonic()
        with self._lock:
            for key in message.rooms:
                room = self._rooms.get(key)
                if room is not None and not room.machine.is_stale(key[1], message.epoch):
                    room.machine.renewed(now)

    def peer_replaced(self, session: str, epoch: int) -> None:
        """Another D process has this session: the rooms of the one before end."""
        with self._lock:
            rooms = [r for r in self._rooms.values() if r.session == session]
        for room in rooms:
            if room.machine.epoch != epoch:
                self._happen(room, lambda machine: machine.peer_replaced(time.monotonic()))

    def finishes(self, room: PrefillRoom) -> bool:
        """True for the first who ends the pushes of a room."""
        with self._lock:
            first, room.finishing = not room.finishing, True
            return first

    def let_go(self, room: PrefillRoom, give_back: Callable[[], None], scheduler: bool) -> None:
        """Scheduler or push thread has no use for the entry any more; a repeat has no effect."""
        with self._lock:
            held = room.scheduler_holds if scheduler else room.push_holds
            if scheduler:
                room.scheduler_holds = False
            else:
                room.push_holds = False
        if held:
            give_back()
            with self._lock:
                if not (room.scheduler_holds or room.push_holds):
                    self.active.pop(room.message.room, None)

    # What the machines want -----------------------------------------------------------------

    def _happen(self, room: PrefillRoom, event: Callable[[Machine], list[PrefillAction]]) -> None:
        with self._lock:
            actions = event(room.machine)
        self._act(room, actions)

    def _act(self, room: PrefillRoom, actions: list[PrefillAction]) -> None:
        for action in actions:
            if action is PrefillAction.SEND_STARTED:
                self._start(room)
            elif action is PrefillAction.SEND_RELEASED:
                self._answer(self._release_of(room))
            elif action is PrefillAction.FENCE:
                self._fencer.submit(room.session, room.key)
            elif action is PrefillAction.DROP_ENTRY:
                self._drop(room.key)
            else:
                self._fail(room)
        self._stop_serving(room)
        self._forget_if_gone(room)

    def _release_of(self, room: PrefillRoom) -> Release:
        return Release(*room.key, room.session, room.endpoint)

    def _fail(self, room: PrefillRoom) -> None:
        cause = room.machine.failure
        assert cause is not None
        if room.push is None:
            self._outcome.fail(room.message.room, cause)
            return
        with self._lock:
            if room.push.failure is None:
                room.push.ended_early = room.push.ended_early or cause
        self._finish(room)

    def _stop_serving(self, room: PrefillRoom) -> None:
        """Tell the server that the room has ended, again while it does not answer."""
        now = time.monotonic()
        with self._lock:
            over = room.machine.phase in (PrefillPhase.ENDING, PrefillPhase.GONE)
            wanted = over and room.served and not room.handing_over
            if not wanted or now < room.stop_again_at:
                return
            room.stop_again_at = now + self._limits.fence_retry_s
        self._stop(self._release_of(room))

    def _forget_if_gone(self, room: PrefillRoom) -> None:
        with self._lock:
            if room.machine.phase is not PrefillPhase.GONE:
                return
            if room.machine.settled:
                self._rooms.pop(room.key, None)
            if room.forget_at is None:
                # Without a promise it must not pass for a room that never was; and one that was
                # announced must not begin as a stock transfer.
                room.forget_at = time.monotonic() + FORGET_S

    def _fenced(self, key: Key, sure: bool) -> None:
        with self._lock:
            room = self._rooms.get(key)
        if room is not None:
            self._happen(room, lambda machine: machine.fenced(sure, time.monotonic()))

    # Time -----------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            before = time.monotonic()
            time.sleep(TICK_S)
            if time.monotonic() - before > STALL_S:
                continue  # this process was stopped: first hear what D has said meanwhile
            try:
                self.tick()
            except Exception:
                logger.exception("SmartGen: a room could not be ended")

    def tick(self) -> None:
        """Time has passed: what is late, is given up, fenced again or forgotten."""
        now = time.monotonic()
        with self._lock:
            rooms = list(self._rooms.values())
            for announced in list(self._announced.values()):
                if announced.forget_at is not None and announced.forget_at <= now:
                    del self._announced[announced.message.room]
        for room in rooms:
            serving = room.machine.phase is PrefillPhase.SERVING
            try:
                self._happen(room, lambda machine: machine.tick(now))
            except Exception:
                logger.exception("room %s could not be ended", room.message.room)
            if serving and room.machine.phase is not PrefillPhase.SERVING:
                logger.warning(
                    "room %s: decode has not named it for %g s; it is dropped from the store",
                    room.message.room,
                    self._limits.lease_s,
                )
            if room.forget_at is not None and room.forget_at <= now:
                with self._lock:
                    self._rooms.pop(room.key, None)
