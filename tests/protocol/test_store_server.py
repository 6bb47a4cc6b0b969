"""The store's server as a thread and as a process: the same cases, and what only a process does."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from serve_bench import (
    CANARY,
    DIM,
    HEADS,
    LAYERS,
    PATIENCE_S,
    ROW,
    TOKENS,
    ServeBench,
    ask,
)

from sglang_smartgen.core.geometry import DENSE_LAYERS
from sglang_smartgen.transfer import store_server
from sglang_smartgen.transfer.messages import FetchDone, Filled, Released


@pytest.fixture(scope="module")
def process_bench() -> Iterator[ServeBench]:
    made = ServeBench(as_process=True)
    yield made
    made.close()


@pytest.fixture(params=["thread", "process"])
def bench(request: pytest.FixtureRequest) -> Iterator[ServeBench]:
    """A bench without rooms; the one with a process is shared, since a process takes seconds."""
    shared = request.param == "process"
    made = request.getfixturevalue("process_bench") if shared else ServeBench(as_process=False)
    made.wipe()
    assert made.d.inbox.empty()
    yield made
    while not made.d.inbox.empty():
        made.d.inbox.get()
    if not shared:
        made.close()


def pid(bench: ServeBench) -> int:
    return int(bench.server.snapshot()["store_server_pid"])


def test_entries_land_in_the_order_asked(bench: ServeBench) -> None:
    bench.open(11)
    bench.open(12)
    asks = [ask(11, [29, 0, 7, 7], [5], offset=ROW * 3), ask(12, [1], [2, 3], offset=ROW * 20)]
    assert bench.d.fetch(*asks, layer=3) == {}
    assert torch.equal(bench.d.arena.bytes, bench.wanted(*asks, layer=3))
    end(bench, 11, 12)


def count_readers() -> int:
    return sum(thread.name == "smartgen-store-server" for thread in threading.enumerate())


def end(bench: ServeBench, *rooms: int) -> None:
    """Release the rooms; nothing of them stays."""
    for room in rooms:
        bench.d.release(room)
    answers = set()
    while len(answers) < len(rooms):
        message = bench.d.heard()
        if isinstance(message, Released):
            answers.add(message.room)
    assert answers == set(rooms)
    bench.freed()


def test_what_cannot_be_served_is_named(bench: ServeBench) -> None:
    bench.open(11)
    failures = bench.d.fetch(ask(11, [0], [TOKENS]), ask(99, offset=ROW))
    assert f"outside the {TOKENS} tokens" in failures[11]
    assert failures[99] == "its prefill store entry is gone"
    assert bool((bench.d.arena.bytes == CANARY).all())
    end(bench, 11)


def test_a_message_that_comes_to_the_scheduler_process_is_served_too(bench: ServeBench) -> None:
    """A decode node that has not read its Hello yet sends to the bootstrap socket."""
    serve, bench.d.serve = bench.d.serve, None
    bench.open(11)
    assert bench.d.fetch(ask(11)) == {}
    assert torch.equal(bench.d.arena.bytes, bench.wanted(ask(11)))
    end(bench, 11)
    bench.d.serve = serve


def test_an_entry_is_served_from_the_moment_it_was_handed_over(bench: ServeBench) -> None:
    """D may ask as soon as it hears of the room, by another way than the server does."""
    rooms = range(100, 130)
    for room in rooms:
        bench.open(room)
        assert bench.d.fetch(ask(room)) == {}
    end(bench, *rooms)


def fill_until_whole(bench: ServeBench, room: int, length: int, *, paced: bool) -> torch.Tensor:
    """How often each sparse entry came [layers, tokens, heads]; the bytes must be the prompt's."""
    came = torch.zeros((LAYERS, TOKENS, HEADS), dtype=torch.int64)
    left = 1
    while left:
        bench.d.grant(room, length, paced=paced)
        used = 0
        while used < length and left:
            filled = bench.d.heard_filled()
            assert filled.failure is None
            used, left = filled.arena_offset + filled.length, filled.left
            check_filled(bench, room, filled, came)
    return came


def check_filled(bench: ServeBench, room: int, filled: Filled, came: torch.Tensor) -> None:
    tokens = np.frombuffer(filled.tokens, dtype=np.int32)
    entries = np.frombuffer(filled.entries, dtype=np.int32)
    piece = bench.d.fill.bytes[filled.arena_offset : filled.arena_offset + filled.length]
    count = len(tokens) * HEADS * 2 * DIM
    values = piece.view(torch.float32)
    whole = values[:count].view(2, len(tokens), HEADS, DIM)
    single = values[count : count + len(entries) * 2 * DIM].view(len(entries), 2, DIM)
    for i, code in enumerate(tokens.tolist()):
        layer, token = divmod(code, TOKENS)
        came[layer, token] += 1
        assert torch.equal(whole[:, i], bench.kv[room][layer, :, token])
    for i, code in enumerate(entries.tolist()):
        (layer, token), head = divmod(code // HEADS, TOKENS), code % HEADS
        came[layer, token, head] += 1
        assert torch.equal(single[i], bench.kv[room][layer, :, token, head])


@pytest.mark.parametrize("paced", [True, False])
def test_the_residual_is_filled_and_nothing_comes_twice(bench: ServeBench, paced: bool) -> None:
    bench.open(11)
    assert bench.d.fetch(ask(11, [4, 5, 6], [6, 7]), layer=2) == {}
    came = fill_until_whole(bench, 11, 40 * HEADS * ROW, paced=paced)
    wanted = torch.ones_like(came)
    wanted[:DENSE_LAYERS] = 0
    wanted[2, [4, 5, 6], 0] = 0
    wanted[2, [6, 7], 1] = 0
    assert torch.equal(came, wanted)
    end(bench, 11)


def test_speculative_bytes_wait_for_a_push(bench: ServeBench) -> None:
    bench.open(11)
    bench.busy = True
    bench.server.pushing(True)
    bench.d.grant(11, 4 * HEADS * ROW, paced=True)
    assert bench.d.fetch(ask(11)) == {}
    assert isinstance(bench.d.heard(), FetchDone)
    time.sleep(0.05)
    assert bench.d.inbox.empty() and bool((bench.d.fill.bytes == CANARY).all())
    bench.busy = False
    bench.server.pushing(False)
    assert bench.d.heard_filled().length == 4 * HEADS * ROW
    end(bench, 11)


def test_a_release_comes_after_the_fetches_before_it(bench: ServeBench) -> None:
    """Their bytes are there when D hears Released; a FetchDone by another way may come later."""
    bench.open(11)
    wanted = [ask(11, [i], [i], offset=2 * ROW * i) for i in range(TOKENS)]
    tickets = [bench.d.lane.ask(2, [one]) for one in wanted]
    bench.d.release(11)
    while not isinstance(message := bench.d.heard(), Released):
        assert isinstance(message, FetchDone)
    assert torch.equal(bench.d.arena.bytes, bench.wanted(*wanted))
    assert [bench.d.lane.wait(ticket) for ticket in tickets] == [{}] * TOKENS
    bench.freed()
    assert "gone" in bench.d.fetch(ask(11))[11]


def test_a_release_is_answered_as_often_as_it_is_asked(bench: ServeBench) -> None:
    bench.open(11)
    end(bench, 11)
    end(bench, 11)
    end(bench, 99)


def test_a_room_that_prefill_drops_is_let_go_of(bench: ServeBench) -> None:
    bench.open(11)
    bench.server.drop(11, 1)
    bench.freed()
    assert "gone" in bench.d.fetch(ask(11))[11]
    bench.open(11)  # the same name again
    assert bench.d.fetch(ask(11)) == {}
    end(bench, 11)


def test_a_failed_write_is_fenced_before_its_release_is_answered(bench: ServeBench) -> None:
    bench.open(11)
    bench.d.transport.unregister(bench.d.arena.region)
    assert "not registered" in bench.d.fetch(ask(11))[11]
    bench.d.transport.register(bench.d.arena.region)
    end(bench, 11)
    assert not bench.doubted
    bench.open(12)
    assert bench.d.fetch(ask(12)) == {}
    end(bench, 12)


def test_a_restarted_decode_node_is_known_by_its_new_addresses(bench: ServeBench) -> None:
    arena, d = bench.d.arena, bench.d
    d.arena = d.fill  # as if the new process had its arena there
    bench.register(epoch=2)
    bench.open(11)
    assert d.fetch(ask(11)) == {}
    assert torch.equal(d.arena.bytes, bench.wanted(ask(11)))
    assert bool((arena.bytes == CANARY).all())
    d.arena = arena
    bench.register(epoch=3)
    end(bench, 11)


def test_the_counters_are_right_when_a_room_has_ended(bench: ServeBench) -> None:
    end(bench, 99)
    before = bench.server.snapshot()
    bench.open(11)
    assert bench.d.fetch(ask(11)) == {}
    fill_until_whole(bench, 11, 40 * HEADS * ROW, paced=False)
    end(bench, 11)
    now = bench.server.snapshot()
    assert now["fetches"] == before["fetches"] + 1
    assert now["bytes_on_demand"] == before["bytes_on_demand"] + 3 * ROW
    filled = (LAYERS - DENSE_LAYERS) * TOKENS * HEADS * ROW - 3 * ROW
    assert now["bytes_speculative"] == before["bytes_speculative"] + filled


# What only a process does.


def test_the_range_of_a_dropped_entry_is_not_reused_before_the_process_let_go(
    process_bench: ServeBench,
) -> None:
    bench = process_bench
    bench.open(11)
    used = bench.store.used_bytes
    os.kill(pid(bench), signal.SIGSTOP)
    bench.server.drop(11, 1)
    assert bench.store.acquire(11, 1) is None
    time.sleep(0.1)
    assert bench.store.used_bytes == used
    os.kill(pid(bench), signal.SIGCONT)
    bench.freed()


def test_the_process_uses_no_sglang_and_is_not_pinned(process_bench: ServeBench) -> None:
    maps = Path(f"/proc/{pid(process_bench)}/maps").read_text()
    assert "smartgen" in maps and "sgl_kernel" not in maps
    assert os.sched_getaffinity(pid(process_bench)) == set(range(os.cpu_count() or 1))


def test_a_process_that_dies_hands_its_rooms_to_the_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_server, "engine_progress_timeout_s", lambda: 0.4)
    readers = count_readers()
    pinned = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(pinned)})  # as SGLang does with its scheduler
    try:
        bench = ServeBench(as_process=True)
    finally:
        os.sched_setaffinity(0, pinned)
    assert os.sched_getaffinity(pid(bench)) >= pinned
    bench.open(11)
    bench.open(12)
    assert bench.d.fetch(ask(12)) == {}
    dead = pid(bench)
    os.kill(dead, signal.SIGSTOP)  # so that a fetch is under way when it dies
    ticket = bench.d.lane.ask(2, [ask(11)])
    os.kill(dead, signal.SIGKILL)
    began = time.monotonic()
    assert bench.d.lane.wait(ticket) == {11: "the store server has ended"}
    assert time.monotonic() - began < PATIENCE_S / 2
    assert bench.moves == 1 and bench.server.endpoint is None
    assert not os.path.exists(f"/proc/{dead}"), "it is not even a zombie"
    assert f"store server {dead}: killed by signal 9" in caplog.text and "11, 12" in caplog.text
    # What it held is served on, and is released when nothing it wrote can land any more.
    assert bench.doubted == {(11, 1), (12, 1)}
    assert bench.d.fetch(ask(12)) == {}
    assert torch.equal(bench.d.arena.bytes, bench.wanted(ask(12)))
    fill_until_whole(bench, 12, 40 * HEADS * ROW, paced=False)
    end(bench, 11, 12)
    assert time.monotonic() - began >= 0.4
    bench.open(13)
    assert bench.d.fetch(ask(13)) == {}
    end(bench, 13)
    assert bench.server.snapshot()["store_server"] == "thread"
    bench.close()
    assert count_readers() == readers
