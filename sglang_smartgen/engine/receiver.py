"""D's receiver of one request: opens the SmartGen room with the slots that it tells P."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVReceiver

from sglang_smartgen.config import ConfigError
from sglang_smartgen.core.recordings import RecordingError
from sglang_smartgen.engine.peers import check_sizes
from sglang_smartgen.transfer.messages import Endpoint

OVERRIDES_KEY = "smartgen"


class SmartGenKVReceiver(MooncakeKVReceiver):
    """MooncakeKVReceiver that opens a room; `request` is set by the scheduler hook beforehand."""

    request: Any = None

    def send_metadata(self, kv_indices: Any, *rest: Any, **named: Any) -> None:
        """Row, mask and generation first, then the slots to P (design.md section 4, step 1)."""
        manager = self.kv_mgr
        try:
            manager.open_message = self._open(kv_indices)
        except (ConfigError, RecordingError) as error:
            manager.record_failure(self.bootstrap_room, str(error))
            manager.update_status(self.bootstrap_room, KVPoll.Failed)
            return
        try:
            super().send_metadata(kv_indices, *rest, **named)
        finally:
            manager.open_message = None

    def _open(self, kv_indices: Any) -> Any:
        if self.request is None or not self.bootstrap_infos:
            return None
        sizes = self.prefill_info.attn_tp_size, self.kv_mgr.attn_tp_size
        check_sizes(self.bootstrap_addr, *sizes)
        peer = None
        if len(self.bootstrap_infos) == 1 and not self.bootstrap_infos[0]["is_dummy"]:
            info = self.bootstrap_infos[0]
            peer = Endpoint(info["rank_ip"], int(info["rank_port"]))
        params = self.request.sampling_params.custom_params
        return self.kv_mgr.decode.open(
            room=self.bootstrap_room,
            rid=self.request.rid,
            row=int(self.request.kv.req_pool_idx),
            slots=torch.from_numpy(np.asarray(kv_indices, dtype=np.int64)),
            peer=peer,
            bootstrap_addr=self.bootstrap_addr,
            overrides=params.get(OVERRIDES_KEY) if isinstance(params, dict) else None,
        )
