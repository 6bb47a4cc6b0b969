"""What a pair of servers holds when no request is open: every trial must give all of it back."""

from __future__ import annotations

import time
from typing import Any

from sglang_smartgen.report.cluster import Cluster

DECODE_OPEN = ("open_rooms", "quarantined_rooms", "quarantined_slabs", "granted_bytes")
PREFILL_OPEN = ("open_rooms", "store_rooms")
FREE = {"prefill": ("store_used_bytes", "free_rows"), "decode": ("free_slots", "free_rows")}


class LeakError(RuntimeError):
    """Something of an ended request is still held; one sentence that names it."""


def wait_until_idle(cluster: Cluster, timeout_s: float = 90.0) -> dict[str, dict[str, int]]:
    """Free rows and slots, and store bytes in use, by role, once nothing is open any more.

    Raises LeakError when rooms, quarantined slots or arena ranges are still there after
    `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        state: dict[str, Any] = {role: cluster.smartgen_state(role) for role in FREE}
        held = {f"{key} of decode": state["decode"][key] for key in DECODE_OPEN}
        held |= {f"{key} of prefill": state["prefill"][key] for key in PREFILL_OPEN}
        if not any(held.values()):
            return {role: {key: state[role][key] for key in keys} for role, keys in FREE.items()}
        if time.monotonic() > deadline:
            left = ", ".join(f"{key}: {value}" for key, value in held.items() if value)
            raise LeakError(f"still held {timeout_s:.0f} s after the last request: {left}")
        time.sleep(0.3)
