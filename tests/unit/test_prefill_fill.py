"""P's rooms after their push: what D grants is filled, and `observed` sees the right queries."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prefill_bench import D_END, ROOM, ROW, TOKENS, Bench
from small_rank import DIM, HEADS, LAYERS

from sglang_smartgen.core import recordings
from sglang_smartgen.core.geometry import DENSE_LAYERS
from sglang_smartgen.core.mask import LOCAL
from sglang_smartgen.core.observe import WINDOW
from sglang_smartgen.core.room_plan import RoomPlan
from sglang_smartgen.transfer import fetch_servers
from sglang_smartgen.transfer.fake import FakeTransport, Fault, FaultKind
from sglang_smartgen.transfer.messages import (
    Fetch,
    FetchDone,
    FetchItem,
    Filled,
    Grant,
    GrantItem,
    Released,
)

ENTRY = 2 * DIM * 2  # bytes of one entry
TOKEN = HEADS * ENTRY  # and of a token's entries in one layer
LEFT = (LAYERS - DENSE_LAYERS) * TOKENS * HEADS  # when the dense layers were pushed


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.p.release()


def pushed(bench: Bench) -> None:
    """A room whose dense layers are on D, and no more."""
    bench.begun()
    bench.layers()
    bench.finish()
    assert bench.end().failure is None
    bench.closed(entries=1)


def grant(bench: Bench, offset: int, length: int) -> Filled:
    """Grant a range of D's fill memory, and P's answer."""
    bench.side.submit(Grant("d", D_END, False, [GrantItem(ROOM, 1, offset, length)]))
    filled = bench.reply()
    assert isinstance(filled, Filled)
    return filled


def test_the_fill_begins_where_the_push_ended(bench: Bench) -> None:
    pushed(bench)
    filled = grant(bench, TOKEN, 5 * TOKEN)
    assert (filled.arena_offset, filled.length) == (TOKEN, 5 * TOKEN)
    assert (filled.failure, filled.left) == (None, LEFT - 5 * HEADS)
    first = DENSE_LAYERS * TOKENS  # order sequential
    assert np.frombuffer(filled.tokens, dtype=np.int32).tolist() == list(range(first, first + 5))
    rows = bench.small.tensor(4096, (2048,), torch.uint8)
    there = rows[TOKEN : 6 * TOKEN].view(torch.bfloat16).view(2, 5, HEADS, DIM)
    assert torch.equal(there, bench.here.pool[:, DENSE_LAYERS, bench.source[:5]])
    assert not bool(rows[:TOKEN].any()) and not bool(rows[6 * TOKEN :].any())
    assert bench.side.snapshot()["bytes_speculative"] == 5 * TOKEN


def test_a_failed_slice_is_fenced_before_the_release_is_answered(bench: Bench) -> None:
    pushed(bench)
    nth = bench.p.writes["d"] + 1
    bench.p.script("d", nth, Fault(FaultKind.LATE, delay_s=5.0, spans=0))
    failed = grant(bench, 0, 5 * TOKEN)
    assert failed.failure is not None and failed.length == 0
    bench.release()
    with pytest.raises(queue.Empty):  # it may still land
        bench.replies.get(timeout=0.1)
    bench.p.network.advance(10.0)
    assert bench.reply() == Released(ROOM, 1)
    bench.closed()


def test_the_last_chunk_shows_its_last_queries_and_no_other(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int, torch.Tensor | None]] = []
    real = RoomPlan.ranges

    def ranges(plan: RoomPlan, layer: int, *rest: Any) -> list[tuple[int, int]]:
        _, stop, queries, _ = rest
        seen.append((layer, stop, queries))
        return real(plan, layer, *rest)

    monkeypatch.setattr(RoomPlan, "ranges", ranges)
    bench.announce(order="observed", proactive_blocks=120)
    assert bench.side.begin(ROOM, TOKENS)
    width = 2 * HEADS * DIM
    batch = torch.randn(7 + 40, width, generator=torch.Generator().manual_seed(1))
    bench.side.set_batch([None, ROOM])
    rows = torch.tensor([0, ROW])
    bench.side.on_layer(2, rows, [7, TOKENS - 40], [7, 40], batch)
    bench.wait_for(lambda: len(seen) == 1)
    bench.side.set_batch([None, ROOM])
    bench.side.on_layer(2, rows, [7, TOKENS], [7, 40], batch)
    batch.zero_()  # the engine's buffer has a new owner
    bench.wait_for(lambda: len(seen) == 2)
    (_, at, early), (layer, end, queries) = seen
    assert (at, early, layer, end) == (TOKENS - 40, None, 2, TOKENS)
    wanted = torch.randn(7 + 40, width, generator=torch.Generator().manual_seed(1))[-WINDOW:]
    assert queries is not None and torch.equal(queries, wanted.view(WINDOW, 2 * HEADS, DIM))
    bench.finish()
    assert bench.end().failure is None
    # 20 blocks of 3 tokens are left for the sparse layers, equally.
    mask = bench.mask.tensor(0, (LAYERS, bench.mask.region.length // LAYERS), torch.int8)
    assert (mask == LOCAL).sum(1).tolist() == [TOKENS, TOKENS, 30, 30]


def test_an_order_that_cannot_be_had_is_a_full_transfer(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(recordings.RECORD_DIR_ENV, str(tmp_path))
    recordings.write("short", counts=torch.zeros(LAYERS - DENSE_LAYERS, HEADS, TOKENS - 1).int())
    for order, recording in (("oracle", "missing"), ("oracle", "short"), ("profile", "")):
        bench.announce(order=order, recording=recording)
        assert not bench.side.begin(ROOM, TOKENS)
    missing, short, profile = bench.side.fallbacks
    assert missing.startswith("recording missing.npz cannot be read")
    assert short.startswith("recording short is [2, 2, 149]; it must be [2, 2, 150]")
    assert profile == "order is profile; it needs importance"
    bench.closed()


def test_the_oracle_sends_what_was_selected(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(recordings.RECORD_DIR_ENV, str(tmp_path))
    counts = torch.zeros(LAYERS - DENSE_LAYERS, HEADS, TOKENS, dtype=torch.int32)
    counts[1, 0, 30:33] = 9  # layer 3, block 10
    counts[0, 1, 148] = 1  # layer 2, block 49
    recordings.write("r", counts=counts)
    bench.announce(order="oracle", recording="r", proactive_blocks=102)
    assert bench.side.begin(ROOM, TOKENS)
    bench.layers()
    bench.finish()
    assert bench.end().failure is None
    at = bench.mask.bytes.view(LAYERS, -1)[DENSE_LAYERS:].nonzero().tolist()
    width = bench.here.facts.req_to_token.shape[1]
    assert [(i, flat - ROW * width) for i, flat in at] == [
        *((0, token) for token in (147, 148, 149)),
        *((1, token) for token in (30, 31, 32)),
    ]


def test_k_r_is_computed_once_speed_and_network_are_known(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.announce(proactive_blocks=None)
    assert bench.side.begin(ROOM, TOKENS)
    bench.layers()
    bench.finish()
    bench.end()
    assert local(bench)[:DENSE_LAYERS] == [TOKENS, TOKENS]
    monkeypatch.setattr(bench.p, "bandwidth", lambda session: 1.0)
    bench.mask.bytes.zero_()
    bench.announce(9, proactive_blocks=None)
    assert bench.side.begin(9, TOKENS)
    bench.layers(room=9)
    bench.finish(9)
    assert bench.end().entry.residual.left  # on a slow one decode does not wait for it
    assert local(bench)[:DENSE_LAYERS] == [TOKENS, TOKENS]
    monkeypatch.setattr(bench.p, "bandwidth", lambda session: 1e15)
    bench.announce(8, proactive_blocks=None)
    assert bench.side.begin(8, TOKENS)
    bench.layers(room=8)
    bench.finish(8)
    assert bench.end().entry.residual.left == 0  # on a fast network it is a full transfer
    assert local(bench) == [TOKENS] * LAYERS


def local(bench: Bench) -> list[int]:
    """How many tokens of each layer the mask says are local."""
    return (bench.mask.bytes.view(LAYERS, -1) == LOCAL).sum(1).tolist()


def test_a_hung_decode_node_holds_up_no_fetch_of_another(bench: Bench) -> None:
    other = FakeTransport(bench.network, "e")
    other.register(bench.small.region)
    assert bench.add_peer(session="e")
    pushed(bench)
    bench.p.script("d", bench.p.writes["d"] + 1, Fault(FaultKind.DELAY, delay_s=1.0))
    item = FetchItem(ROOM, 1, 0, [b"\0\0\0\0", b""])
    bench.side.submit(Fetch(1, "d", D_END, LAYERS - 1, [item]))
    bench.side.submit(Fetch(2, "e", D_END, LAYERS - 1, [item]))
    assert bench.reply() == FetchDone(2, [])
    assert bench.replies.empty()
    bench.network.advance(1.0)  # of a clock that stood still
    assert bench.reply() == FetchDone(1, [])
    shown = bench.side.snapshot()
    assert (shown["fetches"], shown["bytes_on_demand"]) == (2, 2 * ENTRY)


def test_the_serve_thread_of_a_silent_decode_node_ends(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_servers, "UNUSED_S", 0.0)
    other = FakeTransport(bench.network, "e")
    other.register(bench.small.region)
    assert bench.add_peer(session="e")
    pushed(bench)
    item = FetchItem(ROOM, 1, 0, [b"\0\0\0\0", b""])
    before = serve_threads()
    for number in range(4):
        for session in ("d", "e"):
            bench.side.submit(Fetch(number, session, D_END, LAYERS - 1, [item]))
            assert bench.reply() == FetchDone(number, [])
    bench.wait_for(lambda: serve_threads() == before + 1)
    assert bench.side.snapshot()["fetches"] == 8


def serve_threads() -> int:
    return sum(thread.name == "smartgen-fetch" for thread in threading.enumerate())
