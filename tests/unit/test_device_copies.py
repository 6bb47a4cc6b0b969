"""P's copies beside the prefill: nothing counts as captured before its bytes are in the store."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest
import torch
from late_streams import LateMark, LateStreams
from prefill_bench import PATIENCE_S, ROOM, TOKENS, Bench
from small_rank import HEADS, LAYERS, hata

from sglang_smartgen.core.geometry import DENSE_LAYERS
from sglang_smartgen.engine.cuda.copies import DeviceCopies
from sglang_smartgen.engine.cuda.streams import Mark
from sglang_smartgen.engine.device_path import Copies, DevicePath, Stored
from sglang_smartgen.select.base import Selector


class HeldMark(LateMark):
    """A mark that passes when the test lets it."""

    def __init__(self, gate: threading.Semaphore) -> None:
        super().__init__([])
        self._gate = gate

    def synchronize(self) -> None:
        assert self._gate.acquire(timeout=PATIENCE_S)


class HeldStreams(LateStreams):
    """Copies are done one by one, as the test lets them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Semaphore(0)

    def mark(self) -> Mark:
        super().mark()
        return HeldMark(self.gate)


class HeldPath(DevicePath):
    """A GPU host's way to capture, on CPU tensors."""

    def __init__(self) -> None:
        self.streams = HeldStreams()

    def copies(self, stored: Stored, selector: Selector) -> Copies:
        return DeviceCopies(self.streams, stored, selector)


class HeldBench(Bench):
    """A prefill side whose copies take as long as the test wants."""

    def __init__(self) -> None:
        self.path = HeldPath()
        super().__init__(path=self.path)

    def let(self, copies: int) -> None:
        for _ in range(copies):
            self.path.streams.gate.release()


@pytest.fixture
def bench() -> Iterator[HeldBench]:
    made = HeldBench()
    yield made
    made.let(1000)
    made.p.release()


def test_a_layer_is_captured_when_its_copy_is_done(bench: HeldBench) -> None:
    bench.begun()
    bench.layers(0, 1)
    entry = bench.side.store.acquire(ROOM, 1)
    assert entry is not None and entry.captured == [0] * LAYERS
    bench.let(1)
    bench.wait_for(lambda: entry.captured[0] == TOKENS)
    assert entry.captured[1] == 0
    assert torch.equal(entry.kv[0], bench.here.pool[:, 0, bench.source[:TOKENS]].movedim(0, 0))
    bench.side.store.release(entry)


def test_the_whole_push_waits_for_the_copies_and_sends_the_same_bytes(bench: HeldBench) -> None:
    bench.begun()
    bench.layers(stop=100)
    bench.layers()
    bench.finish()
    with pytest.raises(queue.Empty):
        bench.outcome.ends.get(timeout=0.05)
    assert bench.side.store.used_bytes > 0  # SGLang has its slots back, the entry is still held
    # What SGLang writes to the slots now must not reach the store: the rows were staged.
    kept = bench.here.pool[:, :, bench.source[:TOKENS]].clone()
    bench.here.pool[:, :, bench.source[:TOKENS]] = torch.nan
    bench.let(2 * LAYERS)
    push = bench.end()
    assert (push.failure, push.ended_early) == (None, None)
    bench.closed(entries=1)
    target = bench.target[:TOKENS]
    for layer in range(DENSE_LAYERS):
        assert torch.equal(bench.there.pool[:, layer, target], kept[:, layer])
    assert bench.side.layers_swept == 0
    assert bench.side.bytes_metadata == 2 * TOKENS * HEADS * hata().metadata_width * 4


def test_an_aborted_room_keeps_its_entry_until_the_copies_are_done(bench: HeldBench) -> None:
    bench.begun()
    bench.layers(0, 1)
    bench.side.let_go(ROOM)
    bench.side.cancel(ROOM)
    bench.layers(2)  # the batch goes on, but nothing more is copied
    used = bench.side.store.used_bytes
    assert used > 0
    bench.let(1)
    assert bench.side.store.used_bytes == used
    bench.let(1)
    bench.end()
    bench.release()
    bench.closed()
    assert len(bench.path.streams.marks) == 2


def test_layers_that_the_hook_missed_are_swept(bench: HeldBench) -> None:
    bench.begun()
    bench.layers(0)
    bench.finish()
    bench.let(LAYERS)
    assert bench.end().failure is None
    assert bench.side.layers_swept == LAYERS - 1
    target, source = bench.target[:TOKENS], bench.source[:TOKENS]
    assert torch.equal(bench.there.pool[:, :2, target], bench.here.pool[:, :2, source])


@pytest.mark.parametrize("first", [TOKENS, 140, 40])
def test_metadata_is_the_bytes_that_a_cpu_host_makes(bench: HeldBench, first: int) -> None:
    """Whole, in chunks, and with a first chunk too short to centre on, which the push encodes."""
    whole = Bench()
    bench.let(1000)
    for each in (whole, bench):
        each.begun()
        each.layers(stop=first)
        each.layers()
        each.finish()
        assert each.end().failure is None
    ours, theirs = bench.side.store.acquire(ROOM, 1), whole.side.store.acquire(ROOM, 1)
    assert ours is not None and theirs is not None
    assert torch.equal(ours.metadata, theirs.metadata) and torch.equal(ours.kv, theirs.kv)
    beside = [0 if first < hata().anchor_tokens else TOKENS] * len(ours.sparse_layers)
    assert ours.encoded_before == beside
    size = whole.metadata.bytes
    assert torch.equal(bench.metadata.bytes, size) and bool(size.any())
    whole.p.release()
