"""Which of the announced rooms P serves for SmartGen; the others get a stock full transfer.

Used by the scheduler thread alone, right before a request's first layer runs.
"""

from __future__ import annotations

import logging

from sglang_smartgen.core import prefill_room as core
from sglang_smartgen.core.room_plan import RoomPlan
from sglang_smartgen.engine.prefill_room import Outcome, PrefillRoom
from sglang_smartgen.engine.prefill_rooms import PrefillRooms
from sglang_smartgen.engine.push_policy import PushPolicy
from sglang_smartgen.transfer.messages import OpenRoom
from sglang_smartgen.transfer.push_room import PushRoom
from sglang_smartgen.transfer.store import PrefillStore, StoreEntry

logger = logging.getLogger(__name__)


class RoomGate:
    """See push.Gate."""

    def __init__(self, rooms: PrefillRooms, room: PrefillRoom, outcome: Outcome) -> None:
        self._rooms = rooms
        self._room = room
        self._outcome = outcome

    def live(self) -> bool:
        """False once the room has ended, here or at SGLang."""
        pushing = self._room.machine.phase is core.PrefillPhase.PUSHING
        return pushing and self._outcome.live(self._room.message.room)

    def began(self) -> bool:
        """Leave for one write."""
        return self._rooms.write_began(self._room)

    def late(self) -> None:
        """A copy of a complete write may still land."""
        self._rooms.write_late(self._room)

    def ended(self, done: bool) -> None:
        """The write is complete, or its bytes may still land."""
        self._rooms.write_ended(self._room, done)


class Admission:
    """Begins rooms, or counts why not."""

    def __init__(
        self, store: PrefillStore, policy: PushPolicy, rooms: PrefillRooms, outcome: Outcome
    ) -> None:
        self._store = store
        self._policy = policy
        self._rooms = rooms
        self._outcome = outcome
        self.fallbacks: dict[str, int] = {}

    def begin(self, room: int, prompt_len: int) -> bool:
        """See PrefillSide.begin."""
        announced = self._rooms.announced(room)
        if announced is None:
            return False
        reason = self._obstacle(announced, prompt_len)
        plan: RoomPlan | None = None
        if reason is None:
            try:
                plan = self._policy.plan(announced.message, announced.session)
            except ValueError as error:
                reason = str(error)
        entry = None if plan is None else self._open_entry(announced.message)
        if entry is None or plan is None:
            if self._rooms.go_stock(announced):
                return self._fall_back(room, reason or "prefill store full")
        else:
            if self._rooms.begin(announced, self._make_push(announced, entry, plan)):
                return True
            for _ in ("scheduler", "push thread"):
                self._store.release(entry)
            self._store.drop(room, announced.message.generation)
        # Not a stock transfer either: D has given the slots up.
        cause = announced.machine.failure or "the decode node announced it again"
        self._outcome.fail(room, cause)
        return self._fall_back(room, "released")

    def _obstacle(self, announced: PrefillRoom, prompt_len: int) -> str | None:
        """Why an announced room cannot be SmartGen's, if it cannot."""
        if announced.peer is None:
            return "peer differs"
        if prompt_len != announced.message.prompt_len:
            return "prompt lengths differ"
        if announced.message.room in self._rooms.active:
            return "room still pushes"  # a client used its number again
        return None

    def _open_entry(self, message: OpenRoom) -> StoreEntry | None:
        """A store entry held by scheduler and push thread; None when there is no room for it."""
        room, generation, prompt_len = message.room, message.generation, message.prompt_len
        return self._store.open(room, generation, prompt_len, users=2)

    def _make_push(self, room: PrefillRoom, entry: StoreEntry, plan: RoomPlan) -> PushRoom:
        message, peer = room.message, room.peer
        assert peer is not None
        return PushRoom(
            entry=entry,
            plan=plan,
            peer=peer,
            reply=room.endpoint,
            slots=room.slots,
            row=message.row,
            with_metadata=message.metadata,
            keep=message.keep,
            gate=RoomGate(self._rooms, room, self._outcome),
            verify=message.verify,
        )

    def _fall_back(self, room: int, reason: str) -> bool:
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1
        logger.info("room %s: full transfer, reason: %s", room, reason)
        return False
