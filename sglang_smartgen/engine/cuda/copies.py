"""P on a GPU host: a layer's new tokens go from the device to the pinned store beside the prefill.

Owner: the scheduler thread calls everything but `_run`. A copy has two halves. The rows are
gathered to a buffer on the forward stream, so that SGLang may give their slots to somebody else at
once; the buffer then goes to the store on the side stream. The copier thread waits for each copy's
event, in order, and only then counts the tokens as captured and wakes the push: what the store says
it has is there. It holds the buffer until then. What must not happen before the copies are done is
queued `behind` them.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from weakref import WeakKeyDictionary

from torch import Tensor

from sglang_smartgen.engine.cuda.streams import Mark, Streams, to_device
from sglang_smartgen.engine.device_path import Stored
from sglang_smartgen.transfer.push import PushRoom

logger = logging.getLogger(__name__)


class DeviceCopies:
    """See `device_path.Copies`."""

    def __init__(self, streams: Streams, stored: Stored) -> None:
        """stored: called on the copier thread."""
        self._streams = streams
        self._stored = stored
        self._taken: WeakKeyDictionary[PushRoom, list[int]] = WeakKeyDictionary()
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="smartgen-copies", daemon=True).start()

    def taken(self, push: PushRoom, layer: int) -> int:
        """See Copies."""
        return self._of(push)[layer]

    def copy(
        self,
        push: PushRoom,
        layer: int,
        slots: Tensor,
        pools: tuple[Tensor, Tensor],
        queries: Tensor | None = None,
    ) -> None:
        """See Copies; launches and returns."""
        entry = push.entry
        start, stop = self.taken(push, layer), min(len(slots), entry.prompt_len)
        if start >= stop:
            return
        wanted = slots[start:stop]
        if wanted.device != pools[0].device:
            wanted = to_device(wanted, pools[0].device)
        staged = [pool.index_select(0, wanted) for pool in pools]
        last = None if queries is None else queries.clone()
        with self._streams.aside():
            for side, rows in enumerate(staged):
                entry.kv[layer, side, start:stop].copy_(rows, non_blocking=True)
            on_host = None if last is None else self._streams.to_host(last)
            done = self._streams.mark()
        self._of(push)[layer] = stop
        # `staged` and `last` live in the closure until the copy is done.
        self._work.put(lambda: self._arrived(done, (staged, last), push, layer, stop, on_host))

    def behind(self, call: Callable[[], None]) -> None:
        """See Copies; `call` runs on the copier thread."""
        self._work.put(call)

    def _of(self, push: PushRoom) -> list[int]:
        return self._taken.setdefault(push, list(push.entry.captured))

    def _arrived(
        self,
        done: Mark,
        held: object,
        push: PushRoom,
        layer: int,
        stop: int,
        queries: Tensor | None,
    ) -> None:
        done.synchronize()
        if queries is not None:
            push.queries[layer] = queries
        push.entry.captured[layer] = stop
        self._stored(push, layer)

    def _run(self) -> None:
        while True:
            work = self._work.get()
            try:
                work()
            except Exception:
                # Or the thread would end for every later room; this one's push ends unfinished.
                logger.exception("a copy to the prefill store failed")
            del work
