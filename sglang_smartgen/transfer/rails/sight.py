"""What each rail has done, for `/server_info`, the metrics and the bench."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sglang_smartgen.transfer.rails.health import State
from sglang_smartgen.transfer.rails.link import Link
from sglang_smartgen.transfer.rails.reach import Rail
from sglang_smartgen.transfer.rails.spray import Sprayer

WORST = (State.HEALTHY, State.DEGRADED, State.PAUSED)


class Sight:
    """Sums over peers. Reads without the sprayers' locks: single numbers, each right by itself."""

    def rails(self, rails: Sequence[Rail], sprayers: Sequence[Sprayer]) -> list[dict[str, Any]]:
        """One row a rail: counters, seconds predicted and real, bandwidth and the worst state."""
        now = time.monotonic()
        rows = []
        for number, rail in enumerate(rails):
            links = [link for s in sprayers for link in s.links if link.transport is rail.transport]
            rows.append({"rail": f"{number}:{rail.name}", "kind": rail.kind, **totals(links, now)})
        return rows


def totals(links: Sequence[Link], now: float) -> dict[str, Any]:
    """The sums of some links. bandwidth in bytes/s; a state is the worst of them."""
    states = [link.state(now) for link in links]
    return {
        "bytes": sum(link.bytes for link in links),
        "slices": sum(link.slices for link in links),
        "predicted_s": round(sum(link.predicted_s for link in links), 6),
        "real_s": round(sum(link.real_s for link in links), 6),
        "errors": sum(link.errors for link in links),
        "retries": sum(link.retries for link in links),
        "pauses": sum(link.health.pauses for link in links),
        "bandwidth": max((link.speed.bandwidth for link in links), default=0.0),
        "state": max(states, key=WORST.index).value if states else State.HEALTHY.value,
        "held_bytes": sum(length for link in links for _, length in link.held),
    }
