"""Fences in the background, one at a time to a peer, so that a stuck peer delays no other.

Owner: one `Fencer` a transport. Whoever has a room whose failed writes may still land submits it,
which starts a thread for that peer unless one is at work. A fence covers every room that waited
when it began, and its thread ends when none is left. `fenced` is called on that thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

Key = tuple[int, int]
"""Room and generation."""


class Fencer:
    """Runs `fence(session)` and tells `fenced(key, sure)` for each room that it covers."""

    def __init__(self, fence: Callable[[str], bool], fenced: Callable[[Key, bool], None]) -> None:
        """fence: True when no earlier write to this session can land; False: not known."""
        self._fence = fence
        self._fenced = fenced
        self._waiting: dict[str, set[Key]] = {}
        self._lock = threading.Lock()

    def submit(self, session: str, key: Key) -> None:
        """Fence the room's peer; a repeat of a waiting one has no effect."""
        with self._lock:
            at_work = session in self._waiting
            self._waiting.setdefault(session, set()).add(key)
        if not at_work:
            name = f"smartgen-fence-{session}"
            threading.Thread(target=self._run, args=(session,), name=name, daemon=True).start()

    def _run(self, session: str) -> None:
        while True:
            with self._lock:
                covered = self._waiting[session]
                if not covered:
                    del self._waiting[session]
                    return
                self._waiting[session] = set()
            sure = False
            try:
                sure = self._fence(session)
            except Exception:
                logger.exception("fence of %s failed", session)
            for key in sorted(covered):
                try:
                    self._fenced(key, sure)
                except Exception:
                    logger.exception("room %s: the end of its fence failed", key[0])
