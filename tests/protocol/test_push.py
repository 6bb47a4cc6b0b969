"""The proactive push: planned bytes land at their slots, and no mask byte is ahead of them."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_smartgen.core.geometry import DENSE_LAYERS, KVGeometry
from sglang_smartgen.core.mask import LOCAL, REMOTE
from sglang_smartgen.core.orders import ORDERS
from sglang_smartgen.core.room_plan import RoomPlan
from sglang_smartgen.select.base import KVShape
from sglang_smartgen.select.exact import ExactSelector
from sglang_smartgen.transfer.fake import FakeNetwork, FakeTransport, Fault, FaultKind
from sglang_smartgen.transfer.messages import VERSION, Endpoint, Registration
from sglang_smartgen.transfer.push import PushWorker
from sglang_smartgen.transfer.push_room import Peer, PushRoom
from sglang_smartgen.transfer.store import PrefillStore
from sglang_smartgen.transfer.transport import Priority, Region, Span, WriteHandle

LAYERS, HEADS, DIM, SLOTS, ROWS, WIDTH = 4, 2, 4, 64, 3, 48
ROW, TOKENS = 1, 40  # the room's mask row and prompt length
CANARY = 77
PATIENCE_S = 30.0  # bound of every wait that is expected to end at once


class WatchedTransport(FakeTransport):
    """Notes every mask write whose KV was not on the decode side when it was issued."""

    check: Callable[[Sequence[Span]], list[str]] | None = None

    def __init__(self, network: FakeNetwork, session: str) -> None:
        super().__init__(network, session)
        self.too_early: list[str] = []
        self.late = False
        self.rate: float | None = None

    def bandwidth(self, peer: str) -> float | None:
        return self.rate

    def write(
        self,
        peer: str,
        spans: Sequence[Span],
        priority: Priority = Priority.PROACTIVE,
        deadline_s: float | None = None,
    ) -> WriteHandle:
        if self.check is not None:
            self.too_early += self.check(spans)
        handle = super().write(peer, spans, priority, deadline_s)
        handle.late = self.late
        return handle


class OpenGate:
    """Lets every write through while the room is live, and counts those under way."""

    def __init__(self, live: Callable[[], bool] = lambda: True) -> None:
        self.live = live
        self.ends: list[bool] = []
        self.shut = False
        self.lates = 0

    def began(self) -> bool:
        return self.live() and not self.shut

    def ended(self, done: bool) -> None:
        self.ends.append(done)

    def late(self) -> None:
        self.lates += 1


class Bench:
    """Prefill node p with one room; decode node d as plain tensors of this process."""

    def __init__(
        self, *, timeout_s: float = PATIENCE_S, slots: Sequence[int] | None = None
    ) -> None:
        network = FakeNetwork()
        self.p, self.d = WatchedTransport(network, "p"), FakeTransport(network, "d")
        self.geometry = KVGeometry(LAYERS, HEADS, DIM, torch.float32)
        self.selector = ExactSelector(KVShape(LAYERS, HEADS, HEADS, DIM, 1.0))
        self.store = PrefillStore(self.geometry, self.selector, 1 << 20)
        self.worker = PushWorker(self.p, self.selector, timeout_s)
        pool = (LAYERS, SLOTS, HEADS, DIM)
        self.source = torch.randn((2, *pool), generator=torch.Generator().manual_seed(1))
        self.here = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(2))[:TOKENS]
        self.slots = np.array(range(5, 5 + TOKENS) if slots is None else slots, dtype=np.int64)
        self.kv = torch.full((2, *pool), float(CANARY))
        self.metadata = torch.full((LAYERS - DENSE_LAYERS, *pool[1:]), float(CANARY))
        self.mask = torch.full((LAYERS, ROWS, WIDTH), CANARY, dtype=torch.int8)
        self.mask[:, ROW, :TOKENS] = REMOTE
        for memory in (self.kv, self.metadata, self.mask):
            self.d.register(Region(memory.data_ptr(), memory.nbytes))
        self.p.check = self._masks_ahead_of_data

    def room(
        self,
        plan: RoomPlan,
        *,
        with_metadata: bool = True,
        gate: OpenGate | None = None,
    ) -> PushRoom:
        entry = self.store.open(9, 1, TOKENS)
        assert entry is not None
        registration = Registration(
            version=VERSION,
            session="d",
            epoch=1,
            fingerprint="",
            layers=LAYERS,
            kv_row_bytes=self.geometry.row_bytes,
            mask=self.mask.data_ptr(),
            mask_rows=ROWS,
            mask_width=WIDTH,
            metadata=[layer.data_ptr() for layer in self.metadata],
            metadata_row_bytes=HEADS * DIM * 4,
            arena=0,
            arena_bytes=0,
            fill=0,
            fill_bytes=0,
            scratch=0,
            tp_size=1,
        )
        keys, values = ([layer.data_ptr() for layer in side] for side in self.kv)
        return PushRoom(
            entry=entry,
            plan=plan,
            peer=Peer(registration, keys, values),
            reply=Endpoint("d", 1),
            slots=self.slots,
            row=ROW,
            with_metadata=with_metadata,
            keep=True,
            gate=gate or OpenGate(),
        )

    def prefill(self, room: PushRoom, stops: Sequence[int] = (TOKENS,)) -> None:
        """Capture the prompt chunk by chunk, layer by layer, as the scheduler thread does."""
        for stop in stops:
            for layer in range(LAYERS):
                k, v = self.source[0, layer], self.source[1, layer]
                room.entry.capture(layer, self.here[:stop], k, v, stop)
                self.worker.layer_ready(room, layer)

    def end(self, room: PushRoom) -> None:
        """Wait until the push thread has nothing left to do for the room."""
        done = threading.Event()
        self.worker.finish(room, lambda _: done.set())
        assert done.wait(PATIENCE_S)

    def writes_begun(self, count: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while len(self.p.log) < count:
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def assert_landed(self, plan: RoomPlan, *, metadata: bool) -> None:
        """D holds exactly the plan: every byte of it, and no other byte has changed."""
        kv, mask = torch.full_like(self.kv, CANARY), torch.full_like(self.mask, CANARY)
        mask[:, ROW, :TOKENS] = REMOTE
        for layer in range(LAYERS):
            for start, stop in planned(plan, layer):
                here, there = self.here[start:stop], torch.from_numpy(self.slots[start:stop])
                kv[:, layer, there] = self.source[:, layer, here]
                mask[layer, ROW, start:stop] = LOCAL
        wanted = torch.full_like(self.metadata, CANARY)
        if metadata:
            wanted[:, torch.from_numpy(self.slots)] = self.source[0, DENSE_LAYERS:, self.here]
        assert torch.equal(self.kv, kv)
        assert torch.equal(self.mask, mask)
        assert torch.equal(self.metadata, wanted)
        assert self.p.too_early == []

    def is_data(self, span: Span) -> bool:
        at = span.destination - self.mask.data_ptr()
        return not 0 <= at < self.mask.nbytes

    def _masks_ahead_of_data(self, spans: Sequence[Span]) -> list[str]:
        early: list[str] = []
        for span in spans:
            at = span.destination - self.mask.data_ptr()
            says = ctypes.string_at(span.source, span.length)
            for i in range(span.length) if 0 <= at < self.mask.nbytes else ():
                layer, position = (at + i) // (ROWS * WIDTH), (at + i) % WIDTH
                if says[i] != LOCAL:
                    assert says[i] == REMOTE and self.mask[layer, ROW, position] != LOCAL
                    continue
                there, here = int(self.slots[position]), int(self.here[position])
                if not torch.equal(self.kv[:, layer, there], self.source[:, layer, here]):
                    early.append(f"layer {layer} token {position}")
        return early


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.p.release()
    made.worker.close()


def make_plan(order: str, k_r: int, seed: int = 0, *, elastic: bool = False) -> RoomPlan:
    """Blocks of 4 tokens; the importance is random."""
    made = torch.Generator().manual_seed(seed)
    return RoomPlan(
        KVGeometry(LAYERS, HEADS, DIM, torch.float32),
        order=order,
        prompt_len=TOKENS,
        blocks=10,
        k_r=k_r,
        k=4,
        scaling=1.0,
        seed=seed,
        importance=torch.rand((LAYERS, 10), generator=made),
        elastic=elastic,
    )


def sequential(proactive_blocks: int) -> RoomPlan:
    return make_plan("sequential", proactive_blocks)


def some() -> RoomPlan:
    """Layers 0 and 1, and half of layer 2."""
    return sequential(25)


def planned(plan: RoomPlan, layer: int) -> list[tuple[int, int]]:
    """Token ranges of a layer, once everything is decided."""
    if layer < DENSE_LAYERS:
        return [(0, TOKENS)]
    return [(4 * m, 4 * m + 4) for m in plan.chosen[layer].nonzero().flatten().tolist()]


def planned_tokens(plan: RoomPlan) -> int:
    return DENSE_LAYERS * TOKENS + 4 * int(plan.chosen.sum())


@pytest.mark.parametrize("blocks", [0, 25, 40])
def test_planned_blocks_and_all_metadata_land_and_nothing_else(bench: Bench, blocks: int) -> None:
    room = bench.room(plan := sequential(blocks))
    bench.prefill(room)
    bench.end(room)
    assert room.failure is None
    bench.assert_landed(plan, metadata=True)
    assert room.proactive_bytes == planned_tokens(plan) * 2 * bench.geometry.row_bytes
    assert room.metadata_bytes == (LAYERS - DENSE_LAYERS) * TOKENS * HEADS * DIM * 4


def test_without_a_selector_no_metadata_is_sent(bench: Bench) -> None:
    room = bench.room(some(), with_metadata=False)
    bench.prefill(room)
    bench.end(room)
    assert (room.failure, room.metadata_bytes) == (None, 0)
    bench.assert_landed(room.plan, metadata=False)


@settings(deadline=None, max_examples=20)
@given(
    order=st.sampled_from(ORDERS),
    k_r=st.integers(0, 40),
    stops=st.sets(st.integers(1, TOKENS - 1), max_size=4),
    seed=st.integers(0, 99),
)
def test_any_plan_in_any_chunks_to_any_slots(
    order: str, k_r: int, stops: set[int], seed: int
) -> None:
    plan = make_plan(order, k_r, seed)
    slots = np.random.default_rng(seed).permutation(SLOTS)[:TOKENS]
    bench = Bench(slots=slots.tolist())
    room = bench.room(plan)
    bench.prefill(room, [*sorted(stops), TOKENS])
    bench.end(room)
    bench.worker.close()
    assert room.failure is None
    bench.assert_landed(plan, metadata=True)
    assert room.proactive_bytes == planned_tokens(plan) * 2 * bench.geometry.row_bytes


def test_the_mask_waits_for_the_data(bench: Bench) -> None:
    room = bench.room(some())
    bench.p.hold()
    bench.prefill(room)
    bench.writes_begun(1)
    assert bench.mask[:, ROW, :TOKENS].unique().tolist() == [REMOTE]
    assert all(bench.is_data(span) for _, spans in bench.p.log for span in spans)
    bench.p.release()
    bench.end(room)
    assert room.failure is None
    bench.assert_landed(room.plan, metadata=True)


def masks_local(bench: Bench) -> bool:
    return bool((bench.mask == LOCAL).any())


@pytest.mark.parametrize(
    "fault",
    [
        Fault(FaultKind.FAIL),
        Fault(FaultKind.PARTIAL, spans=1),
        Fault(FaultKind.LATE, delay_s=1.0, spans=1),
    ],
    ids=lambda fault: fault.kind.value,
)
def test_failed_data_leaves_the_mask_alone_and_is_reported(bench: Bench, fault: Fault) -> None:
    bench.p.script("d", 1, fault)
    room = bench.room(some())
    bench.prefill(room)
    bench.end(room)
    assert room.failure is not None and "scripted failure" in room.failure
    assert room.failure.startswith("push to d failed: ")
    assert not masks_local(bench) and bench.p.writes["d"] == 1
    bench.worker.layer_ready(room, 0)
    bench.end(room)
    bench.p.network.advance(2.0)
    assert not masks_local(bench) and bench.p.writes["d"] == 1


def test_a_write_of_which_a_copy_may_land_again_goes_on_and_its_gate_is_told(bench: Bench) -> None:
    bench.p.late = True
    gate = OpenGate()
    room = bench.room(some(), gate=gate)
    bench.prefill(room)
    bench.end(room)
    assert room.failure is None and room.late
    assert masks_local(bench) and gate.lates == bench.p.writes["d"] == len(gate.ends)


def test_data_that_is_not_complete_in_time_is_a_failure() -> None:
    bench = Bench(timeout_s=0.05)
    bench.p.script("d", 1, Fault(FaultKind.NEVER))
    room = bench.room(some())
    bench.prefill(room)
    bench.end(room)
    assert room.failure is not None and "not complete after" in room.failure
    assert not masks_local(bench) and bench.p.writes["d"] == 1
    bench.worker.close()


def test_a_failed_mask_write_is_reported(bench: Bench) -> None:
    bench.p.script("d", 2, Fault(FaultKind.FAIL))
    room = bench.room(some())
    room.entry.capture(0, bench.here, bench.source[0, 0], bench.source[1, 0], TOKENS)
    bench.worker.layer_ready(room, 0)
    bench.end(room)
    assert room.failure is not None and not masks_local(bench)


def test_a_transport_that_raises_fails_the_room_and_not_the_thread(bench: Bench) -> None:
    bench.p.alive = False  # write raises TransportError
    room = bench.room(some())
    bench.prefill(room)
    bench.end(room)
    assert room.failure is not None and "closed" in room.failure
    bench.p.alive = True
    bench.store.drop(9, 1)
    second = bench.room(some())
    bench.prefill(second)
    bench.end(second)
    assert second.failure is None
    bench.assert_landed(room.plan, metadata=True)


def test_a_room_that_is_not_live_is_skipped_and_ends_once(bench: Bench) -> None:
    room = bench.room(some(), gate=OpenGate(lambda: False))
    ends: list[PushRoom] = []
    bench.prefill(room)
    bench.worker.finish(room, ends.append)
    bench.end(room)
    assert ends == [room] and bench.p.log == []
    assert not masks_local(bench)


def test_a_room_that_dies_under_way_sends_nothing_more(bench: Bench) -> None:
    live = threading.Event()
    live.set()
    room = bench.room(sequential(40), gate=OpenGate(live.is_set))
    bench.p.hold()
    bench.prefill(room, [10])
    bench.writes_begun(1)
    first = [span for _, spans in bench.p.log for span in spans]
    live.clear()
    bench.prefill(room, [TOKENS])
    bench.p.release()
    ends: list[PushRoom] = []
    bench.worker.finish(room, ends.append)
    bench.end(room)
    assert ends == [room]
    data = [span for _, spans in bench.p.log for span in spans if bench.is_data(span)]
    assert data == [span for span in first if bench.is_data(span)]
    assert bench.p.too_early == []


def test_an_end_that_raises_does_not_stop_the_thread(bench: Bench) -> None:
    room = bench.room(some())
    bench.worker.finish(room, lambda _: 1 / 0)
    bench.prefill(room)
    bench.end(room)
    bench.assert_landed(room.plan, metadata=True)


def test_close_finishes_what_is_queued(bench: Bench) -> None:
    room = bench.room(some())
    bench.prefill(room)
    bench.worker.close()
    bench.assert_landed(room.plan, metadata=True)


def test_a_room_that_ends_between_two_writes_makes_no_further_one(bench: Bench) -> None:
    gate = OpenGate()
    room = bench.room(sequential(40), gate=gate)
    bench.p.hold()
    bench.prefill(room)
    while not bench.p.log:
        time.sleep(0.001)
    gate.shut = True
    bench.p.release()
    bench.end(room)
    assert gate.ends == [True] and len(bench.p.log) == 1  # the data, and never its mask
    assert room.failure is None and room.ended_early is not None
    assert not bool((bench.mask == LOCAL).any())


def test_every_write_is_reported_as_it_ended(bench: Bench) -> None:
    gate = OpenGate()
    bench.p.script("d", 2, Fault(FaultKind.FAIL))
    room = bench.room(sequential(40), gate=gate)
    bench.prefill(room)
    bench.end(room)
    assert gate.ends == [True, False] and room.failure is not None


@pytest.mark.parametrize("order", ORDERS)
def test_while_the_network_is_idle_an_elastic_plan_sends_more(bench: Bench, order: str) -> None:
    room = bench.room(plan := make_plan(order, 25, elastic=True))
    bench.prefill(room, [10])
    deadline = time.monotonic() + PATIENCE_S
    while not bool((bench.mask[DENSE_LAYERS:, ROW, :8] == LOCAL).all()):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    bench.prefill(room, [TOKENS])
    while not bool((bench.mask[:, ROW, :TOKENS] == LOCAL).all()):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    room.prefilled(1.0)
    bench.end(room)
    assert room.entry.residual.left == 0
    bench.assert_landed(plan, metadata=True)
    assert room.proactive_bytes == LAYERS * TOKENS * 2 * bench.geometry.row_bytes  # nothing twice


@pytest.mark.parametrize("elastic", [True, False])
def test_what_is_planned_but_late_is_left_over(bench: Bench, elastic: bool) -> None:
    room = bench.room(plan := make_plan("observed", 40, elastic=elastic))
    bench.p.rate = 1.0  # byte a second: nothing is in time
    bench.p.hold()
    room.entry.capture(0, bench.here, bench.source[0, 0], bench.source[1, 0], TOKENS)
    bench.worker.layer_ready(room, 0)
    bench.writes_begun(1)
    bench.prefill(room)
    room.prefilled(0.1)
    bench.p.release()
    bench.end(room)
    left = (LAYERS - DENSE_LAYERS) * TOKENS * HEADS if elastic else 0
    assert room.entry.residual.left == left
    assert plan.residual().numel() == left // HEADS
    bench.assert_landed(plan, metadata=True)


def test_a_fast_network_leaves_nothing_over(bench: Bench) -> None:
    room = bench.room(plan := make_plan("observed", 40, elastic=True))
    bench.p.rate = 1e9
    bench.p.hold()
    bench.prefill(room)
    bench.writes_begun(1)
    room.prefilled(100.0)
    bench.p.release()
    bench.end(room)
    assert room.entry.residual.left == 0
    bench.assert_landed(plan, metadata=True)
