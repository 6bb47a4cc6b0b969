"""One request on D: its row, what of its prompt is local, and how it ends."""

from __future__ import annotations

import time

import msgspec
import torch
from torch import Tensor

from sglang_smartgen.config import SmartGenConfig
from sglang_smartgen.core.geometry import DENSE_LAYERS, KVGeometry
from sglang_smartgen.core.mask import LOCAL, REMOTE
from sglang_smartgen.select.base import budget
from sglang_smartgen.transfer.messages import Endpoint, Started


class RoomStats(msgspec.Struct):
    """What one request cost, in bytes, seconds and counts."""

    rid: str
    room: int
    mode: str
    prompt_len: int
    bytes_proactive: int = 0
    bytes_metadata: int = 0
    bytes_on_demand: int = 0
    bytes_speculative: int = 0
    local_share_at_start: float = 1.0
    entries_selected: int = 0
    entries_fetched: int = 0
    fetched_layers: list[int] = []
    steps: int = 0
    fallback: str = ""


class DecodeRoom:
    """State of one room and generation on D.

    mask: int8 [layers, prompt_len], P writes it (1 = the token's bytes are on D in that layer).
    held: int8 [sparse_layers, kv_heads, prompt_len], D writes it: 1 = this entry was fetched and is
    kept in the pool. An entry is local when either says so, so `minimum` of the two is its status.
    """

    def __init__(
        self,
        *,
        room: int,
        generation: int,
        rid: str,
        row: int,
        slots: Tensor,
        mask: Tensor,
        peer: Endpoint | None,
        bootstrap_addr: str,
        config: SmartGenConfig,
        geometry: KVGeometry,
    ) -> None:
        self.room = room
        self.generation = generation
        self.rid = rid
        self.row = row
        self.slots = slots
        self.mask = mask
        self.peer = peer
        self.bootstrap_addr = bootstrap_addr
        self.config = config
        self.geometry = geometry
        self.opened = time.monotonic()
        self.prompt_len = int(slots.numel())
        self.k = budget(self.prompt_len, config.ratio)
        self.started: Started | None = None
        self.failure: str | None = None
        self.layer_is_local = [False] * geometry.layers
        self.held = torch.full(
            (geometry.sparse_layers, geometry.kv_heads, self.prompt_len), REMOTE, dtype=torch.int8
        )
        self.stats = RoomStats(rid, room, config.mode, self.prompt_len)

    @property
    def selects_all(self) -> bool:
        """True when every entry of the prompt is used, so that no selector runs."""
        return self.k >= self.prompt_len

    def commit(self, whole: bool) -> None:
        """P reported success: on partial KV, or with the `whole` KV here."""
        if whole:
            self.mask.fill_(LOCAL)
        share = (self.mask == LOCAL).float().mean().item()
        self.stats.local_share_at_start = share
        if self.started is not None:
            self.stats.bytes_proactive = self.started.proactive_bytes
            self.stats.bytes_metadata = self.started.metadata_bytes

    def status(self, layer: int) -> Tensor | None:
        """int8 [kv_heads, prompt_len] status of every entry, or None when all are local."""
        if self.layer_is_local[layer]:
            return None
        status = torch.minimum(self.mask[layer], self.held[layer - DENSE_LAYERS])
        if bool((status == LOCAL).all()):
            self.layer_is_local[layer] = True
            return None
        return status

    def fail(self, cause: str) -> None:
        """Remember the first cause; the scheduler hook ends the request with it."""
        self.failure = self.failure or cause
