"""P's releases that cannot be answered at once: the room still pushes, or a write of it failed.

Owner: one `Settler` a prefill rank, with one thread. The fetch thread hands it a Release that is
not settled yet, which wakes it; it waits or fences, answers, and takes the next. It exists so that
this waiting never delays a fetch. D repeats a Release every second; repeats of a waiting one are
dropped.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from sglang_smartgen.transfer.messages import Release

logger = logging.getLogger(__name__)


class Settler:
    """Runs `settle` for one Release after the other and `answer` for those that it settled."""

    def __init__(
        self, settle: Callable[[Release], bool], answer: Callable[[Release], None]
    ) -> None:
        self._settle = settle
        self._answer = answer
        self._waiting: set[tuple[int, int]] = set()
        self._lock = threading.Lock()
        self._inbox: queue.SimpleQueue[Release] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="smartgen-settle", daemon=True).start()

    def submit(self, release: Release) -> None:
        """Settle a Release in the background; a repeat of a waiting one has no effect."""
        key = (release.room, release.generation)
        with self._lock:
            if key in self._waiting:
                return
            self._waiting.add(key)
        self._inbox.put(release)

    def _run(self) -> None:
        while True:
            release = self._inbox.get()
            try:
                # Unsettled after its deadline: D asks again.
                if self._settle(release):
                    self._answer(release)
            except Exception:
                logger.exception("release of room %s failed", release.room)
            finally:
                with self._lock:
                    self._waiting.discard((release.room, release.generation))
