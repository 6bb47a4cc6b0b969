"""The metrics that SmartGen adds to SGLang's `/metrics`: name, type, help, labels, roles.

Every metric also carries the labels of SGLang's scheduler metrics (model_name, engine_type,
tp_rank, ...). Names and labels are an interface: dashboards and alerts rely on them (deploy/), and
a test compares this table with a committed list. What feeds them is in metrics_feed.py.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from sglang_smartgen.core.counts import LATENCY_S, SHARES

PREFIX = "sglang:smartgen_"

P: tuple[str, ...] = ("prefill",)
D: tuple[str, ...] = ("decode",)
BOTH = P + D


class Metric(NamedTuple):
    """One metric family. bounds: of a histogram's buckets, without the last, infinite one."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...]
    roles: tuple[str, ...]
    bounds: tuple[float, ...] = ()


def _counter(name: str, text: str, roles: tuple[str, ...], *labels: str) -> Metric:
    return Metric(f"{PREFIX}{name}_total", "counter", text, labels, roles)


def _gauge(name: str, text: str, roles: tuple[str, ...], *labels: str) -> Metric:
    return Metric(PREFIX + name, "gauge", text, labels, roles)


TABLE = (
    _gauge(
        "info",
        "1; the labels say which SmartGen serves here, and how.",
        BOTH,
        "version",
        "mode",
        "selector",
        "order",
    ),
    _counter("rooms", "Requests that SmartGen opened a room for.", D),
    _gauge("open_rooms", "Rooms that are open now.", BOTH),
    _counter(
        "bytes",
        "Bytes of KV and selector metadata by kind: what prefill sent, what decode got.",
        BOTH,
        "kind",
    ),
    _counter(
        "requests",
        "Transfer requests by kind. Prefill: writes that carried it, fetches answered, slices of "
        "fill sent. Decode: fetches asked for, portions of fill placed.",
        BOTH,
        "kind",
    ),
    _counter("descriptors", "Pieces of memory given to the network by prefill.", P),
    _counter("post_seconds", "Time that giving them to the network took.", P),
    _gauge("bandwidth_bytes_per_second", "Bandwidth last measured to the fastest decode rank.", P),
    _gauge("store_bytes", "Bytes of the prefill store that are in use.", P),
    _gauge("store_capacity_bytes", "Size of the prefill store.", P),
    _gauge("store_rooms", "Rooms whose KV is in the prefill store.", P),
    _counter("layers_swept", "Layers that the layer hook missed and that were sent later.", P),
    Metric(
        f"{PREFIX}fetch_latency_seconds",
        "histogram",
        "Time from asking for what a layer misses to the last answer.",
        (),
        D,
        LATENCY_S,
    ),
    _counter("fetch_wait_seconds", "Time that decode steps waited for fetches.", D),
    Metric(
        f"{PREFIX}start_remote_ratio",
        "histogram",
        "Share of a prompt's KV that was still on prefill when its decode started.",
        (),
        D,
        SHARES,
    ),
    _counter("selected_entries", "Entries that decode steps selected, by first step.", D, "step"),
    _counter("mask_misses", "Selected entries that were still remote, by first step.", D, "step"),
    _gauge("residual_blocks", "Blocks of the open rooms that are not on decode yet.", D),
    _counter("credits", "Ranges of the fill arena granted to prefill.", D),
    _counter("credit_bytes", "Bytes of the fill arena granted to prefill.", D),
    _gauge("granted_bytes", "Bytes of the fill arena that are granted now.", D),
    _gauge("quarantined_slots", "KV slots held until prefill lets go of them.", D),
    _gauge("quarantined_rooms", "Rooms that wait for prefill to let go of them.", D),
    _gauge("quarantined_slabs", "Fetch landing areas that late bytes may still reach.", D),
    _counter("unacknowledged_releases", "Rooms freed although prefill never let go of them.", D),
    _counter("rail_bytes", "Bytes that a rail has brought to decode.", P, "rail"),
    _counter("rail_slices", "Slices that a rail has brought to decode.", P, "rail"),
    _counter("rail_errors", "Slices that failed on a rail.", P, "rail"),
    _counter(
        "rail_retries", "Slices that a rail got because another one had not done it.", P, "rail"
    ),
    _counter(
        "rail_pauses", "How often a rail was given up, until a probe was answered.", P, "rail"
    ),
    _counter("rail_predicted_seconds", "Predicted time of a rail's slices.", P, "rail"),
    _counter("rail_finish_seconds", "Time that a rail's slices really took.", P, "rail"),
    _gauge("rail_bandwidth_bytes_per_second", "Bandwidth learned of a rail.", P, "rail"),
    _gauge("rail_state", "Of a rail: 0 healthy, 1 degraded, 2 paused.", P, "rail"),
    _counter("rail_switches", "How often traffic went over to rails of another kind.", P),
    _counter("fallbacks", "Requests that got a full transfer instead, by reason.", BOTH, "reason"),
    _counter("failures", "Requests that failed in SmartGen, by cause.", BOTH, "cause"),
)
