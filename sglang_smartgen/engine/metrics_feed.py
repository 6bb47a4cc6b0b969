"""Feeds the table of metrics: once a second, from plain numbers, on a thread of its own.

The scheduler process of SGLang writes prometheus samples to files that the HTTP server reads at a
scrape, so nothing can be computed there; this thread writes what has changed. The hot path only
adds to `core.counts` and to what `/server_info` shows. Owner: `start`, called once a scheduler
process, when SGLang itself counts on this rank (--enable-metrics).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import sglang_smartgen
from sglang_smartgen.core.counts import KINDS, OTHER, STEPS, Buckets, Counts, counts
from sglang_smartgen.engine.metrics_table import PREFIX, TABLE, Metric

logger = logging.getLogger(__name__)

PERIOD_S = 1.0

REASONS = (
    "short prompt",
    "full transfer",
    "peer differs",
    "prompt lengths differ",
    "room still pushes",
    "released",
    "prefill store full",
)
"""Reasons of fallbacks that have a label of their own; any other one is `other`."""

Values = dict[tuple[str, ...], float | Buckets]
"""One metric's values by the values of its labels."""

RAIL_STATES = {"healthy": 0, "degraded": 1, "paused": 2}

_RAIL = {
    "rail_bytes": "bytes",
    "rail_slices": "slices",
    "rail_errors": "errors",
    "rail_retries": "retries",
    "rail_pauses": "pauses",
    "rail_predicted_seconds": "predicted_s",
    "rail_finish_seconds": "real_s",
    "rail_bandwidth_bytes_per_second": "bandwidth",
    "rail_state": "state",
}
"""Metric of a rail without prefix and `_total` -> key of its row in `/server_info`."""

_SHOWN = {
    "open_rooms": "open_rooms",
    "bandwidth_bytes_per_second": "bandwidth",
    "store_bytes": "store_used_bytes",
    "store_capacity_bytes": "store_bytes",
    "store_rooms": "store_rooms",
    "layers_swept_total": "layers_swept",
    "descriptors_total": "descriptors",
    "post_seconds_total": "post_s",
    "fetch_wait_seconds_total": "fetch_wait_s",
    "residual_blocks": "residual_blocks",
    "granted_bytes": "granted_bytes",
    "quarantined_slots": "quarantined_slots",
    "quarantined_rooms": "quarantined_rooms",
    "quarantined_slabs": "quarantined_slabs",
}
"""Metric without its prefix -> key of the `smartgen` block of /server_info."""


def values(state: Mapping[str, Any], count: Counts) -> dict[str, Values]:
    """Every metric of this role: from a side's `snapshot()` and this process's counters."""
    role = state["role"]
    found = {
        metric.name: _values(metric.name.removeprefix(PREFIX), state, count)
        for metric in TABLE
        if role in metric.roles
    }
    return found


def _values(name: str, state: Mapping[str, Any], count: Counts) -> Values:
    prefill = state["role"] == "prefill"
    config = state["config"]
    match name:
        case "info":
            labels = (config["mode"], config["selector"], config["order"])
            return {(sglang_smartgen.__version__, *labels): 1}
        case "bytes_total":
            sent = {kind: state[f"bytes_{kind}"] for kind in KINDS} if prefill else count.bytes
            return {(kind,): n for kind, n in sent.items()}
        case "requests_total":
            served = {"on_demand": "fetches", "speculative": "slices"} if prefill else {}
            asked = {**count.requests, **{kind: state[key] for kind, key in served.items()}}
            return {(kind,): n for kind, n in asked.items()}
        case "rail_switches_total":
            return {(): state["rail_switches"]}
        case _ if name.removesuffix("_total") in _RAIL:
            key = _RAIL[name.removesuffix("_total")]
            shown = {row["rail"]: row[key] for row in state["rails"]}
            return {(rail,): RAIL_STATES.get(value, value) for rail, value in shown.items()}
        case "rooms_total":
            return {(): state["counters"]["rooms"]}
        case "fetch_latency_seconds":
            return {(): count.fetch_latency}
        case "start_remote_ratio":
            return {(): count.start_remote}
        case "selected_entries_total":
            return {(str(step),): n for step, n in zip(STEPS, count.selected, strict=True)}
        case "mask_misses_total":
            return {(str(step),): n for step, n in zip(STEPS, count.missed, strict=True)}
        case "credits_total":
            return {(): count.credits}
        case "credit_bytes_total":
            return {(): count.credit_bytes}
        case "unacknowledged_releases_total":
            return {(): count.unacknowledged}
        case "failures_total":
            return {(cause,): n for cause, n in count.failures.items()}
        case "fallbacks_total":
            reasons = dict.fromkeys((*REASONS, OTHER), 0)
            for reason, n in list(state["fallbacks"].items()):
                reasons[reason if reason in REASONS else OTHER] += n
            return {(reason.replace(" ", "_"),): n for reason, n in reasons.items()}
    return {(): state[_SHOWN[name]] or 0}


class Feed:
    """The prometheus objects of one process, and what they were last told."""

    def __init__(self, role: str, labels: Mapping[str, object], registry: Any = None) -> None:
        """labels: of SGLang's own metrics. registry: prometheus_client's; None: its default."""
        self._labels = {name: str(value) for name, value in labels.items()}
        self._metrics = {
            metric.name: (metric, _make(metric, tuple(labels), registry))
            for metric in TABLE
            if role in metric.roles
        }
        self._told: dict[tuple[str, tuple[str, ...]], list[float]] = {}

    def tell(self, found: Mapping[str, Values]) -> None:
        """Bring the prometheus objects to these values; counters by what they grew."""
        for name, by_labels in found.items():
            metric, family = self._metrics[name]
            for own, value in by_labels.items():
                key = (name, own)
                now = [*value.counts, value.sum] if isinstance(value, Buckets) else [float(value)]
                told = self._told.get(key)
                if now == told:
                    continue
                child = family.labels(**self._labels, **dict(zip(metric.labels, own, strict=True)))
                if metric.kind == "gauge":
                    child.set(now[0])
                else:
                    grown = [
                        new - old for new, old in zip(now, told or [0.0] * len(now), strict=True)
                    ]
                    if metric.kind == "counter":
                        child.inc(max(0.0, grown[0]))
                    else:
                        _add(child, grown)
                self._told[key] = now


def _make(metric: Metric, labels: tuple[str, ...], registry: Any) -> Any:
    # Imported late: prometheus_client looks for SGLang's multiprocess folder when it is imported.
    import prometheus_client as prometheus

    more: dict[str, Any] = {} if registry is None else {"registry": registry}
    names = (*labels, *metric.labels)
    match metric.kind:
        case "counter":
            return prometheus.Counter(metric.name, metric.help, names, **more)
        case "gauge":
            more["multiprocess_mode"] = "mostrecent"  # as SGLang's own gauges
            return prometheus.Gauge(metric.name, metric.help, names, **more)
    return prometheus.Histogram(metric.name, metric.help, names, buckets=metric.bounds, **more)


def _add(histogram: Any, grown: list[float]) -> None:
    """Add many observations at once, as SGLang does for its token latencies."""
    for bucket, n in zip(histogram._buckets, grown, strict=False):
        if n:
            bucket.inc(n)
    histogram._sum.inc(grown[-1])


def start(
    scheduler: Any, snapshot: Callable[[], Mapping[str, Any]], registry: Any = None
) -> threading.Thread | None:
    """Feed this scheduler's metrics from now on; None where SGLang does not count here."""
    context = scheduler.metrics_collector_context
    if not context.current_scheduler_metrics_enabled or context.collector is None:
        return None
    feed = Feed(snapshot()["role"], context.collector.labels, registry)

    def run() -> None:
        failed = False
        while True:
            try:
                feed.tell(values(snapshot(), counts))
                failed = False
            except Exception:
                if not failed:  # once, not once a second
                    logger.exception("SmartGen: metrics are not up to date")
                failed = True
            time.sleep(PERIOD_S)

    thread = threading.Thread(target=run, name="smartgen-metrics", daemon=True)
    thread.start()
    return thread
