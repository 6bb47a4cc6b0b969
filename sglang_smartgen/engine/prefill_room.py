"""One request on P: what D announced, what is pushed of it, and who still holds its bytes."""

from __future__ import annotations

import threading
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from sglang_smartgen.transfer.messages import Endpoint, OpenRoom
from sglang_smartgen.transfer.push import Peer, PushRoom


class Outcome(Protocol):
    """What the KV manager does when a room's pushes have ended."""

    def live(self, room: int) -> bool:
        """False once the room has failed or was aborted."""

    def fail(self, room: int, cause: str) -> None:
        """End a room that has not begun to push."""

    def pushed(self, room: PushRoom) -> None:
        """The planned blocks are on D, or `room.failure` says why not (push thread)."""


class Announced(msgspec.Struct):
    """A room that D has opened; the request itself may not be here yet."""

    message: OpenRoom
    peer: Peer | None  # as it was then; None: its layout differs
    endpoint: Endpoint
    slots: npt.NDArray[np.int64]


class PrefillRoom(msgspec.Struct):
    """A room whose layers are captured and pushed."""

    push: PushRoom
    scheduler_holds: bool = True
    ended: threading.Event = msgspec.field(default_factory=threading.Event)
    finishing: bool = False
    began: float | None = None  # when its first layer had run
