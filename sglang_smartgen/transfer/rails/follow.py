"""Being told when a rail's write is final."""

from __future__ import annotations

import threading
from collections.abc import Callable

from sglang_smartgen.transfer.transport import Completion, WriteHandle, WriteState


def follow(handle: WriteHandle, action: Callable[[], None]) -> None:
    """Call `action` when the handle is final; a rail's own kind of handle is waited for."""
    if isinstance(handle, Completion):
        handle.then(action)
        return

    def wait() -> None:
        while handle.wait(60.0) is WriteState.PENDING:
            pass
        action()

    threading.Thread(target=wait, name="smartgen-rail-wait", daemon=True).start()
