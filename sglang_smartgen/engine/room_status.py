"""A room's status in SGLang's KV manager, changed by one thread at a time.

SGLang 0.5.23 reads the status and writes the new one in two steps. On P the scheduler thread opens
a room (Bootstrapping) while the bootstrap thread hears that D has its slots (WaitingForInput). When
both have read that there is no status yet, Bootstrapping can be written last, and the request waits
until SGLang gives it up after 300 s.
"""

from __future__ import annotations

import threading
from typing import Any


class SerialStatus:
    """Goes before SGLang's manager class; its `update_status` then is one step."""

    def __init__(self, *args: Any, **named: Any) -> None:
        # Set first: the base class starts threads. Reentrant, as SGLang calls itself.
        self._status_lock = threading.RLock()
        super().__init__(*args, **named)

    def update_status(self, bootstrap_room: int, status: Any) -> None:
        """See SGLang's CommonKVManager."""
        with self._status_lock:
            super().update_status(bootstrap_room, status)  # type: ignore[misc]
