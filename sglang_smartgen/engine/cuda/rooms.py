"""What the device keeps of a room: its slots, and its metadata copied from where P wrote it."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sglang_smartgen.engine.cuda.streams import to_device
from sglang_smartgen.engine.decode_room import DecodeRoom


class DeviceRoom:
    """One room; lives as long as the DecodeRoom it belongs to."""

    def __init__(self, room: DecodeRoom, pool: Tensor) -> None:
        """pool: the device's view of the metadata pool [sparse_layers, slots, kv_heads, width]."""
        self.slots = to_device(room.slots, pool.device)
        self._pool = pool
        self._metadata: dict[int, Tensor] = {}

    def metadata(self, sparse: int) -> Tensor:
        """[prompt_len, kv_heads, width] of a sparse layer, in device memory.

        All of it is here before the first step (design.md section 4), so one copy is enough. It
        crosses the bus once, and not in every step.
        """
        if sparse not in self._metadata:
            self._metadata[sparse] = self._pool[sparse].index_select(0, self.slots)
        return self._metadata[sparse]


class DeviceRooms:
    """The device's part of every room that has decoded."""

    def __init__(self, pool: Tensor) -> None:
        self._pool = pool
        self._known: WeakKeyDictionary[DecodeRoom, DeviceRoom] = WeakKeyDictionary()

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self._pool.device

    def of(self, room: DecodeRoom) -> DeviceRoom:
        """The room's, made when it is first asked for."""
        if room not in self._known:
            self._known[room] = DeviceRoom(room, self._pool)
        return self._known[room]
