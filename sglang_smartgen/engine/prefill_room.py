"""One request on P: what D announced, what is pushed of it, and who still holds its bytes."""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from sglang_smartgen.core import prefill_room as core
from sglang_smartgen.transfer.messages import Endpoint, OpenRoom
from sglang_smartgen.transfer.push_room import Peer, PushRoom


class Outcome(Protocol):
    """What the KV manager does when a room's pushes have ended (push thread, `fail` aside)."""

    def live(self, room: int) -> bool:
        """False once the room has failed or was aborted."""

    def fail(self, room: int, cause: str) -> None:
        """End a room that has not begun to push (any thread)."""

    def conclude(self, room: PushRoom) -> None:
        """The planned blocks are on D: write what SGLang adds to them.

        When that fails it sets `room.failure` (its bytes may still land) or `room.ended_early`.
        """

    def start(self, room: PushRoom) -> None:
        """Every write to D is complete: Started and success; `room.ended_early` when that fails."""

    def ended(self, room: PushRoom) -> None:
        """No further write is made by the push; `failure` or `ended_early` says what went wrong."""


class PrefillRoom(msgspec.Struct, eq=False):
    """State of one room and generation. Guarded by the lock of PrefillRooms.

    machine: whether it may still write and what must be kept; PrefillRooms does what it answers.
    For the machine, that the server of the store serves the room is one write to D's arena.
    """

    machine: core.PrefillRoom
    message: OpenRoom
    session: str
    peer: Peer | None  # as it was when D opened the room; None: its layout differs
    endpoint: Endpoint
    slots: npt.NDArray[np.int64]
    push: PushRoom | None = None
    scheduler_holds: bool = False
    push_holds: bool = False
    finishing: bool = False
    filled: bool = False  # the scheduler copies nothing more to its entry; scheduler thread
    began: float | None = None  # when its first layer had run
    served: bool = False  # the server of the store may write for it
    handing_over: bool = False  # the server is being told; it cannot be told to stop yet
    doubtful: bool = False  # a write of the server failed
    stop_again_at: float = 0.0
    forget_at: float | None = None  # gone without a promise

    @property
    def key(self) -> tuple[int, int]:
        """Room and generation."""
        return self.message.room, self.message.generation
