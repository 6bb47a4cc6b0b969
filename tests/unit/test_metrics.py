"""SmartGen's metrics: their names stay, they follow Prometheus' conventions, and each one moves."""

from __future__ import annotations

import copy
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import decode_bench
import prefill_bench
import prometheus_client.values
import pytest
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.values import MultiProcessValue

from sglang_smartgen.core.counts import CAUSES, KINDS, Buckets, Counts, cause_of, step_range
from sglang_smartgen.engine import metrics_feed
from sglang_smartgen.engine.metrics_feed import Feed, values
from sglang_smartgen.engine.metrics_table import TABLE

COMMITTED = Path(__file__).with_name("metrics.txt")
OURS = {"model_name": "tiny", "engine_type": "prefill", "tp_rank": 0}
ROLES = ("prefill", "decode")


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """What both sides really show, by role."""
    prefill = prefill_bench.Bench()
    return {
        "prefill": prefill.side.snapshot(),
        "decode": decode_bench.Bench(monkeypatch).side.snapshot(),
    }


def grown(value: Any) -> Any:
    """Every number one larger, however deep."""
    match value:
        case bool() | str():
            return value
        case int() | float():
            return value + 1
        case None:
            return 1
        case dict():
            return {key: grown(item) for key, item in value.items()}
        case list():
            return [grown(item) for item in value]
        case Buckets():
            value.counts, value.sum = grown(value.counts), grown(value.sum)
            return value
    return value


def scraped(registry: CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample by name and labels; what a scrape would read."""
    text = generate_latest(registry).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_names_types_and_labels_are_those_that_were_committed() -> None:
    """A changed line breaks somebody's dashboard: add new metrics, keep the old ones."""
    lines = [
        f"{m.name} {m.kind} {{{','.join(m.labels)}}} {'+'.join(m.roles)}"
        for m in sorted(TABLE, key=lambda m: m.name)
    ]
    assert lines == COMMITTED.read_text().splitlines()


@pytest.mark.parametrize("role", ROLES)
def test_prometheus_parses_them_and_they_follow_its_conventions(
    role: str, states: dict[str, Any]
) -> None:
    registry = CollectorRegistry()
    Feed(role, OURS, registry).tell(values(states[role], Counts()))
    families = {
        family.name: family
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        if not family.name.endswith("_created")
    }
    mine = {m.name.removesuffix("_total"): m for m in TABLE if role in m.roles}
    assert set(families) == set(mine)
    for name, metric in mine.items():
        assert re.fullmatch(r"sglang:smartgen_[a-z][a-z_]*", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert families[name].type == metric.kind
        assert metric.help.endswith(".") and families[name].documentation == metric.help
        for sample in families[name].samples:
            assert set(sample.labels) - {"le"} == {*OURS, *metric.labels}, sample
            assert all(sample.labels.values()), sample
        # Base units, written out.
        assert not re.search(r"_(ms|us|kb|mb|gb|percent|milliseconds)(_|$)", metric.name)
        assert (metric.kind == "histogram") == bool(metric.bounds)
        assert list(metric.bounds) == sorted(set(metric.bounds))


@pytest.mark.parametrize("role", ROLES)
def test_each_one_moves_when_fed(role: str, states: dict[str, Any]) -> None:
    registry = CollectorRegistry()
    feed = Feed(role, OURS, registry)
    state, count = states[role], Counts()
    feed.tell(values(state, count))
    before = scraped(registry)
    state = grown(
        copy.deepcopy(
            {
                **state,
                "fallbacks": {reason: 0 for reason in (*metrics_feed.REASONS, "nobody knows")},
            }
        )
    )
    for name, value in vars(count).items():
        setattr(count, name, grown(value))
    feed.tell(values(state, count))
    after = scraped(registry)
    assert set(before) == set(after), "series appear from the start, at 0"
    still = {name for (name, labels), value in after.items() if value <= before[name, labels]}
    assert still == {"sglang:smartgen_info"}
    feed.tell(values(state, count))
    assert scraped(registry) == after, "what was told once is not added again"


def test_gauges_come_back_to_zero(states: dict[str, Any]) -> None:
    registry = CollectorRegistry()
    feed = Feed("decode", OURS, registry)
    labels = tuple(sorted((name, str(text)) for name, text in OURS.items()))
    for n in (0, 7, 0):
        feed.tell(values({**states["decode"], "quarantined_slots": n}, Counts()))
        assert scraped(registry)["sglang:smartgen_quarantined_slots", labels] == n


def test_an_unknown_reason_is_other(states: dict[str, Any]) -> None:
    state = {**states["prefill"], "fallbacks": {"released": 2, "recording 1": 3, "recording 2": 4}}
    found = values(state, Counts())["sglang:smartgen_fallbacks_total"]
    assert (found["released",], found["other",], found["short_prompt",]) == (2, 7, 0)


def test_buckets_count_like_prometheus() -> None:
    from prometheus_client import Histogram

    mine, registry = Buckets((0.5, 1.0)), CollectorRegistry()
    theirs = Histogram("x", "x", buckets=(0.5, 1.0), registry=registry)
    told = Histogram("y", "y", buckets=(0.5, 1.0), registry=registry)
    for value in (0.0, 0.5, 0.6, 1.0, 1.1, 9.0):
        mine.add(value)
        theirs.observe(value)
    metrics_feed._add(told, [*mine.counts, mine.sum])
    samples = scraped(registry)
    for (name, labels), value in samples.items():
        if name.startswith("x"):
            assert samples["y" + name[1:], labels] == pytest.approx(value)


@pytest.mark.parametrize(
    ("step", "first"),
    [(0, 1), (1, 1), (2, 2), (3, 2), (4, 4), (1023, 512), (1024, 1024), (10**6, 1024)],
)
def test_ranges_of_steps(step: int, first: int) -> None:
    assert 1 << step_range(step) == first


@pytest.mark.parametrize(
    ("sentence", "cause"),
    [
        ("no answer from prefill within 5.0 s", "timeout"),
        ("cannot reach p:1: refused", "unreachable"),
        ("every arena slab is in quarantine after failed fetches", "arena_full"),
        ("its prefill store entry is gone", "store_entry_gone"),
        ("fetch write failed: Mooncake returned -1", "write_failed"),
        ("push to d:1 failed: not complete after 60.0 s", "write_failed"),
        ("push failed: division by zero", "internal"),
        ("room 7, decode rank 0: KV differs from P's in layer 3", "kv_differs"),
        ("prefill did not start within 360 s", "timeout"),
        ("the request took too long", "timeout"),
        ("the decode node is silent", "peer_silent"),
        ("the decode node was restarted", "peer_ended"),
        ("the prefill node ended", "peer_ended"),
        ("a write to the decode node failed", "write_failed"),
        ("the decode node ended the request before it could start", "request_ended"),
        ("lookahead is on, and this server did not look ahead to 3", "internal"),
        ("the store server at p:1 has ended", "server_ended"),
        ("the request ended before its prefill", "request_ended"),
        ("decode session d is not registered here", "not_registered"),
        ("arena offset 7 is out of range", "malformed"),
        ("", "other"),
    ],
)
def test_causes(sentence: str, cause: str) -> None:
    assert cause_of(sentence) == cause and cause in {*CAUSES.values(), "other"}


def test_nothing_is_fed_where_sglang_does_not_count() -> None:
    context = SimpleNamespace(current_scheduler_metrics_enabled=False, collector=None)
    scheduler = SimpleNamespace(metrics_collector_context=context)
    assert metrics_feed.start(scheduler, lambda: pytest.fail("not asked for")) is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_sglangs_scrape_of_many_processes_shows_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, states: dict[str, Any]
) -> None:
    """As in SGLang: the scheduler writes to files of a folder, another process reads them."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setattr(prometheus_client.values, "ValueClass", MultiProcessValue())
    mine = Counts()
    monkeypatch.setattr(metrics_feed, "counts", mine)
    monkeypatch.setattr(metrics_feed, "PERIOD_S", 0.01)
    mine.fetch_latency.add(0.003)
    mine.fetch_latency.add(7.0)
    state = {**states["decode"], "counters": {"rooms": 3, "failures": 0}, "residual_blocks": 2}
    asked, ended = threading.Semaphore(0), threading.Event()

    def snapshot() -> dict[str, Any]:
        asked.release()
        if ended.is_set():
            raise SystemExit  # ends the thread
        return state

    context = SimpleNamespace(
        current_scheduler_metrics_enabled=True, collector=SimpleNamespace(labels=OURS)
    )
    scheduler = SimpleNamespace(metrics_collector_context=context)
    thread = metrics_feed.start(scheduler, snapshot, CollectorRegistry())
    assert thread is not None and thread.daemon
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    for _ in range(3):  # for its role, for the first values, and after it has written them
        assert asked.acquire(timeout=30)
    ended.set()
    thread.join(30)
    text = generate_latest(registry).decode()
    labels = 'engine_type="prefill",model_name="tiny",tp_rank="0"'
    bucket = (
        f"sglang:smartgen_fetch_latency_seconds_bucket{{{labels.replace(',mod', ',LE,mod', 1)}}}"
    )
    for line in (
        f"sglang:smartgen_rooms_total{{{labels}}} 3.0",
        f"sglang:smartgen_residual_blocks{{{labels}}} 2.0",
        bucket.replace("LE", 'le="0.004"') + " 1.0",
        bucket.replace("LE", 'le="+Inf"') + " 2.0",
        f"sglang:smartgen_fetch_latency_seconds_count{{{labels}}} 2.0",
        f"sglang:smartgen_fetch_latency_seconds_sum{{{labels}}} 7.003",
    ):
        assert line in text.splitlines(), line
    assert len(KINDS) == text.count("sglang:smartgen_bytes_total{")
