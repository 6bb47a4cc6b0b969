"""State machine of one room and generation on D: what may be asked, and when slots are free.

    opened -> partial -> local -> releasing -> gone        (whole: opened -> local)

Every method is an event; it returns what the caller must do, in order. Nothing here waits, sends or
frees. The rules behind it (design.md section 2):

* P writes slots and mask before Started only. Until Started was seen they may be written at any
  time, so they are freed on P's promise (Released), on the end of P's process, or at `limit_s`,
  which is longer than P may write without hearing that this generation is open.
* After Started P writes to granted ranges only. Slots are then free as soon as the request ends;
  ranges that P may still write to are freed like the slots above.
* A room that is fully local asks P for the promise while it decodes on, so its end waits for
  nobody.
* A failed room does nothing more with P until it is released.
* Every wait ends at `deadline`; `tick` is what happens then.
"""

from __future__ import annotations

import enum

import msgspec


class DecodePhase(enum.Enum):
    """Where a room is."""

    OPENED = "opened"  # P has the slots and may write them
    PARTIAL = "partial"  # decoding; some entries are on P only
    LOCAL = "local"  # decoding; everything is here
    RELEASING = "releasing"  # over; what P may still write to is in quarantine
    GONE = "gone"


class DecodeAction(enum.Enum):
    """What the caller does."""

    SEND_RELEASE = "send release"
    FAIL = "fail"  # end the request; the cause is `failure`
    FREE_SLOTS = "free slots"  # row, slots and mask may get a new owner
    FREE_RANGES = "free ranges"  # and so may every range granted to this generation


class DecodeLimits(msgspec.Struct, frozen=True):
    """Deadlines in seconds.

    open_s: from opening to Started or success. ask_s: of one fetch. resend_s: between Releases.
    limit_s: quarantine without an answer; must exceed P's lease, the life of a message and the
    time after which a write that failed can no longer land, all together.
    """

    open_s: float
    ask_s: float
    resend_s: float
    limit_s: float


class DecodeRoom:
    """One generation of one room on D. Not thread safe; times are seconds of a monotonic clock."""

    def __init__(self, room: int, generation: int, now: float, limits: DecodeLimits) -> None:
        """P is about to be told the slots."""
        self.room = room
        self.generation = generation
        self.phase = DecodePhase.OPENED
        self.failure: str | None = None
        self.settled = False  # P can write nothing of this generation any more
        self.slots_reachable = True  # P may write slots and mask
        self.overdue = False  # freed without an answer: worth a line in the log
        self._limits = limits
        self._since = now  # of the phase
        self._asks: dict[int, float] = {}  # number -> deadline
        self._sent_at: float | None = None  # last Release
        self._first_sent: float | None = None
        self._fill_ended = False
        self._slots_freed = False
        self._ranges_freed = False

    # Questions ------------------------------------------------------------------------------

    @property
    def may_ask(self) -> bool:
        """May P be asked for entries? Its fills may be placed for as long."""
        return self.phase is DecodePhase.PARTIAL and self.failure is None

    @property
    def may_grant(self) -> bool:
        """May P be granted ranges to fill?"""
        return self.may_ask and not self._fill_ended

    @property
    def open(self) -> bool:
        """Is this generation to be named to P, whose leave to write it renews?"""
        return self.phase in (DecodePhase.OPENED, DecodePhase.PARTIAL)

    def is_stale(self, generation: int) -> bool:
        """Is a message about this room meant for another generation?"""
        return generation != self.generation

    @property
    def deadline(self) -> float | None:
        """When `tick` has something to do; None when nothing is waited for."""
        times = list(self._asks.values())
        if self.phase is DecodePhase.OPENED and self.failure is None:
            times.append(self._since + self._limits.open_s)
        if self._waits_for_promise():
            assert self._sent_at is not None and self._first_sent is not None
            times.append(self._sent_at + self._limits.resend_s)
            times.append(self._first_sent + self._limits.limit_s)
        return min(times, default=None)

    # Events of P ----------------------------------------------------------------------------

    def started(self, left: int, now: float) -> list[DecodeAction]:
        """P's Started: its writes to slots and mask are over; `left` entries are not here."""
        self.slots_reachable = False
        if self.phase is DecodePhase.RELEASING:
            return self._free_slots()
        if self.phase is not DecodePhase.OPENED:
            return []  # a repeat
        if self.failure is not None:
            return []
        self._enter(DecodePhase.PARTIAL, now)
        return [] if left else self._all_here(now)

    def whole(self, now: float) -> None:
        """A stock transfer is complete: no SmartGen write was ever made for this generation."""
        if self.phase is DecodePhase.OPENED:
            self.slots_reachable, self.settled = False, True
            self._enter(DecodePhase.LOCAL, now)

    def answered(self, number: int, failure: str | None, now: float) -> list[DecodeAction]:
        """The answer to one fetch; one that is late or came before is dropped."""
        if self._asks.pop(number, None) is None or failure is None:
            return []
        return self._fail(failure)

    def filled(self, left: int, failure: str | None, now: float) -> list[DecodeAction]:
        """P has filled a range; call it after the bytes were placed, for which ask `may_ask`.

        After a failure the room decodes on, without fill: what it needs it asks for.
        """
        if not self.may_ask:
            return []
        if failure is not None:
            self._fill_ended = True
            return []
        return [] if left else self._all_here(now)

    def all_here(self, now: float) -> list[DecodeAction]:
        """Nothing of the prompt is on P only any more, by the mask and by what was fetched."""
        return self._all_here(now) if self.may_ask else []

    def failed(self, cause: str) -> list[DecodeAction]:
        """P says that the room failed, or something failed here."""
        return self._fail(cause) if self._active() else []

    def released(self, now: float) -> list[DecodeAction]:
        """P's promise. One that nobody asked for is not believed."""
        if self._first_sent is None:
            return []
        return self._settled(now)

    def stock(self, now: float) -> list[DecodeAction]:
        """P turned out not to speak SmartGen: it never writes for it, and is never asked."""
        return self._settled(now)

    def peer_gone(self, now: float) -> list[DecodeAction]:
        """The P process that got the slots has ended, and its writes with it.

        A silent P proves nothing, and the end of one process nothing about rooms of the next.
        """
        needed = self.phase in (DecodePhase.OPENED, DecodePhase.PARTIAL)
        actions = self._fail("the prefill node ended") if needed else []
        return actions + self._settled(now)

    # Events of the request ------------------------------------------------------------------

    def asked(self, number: int, now: float) -> None:
        """A fetch was sent. Raises ValueError when it was not allowed."""
        if not self.may_ask:
            raise ValueError(f"room {self.room} is {self.phase.value}; it may not ask P")
        self._asks[number] = now + self._limits.ask_s

    def release(self, now: float) -> list[DecodeAction]:
        """The request is over (finished, aborted, retracted, failed); its slots can go."""
        if not self._active():
            return []
        self._asks.clear()
        self._enter(DecodePhase.RELEASING, now)
        if self.settled:
            return self._settled(now)
        actions = [] if self.slots_reachable else self._free_slots()
        return actions + self._send_release(now, first=True)

    def tick(self, now: float) -> list[DecodeAction]:
        """Time passed; call it at `deadline`, or more often."""
        actions: list[DecodeAction] = []
        late = [number for number, deadline in self._asks.items() if deadline <= now]
        for number in late:
            del self._asks[number]
        if late:
            actions += self._fail(f"no answer from prefill within {self._limits.ask_s:g} s")
        opening = self.phase is DecodePhase.OPENED and self.failure is None
        if opening and now >= self._since + self._limits.open_s:
            actions += self._fail(f"prefill did not start within {self._limits.open_s:g} s")
        if self._waits_for_promise():
            assert self._sent_at is not None and self._first_sent is not None
            if now >= self._first_sent + self._limits.limit_s:
                self.overdue = True
                return actions + self._settled(now)
            if now >= self._sent_at + self._limits.resend_s:
                actions += self._send_release(now)
        return actions

    # ----------------------------------------------------------------------------------------

    def _active(self) -> bool:
        return self.phase not in (DecodePhase.RELEASING, DecodePhase.GONE)

    def _waits_for_promise(self) -> bool:
        return self._first_sent is not None and not self.settled

    def _enter(self, phase: DecodePhase, now: float) -> None:
        self.phase, self._since = phase, now

    def _fail(self, cause: str) -> list[DecodeAction]:
        if self.failure is not None or not self._active():
            return []
        self.failure = cause
        return [DecodeAction.FAIL]

    def _all_here(self, now: float) -> list[DecodeAction]:
        self._enter(DecodePhase.LOCAL, now)
        return self._send_release(now, first=True)

    def _send_release(self, now: float, first: bool = False) -> list[DecodeAction]:
        # The end of a local room starts the quarantine anew.
        if first or self._first_sent is None:
            self._first_sent = now
        self._sent_at = now
        return [DecodeAction.SEND_RELEASE]

    def _settled(self, now: float) -> list[DecodeAction]:
        self.settled, self.slots_reachable = True, False
        actions: list[DecodeAction] = []
        if self.phase is DecodePhase.RELEASING:
            actions += self._free_slots()
            self._enter(DecodePhase.GONE, now)
        if not self._ranges_freed and self.phase in (DecodePhase.LOCAL, DecodePhase.GONE):
            self._ranges_freed = True
            actions.append(DecodeAction.FREE_RANGES)
        return actions

    def _free_slots(self) -> list[DecodeAction]:
        if self._slots_freed:
            return []
        self._slots_freed = True
        return [DecodeAction.FREE_SLOTS]
