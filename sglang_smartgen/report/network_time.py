"""How long a cell of `smartgen bench network` takes: for the time left, and for `--quick`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sglang_smartgen.report.client import Answer
from sglang_smartgen.report.network_cells import STOCK, Cell

LEAST_STEPS, MOST_STEPS = 24, 64
MARGIN = 1.15  # cells take longer than the estimate says
BESIDE_S = 1.5  # of every cell: empty caches, read records
FULL_BATCH = 0.6  # a step of b requests takes this power of b times one of one


class Speed(msgspec.Struct, frozen=True):
    """Seconds that this machine takes: prefill of a token, a decode step of one request."""

    prefill_s: float = 0.005
    step_s: float = 0.25

    def seconds(self, cell: Cell, token_bytes: int) -> float:
        """Estimate of a cell: prefill, what the transfer adds to it, and the steps."""
        prefill = cell.prompt_tokens * cell.batch * self.prefill_s
        transfer = 0.0
        if cell.mbit is not None:
            transfer = cell.prompt_tokens * cell.batch * token_bytes * 8 / (cell.mbit * 1e6)
        if cell.mode == STOCK:
            first = prefill + transfer
        elif cell.mode == "full":
            first = max(prefill, transfer)
        else:
            first = prefill
        return first + cell.steps * self.step_s * cell.batch**FULL_BATCH + BESIDE_S


def speed_of(answer: Answer, tokens: int) -> Speed:
    """The speed seen in the answer to a prompt of `tokens` tokens on a fast network."""
    if answer.ttft_s is None or answer.tbt_s is None:
        return Speed()
    return Speed(prefill_s=answer.ttft_s / tokens, step_s=answer.tbt_s)


def steps_that_fit(cells: Sequence[Cell], seconds: float, speed: Speed, token_bytes: int) -> int:
    """Steps of each cell with which all of them take at most `seconds`, from 24 to 64."""
    bare = [msgspec.structs.replace(cell, steps=0) for cell in cells]
    one = [msgspec.structs.replace(cell, steps=1) for cell in cells]
    fixed = sum(speed.seconds(cell, token_bytes) for cell in bare)
    each = sum(speed.seconds(cell, token_bytes) for cell in one) - fixed
    fit = int((seconds / MARGIN - fixed) / each) if each > 0 else MOST_STEPS
    return max(LEAST_STEPS, min(MOST_STEPS, fit))
