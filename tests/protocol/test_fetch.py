"""The remote lane and the fetch server as one: what is asked lands, what goes wrong is named."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_smartgen.core.geometry import KVGeometry
from sglang_smartgen.select.base import KVShape
from sglang_smartgen.select.exact import ExactSelector
from sglang_smartgen.transfer.fake import FakeNetwork, FakeTransport, Fault, FaultKind
from sglang_smartgen.transfer.fetch_server import BOUNCE_BYTES, FetchServer
from sglang_smartgen.transfer.messages import (
    VERSION,
    Endpoint,
    Fetch,
    FetchDone,
    FetchItem,
    Message,
    Registration,
    Release,
    Released,
    from_frames,
    to_frames,
)
from sglang_smartgen.transfer.push_room import Peer
from sglang_smartgen.transfer.region import HostRegion
from sglang_smartgen.transfer.remote_lane import Ask, RemoteLane, Ticket
from sglang_smartgen.transfer.store import PrefillStore
from sglang_smartgen.transfer.transport import Priority, Region, Span, WriteHandle

LAYERS, HEADS, DIM, TOKENS, ROOMS = 3, 2, 8, 30, (11, 12, 13)
ROW = 2 * DIM * 4  # bytes of one entry
ARENA_BYTES, CANARY = 64 * 1024, 0xAB
P_END, D_END = Endpoint("p", 1), Endpoint("d", 2)
PATIENCE_S = 30.0  # bound of every wait that is expected to end at once


class CountingTransport(FakeTransport):
    """Knows what is registered: `regions`, in the order of registration."""

    def __init__(self, network: FakeNetwork, session: str) -> None:
        super().__init__(network, session)
        self.regions: list[Region] = []
        self.late = False  # of every further write

    def write(
        self,
        peer: str,
        spans: Sequence[Span],
        priority: Priority = Priority.PROACTIVE,
        deadline_s: float | None = None,
    ) -> WriteHandle:
        handle = super().write(peer, spans, priority, deadline_s)
        handle.late = self.late
        return handle

    def register(self, region: Region) -> None:
        super().register(region)
        self.regions.append(region)

    def unregister(self, region: Region) -> None:
        super().unregister(region)
        self.regions.remove(region)


class Bench:
    """Fetch server at node p, lane and arena at node d; messages cross as frames."""

    def __init__(
        self,
        *,
        server_timeout_s: float = PATIENCE_S,
        lane_timeout_s: float = PATIENCE_S,
        arena_bytes: int = ARENA_BYTES,
    ) -> None:
        network = FakeNetwork()
        self.p, self.d = CountingTransport(network, "p"), FakeTransport(network, "d")
        geometry = KVGeometry(LAYERS, HEADS, DIM, torch.float32)
        selector = ExactSelector(KVShape(LAYERS, HEADS, HEADS, DIM, 1.0))
        self.store = PrefillStore(geometry, selector, 1 << 20)
        made = torch.Generator().manual_seed(1)
        self.kv = {
            room: torch.randn((LAYERS, 2, TOKENS, HEADS, DIM), generator=made) for room in ROOMS
        }
        for room, kv in self.kv.items():
            entry = self.store.open(room, 1, TOKENS)
            assert entry is not None
            entry.kv.copy_(kv)
            entry.captured[:] = [TOKENS] * LAYERS
        self.arena = HostRegion(arena_bytes)
        self.arena.bytes.fill_(CANARY)
        self.d.register(self.arena.region)
        peer = Peer(self._registration(), [], [])
        self.settled, self.doubted = True, set[tuple[int, int]]()
        self.server = FetchServer(
            self.p,
            self.store,
            peer_of=lambda session: peer if session == "d" else None,
            reply=self._to_decode,
            settle=lambda _: self.settled,
            doubt=lambda room, generation: self.doubted.add((room, generation)),
            timeout_s=server_timeout_s,
        )
        self.lane = RemoteLane("d", D_END, self._to_prefill, lane_timeout_s)
        self.replies: queue.Queue[Message] = queue.Queue()
        self.answering = True  # False: replies are only noted

    def _registration(self) -> Registration:
        return Registration(
            version=VERSION,
            session="d",
            epoch=1,
            fingerprint="",
            layers=LAYERS,
            kv_row_bytes=HEADS * DIM * 4,
            mask=0,
            mask_rows=0,
            mask_width=0,
            metadata=[],
            metadata_row_bytes=0,
            arena=self.arena.region.address,
            arena_bytes=self.arena.region.length,
            fill=0,
            fill_bytes=0,
            scratch=0,
            tp_size=1,
        )

    def _to_prefill(self, endpoint: Endpoint, message: Message) -> None:
        assert endpoint == P_END
        received = from_frames(to_frames(message))
        assert isinstance(received, Fetch | Release)
        self.server.submit(received)

    def _to_decode(self, endpoint: Endpoint, message: Message) -> None:
        assert endpoint == D_END
        received = from_frames(to_frames(message))
        if isinstance(received, FetchDone) and self.answering:
            self.lane.answered(received)
        self.replies.put(received)

    def fetch(self, *asks: Ask, layer: int = 1) -> dict[int, str]:
        return self.lane.wait(self.lane.ask(layer, list(asks)))

    def release(self, room: int) -> None:
        self._to_prefill(P_END, Release(room, 1, "d", D_END))

    def reply(self) -> Message:
        return self.replies.get(timeout=PATIENCE_S)

    def writes_begun(self, count: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while len(self.p.log) < count:
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def wanted(self, *asks: Ask, layer: int = 1) -> torch.Tensor:
        """The arena after these asks: head after head, K and V of an entry side by side."""
        arena = torch.full_like(self.arena.bytes, CANARY)
        for ask in asks:
            kv = self.kv[ask.room][layer]
            rows = [kv[:, p, head].transpose(0, 1) for head, p in enumerate(ask.positions)]
            packed = torch.cat(rows).contiguous().view(torch.uint8).flatten()
            arena[ask.arena_offset : ask.arena_offset + len(packed)] = packed
        return arena

    def nobody_reads(self) -> bool:
        """True when every entry is freed as soon as it is dropped (which this does)."""
        for room in ROOMS:
            self.store.drop(room, 1)
        return self.store.used_bytes == 0

    def untouched(self) -> bool:
        return bool((self.arena.bytes == CANARY).all())

    def close(self) -> None:
        self.p.release()
        self.server.close()


def ask(room: int = 11, *heads: Sequence[int], generation: int = 1, offset: int = 0) -> Ask:
    positions = [torch.tensor(head, dtype=torch.int64) for head in heads or ([3, 1], [2])]
    return Ask(room, generation, P_END, offset, positions)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def test_entries_land_in_the_order_asked(bench: Bench) -> None:
    wanted = ask(11, [29, 0, 7, 7], [5], offset=ROW * 3)
    assert bench.fetch(wanted, layer=2) == {}
    assert torch.equal(bench.arena.bytes, bench.wanted(wanted, layer=2))
    assert (bench.server.fetches, bench.server.bytes_on_demand) == (1, 5 * ROW)


heads = st.lists(st.integers(0, TOKENS - 1), max_size=8)


@settings(deadline=None, max_examples=20)
@given(
    rows=st.lists(st.tuples(st.sampled_from(ROOMS), heads, heads), min_size=1, max_size=4),
    layer=st.integers(0, LAYERS - 1),
)
def test_several_rooms_travel_in_one_message_and_one_write(
    rows: list[tuple[int, list[int], list[int]]], layer: int
) -> None:
    bench = Bench()
    asks = [ask(room, a, b, offset=i * 20 * ROW) for i, (room, a, b) in enumerate(rows)]
    assert bench.fetch(*asks, layer=layer) == {}
    bench.close()
    assert torch.equal(bench.arena.bytes, bench.wanted(*asks, layer=layer))
    assert bench.replies.qsize() == 1 and len(bench.p.log) == 1
    assert bench.nobody_reads()


def test_more_than_the_bounce_buffer_holds() -> None:
    bench = Bench(arena_bytes=2 * BOUNCE_BYTES)
    many = torch.arange(BOUNCE_BYTES // ROW + 5) % TOKENS
    small, big = ask(12, [1], [2]), Ask(11, 1, P_END, 4 * ROW, [many, many[:1]])
    usual, fill = bench.p.regions
    assert usual.length == BOUNCE_BYTES
    assert bench.fetch(small, big) == {}
    assert torch.equal(bench.arena.bytes, bench.wanted(small, big))
    left, larger = bench.p.regions
    assert left == fill
    assert larger.length == ROW * (len(many) + 3)
    assert bench.fetch(big) == {} and bench.p.regions == [fill, larger]  # it stays for the next
    bench.close()


@pytest.mark.parametrize(
    ("bad", "layer", "part"),
    [
        (ask(99), 1, "store entry is gone"),
        (ask(generation=2), 1, "store entry is gone"),
        (ask(11, [TOKENS], [0]), 1, f"outside the {TOKENS} tokens"),
        (ask(11, [0], [-1]), 1, f"outside the {TOKENS} tokens"),
        (ask(), LAYERS, f"layer {LAYERS}"),
        (ask(), -1, "Expected `int` >= 0 - at `$.layer`"),
        (ask(11, [0]), 1, "1 KV heads"),
        (ask(11, [0], [0], [0]), 1, "3 KV heads"),
        (ask(offset=-ROW), 1, "Expected `int` >= 0"),
        (ask(offset=ARENA_BYTES - 2 * ROW), 1, "is out of range"),
    ],
)
def test_nonsense_is_named_and_nothing_is_written(
    bench: Bench, bad: Ask, layer: int, part: str
) -> None:
    failures = bench.fetch(bad, layer=layer)
    assert list(failures) == [bad.room] and part in failures[bad.room]
    assert bench.p.log == [] and bench.untouched()
    assert bench.nobody_reads()


def test_a_fetch_of_more_than_the_arena_is_served_in_part(bench: Bench) -> None:
    """Or one message, with ranges that overlap, could ask for any amount of memory."""
    count = ARENA_BYTES // ROW - 4
    first, second = ask(11, [1] * count, []), ask(12, [2] * 5, [], offset=8)
    failures = bench.fetch(first, second)
    assert failures == {12: f"malformed: {5 * ROW} bytes more in one fetch"}
    assert torch.equal(bench.arena.bytes, bench.wanted(first))
    assert bench.nobody_reads()


def test_a_position_that_is_not_captured_yet_is_refused(bench: Bench) -> None:
    entry = bench.store.acquire(11, 1)
    assert entry is not None
    entry.captured[1] = 3
    assert "outside the 3 tokens" in bench.fetch(ask(11, [3], [0]))[11]
    assert bench.fetch(ask(11, [2], [0])) == {}
    bench.store.release(entry)


def test_positions_that_are_not_whole_numbers_are_answered_too(bench: Bench) -> None:
    item = FetchItem(11, 1, 0, [b"\0\0\0\0\0", b""])
    bench.server.submit(Fetch(1, "d", D_END, 1, [item]))
    bench.server.submit(Fetch(2, "d", D_END, 1, []))
    done = bench.reply()
    assert isinstance(done, FetchDone) and done.sequence == 1
    assert [room for room, _ in done.failures] == [11] and bench.untouched()


def test_a_bad_item_does_not_spoil_its_neighbours(bench: Bench) -> None:
    good, late = ask(11, [1], [2, 3]), ask(13, [4, 5], [6], offset=8 * ROW)
    bad = [ask(12, [0], [TOKENS], offset=4 * ROW), ask(99, offset=5 * ROW)]
    failures = bench.fetch(good, *bad, late)
    assert sorted(failures) == [12, 99]
    assert torch.equal(bench.arena.bytes, bench.wanted(good, late))


def test_an_unknown_session_is_named(bench: Bench) -> None:
    bench.server.submit(Fetch(1, "stranger", D_END, 1, [FetchItem(11, 1, 0, [b"", b""])]))
    assert bench.reply() == FetchDone(1, [(11, "decode session stranger is not registered here")])


# Deadlines.


def test_the_lane_ends_at_its_deadline_and_ignores_what_comes_later() -> None:
    bench = Bench(lane_timeout_s=0.1)
    bench.p.hold()
    ticket = bench.lane.ask(1, [ask(11), ask(12, offset=8 * ROW)])
    began = time.monotonic()
    failures = dict(bench.lane.wait(ticket))
    assert time.monotonic() - began < PATIENCE_S / 2
    assert failures == dict.fromkeys((11, 12), "no answer from prefill within 0.1 s")
    bench.writes_begun(1)
    bench.p.release()
    late = bench.reply()
    assert isinstance(late, FetchDone) and late.failures == []
    bench.lane.answered(late)  # once more
    assert bench.lane.wait(ticket) == failures
    bench.close()


def test_a_late_failure_does_not_change_a_closed_ticket() -> None:
    bench = Bench(lane_timeout_s=0.02)
    bench.p.hold()
    ticket: Ticket = bench.lane.ask(1, [ask()])
    (sequence,) = ticket.pending
    before = dict(bench.lane.wait(ticket))
    bench.lane.answered(FetchDone(sequence, [(11, "something else"), (12, "not asked")]))
    assert ticket.failures == before
    bench.close()


def test_the_server_gives_a_write_up_and_says_so() -> None:
    bench = Bench(server_timeout_s=0.05)
    bench.p.script("d", 1, Fault(FaultKind.NEVER))
    failures = bench.fetch(ask())
    assert failures == {11: "fetch write failed: not complete after 0.05 s"}
    assert bench.doubted == {(11, 1)} and bench.server.bytes_on_demand == 0
    assert bench.fetch(ask()) == {}
    bench.close()


def test_late_bytes_of_a_failed_write_are_still_its_own(bench: Bench) -> None:
    first, second = ask(11, [1, 2], [3]), ask(12, [4, 5], [6], offset=8 * ROW)
    bench.p.script("d", 1, Fault(FaultKind.LATE, delay_s=5.0, spans=0))
    failures = bench.fetch(first)
    assert "scripted failure" in failures[11] and bench.untouched()
    assert bench.fetch(second) == {}
    bench.p.network.advance(5.0)
    assert torch.equal(bench.arena.bytes, bench.wanted(first, second))
    assert bench.doubted == {(11, 1)}


def test_what_may_land_again_is_said_and_doubted(bench: Bench) -> None:
    bench.p.late = True
    ticket = bench.lane.ask(1, [ask(11, [1, 2], [3])])
    assert bench.lane.wait(ticket) == {} and ticket.late == {11}
    assert bench.doubted == {(11, 1)}
    bench.p.late = False
    ticket = bench.lane.ask(1, [ask(12, [1, 2], [3])])
    assert bench.lane.wait(ticket) == {} and not ticket.late


def test_the_buffer_of_a_failed_write_is_kept_until_its_session_is_fenced(bench: Bench) -> None:
    first, fill = bench.p.regions
    bench.p.script("d", 1, Fault(FaultKind.FAIL))
    assert list(bench.fetch(ask())) == [11]
    *_, second = bench.p.regions
    before_the_fence = bench.server.retired("d")
    assert [bounce.region for bounce in before_the_fence] == [first]
    assert bench.server.retired("e") == []
    # Another write fails while the fence is under way: the fence says nothing about it.
    bench.p.script("d", 2, Fault(FaultKind.FAIL))
    assert list(bench.fetch(ask())) == [11]
    third = bench.p.regions[-1]
    bench.server.fenced("e", [])
    assert bench.p.regions == [first, fill, second, third]
    bench.server.fenced("d", before_the_fence)
    assert bench.p.regions == [fill, second, third]
    bench.server.fenced("d", bench.server.retired("d"))
    assert bench.p.regions == [fill, third] and bench.server.retired("d") == []
    assert bench.fetch(ask()) == {}


def test_a_failed_oversized_fetch_keeps_its_buffer_too() -> None:
    bench = Bench(arena_bytes=2 * BOUNCE_BYTES)
    many = torch.arange(BOUNCE_BYTES // ROW + 5) % TOKENS
    big = Ask(11, 1, P_END, 0, [many, many[:1]])
    bench.p.script("d", 1, Fault(FaultKind.LATE, delay_s=5.0, spans=0))
    assert list(bench.fetch(big)) == [11]
    _, *sizes = [region.length for region in bench.p.regions]  # but for the fill's buffer
    assert sizes == [ROW * (len(many) + 1)] * 2
    assert bench.fetch(ask(12, [1], [2], offset=BOUNCE_BYTES + 8 * ROW)) == {}
    bench.p.network.advance(5.0)
    both = bench.wanted(big, ask(12, [1], [2], offset=BOUNCE_BYTES + 8 * ROW))
    assert torch.equal(bench.arena.bytes, both)
    bench.close()


# The lane alone.


def test_one_message_a_peer_and_a_peer_that_cannot_be_reached() -> None:
    sent: list[tuple[Endpoint, Fetch]] = []

    def send(endpoint: Endpoint, message: Message) -> None:
        assert isinstance(message, Fetch)
        if endpoint.host == "gone":
            raise OSError("no route")
        sent.append((endpoint, message))

    lane = RemoteLane("d", D_END, send, PATIENCE_S)
    other, gone = Endpoint("q", 1), Endpoint("gone", 3)
    asks = [ask(11), ask(12), ask(13), ask(14)]
    asks[1].peer, asks[3].peer = other, gone
    ticket = lane.ask(5, asks)
    assert [(end, [i.room for i in m.items], m.layer) for end, m in sent] == [
        (P_END, [11, 13], 5),
        (other, [12], 5),
    ]
    for _, message in reversed(sent):
        assert message.reply == D_END and message.session == "d"
        lane.answered(FetchDone(message.sequence, []))
    assert lane.wait(ticket) == {14: "cannot reach gone:3: no route"}


# Release.


def test_a_release_is_answered_after_the_fetches_before_it(bench: Bench) -> None:
    bench.p.hold()
    wanted = ask()
    ticket = bench.lane.ask(1, [wanted])
    bench.release(11)
    bench.writes_begun(1)
    assert bench.replies.empty() and bench.store.acquire(12, 1) is not None
    bench.p.release()
    assert isinstance(bench.reply(), FetchDone)
    assert bench.reply() == Released(11, 1)
    assert bench.lane.wait(ticket) == {}
    assert torch.equal(bench.arena.bytes, bench.wanted(wanted))
    assert bench.store.acquire(11, 1) is None
    assert "gone" in bench.fetch(wanted)[11]


def test_a_release_of_an_unknown_room_is_answered(bench: Bench) -> None:
    bench.release(99)
    assert bench.reply() == Released(99, 1)


def test_a_release_that_is_not_settled_is_not_answered_until_it_is(bench: Bench) -> None:
    bench.settled = False
    bench.release(11)
    bench.fetch(ask(12))
    assert isinstance(bench.reply(), FetchDone) and bench.replies.empty()
    bench.settled = True
    bench.release(11)
    assert bench.reply() == Released(11, 1)
