"""Two threads that change a room's status do not lose the later state."""

from __future__ import annotations

import threading
import time

from sglang_smartgen.engine.room_status import SerialStatus

BOOTSTRAPPING, WAITING = 1, 2


class TwoSteps:
    """What SGLang's manager does: the status only grows, read and written in two steps."""

    def __init__(self) -> None:
        self.status: dict[int, int] = {}

    def update_status(self, room: int, status: int) -> None:
        before = self.status.get(room, status)
        time.sleep(0.03)
        self.status[room] = max(before, status)


class Serial(SerialStatus, TwoSteps):
    pass


def at_once(manager: TwoSteps) -> int:
    """D's slots are heard of a moment before the room is opened."""
    heard = threading.Thread(target=manager.update_status, args=(7, WAITING))
    heard.start()
    time.sleep(0.01)
    manager.update_status(7, BOOTSTRAPPING)
    heard.join()
    return manager.status[7]


def test_a_room_that_is_opened_late_still_waits_for_input() -> None:
    assert at_once(TwoSteps()) == BOOTSTRAPPING  # the request would hang
    assert at_once(Serial()) == WAITING
