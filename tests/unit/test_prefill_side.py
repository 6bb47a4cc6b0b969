"""P's rooms as they should go: pushed, kept and released, or left to SGLang with a reason."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from msgspec.structs import replace
from prefill_bench import PATIENCE_S, ROOM, ROW, TOKENS, Bench
from small_rank import HEADS, LAYERS, ROWS, WIDTH, hata

from sglang_smartgen.config import ConfigError
from sglang_smartgen.core.geometry import DENSE_LAYERS
from sglang_smartgen.core.mask import LOCAL
from sglang_smartgen.engine import prefill_side as module
from sglang_smartgen.transfer.messages import Alive, Released


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.p.release()


# The good end.


def test_a_kept_entry_survives_until_its_release(bench: Bench) -> None:
    bench.begun()
    bench.layers(stop=100)
    bench.layers()
    bench.finish()
    push = bench.end()
    assert (push.failure, push.ended_early, push.keep) == (None, None, True)
    bench.closed(entries=1)
    target, source = bench.target[:TOKENS], bench.source[:TOKENS]
    for layer in range(DENSE_LAYERS):
        assert torch.equal(bench.there.pool[:, layer, target], bench.here.pool[:, layer, source])
    mask = bench.mask.tensor(0, (LAYERS, ROWS, WIDTH), torch.int8)
    assert bool((mask[:DENSE_LAYERS, ROW, :TOKENS] == LOCAL).all())
    assert int(mask.sum()) == DENSE_LAYERS * TOKENS  # no other mark
    row_bytes = bench.here.facts.geometry.row_bytes
    assert bench.side.bytes_proactive == 2 * row_bytes * DENSE_LAYERS * TOKENS
    assert bench.side.bytes_metadata == 2 * TOKENS * HEADS * hata().metadata_width * 4
    assert (bench.side.layers_swept, bench.side.fallbacks) == (0, {})
    assert bench.replies.empty() and bench.outcome.failed == []
    bench.release()
    assert bench.reply() == Released(ROOM, 1)
    bench.closed()
    bench.release()  # the answer was lost
    assert bench.reply() == Released(ROOM, 1)


def test_an_entry_that_need_not_be_kept_goes_with_its_push(bench: Bench) -> None:
    bench.begun(keep=False)
    bench.layers()
    bench.finish()
    assert bench.end().failure is None
    bench.closed()


def test_a_plan_of_the_whole_prompt_keeps_nothing(bench: Bench) -> None:
    bench.announce(proactive_blocks=LAYERS * 50)
    assert bench.side.begin(ROOM, TOKENS)
    bench.layers()
    bench.finish()
    assert bench.end().entry.residual.left == 0
    bench.closed()


def test_layers_that_the_hook_missed_are_swept_and_counted(bench: Bench) -> None:
    bench.begun()
    bench.finish()
    assert bench.end().failure is None
    assert bench.side.layers_swept == LAYERS
    target, source = bench.target[:TOKENS], bench.source[:TOKENS]
    assert torch.equal(bench.there.pool[:, :2, target], bench.here.pool[:, :2, source])
    bench.begun(8)
    bench.layers(0, 1, room=8)
    bench.layers(2, room=8, stop=TOKENS - 1)
    bench.finish(8)
    assert bench.end().failure is None
    assert bench.side.layers_swept == LAYERS + 2  # layer 2 in part, layer 3 whole
    bench.closed(entries=2)


def test_batches_without_our_rooms_are_left_alone(bench: Bench) -> None:
    bench.begun()
    bench.layers(room=99)
    bench.side.set_batch([None])
    bench.side.on_layer(0, torch.tensor([0]), [5], [5], torch.zeros(5, 16))
    bench.finish()
    assert bench.end().failure is None and bench.side.layers_swept == LAYERS


# Not ours.


def test_a_room_that_was_not_announced_is_stock_without_a_reason(bench: Bench) -> None:
    assert not bench.side.begin(ROOM, TOKENS)
    assert bench.side.fallbacks == {}


def test_reasons_of_fallbacks_are_counted(bench: Bench) -> None:
    assert not bench.add_peer(session="e", fingerprint="another selector")
    assert not bench.add_peer(session="f", tp_size=2)
    assert not bench.add_peer(session="g", kv_row_bytes=1)
    for room, session in enumerate(("e", "f", "g", "never registered")):
        bench.announce(room, session=session)
        assert not bench.side.begin(room, TOKENS)
    bench.announce()
    assert not bench.side.begin(ROOM, TOKENS - 1)
    assert not bench.side.begin(ROOM, TOKENS)  # an announcement counts once
    assert bench.side.fallbacks == {"peer differs": 4, "prompt lengths differ": 1}
    bench.closed()
    assert bench.outcome.failed == []


def test_a_full_store_sends_a_room_stock_until_another_ends(bench: Bench) -> None:
    fits = bench.side.store.region.length // bench.side.store.entry_bytes(TOKENS)
    for room in range(fits):
        bench.begun(room)
    bench.announce(ROOM + fits)
    assert not bench.side.begin(ROOM + fits, TOKENS)
    assert bench.side.fallbacks == {"prefill store full": 1}
    bench.side.let_go(0)
    bench.side.cancel(0)
    assert bench.end().ended_early is not None
    bench.wait_for(lambda: bench.side.store.rooms == fits - 1)
    bench.begun(ROOM + fits)


def test_what_a_silent_decode_node_left_is_dropped_after_its_lease(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "LIMITS", replace(module.LIMITS, lease_s=3.0))
    bench = Bench()
    fits = bench.side.store.region.length // bench.side.store.entry_bytes(TOKENS)
    assert fits > 2
    for room in range(fits):
        bench.begun(room)
        bench.layers(room=room)
        bench.finish(room)
        bench.end()
    names = [(room, 1) for room in range(fits)]
    began = time.monotonic()
    while bench.side.store.rooms > 1:  # it names room 1; the others it names under another epoch
        bench.side.submit(Alive("d", 1, names[1:2]))
        bench.side.submit(Alive("d", 2, names))
        assert time.monotonic() - began < PATIENCE_S
        time.sleep(0.01)
    assert time.monotonic() - began > 0.5
    assert bench.side.store.acquire(1, 1) is not None
    assert "room 0: decode has not named it for 3 s" in caplog.text
    assert bench.outcome.failed == [] and bench.replies.empty()
    bench.release(0)
    assert bench.reply() == Released(0, 1)
    bench.begun(ROOM + fits)
    assert bench.side.fallbacks == {}


def test_a_push_to_a_silent_decode_node_ends_and_names_the_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LIMITS", replace(module.LIMITS, lease_s=0.3))
    bench = Bench()
    bench.begun()
    bench.layers(0)
    assert bench.end().ended_early == "the decode node is silent"
    writes = len(bench.p.log)
    bench.layers(1)
    bench.finish()
    bench.closed()
    assert len(bench.p.log) == writes
    bench.announce(8)
    bench.wait_for(lambda: bench.outcome.failed == [(8, "the decode node is silent")])
    assert not bench.side.begin(8, TOKENS)  # nor a stock transfer to slots of nobody


def test_a_store_that_cannot_be_mapped_is_named() -> None:
    with pytest.raises(ConfigError, match=r"store_gb is 1e\+20; this machine cannot map"):
        Bench(store_gb=1e20)
