"""The batch of one decode step: its rows, how long they are, and the slots that follow from both.

The scheduler hook notes rows and lengths as host numbers before a step, so that no layer has to ask
the device for them. A CUDA graph may run with more rows than the batch has; those attend to the
padding slot of row 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_smartgen.engine.cuda.streams import to_device


class Step:
    """One decode step; row i of the batch is `rows[i]` of req_to_token, `lengths[i]` tokens long.

    The token that the step adds counts in its length.
    """

    def __init__(self, rows: list[int], lengths: list[int]) -> None:
        self.rows = rows
        self.lengths = lengths
        self._tails: dict[tuple[int, ...], Tensor] = {}
        self._padded: Step | None = None

    def padded(self, batch: int) -> Step:
        """The same step with rows of padding up to `batch`."""
        more = batch - len(self.rows)
        if more <= 0:
            return self
        if self._padded is None or len(self._padded.rows) != batch:
            self._padded = Step(self.rows + [0] * more, self.lengths + [1] * more)
        return self._padded

    def tail(self, table: Tensor, members: list[int], starts: list[int]) -> Tensor:
        """Slots of positions `starts[j]` up to the length of member j, int64 [members, T].

        table: int32 [rows, max_len], slots by row and position. Shorter ones end in -1. Made once
        for all layers that ask for the same.
        """
        key = (*members, -1, *starts)
        if key not in self._tails:
            ends = [self.lengths[i] for i in members]
            numbers = to_device(
                torch.tensor([[self.rows[i] for i in members], starts, ends]), table.device
            )
            longest = max(end - start for start, end in zip(starts, ends, strict=True))
            at = numbers[1, :, None] + torch.arange(longest, device=table.device)
            slots = table[numbers[0, :, None], at.clamp(max=table.shape[1] - 1)].long()
            self._tails[key] = torch.where(at < numbers[2, :, None], slots, -1)
        return self._tails[key]
