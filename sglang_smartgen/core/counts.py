"""Plain numbers that one rank counts while it serves, for whoever shows them (once a second).

A process is one rank of one role, so there is one `counts`. Adding costs well below a microsecond
and takes no lock, so every field has one writing thread, except those of the methods, which lock.
Readers may see a number that is a moment old.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence

KINDS = ("proactive", "metadata", "on_demand", "speculative")
"""What bytes are sent for; see design.md section 1."""

STEPS = tuple(1 << i for i in range(11))
"""Decode steps are counted in ranges of a power of two: 1, 2-3, 4-7, ... and 1024 and later."""

LATENCY_S = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)

CAUSES = {
    "differs from P's": "kv_differs",
    "no answer from prefill": "timeout",
    "did not start within": "timeout",
    "took too long": "timeout",
    "is silent": "peer_silent",
    "prefill node ended": "peer_ended",
    "was restarted": "peer_ended",
    "cannot reach": "unreachable",
    "has ended": "server_ended",
    "arena slab": "arena_full",
    "store entry is gone": "store_entry_gone",
    "write failed": "write_failed",
    "a write to": "write_failed",
    "push to": "write_failed",
    "aux data": "write_failed",
    "hand-over": "hand_over",
    "not registered": "not_registered",
    "out of range": "malformed",
    "does not fit": "malformed",
    "no int32 array": "malformed",
    "is outside": "malformed",
    "malformed": "malformed",
    "not all pushed": "internal",
    "push failed": "internal",
    "fetch failed": "internal",
    "lookahead": "internal",
    "the request": "request_ended",
}
"""Part of a failure's sentence -> its class; the first that is found counts."""
OTHER = "other"


def cause_of(sentence: str) -> str:
    """The class of a failure, one of few, so that it can be a label."""
    return next((cause for part, cause in CAUSES.items() if part in sentence), OTHER)


class Buckets:
    """A histogram: how many values were at most each bound, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)  # not cumulative; the last: above every bound
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Counts:
    """Everything that is counted where it arises; all start at 0 and only grow."""

    def __init__(self) -> None:
        self.bytes = dict.fromkeys(KINDS, 0)  # D: what came
        self.requests = dict.fromkeys(KINDS, 0)  # P: writes of a push; D: what it asked or placed
        self.selected = [0] * len(STEPS)  # D: entries that steps wanted, by range of steps
        self.missed = [0] * len(STEPS)  # D: those of them that the mask called remote
        self.fetch_latency = Buckets(LATENCY_S)  # D: seconds from ask to the last answer
        self.start_remote = Buckets(SHARES)  # D: share of a prompt's KV that was not there
        self.credits = 0  # D: ranges granted
        self.credit_bytes = 0
        self.unacknowledged = 0  # D: rooms whose slots were freed without P's answer
        self.descriptors = 0  # pieces given to the network
        self.post_s = 0.0  # seconds that giving them took
        self.failures: dict[str, int] = dict.fromkeys((*CAUSES.values(), OTHER), 0)
        self._lock = threading.Lock()

    def posted(self, descriptors: int, seconds: float) -> None:
        """The network took this many pieces (any thread)."""
        with self._lock:
            self.descriptors += descriptors
            self.post_s += seconds

    def pushed(self, proactive: bool, metadata: bool) -> None:
        """A push has written something of either kind (any thread)."""
        with self._lock:
            self.requests["proactive"] += proactive
            self.requests["metadata"] += metadata

    def failed(self, sentence: str) -> None:
        """A request failed for this cause (any thread)."""
        with self._lock:
            self.failures[cause_of(sentence)] += 1


def step_range(step: int) -> int:
    """The index in STEPS of a decode step, which is 0 or more."""
    return min(max(step, 1).bit_length(), len(STEPS)) - 1


counts = Counts()
