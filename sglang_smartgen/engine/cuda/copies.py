"""P on a GPU host: a layer's new tokens go from the device to the pinned store beside the prefill.

Owner: the scheduler thread calls everything but `_run`. A copy has two halves. The rows are
gathered to a buffer on the forward stream, so that SGLang may give their slots to somebody else at
once; the buffer then goes to the store on the side stream. The copier thread waits for each copy's
event, in order, and only then counts the tokens as captured and wakes the push: what the store says
it has is there. It holds the buffer until then. The selector's metadata is made beside the copy, on
the device, where that can be. What must not happen before the copies are done is queued `behind`
them.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from weakref import WeakKeyDictionary

from torch import Tensor

from sglang_smartgen.engine.cuda.streams import Streams, to_device
from sglang_smartgen.engine.device_path import Stored
from sglang_smartgen.select.base import Selector
from sglang_smartgen.transfer.push_room import PushRoom

logger = logging.getLogger(__name__)


class _Progress:
    """What of one push is copied or under way, and the keys that its metadata is centred on."""

    def __init__(self, push: PushRoom) -> None:
        entry = push.entry
        self.taken = list(entry.captured)
        self.encoded = list(entry.encoded_before)
        self.anchors: dict[int, Tensor] = {}


class DeviceCopies:
    """See `device_path.Copies`."""

    def __init__(self, streams: Streams, stored: Stored, selector: Selector) -> None:
        """stored: called on the copier thread."""
        self._streams = streams
        self._stored = stored
        self._selector = selector
        self._known: WeakKeyDictionary[PushRoom, _Progress] = WeakKeyDictionary()
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="smartgen-copies", daemon=True).start()

    def taken(self, push: PushRoom, layer: int) -> int:
        """See Copies."""
        return self._of(push).taken[layer]

    def copy(
        self,
        push: PushRoom,
        layer: int,
        slots: Tensor,
        pools: tuple[Tensor, Tensor],
        queries: Tensor | None = None,
    ) -> None:
        """See Copies; launches and returns."""
        entry, progress = push.entry, self._of(push)
        start, stop = progress.taken[layer], min(len(slots), entry.prompt_len)
        if start >= stop:
            return
        wanted = slots[start:stop]
        if wanted.device != pools[0].device:
            wanted = to_device(wanted, pools[0].device)
        staged = [pool.index_select(0, wanted) for pool in pools]
        last = None if queries is None else queries.clone()
        with self._streams.aside():
            for side, rows in enumerate(staged):
                entry.own(layer, side, start, stop).copy_(rows, non_blocking=True)
            on_host = None if last is None else self._streams.to_host(last)
            metadata = self._encode(push, progress, layer, staged[0], start)
            done = self._streams.mark()
        progress.taken[layer] = stop
        # What the copies read lives in the closure until they are done.
        held = staged, last, metadata

        def arrived() -> None:
            done.synchronize()
            if on_host is not None:
                push.queries[layer] = on_host
            if metadata is not None:
                entry.encoded_before[entry.sparse_layers.index(layer)] = stop
            entry.captured[layer] = stop
            self._stored(push, layer)
            _ = held

        self._work.put(arrived)

    def _encode(
        self, push: PushRoom, progress: _Progress, layer: int, keys: Tensor, start: int
    ) -> Tensor | None:
        """Metadata of the tokens from `start`, on its way to the store; None: the push makes it.

        That is so for a layer without, and for a prompt whose first chunk is shorter than what the
        metadata is centred on: then the push thread encodes it from the store.
        """
        entry, selector = push.entry, self._selector
        if layer not in entry.sparse_layers or entry.metadata.shape[-1] == 0:
            return None
        sparse = entry.sparse_layers.index(layer)
        length = min(selector.anchor_tokens, entry.prompt_len)
        if progress.encoded[sparse] != start or (start == 0 and len(keys) < length):
            return None
        if start == 0:
            progress.anchors[layer] = keys[:length].clone()
        encoded = selector.encode(layer, keys, progress.anchors[layer] if length else None)
        stop = start + len(keys)
        entry.metadata[sparse, start:stop].copy_(encoded, non_blocking=True)
        progress.encoded[sparse] = stop
        return encoded

    def behind(self, call: Callable[[], None]) -> None:
        """See Copies; `call` runs on the copier thread."""
        self._work.put(call)

    def _of(self, push: PushRoom) -> _Progress:
        if push not in self._known:
            self._known[push] = _Progress(push)
        return self._known[push]

    def _run(self) -> None:
        while True:
            work = self._work.get()
            try:
                work()
            except Exception:
                # Or the thread would end for every later room; this one's push ends unfinished.
                logger.exception("a copy to the prefill store failed")
            del work
