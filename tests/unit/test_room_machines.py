"""Single moves of the two room machines: deadlines, repeats, and what is refused."""

from __future__ import annotations

import pytest

from sglang_smartgen.core.decode_room import DecodeAction, DecodeLimits, DecodePhase, DecodeRoom
from sglang_smartgen.core.prefill_room import (
    PrefillAction,
    PrefillLimits,
    PrefillPhase,
    PrefillRoom,
    ReleasedRooms,
    Target,
)

P_LIMITS = PrefillLimits(lease_s=10.0, idle_s=30.0, fence_retry_s=2.0, doubt_s=60.0)
D_LIMITS = DecodeLimits(open_s=20.0, ask_s=5.0, resend_s=1.0, limit_s=50.0)
RELEASED, FENCE = PrefillAction.SEND_RELEASED, PrefillAction.FENCE
FAIL, DROP, STARTED = PrefillAction.FAIL, PrefillAction.DROP_ENTRY, PrefillAction.SEND_STARTED


def pushing() -> PrefillRoom:
    room = PrefillRoom(1, 7, 3, 0.0, P_LIMITS)
    assert not room.may_write(Target.SLOTS, 0.0)
    room.begin(0.0)
    return room


def serving() -> PrefillRoom:
    room = pushing()
    assert room.pushed(True, 1.0) == [STARTED]
    return room


def opened() -> DecodeRoom:
    return DecodeRoom(1, 7, 0.0, D_LIMITS)


def partial() -> DecodeRoom:
    room = opened()
    assert room.started(5, 1.0) == []
    return room


def test_slots_are_written_before_started_and_ranges_after() -> None:
    room = pushing()
    assert [room.may_write(target, 1.0) for target in Target] == [True, False]
    room.write_began(Target.SLOTS, 1.0)
    with pytest.raises(ValueError, match="room 1 has 1 writes under way"):
        room.pushed(True, 1.0)
    assert room.write_ended(True, 2.0) == []
    assert room.pushed(True, 2.0) == [STARTED]
    assert [room.may_write(target, 3.0) for target in Target] == [False, True]
    with pytest.raises(ValueError, match="it may not write"):
        room.write_began(Target.SLOTS, 3.0)
    with pytest.raises(ValueError, match="only an announced one begins"):
        room.begin(3.0)


def test_nothing_is_kept_for_a_room_that_will_not_ask() -> None:
    room = pushing()
    assert room.pushed(False, 1.0) == [STARTED, DROP]
    assert not room.may_write(Target.ARENA, 1.0)
    assert room.release(2.0) == [RELEASED] and room.phase is PrefillPhase.GONE


def test_the_promise_waits_for_the_last_write_and_is_repeated() -> None:
    room = serving()
    room.write_began(Target.ARENA, 2.0)
    assert room.release(3.0) == [] and not room.may_write(Target.ARENA, 3.0)
    assert room.write_ended(True, 4.0) == [DROP, RELEASED]
    assert room.release(5.0) == [RELEASED]
    assert room.deadline is None and room.tick(1000.0) == []


def test_a_failed_write_is_fenced_before_the_promise() -> None:
    room = serving()
    room.write_began(Target.ARENA, 2.0)
    assert room.write_ended(False, 3.0) == [] and room.may_write(Target.ARENA, 3.0)
    assert room.release(4.0) == [FENCE]
    assert room.release(4.5) == []  # asked again while the fence runs
    assert room.fenced(False, 5.0) == [] and room.deadline == 7.0
    assert room.tick(6.0) == [] and room.tick(7.0) == [FENCE]
    assert room.fenced(True, 8.0) == [DROP, RELEASED]
    assert room.fenced(True, 9.0) == []


def test_without_a_fence_there_is_no_promise_but_an_end() -> None:
    room = pushing()
    room.write_began(Target.SLOTS, 1.0)
    assert room.write_ended(False, 2.0) == [FAIL, FENCE]
    assert room.failure == "a write to the decode node failed"
    assert room.release(3.0) == []
    assert room.fenced(False, 4.0) == []
    assert room.tick(62.0) == [DROP]
    assert room.phase is PrefillPhase.GONE and not room.settled
    assert room.release(63.0) == []


def test_leave_to_write_ends_unless_decode_renews_it() -> None:
    room = pushing()
    room.renewed(8.0)
    assert room.may_write(Target.SLOTS, 17.0) and not room.may_write(Target.SLOTS, 18.0)
    assert room.deadline == 18.0 and room.tick(17.0) == []
    assert room.tick(18.0) == [FAIL, DROP] and room.failure == "the decode node is silent"
    quiet = serving()
    assert quiet.tick(10.0) == [DROP] and quiet.failure is None
    endless = pushing()
    endless.renewed(29.0)
    assert endless.tick(30.0) == [FAIL, DROP] and endless.failure == "the request took too long"


def test_aborts_and_a_new_decode_process_end_a_room_once() -> None:
    room = PrefillRoom(1, 7, 3, 0.0, P_LIMITS)
    assert room.abort("aborted", 1.0) == [FAIL] and room.abort("again", 1.0) == []
    assert serving().abort("aborted", 2.0) == []
    assert serving().peer_replaced(2.0) == [DROP]
    started = pushing()
    assert started.peer_replaced(2.0) == [FAIL, DROP]
    assert [started.is_stale(*who) for who in ((7, 3), (8, 3), (7, 4))] == [False, True, True]


def test_a_repeated_or_overtaken_message_is_not_served() -> None:
    room = serving()
    assert [room.accepts(number) for number in (3, 3, 2, 4)] == [True, False, False, True]


def test_a_release_is_remembered_for_a_while() -> None:
    released = ReleasedRooms(forget_s=5.0)
    released.add(1, 7, 0.0)
    assert released.has(1, 7, 4.9) and not released.has(1, 8, 4.9) and not released.has(1, 7, 5.0)


def test_before_started_slots_wait_for_the_promise() -> None:
    room = opened()
    assert room.release(1.0) == [DecodeAction.SEND_RELEASE] and room.slots_reachable
    assert room.deadline == 2.0 and room.tick(2.0) == [DecodeAction.SEND_RELEASE]
    assert room.released(2.5) == [DecodeAction.FREE_SLOTS, DecodeAction.FREE_RANGES]
    assert room.phase is DecodePhase.GONE and room.released(3.0) == [] and not room.overdue


def test_after_started_only_ranges_wait() -> None:
    room = partial()
    assert room.release(2.0) == [DecodeAction.FREE_SLOTS, DecodeAction.SEND_RELEASE]
    assert room.released(3.0) == [DecodeAction.FREE_RANGES]
    late = opened()
    late.release(1.0)
    assert late.started(5, 1.5) == [DecodeAction.FREE_SLOTS]
    assert late.started(5, 1.6) == []


def test_without_an_answer_the_limit_frees_all() -> None:
    room = opened()
    room.release(1.0)
    assert room.tick(51.0) == [DecodeAction.FREE_SLOTS, DecodeAction.FREE_RANGES]
    assert room.overdue and room.deadline is None


def test_a_local_room_asks_for_the_promise_early_and_waits_for_nobody_later() -> None:
    room = partial()
    assert room.filled(2, None, 2.0) == []
    assert room.filled(0, None, 3.0) == [DecodeAction.SEND_RELEASE]
    assert room.phase is DecodePhase.LOCAL and not room.may_ask and not room.open
    assert room.released(4.0) == [DecodeAction.FREE_RANGES]
    assert room.release(9.0) == [DecodeAction.FREE_SLOTS] and room.phase is DecodePhase.GONE
    lost = partial()
    assert lost.all_here(3.0) == [DecodeAction.SEND_RELEASE] and lost.all_here(3.0) == []
    assert lost.release(40.0) == [DecodeAction.FREE_SLOTS, DecodeAction.SEND_RELEASE]
    assert lost.tick(54.0) == [DecodeAction.SEND_RELEASE]
    assert lost.tick(90.0) == [DecodeAction.FREE_RANGES]


def test_a_promise_that_nobody_asked_for_is_not_believed() -> None:
    room = partial()
    assert room.released(2.0) == [] and not room.settled


def test_late_and_failed_answers_fail_the_room_once() -> None:
    room = partial()
    room.asked(1, 2.0)
    room.asked(2, 3.0)
    assert room.deadline == 7.0
    assert room.answered(1, None, 4.0) == [] and room.deadline == 8.0
    assert room.tick(8.0) == [DecodeAction.FAIL] and room.failure is not None
    assert room.failure == "no answer from prefill within 5 s" and not room.may_ask
    assert room.answered(2, "gone", 9.0) == [] and room.failed("more") == []
    with pytest.raises(ValueError, match="it may not ask P"):
        room.asked(3, 9.0)
    other = partial()
    other.asked(1, 2.0)
    assert other.answered(1, "gone", 3.0) == [DecodeAction.FAIL] and other.failure == "gone"


def test_a_failed_fill_ends_the_fill_alone() -> None:
    room = partial()
    assert room.may_grant and room.filled(5, "the write failed", 2.0) == []
    assert room.may_ask and not room.may_grant and room.failure is None


def test_a_prefill_that_never_starts_or_dies_fails_the_room() -> None:
    room = opened()
    assert room.tick(20.0) == [DecodeAction.FAIL] and room.tick(21.0) == []
    assert room.release(22.0) == [DecodeAction.SEND_RELEASE]
    dead = partial()
    assert dead.peer_gone(2.0) == [DecodeAction.FAIL]
    assert dead.release(3.0) == [DecodeAction.FREE_SLOTS, DecodeAction.FREE_RANGES]
    local = partial()
    local.all_here(2.0)
    assert local.peer_gone(3.0) == [DecodeAction.FREE_RANGES] and local.failure is None


def test_a_stock_transfer_owes_nothing_to_smartgen() -> None:
    room = opened()
    room.whole(1.0)
    assert room.phase is DecodePhase.LOCAL and not room.may_ask and room.deadline is None
    assert room.release(2.0) == [DecodeAction.FREE_SLOTS, DecodeAction.FREE_RANGES]


def test_a_peer_that_does_not_speak_smartgen_is_never_asked() -> None:
    room = opened()
    assert room.stock(1.0) == [] and room.settled
    assert room.release(2.0) == [DecodeAction.FREE_SLOTS, DecodeAction.FREE_RANGES]
    late = opened()
    assert late.release(1.0) == [DecodeAction.SEND_RELEASE]
    assert late.stock(2.0) == [DecodeAction.FREE_SLOTS, DecodeAction.FREE_RANGES]


def test_a_start_that_decode_cannot_be_told_ends_the_room() -> None:
    room = serving()
    assert room.start_failed("no route", 2.0) == [FAIL, DROP] and room.failure == "no route"
    assert pushing().start_failed("no route", 2.0) == []
