"""What P knows of a decode rank it pushes to, and of a room whose prompt it pushes."""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from torch import Tensor

from sglang_smartgen.core.room_plan import RoomPlan
from sglang_smartgen.transfer.messages import Endpoint, Registration
from sglang_smartgen.transfer.store import StoreEntry
from sglang_smartgen.transfer.transport import Span

GRACE, LEAST_GRACE_S = 0.02, 0.02
"""Of the time of a prefill: what pushes may take after it. A fast network needs no more."""


class Peer(msgspec.Struct, frozen=True):
    """A decode rank as P writes to it. Addresses are the decode rank's, one a layer."""

    registration: Registration
    keys: list[int]
    values: list[int]

    def mask_address(self, layer: int, row: int, position: int) -> int:
        """Address of one mask byte."""
        r = self.registration
        return r.mask + (layer * r.mask_rows + row) * r.mask_width + position


class Gate(Protocol):
    """Whether P may still write for a room; asked and told around every write."""

    def live(self) -> bool:
        """False once the room has ended: nothing more need be prepared."""

    def began(self) -> bool:
        """Leave for one write; if given, `ended` must follow."""

    def late(self) -> None:
        """The write is complete, but a copy of its bytes may land again: fence before reuse."""

    def ended(self, done: bool) -> None:
        """The write is complete, or its bytes may still land."""


class PushRoom:
    """What the push thread knows of one room.

    `failure` is the cause of a failed write, whose bytes may still land; `ended_early` the cause of
    an end without one. Each is set once and ends the pushes. writes: one (monotonic start, end,
    bytes, spans) a write. masks: of what has arrived and D does not know of yet. grace_s: seconds
    that blocks of an elastic plan may take after the prefill, None until it is over; after_bytes:
    how much of them has been sent since.
    """

    def __init__(
        self,
        *,
        entry: StoreEntry,
        plan: RoomPlan,
        peer: Peer,
        reply: Endpoint,
        slots: npt.NDArray[np.int64],
        row: int,
        with_metadata: bool,
        keep: bool,
        gate: Gate,
        verify: bool = False,
    ) -> None:
        self.entry = entry
        self.plan = plan
        self.peer = peer
        self.reply = reply
        self.slots = slots
        self.row = row
        self.with_metadata = with_metadata
        self.keep = keep
        self.gate = gate
        self.verify = verify  # D wants checksums
        self.pushed = [0] * len(entry.captured)
        # The prompt's last queries [w, q_heads, head_dim] by layer, for a plan that looks at them.
        self.queries: dict[int, Tensor] = {}
        self.prefill_s = 0.0
        self.grace_s: float | None = None
        self.after_bytes = 0
        self.proactive_bytes = 0
        self.metadata_bytes = 0
        self.writes: list[tuple[float, float, int, int]] = []
        self.masks: list[Span] = []
        self.late = False  # bytes of a complete write may land again
        self.failure: str | None = None
        self.ended_early: str | None = None

    @property
    def over(self) -> bool:
        """True once nothing more of it may be sent."""
        return self.failure is not None or self.ended_early is not None

    def prefilled(self, seconds: float) -> None:
        """Its prompt is computed; that took so long. A fiftieth of it more is not noticed."""
        self.prefill_s = seconds
        self.grace_s = max(LEAST_GRACE_S, GRACE * seconds)
