"""Pieces of `room_world`: sizes, deadlines, memory that shows whose bytes it holds, messages."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_smartgen.core.decode_room import DecodeLimits, DecodeRoom
from sglang_smartgen.core.prefill_room import PrefillLimits, PrefillRoom
from sglang_smartgen.transfer.transport import Region, WriteHandle

SIZE = 8  # bytes of a slot and of a range
SLOTS, RANGES, ENTRIES = 6, 4, 4
SLOTS_A_ROOM = 2
FREE, FRESH, DROPPED = 0xEE, 0x00, 0xDD
NOBODY = bytes([FREE]) * SIZE
REMOTE, LOCAL = 2, 1
ROOM_NUMBERS = 3  # a client uses them again

MESSAGE_LIFE_S = 4.0
LATE_S = 5.0  # longest time after which a failed write still lands
WRITE_S = 3.0
PREFILL_LIMITS = PrefillLimits(lease_s=10.0, idle_s=25.0, fence_retry_s=2.0, doubt_s=25.0)
DECODE_LIMITS = DecodeLimits(open_s=20.0, ask_s=5.0, resend_s=2.0, limit_s=25.0)

Key = tuple[int, int]


class Memory:
    """Some bytes of a process."""

    def __init__(self, length: int, value: int) -> None:
        self.bytes = (ctypes.c_ubyte * length)(*([value] * length))
        self.region = Region(ctypes.addressof(self.bytes), length)

    def fill(self, start: int, length: int, value: int) -> None:
        ctypes.memset(self.region.address + start, value, length)

    def read(self, start: int, length: int) -> bytes:
        return bytes(self.bytes[start : start + length])


def pattern(generation: int) -> int:
    """The byte that a generation's KV is made of."""
    return generation % 200 + 3


@dataclass
class Message:
    """A message under way. `epoch`: of the D process that sent it (to P only)."""

    to: str
    kind: str
    key: Key
    sent: float
    epoch: int = 0
    number: int = 0
    place: list[int] = field(default_factory=list)
    left: int = 0
    failure: str | None = None
    open: list[Key] = field(default_factory=list)
    base: int = 0  # address of D's memory, in the message that opens a room


@dataclass
class DRoom:
    machine: DecodeRoom
    slots: list[int]
    p_epoch: int  # of the P process that has the request
    ranges: dict[int, int] = field(default_factory=dict)  # number -> range
    over: bool = False  # the request has failed; its owner releases it soon


@dataclass
class PRoom:
    machine: PrefillRoom
    slots: list[int]
    base: int
    stage: str = "idle"  # idle, data, mask, pushed
    entry: int | None = None
    left: int = 2


@dataclass
class Write:
    handle: WriteHandle
    room: PRoom
    deadline: float
    done: Callable[[bool], None]
