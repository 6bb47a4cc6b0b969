"""P's sender of one request: SmartGen rooms are pushed by the layer hook, the rest goes stock."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender


class SmartGenKVSender(MooncakeKVSender):
    """MooncakeKVSender whose `send` only closes what the layer hook has already pushed."""

    # Pinned index tensors and CUDA events exist on a GPU only.
    supports_host_tensor_indices = torch.cuda.is_available()

    _smart = False

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """Decide between SmartGen and stock for this room, before its first layer runs."""
        super().init(num_kv_indices, aux_index)
        manager, room = self.kv_mgr, self.bootstrap_room
        # First, since the room's pushes may end (and give these back) as soon as it has begun.
        manager.aux_indices[room] = aux_index
        manager.hold_drain(room)
        self._smart = manager.prefill.begin(room, num_kv_indices)
        self._slots: list[npt.NDArray[np.int32]] = []
        if not self._smart:
            manager.let_drain(room)

    def send(
        self,
        kv_indices: Any,
        state_indices: Any = None,
        num_kv_tokens: int | None = None,
        indices_event: Any = None,
    ) -> None:
        """A chunk's pages: stock sends them, SmartGen only notes them until the last chunk."""
        if not self._smart:
            super().send(kv_indices, state_indices, num_kv_tokens, indices_event)
            return
        if self.conclude_state in (KVPoll.Success, KVPoll.Failed):
            return
        if indices_event is not None:
            indices_event.synchronize()
        indices = np.asarray(kv_indices, dtype=np.int32)
        self._slots.append(indices)
        self._record_transfer_indices(indices, state_indices)
        self.curr_idx += len(indices)
        if self.curr_idx == self.num_kv_indices:
            slots = torch.from_numpy(np.concatenate(self._slots).astype(np.int64))
            self.kv_mgr.prefill.finish(self.bootstrap_room, slots)

    def abort(self) -> None:
        """Stock abort; the room's pushes are skipped from here on."""
        super().abort()
        self._end()

    def clear(self) -> None:
        """Stock clean-up; a room that never finished ends here, one that did stays in the store."""
        failed = self.kv_mgr.request_status.get(self.bootstrap_room) != KVPoll.Success
        super().clear()
        if failed:
            self._end()
        else:
            self.kv_mgr.prefill.let_go(self.bootstrap_room)

    def _end(self) -> None:
        self.kv_mgr.prefill.let_go(self.bootstrap_room)
        self.kv_mgr.prefill.cancel(self.bootstrap_room)
