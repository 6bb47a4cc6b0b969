"""D's rooms: what is local when a room starts, and when its slots get a new owner."""

from __future__ import annotations

import pytest
import torch
from decode_bench import D_END, P_END, ROOM, ROW, TICK_S, TOKENS, Bench
from small_rank import HEADS, LAYERS, ROWS, SLOTS, WIDTH, hata

from sglang_smartgen.config import ConfigError
from sglang_smartgen.core.geometry import DENSE_LAYERS
from sglang_smartgen.core.mask import LOCAL, PADDING, REMOTE
from sglang_smartgen.engine import heartbeat
from sglang_smartgen.engine.decode_side import OPEN_LIMIT_S, QUARANTINE_LIMIT_S
from sglang_smartgen.engine.prefill_peers import HELLO_LIMIT_S
from sglang_smartgen.transfer.messages import (
    ALIVE_ROOMS,
    VERSION,
    Alive,
    Failed,
    OpenRoom,
    Release,
    Released,
    Started,
)
from sglang_smartgen.transfer.remote_lane import Ask


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


# Opening.


def test_open_makes_the_prompt_remote_and_padding_behind_it(bench: Bench) -> None:
    bench.side.masks.fill_(LOCAL)  # what earlier owners left
    message = bench.opened()
    assert message == OpenRoom(
        version=VERSION,
        room=ROOM,
        generation=message.generation,
        row=ROW,
        prompt_len=TOKENS,
        blocks_per_layer=50,
        proactive_blocks=120,
        order="observed",
        k=30,
        recording="",
        metadata=True,
        keep=True,
    )
    masks = bench.side.masks
    assert masks.shape == (LAYERS, ROWS, WIDTH)
    assert bool((masks[:, ROW, :TOKENS] == REMOTE).all())
    assert bool((masks[:, ROW, TOKENS:] == PADDING).all())
    others = [row for row in range(ROWS) if row != ROW]
    assert bool((masks[:, others] == LOCAL).all())
    assert bench.side.room_of_row(ROW) is bench.side.room(ROOM) is not None


def test_each_opening_is_a_new_generation(bench: Bench) -> None:
    first, second = bench.opened(1), bench.opened(2)
    assert second.generation > first.generation > 0


def test_a_prompt_with_fewer_tokens_than_blocks_pushes_the_same_share(bench: Bench) -> None:
    message = bench.open(tokens=40)
    assert message is not None
    assert (message.blocks_per_layer, message.proactive_blocks) == (40, 120 * 40 // 50)


def test_a_short_prompt_stays_stock_and_is_counted(bench: Bench) -> None:
    bench.side.masks.fill_(LOCAL)
    assert bench.open(tokens=31) is None and bench.open(tokens=1) is None
    assert bench.side.fallbacks == {"short prompt": 2}
    assert bench.side.counters["rooms"] == 0
    assert bench.side.room(ROOM) is None and bench.side.room_of_row(ROW) is None
    assert bool((bench.side.masks == LOCAL).all())
    bench.side.commit(ROOM)
    bench.release()
    assert bench.freed == [ROOM] and bench.sent == [] and len(bench.side.finished) == 0
    assert bench.open(tokens=32) is not None


def test_overrides_hold_for_one_room(bench: Bench) -> None:
    message = bench.opened(1, {"mode": "full", "ratio": 1.0})
    assert (message.keep, message.metadata) == (False, False)
    assert message.proactive_blocks == LAYERS * 50
    message = bench.opened(2, {"mode": "partial", "ratio": 0.5})
    assert (message.keep, message.metadata) == (True, True)
    assert message.proactive_blocks == DENSE_LAYERS * 50
    room = bench.side.room(2)
    assert room is not None and room.k == 75 and room.stats.mode == "partial"
    message = bench.opened(3, {"mode": "proactive_only", "proactive_blocks": 101})
    assert (message.keep, message.proactive_blocks) == (False, 101)
    assert bench.opened(4).proactive_blocks == 120


@pytest.mark.parametrize("overrides", [{"selector": "exact"}, {"ratio": 0}, {"mode": "fast"}, 3])
def test_wrong_overrides_open_nothing(bench: Bench, overrides: object) -> None:
    bench.side.masks.fill_(LOCAL)
    with pytest.raises(ConfigError):
        bench.open(overrides=overrides)
    assert bench.side.room(ROOM) is None and bench.side.room_of_row(ROW) is None
    assert bool((bench.side.masks == LOCAL).all())


# Starting.


def encoded_here(bench: Bench) -> torch.Tensor:
    """The whole metadata pool as it must be when this prompt came whole."""
    wanted = torch.zeros_like(bench.side.metadata)
    for layer in range(DENSE_LAYERS, LAYERS):
        keys = bench.rank.facts.keys[layer][bench.slots]
        encoded = hata().encode(layer, keys, keys[: hata().anchor_tokens])
        wanted[layer - DENSE_LAYERS, bench.slots] = encoded
    return wanted


def test_a_mask_without_a_mark_is_a_full_transfer(bench: Bench) -> None:
    bench.opened()
    bench.side.commit(ROOM)
    room = bench.side.room(ROOM)
    assert room is not None
    assert bool((bench.side.masks[:, ROW, :TOKENS] == LOCAL).all())
    assert bool((bench.side.masks[:, ROW, TOKENS:] == PADDING).all())
    assert [room.status(layer) for layer in range(LAYERS)] == [None] * LAYERS
    assert bench.side.metadata.shape[:3] == (LAYERS - DENSE_LAYERS, SLOTS, HEADS)
    wanted = encoded_here(bench)
    assert bool(wanted.any()) and torch.equal(bench.side.metadata, wanted)
    assert bench.side.fallbacks == {"full transfer": 1}
    assert (room.stats.fallback, room.stats.local_share_at_start) == ("full transfer", 1.0)


def test_a_full_transfer_that_selects_all_needs_no_metadata(bench: Bench) -> None:
    bench.opened(overrides={"ratio": 1.0})
    bench.side.commit(ROOM)
    assert bool((bench.side.masks[:, ROW, :TOKENS] == LOCAL).all())
    assert not bool(bench.side.metadata.any())
    assert bench.side.fallbacks == {"full transfer": 1}


def test_a_lost_started_is_not_taken_for_a_full_transfer(bench: Bench) -> None:
    bench.opened()
    bench.mark(0, 1)
    bench.side.commit(ROOM)
    room = bench.side.room(ROOM)
    assert room is not None
    assert bool((bench.side.masks[2:, ROW, :TOKENS] == REMOTE).all())
    status = room.status(2)
    assert status is not None and bool((status == REMOTE).all())
    assert room.status(0) is None
    assert not bool(bench.side.metadata.any())  # P sent it, or it is lost; never made from no keys
    assert bench.side.fallbacks == {} and room.stats.fallback == ""
    assert room.stats.local_share_at_start == 0.5


def test_a_single_mark_is_enough(bench: Bench) -> None:
    bench.opened()
    bench.side.masks[0, ROW, 0] = LOCAL
    bench.side.commit(ROOM)
    assert int((bench.side.masks[:, ROW] == LOCAL).sum()) == 1
    assert bench.side.fallbacks == {}


def test_started_is_partial_and_its_bytes_are_recorded(bench: Bench) -> None:
    message = bench.opened()
    bench.started(message.generation)
    bench.mark(0, 1, 2)
    bench.side.commit(ROOM)
    room = bench.side.room(ROOM)
    assert room is not None
    assert (room.stats.bytes_proactive, room.stats.bytes_metadata) == (111, 22)
    assert (room.stats.local_share_at_start, room.status(3) is None) == (0.75, False)
    assert bench.side.fallbacks == {}


def test_started_of_another_generation_or_room_is_ignored(bench: Bench) -> None:
    message = bench.opened()
    bench.started(message.generation - 1)
    bench.side.on_message(Started(ROOM + 1, message.generation, 1, 1, 1.0, 1))
    bench.side.commit(ROOM)
    assert bench.side.fallbacks == {"full transfer": 1}


def test_a_peer_of_another_size_gets_a_full_transfer_and_no_message(bench: Bench) -> None:
    assert bench.open(peer=None) is None
    bench.side.commit(ROOM)
    assert torch.equal(bench.side.metadata, encoded_here(bench))
    bench.release()
    assert bench.freed == [ROOM] and bench.sent == [] and bench.side.quarantined_rooms == 0


# Ending.


def test_a_smart_peers_room_is_held_until_released(bench: Bench) -> None:
    bench.hello()
    generation = bench.opened().generation
    bench.release()
    wanted = (P_END, Release(ROOM, generation, "d", D_END))
    assert bench.sent == [wanted] and bench.freed == []
    assert bench.side.room(ROOM) is None and bench.side.room_of_row(ROW) is None
    bench.tick(0.0)
    bench.tick(HELLO_LIMIT_S + 1)  # past the time in which a stock P shows itself
    assert bench.freed == [] and bench.sent == [wanted] * 2
    bench.side.on_message(Released(ROOM, generation + 1))
    bench.side.on_message(Released(ROOM + 1, generation))
    bench.tick()
    assert bench.freed == [] and bench.sent == [wanted] * 3
    assert bench.side.snapshot()["quarantined_rooms"] == 1
    bench.side.on_message(Released(ROOM, generation))
    assert bench.freed == []  # only drain frees: it is the scheduler's thread
    bench.tick()
    bench.tick()
    assert bench.freed == [ROOM] and len(bench.sent) == 3
    assert bench.side.snapshot()["quarantined_rooms"] == 0


def test_a_room_that_ran_gives_its_slots_back_at_once(bench: Bench) -> None:
    """P's writes to slots are complete then; what it was granted waits for the promise."""
    generation = bench.opened().generation
    bench.started(generation, left=100)
    bench.mark(0, 1)
    bench.side.commit(ROOM)
    bench.side.begin_step([ROW])
    assert bench.side.fill.granted_bytes > 0
    bench.release()
    assert bench.freed == [ROOM] and bench.side.snapshot()["quarantined_rooms"] == 1
    assert bench.side.fill.granted_bytes > 0
    bench.side.on_message(Released(ROOM, generation))
    bench.tick()
    assert bench.freed == [ROOM] and bench.side.snapshot()["quarantined_rooms"] == 0
    assert bench.side.fill.granted_bytes == 0


def test_a_slab_of_late_bytes_is_back_with_its_room(bench: Bench) -> None:
    bench.hello()
    generation = bench.opened().generation
    slab = bench.side.arena.take()
    assert slab is not None
    bench.side.arena.quarantine(slab, {(ROOM, generation)})
    bench.release()
    assert bench.side.arena.quarantined == 1
    bench.side.on_message(Released(ROOM, generation))
    bench.tick()
    assert bench.side.arena.quarantined == 0 and bench.freed == [ROOM]


def test_started_makes_a_peer_smart_too(bench: Bench) -> None:
    generation = bench.opened().generation
    bench.started(generation)
    bench.now += HELLO_LIMIT_S + 1
    bench.release()
    # After Started P writes to no slot.
    assert bench.sent == [(P_END, Release(ROOM, generation, "d", D_END))] and bench.freed == [ROOM]


def test_a_stock_peers_room_is_freed_at_once_and_nothing_is_sent(bench: Bench) -> None:
    bench.opened()
    bench.now += HELLO_LIMIT_S + 0.01
    bench.release()
    assert bench.freed == [ROOM] and bench.side.quarantined_rooms == 0
    bench.tick()
    assert bench.sent == []


def test_a_peer_that_may_still_say_hello_is_waited_for_but_not_sent_to(bench: Bench) -> None:
    bench.opened()
    bench.now += HELLO_LIMIT_S - 2 * TICK_S
    bench.release()
    bench.tick()
    assert bench.freed == [] and bench.sent == []
    bench.tick()
    bench.tick()
    assert bench.freed == [ROOM] and bench.sent == []


def test_a_late_hello_brings_the_release(bench: Bench) -> None:
    generation = bench.opened().generation
    bench.release()
    assert bench.sent == []
    bench.hello()
    bench.tick()
    assert bench.sent == [(P_END, Release(ROOM, generation, "d", D_END))] and bench.freed == []
    bench.tick(HELLO_LIMIT_S)
    assert bench.freed == []


def test_a_peer_whose_port_is_closed_frees_its_rooms(bench: Bench) -> None:
    bench.hello()
    bench.opened()
    bench.release()
    bench.refusing.add(P_END)
    bench.side.heartbeat.beat()
    assert bench.freed == []  # only drain frees: it is the scheduler's thread
    bench.tick(0.0)
    assert bench.freed == [ROOM] and len(bench.sent) == 1


def test_a_silent_smart_peer_holds_its_rooms_up_to_the_limit(bench: Bench) -> None:
    bench.hello()
    bench.opened()
    bench.release()
    bench.tick(QUARANTINE_LIMIT_S - 0.01)
    assert bench.freed == []
    bench.tick(0.02)
    assert bench.freed == [ROOM]


def test_a_release_that_cannot_be_sent_is_repeated(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_route(*_: object) -> None:
        raise OSError("no route")

    bench.hello()
    bench.opened()
    with monkeypatch.context() as broken:
        broken.setattr(bench.side, "_send", no_route)
        bench.release()
        bench.tick()
    assert bench.freed == [] and bench.sent == []
    bench.tick()
    assert len(bench.sent) == 1


def test_how_rooms_ended_is_recorded(bench: Bench) -> None:
    bench.opened()
    room = bench.side.room(ROOM)
    assert room is not None
    room.fail("first cause")
    room.fail("second cause")
    bench.release(finish="abort")
    bench.open(room=8, row=1, peer=None)
    bench.release(8)
    first, second = bench.side.snapshot()["finished"]
    assert (first["rid"], first["finish"], first["failure"]) == ("rid-7", "abort", "first cause")
    assert (second["rid"], second["finish"], second["failure"]) == ("rid-8", "stop", None)
    counters = bench.side.counters
    assert (counters["rooms"], counters["failures"]) == (2, 1)


def test_a_row_can_have_its_next_room_before_the_last_ones_arena_is_free(bench: Bench) -> None:
    """A retracted request gives its row back at once; only the arena waits for P."""
    bench.hello()
    generation = bench.opened().generation
    bench.release(finish="retracted")
    bench.opened(8)
    bench.side.on_message(Released(ROOM, generation))
    bench.tick()
    assert bench.freed == [ROOM]
    assert bench.side.room_of_row(ROW) is bench.side.room(8) is not None


# What P's process does to its rooms.


def test_a_new_process_at_the_same_address_ends_the_rooms_of_the_old_one_alone(
    bench: Bench,
) -> None:
    bench.hello(epoch=1)
    first = bench.opened()
    bench.started(first.generation, left=100, epoch=1)
    bench.mark(0, 1)
    bench.side.commit(ROOM)
    # Opened at the new process before its Hello is here; only Started says whose a room is.
    second = bench.open(room=8, row=3)
    assert second is not None
    bench.hello(epoch=2)
    bench.side.on_message(Started(8, second.generation, 1, 1, 1.0, 5, 2))
    bench.tick()
    old, new = bench.side.room(ROOM), bench.side.room(8)
    assert old is not None and new is not None
    assert (old.failure, new.failure) == ("the prefill node ended", None)
    assert new.machine.may_ask and not old.machine.may_ask
    bench.sent.clear()
    bench.release()
    assert bench.freed == [ROOM] and bench.sent == [] and bench.side.quarantined_rooms == 0


def test_two_generations_of_a_room_are_held_apart(bench: Bench) -> None:
    bench.hello()
    first = bench.opened().generation
    bench.release()
    second = bench.opened().generation
    bench.release()
    assert bench.freed == [] and bench.side.quarantined_rooms == 2
    bench.side.on_message(Released(ROOM, second))
    bench.tick(0.0)
    assert bench.freed == [ROOM] and bench.side.quarantined_rooms == 1
    bench.side.on_message(Released(ROOM, second))
    bench.tick(0.0)
    assert bench.side.quarantined_rooms == 1
    bench.side.on_message(Released(ROOM, first))
    bench.tick(0.0)
    assert bench.freed == [ROOM, ROOM] and bench.side.quarantined_rooms == 0


def test_a_prefill_that_never_starts_fails_the_request(bench: Bench) -> None:
    bench.hello()
    generation = bench.opened().generation
    bench.tick(OPEN_LIMIT_S)
    bench.tick()
    assert bench.failed == [(ROOM, f"prefill did not start within {OPEN_LIMIT_S:g} s")]
    bench.release(finish="abort")
    assert bench.freed == [] and bench.sent == [(P_END, Release(ROOM, generation, "d", D_END))]


def test_what_p_says_of_a_failure_is_recorded_and_said_once(bench: Bench) -> None:
    bench.hello()
    generation = bench.opened().generation
    bench.side.on_message(Failed(ROOM, generation - 1, "of another generation"))
    bench.side.on_message(Failed(ROOM, generation, "room 7, prefill rank 0: store is on fire"))
    bench.tick(0.0)
    assert bench.failed == []  # SGLang's own status follows
    bench.release(finish="abort")
    (record,) = bench.side.snapshot()["finished"]
    assert record["failure"] == "room 7, prefill rank 0: store is on fire"


def test_a_free_that_raises_is_not_repeated_and_keeps_nobody_else(bench: Bench) -> None:
    def broken() -> None:
        bench.freed.append(ROOM)
        raise RuntimeError("pool is broken")

    bench.hello()
    first, second = bench.opened(), bench.open(room=8, row=3)
    assert second is not None
    bench.side.release(ROOM, "stop", broken)
    bench.release(8)
    bench.side.on_message(Released(ROOM, first.generation))
    bench.side.on_message(Released(8, second.generation))
    with pytest.raises(RuntimeError, match="pool is broken"):
        bench.tick()
    bench.tick()
    assert bench.freed == [ROOM, 8] and bench.side.quarantined_rooms == 0


# The heartbeat.


def named(bench: Bench) -> list[tuple[int, int]]:
    """The rooms that P is told of."""
    bench.sent.clear()
    bench.side.heartbeat.beat()
    rooms: list[tuple[int, int]] = []
    for peer, message in bench.sent:
        assert peer == P_END and isinstance(message, Alive)
        assert (message.session, message.epoch) == ("d", bench.side.registration().epoch)
        assert 0 < len(message.rooms) <= ALIVE_ROOMS
        rooms += message.rooms
    return rooms


def test_rooms_are_named_while_p_may_write_for_them(bench: Bench) -> None:
    generation = bench.opened().generation
    assert named(bench) == []  # a stock P would die of it
    bench.hello()
    assert named(bench) == [(ROOM, generation)]
    bench.started(generation, left=100)
    bench.mark(0, 1)
    bench.side.commit(ROOM)
    assert named(bench) == [(ROOM, generation)]
    bench.release()
    assert named(bench) == [] and bench.side.quarantined_rooms == 1


def test_many_rooms_are_named_in_bounded_messages(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "ALIVE_ROOMS", 3)
    bench.hello()
    rooms = [bench.open(room=room, row=room) for room in range(4)]
    wanted = [(m.room, m.generation) for m in rooms if m is not None]
    assert named(bench) == wanted and len(bench.sent) == 2


def test_a_peer_whose_port_is_closed_fails_the_rooms_that_decode(bench: Bench) -> None:
    bench.hello(epoch=1)
    generation = bench.opened().generation
    bench.started(generation, left=100, epoch=1)
    bench.mark(0, 1)
    bench.side.commit(ROOM)
    ticket = bench.side.lane.ask(2, [Ask(ROOM, generation, P_END, 0, [])])
    bench.refusing.add(P_END)
    bench.side.heartbeat.beat()
    assert bench.side.lane.wait(ticket) == {ROOM: "the prefill node ended"}  # at once
    later = bench.open(room=8, row=3)  # at the next process, before this one's end is taken in
    assert later is not None
    bench.tick(0.0)
    first, second = bench.side.room(ROOM), bench.side.room(8)
    assert first is not None and first.failure == "the prefill node ended"
    assert second is not None and second.failure is None
