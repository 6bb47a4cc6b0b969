"""State machine of one room and generation on P: may it still write, and what must be kept.

    announced -> pushing -> serving -> ending -> gone

Every method is an event; it returns what the caller must do, in order. Nothing here waits, sends or
writes. The rules behind it (design.md section 2):

* Slots and mask of D are written while `pushing` only. SEND_STARTED comes after the last of those
  writes is complete; what is written later goes to ranges that D granted for it.
* RELEASED is a promise: no write for this generation is under way, and none that failed can land.
  Without it, whatever the reason, there is no answer.
* The promise must also hold when D's Release never gets through: leave to write is a lease that D
  renews by naming the generations it still holds open. D waits longer than a lease and a write can
  last before it reuses slots without an answer.
* Every wait ends at `deadline`; `tick` is what happens then.
"""

from __future__ import annotations

import enum
import math

import msgspec


class Target(enum.Enum):
    """Where on D a write goes."""

    SLOTS = "slots"  # KV and metadata slots, and the mask
    ARENA = "arena"  # a range that D granted to this generation


class PrefillPhase(enum.Enum):
    """Where a room is."""

    ANNOUNCED = "announced"  # D gave slots; the request may not be here yet
    PUSHING = "pushing"
    SERVING = "serving"  # D decodes; fetches and credits are served
    ENDING = "ending"  # no new write; those under way or in doubt are waited for
    GONE = "gone"


class PrefillAction(enum.Enum):
    """What the caller does."""

    SEND_STARTED = "send started"
    SEND_RELEASED = "send released"
    FAIL = "fail"  # end the request, on D too; the cause is `failure`
    FENCE = "fence"  # fence the peer, then call `fenced`
    DROP_ENTRY = "drop entry"  # the store's bytes are free


class PrefillLimits(msgspec.Struct, frozen=True):
    """Deadlines in seconds.

    lease_s: leave to write after D last named the generation. idle_s: a room may be announced or
    push so long. fence_retry_s: between fences that gave no answer. doubt_s: after it the store's
    bytes are freed although a failed write was never fenced; it can reach nothing but slots that D
    has given up long ago.
    """

    lease_s: float
    idle_s: float
    fence_retry_s: float
    doubt_s: float


class PrefillRoom:
    """One generation of one room on P. Not thread safe; times are seconds of a monotonic clock."""

    def __init__(
        self, room: int, generation: int, epoch: int, now: float, limits: PrefillLimits
    ) -> None:
        """D announced the room; epoch: of the D process that holds the slots."""
        self.room = room
        self.generation = generation
        self.epoch = epoch
        self.phase = PrefillPhase.ANNOUNCED
        self.failure: str | None = None
        self.holds_entry = False
        self.settled = False  # the promise of RELEASED holds, and always will
        self._limits = limits
        self._since = now  # of the phase
        self._lease_until = now + limits.lease_s
        self._writes = 0
        self._doubtful = False
        self._fencing = False
        self._retry_at: float | None = None  # of the next fence, after one without an answer
        self._release_asked = False
        self._last_number = -1

    # Questions ------------------------------------------------------------------------------

    def may_write(self, target: Target, now: float) -> bool:
        """May a write be started now?"""
        wanted = {
            Target.SLOTS: PrefillPhase.PUSHING,
            Target.ARENA: PrefillPhase.SERVING,
        }[target]
        return self.phase is wanted and self.holds_entry and now < self._lease_until

    def accepts(self, number: int) -> bool:
        """Is a fetch or a grant with this number new? Numbers of one generation ascend.

        Served twice, it would write to a range that D has got back. One that was overtaken is not
        accepted either: on an ordered channel there is none.
        """
        if number <= self._last_number:
            return False
        self._last_number = number
        return True

    def is_stale(self, generation: int, epoch: int) -> bool:
        """Is a message about this room meant for another generation or another D process?"""
        return (generation, epoch) != (self.generation, self.epoch)

    @property
    def deadline(self) -> float | None:
        """When `tick` has something to do; None once the room is gone."""
        if self.phase is PrefillPhase.GONE:
            return None
        if self.phase is PrefillPhase.ENDING:
            give_up = self._since + self._limits.doubt_s
            return give_up if self._retry_at is None else min(give_up, self._retry_at)
        if self.phase is PrefillPhase.SERVING:
            return self._lease_until
        return min(self._lease_until, self._since + self._limits.idle_s)

    # Events of the request ------------------------------------------------------------------

    def begin(self, now: float) -> None:
        """The request starts to prefill and the store has an entry for it.

        Raises ValueError unless the room is announced: ask `phase` first.
        """
        if self.phase is not PrefillPhase.ANNOUNCED:
            raise ValueError(
                f"room {self.room} is {self.phase.value}; only an announced one begins"
            )
        self.holds_entry = True
        self._enter(PrefillPhase.PUSHING, now)

    def pushed(self, keep: bool, now: float) -> list[PrefillAction]:
        """Every planned write is complete. keep: decode will ask for the rest.

        Nothing happens when the room ended meanwhile. Raises ValueError while a write is under way.
        """
        if self._writes:
            raise ValueError(f"room {self.room} has {self._writes} writes under way")
        if self.phase is not PrefillPhase.PUSHING:
            return []
        self._enter(PrefillPhase.SERVING, now)
        actions = [PrefillAction.SEND_STARTED]
        return actions if keep else actions + self._drop()

    def abort(self, cause: str, now: float) -> list[PrefillAction]:
        """The request ended here (abort, failure of the prefill) before D could start."""
        if self.phase in (PrefillPhase.ANNOUNCED, PrefillPhase.PUSHING):
            return self._fail(cause, now)
        return []

    def start_failed(self, cause: str, now: float) -> list[PrefillAction]:
        """D could not be told that it may start, or it cannot: nobody will ask for the rest."""
        return self._fail(cause, now) if self.phase is PrefillPhase.SERVING else []

    # Events of writes -----------------------------------------------------------------------

    def write_began(self, target: Target, now: float) -> None:
        """A write was started. Raises ValueError when it was not allowed."""
        if not self.may_write(target, now):
            raise ValueError(f"room {self.room} is {self.phase.value}; it may not write {target}")
        self._writes += 1

    def write_ended(self, done: bool, now: float) -> list[PrefillAction]:
        """A write is complete, or it failed or is late: its bytes may still land.

        A failed push ends the room. A failed write to a range does not: D, which knows what the
        bytes were for, fails the request or goes on without; the room then ends with a fence.
        """
        self._writes -= 1
        if not done:
            self._doubtful = True
            if self.phase is PrefillPhase.PUSHING:
                return self._fail("a write to the decode node failed", now)
        return self._settle(now)

    def doubt(self) -> None:
        """A write is complete, but a copy of some of its bytes may still land."""
        self._doubtful = True

    def fenced(self, sure: bool, now: float) -> list[PrefillAction]:
        """The answer to FENCE: no write from before it can land, or that is not sure yet."""
        if not self._fencing:
            return []
        self._fencing = False
        if sure:
            self._doubtful = False
        else:
            self._retry_at = now + self._limits.fence_retry_s
        return self._settle(now)

    # Events of D ----------------------------------------------------------------------------

    def renewed(self, now: float) -> None:
        """D named this generation among those that it holds open."""
        self._lease_until = max(self._lease_until, now + self._limits.lease_s)

    def release(self, now: float) -> list[PrefillAction]:
        """D wants the promise. Asked again, it is given again."""
        if self.settled:
            return [PrefillAction.SEND_RELEASED]
        if self.phase is PrefillPhase.GONE:
            return []  # freed in doubt: it can never be given
        self._release_asked = True
        if self.phase in (PrefillPhase.ANNOUNCED, PrefillPhase.PUSHING):
            return self._fail("the decode node ended the request before it could start", now)
        return self._end(now)

    def peer_replaced(self, now: float) -> list[PrefillAction]:
        """Another D process has the place of the one that gave the slots; nobody can be asked."""
        self._release_asked = False
        if self.phase in (PrefillPhase.ANNOUNCED, PrefillPhase.PUSHING):
            return self._fail("the decode node was restarted", now)
        return self._end(now)

    # Time -----------------------------------------------------------------------------------

    def tick(self, now: float) -> list[PrefillAction]:
        """Time passed; call it at `deadline`, or more often."""
        deadline = self.deadline
        if deadline is None or now < deadline:
            return []
        if self.phase is not PrefillPhase.ENDING:
            if self.phase is PrefillPhase.SERVING:
                return self._end(now)
            silent = now >= self._lease_until
            cause = "the decode node is silent" if silent else "the request took too long"
            return self._fail(cause, now)
        if now >= self._since + self._limits.doubt_s:
            self._enter(PrefillPhase.GONE, now)
            return self._drop()
        self._retry_at = None
        return self._settle(now)

    # ----------------------------------------------------------------------------------------

    def _enter(self, phase: PrefillPhase, now: float) -> None:
        self.phase, self._since = phase, now

    def _fail(self, cause: str, now: float) -> list[PrefillAction]:
        first = self.failure is None
        self.failure = self.failure or cause
        return ([PrefillAction.FAIL] if first else []) + self._end(now)

    def _end(self, now: float) -> list[PrefillAction]:
        if self.phase not in (PrefillPhase.ENDING, PrefillPhase.GONE):
            self._enter(PrefillPhase.ENDING, now)
        return self._settle(now)

    def _settle(self, now: float) -> list[PrefillAction]:
        """Give the promise when it holds, or start the fence that it needs."""
        if self.phase is not PrefillPhase.ENDING or self._writes:
            return []
        if self._doubtful:
            if self._fencing or self._retry_at is not None:
                return []
            self._fencing = True
            return [PrefillAction.FENCE]
        self.settled = True
        self._enter(PrefillPhase.GONE, now)
        answer = [PrefillAction.SEND_RELEASED] if self._release_asked else []
        return self._drop() + answer

    def _drop(self) -> list[PrefillAction]:
        if not self.holds_entry:
            return []
        self.holds_entry = False
        return [PrefillAction.DROP_ENTRY]


class ReleasedRooms:
    """Generations that D has released, remembered while a message about them may be under way.

    A Release can overtake the message that opens its room; that room must never begin. Bounded by
    `forget_s`, which is longer than any message lives.
    """

    def __init__(self, forget_s: float) -> None:
        self._forget_s = forget_s
        self._until: dict[tuple[int, int], float] = {}

    def add(self, room: int, generation: int, now: float) -> None:
        """D released this generation."""
        self._until[room, generation] = now + self._forget_s

    def has(self, room: int, generation: int, now: float) -> bool:
        """Was it released? Forgets what is old."""
        for key in [key for key, until in self._until.items() if until <= now]:
            del self._until[key]
        return self._until.get((room, generation), -math.inf) > now
