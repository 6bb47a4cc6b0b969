"""The parts of rails (predictions, decisions, health, slices, reachability), and all as one."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_smartgen.config import ConfigError, SmartGenConfig
from sglang_smartgen.transfer.fake import FakeNetwork, FakeTransport, Fault, FaultKind
from sglang_smartgen.transfer.fill_lane import Credit, FillLane
from sglang_smartgen.transfer.messages import Endpoint, Filled
from sglang_smartgen.transfer.rails.decide import pick, usable
from sglang_smartgen.transfer.rails.health import Health, State
from sglang_smartgen.transfer.rails.intent import SLICE_BYTES, Intent
from sglang_smartgen.transfer.rails.link import LARGEST_SLICE, MOST_WINDOW_S, WINDOW_S, Link
from sglang_smartgen.transfer.rails.reach import (
    Card,
    Rail,
    RailAddress,
    Segment,
    Segments,
    links_to,
)
from sglang_smartgen.transfer.rails.speed import Speed
from sglang_smartgen.transfer.rails.transport import RailsTransport, merged
from sglang_smartgen.transfer.transport import Priority, Region, Span, TransportError, WriteState

SIZE = 4 << 20


def link(name: str, bandwidth: float = 12.5e6, tier: int = 1) -> Link:
    speed = Speed(bandwidth)
    speed.measured = True
    return Link(name, FakeTransport(FakeNetwork(), name), "d", tier=tier, speed=speed)


def load(link: Link, size: int, now: float = 0.0) -> None:
    """Put one slice of so many bytes on a link."""
    intent = Intent([Span(0, 0, size)])
    link.begin(intent.cut(size), now)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.floats(1e5, 1e9), st.integers(0, 1 << 20)), min_size=1, max_size=5),
    st.sampled_from(list(Priority)),
    st.integers(1, 100 << 20),
)
def test_a_slice_takes_the_open_link_that_ends_first_or_waits_for_a_busy_one(
    ways: list[tuple[float, int]], priority: Priority, backlog: int
) -> None:
    links = [link(str(i), bandwidth) for i, (bandwidth, _) in enumerate(ways)]
    for way, (_, queued) in zip(links, ways, strict=True):
        if queued:
            load(way, queued)
    length = min(backlog, SLICE_BYTES)
    found = pick(links, priority, backlog, length, 0.0)
    open_ = [way for way in links if way.is_open(priority)]
    if found is None:
        assert len(open_) < len(links)
    else:
        assert found in open_
        assert found.finish_s(length, 0.0) == min(way.finish_s(length, 0.0) for way in open_)


def test_a_slow_link_helps_with_much_and_not_with_the_last_slice() -> None:
    fast, slow = link("fast", 12.5e6), link("slow", 1.25e6)
    for _ in range(4):
        load(fast, SLICE_BYTES)
    assert not fast.is_open(Priority.PROACTIVE)
    assert pick([fast, slow], Priority.PROACTIVE, 64 * SLICE_BYTES, SLICE_BYTES, 0.0) is slow
    assert pick([fast, slow], Priority.PROACTIVE, SLICE_BYTES, SLICE_BYTES, 0.0) is None


def test_of_two_busy_links_a_fetch_takes_the_one_that_is_nearly_done() -> None:
    one, two = link("one"), link("two")
    load(one, SLICE_BYTES, now=0.001)
    load(two, SLICE_BYTES, now=0.0)
    assert pick([one, two], Priority.ON_DEMAND, 8192, 8192, 0.004) is two
    assert pick([one, two], Priority.ON_DEMAND, 8192, 8192, 0.03) is one  # two is overdue


def test_speculative_bytes_keep_one_slice_under_way_and_never_hold_up_a_fetch() -> None:
    way = link("a")
    assert way.is_open(Priority.SPECULATIVE)
    load(way, SLICE_BYTES)
    assert not way.is_open(Priority.SPECULATIVE)
    assert way.is_open(Priority.PROACTIVE) and way.is_open(Priority.ON_DEMAND)


def test_a_link_that_was_not_measured_gets_one_small_slice_at_a_time() -> None:
    way = link("a", 1e9)
    assert way.slice_bytes(Priority.PROACTIVE) == LARGEST_SLICE
    way.speed.doubt()
    assert way.slice_bytes(Priority.PROACTIVE) == SLICE_BYTES
    load(way, SLICE_BYTES)
    assert not way.is_open(Priority.PROACTIVE)


def test_an_idle_link_gets_a_slice_of_a_large_load_however_slow_it_was() -> None:
    fast, slow = link("fast", 100e6), link("slow", 1e3)
    fast.last_done = 10.0
    for backlog, found in ((8 << 20, slow), (SLICE_BYTES, fast)):
        assert pick([fast, slow], Priority.PROACTIVE, backlog, SLICE_BYTES, 10.1) is found
    assert pick([fast, slow], Priority.ON_DEMAND, 8 << 20, SLICE_BYTES, 10.1) is fast


def test_the_lowest_tier_is_used_alone_and_paused_links_only_when_there_is_no_other() -> None:
    near, far, other = link("near", tier=0), link("far"), link("other")
    links = [near, far, other]
    assert usable(links) == [near]
    assert usable(links, [False, True, True]) == [far, other]
    near.health.pause("test")
    assert usable(links) == [far, other]
    for way in links:
        way.health.pause("test")
    assert usable(links) == links


def drive(speed: Speed, rate: float, slices: int, now: float, ahead: int = 2) -> float:
    """A busy serial link of `rate` bytes/s with `ahead` slices before each; the time after it."""
    for _ in range(slices):
        began = now - ahead * SLICE_BYTES / rate
        now += SLICE_BYTES / rate
        speed.ended(now, began, ahead * SLICE_BYTES, SLICE_BYTES, False)
    return now


def test_speed_is_learned_and_a_change_of_it_within_a_second() -> None:
    speed = Speed()
    speed.began(0.0, True)
    now = drive(speed, 12.5e6, 40, 0.0)
    assert speed.bandwidth == pytest.approx(12.5e6, rel=0.05)
    assert speed.finish_s(0, SLICE_BYTES) == pytest.approx(SLICE_BYTES / 12.5e6, rel=0.6)
    after = drive(speed, 1.25e6, 19, now)
    assert after - now < 1.0
    assert speed.bandwidth == pytest.approx(1.25e6, rel=0.2)
    drive(speed, 12.5e6, 60, after)
    assert speed.bandwidth == pytest.approx(12.5e6, rel=0.1)


def test_the_fixed_cost_is_learned_from_small_requests() -> None:
    speed = Speed(1e9)
    for i in range(30):
        speed.began(float(i), True)
        speed.ended(i + 0.003, float(i), 0, 100, True)
    assert speed.b0 == pytest.approx(0.003, rel=0.05)


def test_two_errors_within_the_window_pause_and_a_probe_brings_it_back() -> None:
    health = Health()
    assert health.state(0.0, 1.0, 1.0) is State.HEALTHY
    health.error(0.0, "one")
    assert health.state(1.0, 1.0, 1.0) is State.DEGRADED
    assert health.state(6.0, 1.0, 1.0) is State.HEALTHY
    health.error(6.0, "another, long after")
    assert not health.paused
    health.error(7.0, "again")
    assert health.paused and health.cause == "again" and health.pauses == 1
    health.answered()
    assert health.state(7.1, 1.0, 1.0) is State.HEALTHY
    assert health.state(7.1, 0.4, 1.0) is State.DEGRADED  # of the bandwidth it had


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 300_000), min_size=1, max_size=30), st.data())
def test_slices_cover_every_byte_once_and_none_but_a_small_request_is_small(
    lengths: list[int], data: st.DataObject
) -> None:
    at, spans = 0, []
    for length in lengths:
        spans.append(Span(at, 5 * at, length))  # not contiguous at the destination
        at += length
    intent = Intent(spans)
    found: list[Span] = []
    sizes = []
    while intent.uncut:
        slice_ = intent.cut(data.draw(st.integers(SLICE_BYTES, LARGEST_SLICE)))
        sizes.append(slice_.length)
        found += slice_.spans
    assert sum(sizes) == at == intent.total and intent.open == len(sizes)
    assert min(sizes) >= min(at, SLICE_BYTES)
    pieces = sorted(found)
    assert pieces[0].source == 0 and sum(p.length for p in pieces) == at
    for one, next_ in pairwise(pieces):
        assert one.source + one.length == next_.source
    for piece in pieces:
        home = max(span for span in spans if span.source <= piece.source)
        assert piece.destination == home.destination + piece.source - home.source


def test_a_link_that_ran_dry_has_more_under_way_for_a_while() -> None:
    way = link("dry")
    load(way, int(way.speed.bandwidth * 0.03))
    assert not way.is_open(Priority.PROACTIVE)
    for _ in range(20):
        way.ran_dry()
    assert way.is_open(Priority.PROACTIVE) and way.window_s == MOST_WINDOW_S
    for turn in range(200):
        load(way, SLICE_BYTES, turn * 0.005)
        way.end(next(iter(way.attempts)), None, turn * 0.005)
    assert way.window_s == WINDOW_S


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 5 << 20), st.integers(SLICE_BYTES, LARGEST_SLICE))
def test_slices_are_even_so_none_takes_what_remains_of_another(total: int, length: int) -> None:
    intent = Intent([Span(0, 0, total)])
    sizes = []
    while intent.uncut:
        sizes.append(intent.cut(length).length)
    assert sum(sizes) == total and max(sizes) - min(sizes) <= 1
    assert max(sizes) <= length or max(sizes) < 2 * SLICE_BYTES


def test_contiguous_spans_are_merged_before_they_are_cut() -> None:
    intent = Intent([Span(10 + i, 1000 + i, 1) for i in range(500)])
    assert intent.spans == [Span(10, 1000, 500)]
    assert intent.cut(SLICE_BYTES).spans == [Span(10, 1000, 500)]


def rail(kind: str, host: str, **named: object) -> Rail:
    return Rail(kind, host, FakeTransport(FakeNetwork(), host), **named)  # type: ignore[arg-type]


def test_rails_are_paired_by_their_networks() -> None:
    ours = [rail("mooncake", "10.0.1.1"), rail("mooncake", "10.0.2.1"), rail("socket", "10.0.1.1")]
    theirs = Card(
        [
            RailAddress("mooncake", "10.0.2.9", "b"),
            RailAddress("mooncake", "10.0.1.9", "a"),
            RailAddress("nixl", "10.0.1.9", "n"),
        ],
        [],
    )
    links, there = links_to(ours, theirs)
    assert {(way.transport, way.session) for way in links} == {
        (ours[0].transport, "a"),
        (ours[1].transport, "b"),
    }
    assert sorted(there) == [0, 1]
    links, _ = links_to(ours[:1], theirs)
    assert {way.session for way in links} == {"a", "b"}
    links, _ = links_to(ours[:2], Card(theirs.rails[:1], []))
    assert [way.transport for way in links] == [ours[1].transport, ours[0].transport]
    assert (
        links_to([rail("shm", "", reaches=lambda _: False)], Card([theirs.rails[0]], []))[0] == []
    )


def test_a_link_is_used_for_memory_that_both_ends_of_it_know() -> None:
    card = Card(
        [RailAddress("a", "", "x"), RailAddress("b", "", "y")],
        [Segment(1000, 100, 0b01), Segment(2000, 100, 0b11), Segment(3000, 100, 0b11, True)],
    )
    links, there = links_to([rail("a", "", host_only=False), rail("b", "")], card)
    segments = Segments(card.segments, there, links)
    assert segments.reach([Span(0, 1000, 8)]) == [True, False]
    assert segments.reach([Span(0, 2050, 8)]) == [True, True]
    assert segments.reach([Span(0, 3000, 8)]) == [True, False]
    assert segments.reach([Span(0, 2000, 8), Span(0, 1000, 8)]) == [True, False]
    assert segments.reach([Span(0, 9000, 8)]) is None  # the rails will say
    assert Segments(card.segments[1:2], there, links).reach([Span(0, 1, 1)]) is None
    assert merged([Segment(0, 10, 1), Segment(10, 5, 1), Segment(15, 5, 3)]) == [
        Segment(0, 15, 1),
        Segment(15, 5, 3),
    ]


class Pair:
    """Rails over fakes: each its own network, all the same peer memory."""

    def __init__(self, count: int = 2, **named: object) -> None:
        self.networks = [FakeNetwork() for _ in range(count)]
        self.fakes = [FakeTransport(network, "p") for network in self.networks]
        rails = [
            Rail("fake", str(i), fake, **(named if i == 0 else {}))  # type: ignore[arg-type]
            for i, fake in enumerate(self.fakes)
        ]
        self.rails = RailsTransport(rails, "p")
        self.source = np.random.default_rng(0).integers(0, 255, SIZE, dtype=np.uint8)
        self.memory = np.zeros(SIZE, np.uint8)
        self.at = self.memory.ctypes.data
        for network in self.networks:
            FakeTransport(network, "d").register(Region(self.at, SIZE))
        addresses = [RailAddress("fake", str(i), "d") for i in range(count)]
        everywhere = (1 << count) - 1
        segment = Segment(self.at, SIZE, everywhere)
        self.rails.meet("d", Card(addresses, [segment], self.at + SIZE - 64))

    def write(self, size: int, at: int = 0, **named: object) -> Intent:
        span = Span(self.source.ctypes.data + at, self.at + at, size)
        return self.rails.write("d", [span], **named)  # type: ignore[arg-type]

    @property
    def links(self) -> list[Link]:
        return self.rails.links()["d"]


@pytest.fixture
def pairs() -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(*arguments: int, **named: object) -> Pair:
        made.append(Pair(*arguments, **named))
        return made[-1]

    yield make
    for pair in made:
        pair.rails.close()


def test_a_failed_slice_goes_to_another_rail_and_the_write_says_late(
    pairs: Callable[..., Pair],
) -> None:
    pair = pairs()
    for fake in pair.fakes:
        fake.script("d", 1, Fault(FaultKind.LATE, delay_s=1.0))
    handle = pair.write(2 * SLICE_BYTES)
    assert handle.wait(5.0) is WriteState.DONE
    assert handle.late and handle.progress == 1.0
    assert np.array_equal(pair.memory[: 2 * SLICE_BYTES], pair.source[: 2 * SLICE_BYTES])
    pair.source[:] = 7  # DONE: the source may be used again
    right = pair.memory.copy()
    assert pair.rails.fence("d", pair.at, 0.05) is False
    for network in pair.networks:
        network.advance(2.0)
    assert np.array_equal(pair.memory, right)  # what landed late was a copy
    assert pair.rails.fence("d", pair.at, 5.0) is True
    handle = pair.write(100)
    assert handle.wait(5.0) is WriteState.DONE and not handle.late


def test_a_silent_rail_is_given_up_and_probed_until_it_answers(pairs: Callable[..., Pair]) -> None:
    pair = pairs()
    assert pair.write(2 * SLICE_BYTES).wait(5.0) is WriteState.DONE
    pair.fakes[0].hold()
    began = time.monotonic()
    handle = pair.write(1 << 20)
    assert handle.wait(5.0) is WriteState.DONE and handle.late
    assert time.monotonic() - began < 2.0
    assert [way.paused for way in pair.links] == [True, False]
    before = pair.fakes[1].writes["d"]
    assert pair.write(SLICE_BYTES).wait(5.0) is WriteState.DONE
    assert pair.fakes[1].writes["d"] == before + 1
    pair.fakes[0].release()
    deadline = time.monotonic() + 10.0
    while pair.links[0].paused:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert pair.rails.fence("d", pair.at, 5.0) is True
    assert pair.rails._staging.used == 0


def test_a_whole_transport_is_switched_when_its_rails_are_gone(pairs: Callable[..., Pair]) -> None:
    pair = pairs(tier=0, settles=True)
    assert pair.write(SLICE_BYTES).wait(5.0) is WriteState.DONE
    assert pair.fakes[1].writes == {}
    pair.fakes[0].script_all("d", Fault(FaultKind.FAIL))
    for _ in range(3):
        handle = pair.write(SLICE_BYTES)
        assert handle.wait(5.0) is WriteState.DONE
        assert not handle.late  # what such a rail has FAILED does not land
    assert pair.links[0].paused and pair.rails.switches >= 1
    assert pair.rails.snapshot()[0]["state"] == "paused"
    assert pair.rails.snapshot()[1]["retries"] == 2


def test_a_dead_peer_fails_its_writes_and_does_not_keep_them(pairs: Callable[..., Pair]) -> None:
    pair = pairs()
    for network in pair.networks:
        network.kill("d")
    began = time.monotonic()
    handle = pair.write(1 << 20)
    assert handle.wait(5.0) is WriteState.FAILED
    assert "to peer d failed" in str(handle.error) and time.monotonic() - began < 2.0


def test_a_write_ends_at_its_deadline(pairs: Callable[..., Pair]) -> None:
    pair = pairs()
    for fake in pair.fakes:
        fake.script_all("d", Fault(FaultKind.NEVER))
    handle = pair.write(1 << 20, deadline_s=0.2)
    assert handle.wait(0.1) is WriteState.PENDING
    assert handle.wait(2.0) is WriteState.FAILED
    assert "deadline" in str(handle.error)


def test_what_was_not_started_when_it_is_cancelled_is_not_sent(pairs: Callable[..., Pair]) -> None:
    pair = pairs()
    for fake in pair.fakes:
        fake.hold()
    handle = pair.write(SIZE - 4096)
    started = sum(len(fake.log) for fake in pair.fakes)
    handle.cancel()
    assert handle.poll() is WriteState.PENDING  # some of it is under way
    for fake in pair.fakes:
        fake.release()
    assert handle.wait(2.0) is WriteState.FAILED and "cancelled" in str(handle.error)
    assert sum(len(fake.log) for fake in pair.fakes) == started
    assert 0 < handle.progress < 1
    assert pair.write(100).wait(2.0) is WriteState.DONE


def test_a_fetch_overtakes_a_speculative_load(pairs: Callable[..., Pair]) -> None:
    pair = pairs()
    for fake in pair.fakes:
        fake.hold()
    pair.write(SIZE - 8192, priority=Priority.SPECULATIVE)
    ahead = sum(len(fake.log) for fake in pair.fakes)
    assert ahead == 2  # one slice a link
    pair.write(4096, SIZE - 8192, priority=Priority.ON_DEMAND)
    assert sum(len(fake.log) for fake in pair.fakes) == ahead + 1


def test_device_memory_reaches_a_host_rail_by_way_of_staging_memory() -> None:
    network = FakeNetwork()
    fake = FakeTransport(network, "p")
    rails = RailsTransport([Rail("fake", "", fake)], "p")
    memory = np.zeros(4096, np.uint8)
    FakeTransport(network, "d").register(Region(memory.ctypes.data, 4096))
    rails.meet("d", Card([RailAddress("fake", "", "d")], []))
    device = 1 << 40  # no address of this process

    def copy(to: int, source: int, length: int) -> None:
        view = np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(to))
        view[:] = np.arange(source - device, source - device + length, dtype=np.uint8)

    try:
        rails.register(Region(device, 256), copy)
        handle = rails.write("d", [Span(device + 3, memory.ctypes.data, 100)])
        assert handle.wait(2.0) is WriteState.DONE
        assert memory[:101].tolist() == [*range(3, 103), 0]
        assert rails.card().segments[-1].device or rails.card().segments[0].device
    finally:
        rails.close()


def test_a_peer_without_a_card_is_reached_by_the_plain_rail() -> None:
    one, two = FakeNetwork(), FakeNetwork()
    plain, other = FakeTransport(one, "p"), FakeTransport(two, "p")
    rails = RailsTransport([Rail("b", "", other)], "p", plain=Rail("a", "", plain))
    memory = np.zeros(64, np.uint8)
    FakeTransport(one, "old").register(Region(memory.ctypes.data, 64))
    try:
        source = np.ones(64, np.uint8)
        region = Region(source.ctypes.data, 64)
        rails.register(region)
        for transport in (plain, other):
            with pytest.raises(TransportError, match="overlaps"):
                transport.register(region)
        span = Span(source.ctypes.data, memory.ctypes.data, 64)
        assert rails.write("old", [span]).wait(2.0) is WriteState.DONE
        assert memory.all() and other.log == []
    finally:
        rails.close()


def test_a_late_filled_range_rests_until_its_room_is_settled() -> None:
    placed: list[int] = []
    end = Endpoint("d", 1)
    lane = FillLane(
        "d", end, lambda *_: None, lambda *args: placed.append(args[0]), capacity=1 << 20
    )
    lane.grant([Credit(5, 1, end, False, 1000), Credit(6, 1, end, False, 1000)])
    empty = b""
    lane.filled(Filled(5, 1, 0, 400, empty, empty, 9, late=True))
    lane.filled(Filled(6, 1, 1000, 400, empty, empty, 9))
    deadline = time.monotonic() + 5.0
    while len(placed) < 2 or lane.granted_bytes != 1600:
        assert time.monotonic() < deadline, lane.granted_bytes
        time.sleep(0.002)
    lane.settled(5, 1)
    assert lane.granted_bytes == 600


@pytest.mark.parametrize(
    ("settings_", "sentence"),
    [
        ({"rails": ["shm"]}, "needs transport 'rails'"),
        ({"transport": "rails", "rails": ["rdma"]}, "rails has 'rdma'; a rail is one of mooncake"),
        ({"transport": "rails", "rails": ["mooncake@"]}, "the address of a mooncake rail"),
        ({"transport": "rails", "rails": ["shm@10.0.0.1"]}, "the address of a shm rail"),
    ],
)
def test_a_wrong_rail_is_named(settings_: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        SmartGenConfig(**settings_)  # type: ignore[arg-type]
