"""What servers hold when no request is open: every trial must give all of it back."""

from __future__ import annotations

import time
from typing import Any

from sglang_smartgen.report.cluster import Cluster

OPEN = {
    "prefill": ("open_rooms", "store_rooms"),
    "decode": ("open_rooms", "quarantined_rooms", "quarantined_slabs", "granted_bytes"),
}
FREE = {"prefill": ("store_used_bytes", "free_rows"), "decode": ("free_slots", "free_rows")}


class LeakError(RuntimeError):
    """Something of an ended request is still held; one sentence that names it."""


def wait_until_idle(cluster: Cluster, timeout_s: float = 90.0) -> dict[str, dict[str, int]]:
    """Free rows and slots, and store bytes in use, by server, once nothing is open any more.

    Of a server with several ranks, rank 0's. Servers that were killed are left out. Raises
    LeakError when rooms, quarantined slots or arena ranges are still there after `timeout_s`
    seconds.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        names = [name for name in cluster.pids if name != "router"]
        state: dict[str, Any] = {name: cluster.smartgen_state(name) for name in names}
        held = {
            f"{key} of {name}": max(rank[key] for rank in found.get("ranks", [found]))
            for name, found in state.items()
            for key in OPEN[found["role"]]
        }
        if not any(held.values()):
            return {
                name: {key: found[key] for key in FREE[found["role"]]}
                for name, found in state.items()
            }
        if time.monotonic() > deadline:
            left = ", ".join(f"{key}: {value}" for key, value in held.items() if value)
            raise LeakError(f"still held {timeout_s:.0f} s after the last request: {left}")
        time.sleep(0.3)


def changes(before: dict[str, dict[str, int]], after: dict[str, dict[str, int]]) -> list[str]:
    """What a server that is in both holds now and did not before, a sentence each."""
    return [
        f"{name}'s {key} is {after[name][key]} and was {value}"
        for name in before
        if name in after
        for key, value in before[name].items()
        if after[name][key] != value
    ]
