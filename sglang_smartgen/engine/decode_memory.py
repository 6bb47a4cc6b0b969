"""What of D's memory P writes to from outside, and what P must know to do so."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_smartgen.engine.device_path import DevicePath
from sglang_smartgen.engine.model_facts import ModelFacts
from sglang_smartgen.select.base import Selector
from sglang_smartgen.transfer.arena import Arena
from sglang_smartgen.transfer.fill_lane import FillLane
from sglang_smartgen.transfer.messages import VERSION, Registration
from sglang_smartgen.transfer.region import HostRegion
from sglang_smartgen.transfer.transport import Transport


class DecodeMemory:
    """Masks, metadata pool, arena, fill arena and scratch; all but the KV pool, which is SGLang's.

    masks: int8 [layers, rows, max_len]. metadata: [sparse_layers, slots, kv_heads, width],
    addressed by the KV pool's own slots; device_metadata is the same where the device reads it.
    """

    def __init__(
        self,
        facts: ModelFacts,
        selector: Selector,
        transport: Transport,
        fill: FillLane,
        path: DevicePath,
    ) -> None:
        """Allocate and register with the transport."""
        self._path = path
        self._facts = facts
        self._selector = selector
        self._fill = fill
        g = facts.geometry
        rows, max_len = facts.req_to_token.shape
        slots = facts.keys[0].shape[0]
        self._mask_memory = HostRegion(g.layers * rows * max_len)
        self.masks = self._mask_memory.tensor(0, (g.layers, rows, max_len), torch.int8)
        self.metadata = self._metadata_pool(slots)
        self.arena = Arena(slots * g.kv_heads * g.entry_bytes)
        self._scratch = HostRegion(4096)
        for memory in (
            self._mask_memory,
            self._metadata_memory,
            self.arena.memory,
            fill.memory,
            self._scratch,
        ):
            transport.register(memory.region)

    def _metadata_pool(self, slots: int) -> Tensor:
        g, s = self._facts.geometry, self._selector
        shape = (max(1, len(g.sparse_layers)), slots, g.kv_heads, s.metadata_width)
        length = torch.Size(shape).numel() * s.metadata_dtype.itemsize
        self._metadata_memory = self._path.region(max(1, length))
        self.device_metadata = self._metadata_memory.device_tensor(0, shape, s.metadata_dtype)
        return self._metadata_memory.tensor(0, shape, s.metadata_dtype)

    def registration(self, session: str, epoch: int) -> Registration:
        """What every P must know once to write here."""
        g = self._facts.geometry
        _, rows, max_len = self.masks.shape
        return Registration(
            version=VERSION,
            session=session,
            epoch=epoch,
            fingerprint=self._selector.fingerprint(),
            layers=g.layers,
            kv_row_bytes=g.row_bytes,
            mask=self.masks.data_ptr(),
            mask_rows=rows,
            mask_width=max_len,
            metadata=[self.metadata[i].data_ptr() for i in range(len(g.sparse_layers))],
            metadata_row_bytes=self.metadata[0, 0].numel() * self.metadata.itemsize,
            arena=self.arena.region.address,
            arena_bytes=self.arena.region.length,
            fill=self._fill.region.address,
            fill_bytes=self._fill.region.length,
            scratch=self._scratch.region.address,
            tp_size=self._facts.tp_size,
        )
