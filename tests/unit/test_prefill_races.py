"""However and whenever a room ends on P, it ends once, and its bytes of the store come back."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest
from msgspec.structs import replace
from prefill_bench import D_END, PATIENCE_S, ROOM, SHORT_S, TOKENS, Bench

from sglang_smartgen.engine import prefill_rooms
from sglang_smartgen.engine import prefill_side as module
from sglang_smartgen.transfer.fake import FakeTransport, Fault, FaultKind
from sglang_smartgen.transfer.messages import MessageError, Release, Released
from sglang_smartgen.transfer.push_room import PushRoom

GIVEN_UP = "the decode node ended the request before it could start"


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.p.release()


def test_announced_rooms_have_a_bound(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_rooms, "MAX_ANNOUNCED", 1)
    bench.announce()
    with pytest.raises(MessageError, match=r"^1 rooms are announced and wait"):
        bench.announce(ROOM + 1)
    bench.announce(generation=2)  # the same number again takes no place
    assert bench.side.begin(ROOM, TOKENS)
    bench.announce(ROOM + 1)


# Begin against Release.


def test_a_release_before_begin_fails_the_room_and_leaves_nothing(bench: Bench) -> None:
    bench.announce()
    bench.release()
    assert bench.reply() == Released(ROOM, 1)
    # Told to SGLang, so that it sends no stock transfer to slots that D has given up.
    assert bench.outcome.failed == [(ROOM, GIVEN_UP)]
    assert not bench.side.begin(ROOM, TOKENS)
    assert bench.outcome.failed == [(ROOM, GIVEN_UP)] * 2
    bench.closed()
    assert bench.outcome.ends.empty()


def test_a_release_while_the_entry_is_opened_leaves_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bootstrap and fetch threads were faster, right behind the opening of the entry."""
    store, original = bench.side.store, bench.side.store.open

    def open_and_release(*args: int, **named: int) -> object:
        entry = original(*args, **named)
        assert entry is not None
        bench.release()
        assert bench.reply() == Released(ROOM, 1)
        return entry

    monkeypatch.setattr(store, "open", open_and_release)
    bench.announce()
    assert not bench.side.begin(ROOM, TOKENS)
    assert bench.side.fallbacks == {"released": 1}
    assert bench.outcome.failed == [(ROOM, GIVEN_UP)] * 2
    bench.closed()


def test_an_announcement_replaced_while_the_entry_is_opened(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, original = bench.side.store, bench.side.store.open

    def open_and_replace(*args: int, **named: int) -> object:
        bench.announce(generation=2)
        return original(*args, **named)

    monkeypatch.setattr(store, "open", open_and_replace)
    bench.announce(generation=1)
    assert not bench.side.begin(ROOM, TOKENS)
    bench.closed()


# Ends before the end.


def test_a_cancel_in_mid_prefill_ends_the_room_once(bench: Bench) -> None:
    bench.begun()
    bench.layers(stop=100)
    bench.side.cancel(ROOM)
    bench.side.cancel(ROOM)
    push = bench.end()
    assert push.ended_early == "the request ended before its prefill did"
    assert push.failure is None
    # The scheduler may still write to the entry, so its bytes have no new owner yet.
    bench.wait_for(lambda: bench.side.store.acquire(ROOM, 1) is None)
    assert bench.side.store.rooms == 1
    writes = len(bench.p.log)
    bench.layers()
    bench.side.let_go(ROOM)
    bench.closed()
    assert len(bench.p.log) == writes  # what came after the cancel was not sent
    assert bench.outcome.failed == [] and bench.replies.empty()


def test_a_finish_after_a_cancel_is_harmless(bench: Bench) -> None:
    bench.begun()
    bench.layers(0, 1)
    bench.side.cancel(ROOM)
    bench.finish()
    assert bench.end().ended_early is not None
    bench.closed()
    bench.finish()
    bench.side.let_go(ROOM)
    bench.side.cancel(ROOM)
    bench.layers()
    bench.closed()


def test_a_cancel_after_finish_does_not_take_the_success_back(bench: Bench) -> None:
    bench.p.hold()
    bench.begun()
    bench.layers()
    bench.finish()
    bench.writes_begun(1)
    bench.side.cancel(ROOM)
    bench.p.release()
    push = bench.end()
    assert (push.failure, push.ended_early) == (None, None)
    bench.closed(entries=1)


def test_an_abort_during_the_push_drops_the_entry(bench: Bench) -> None:
    def abort(push: PushRoom) -> None:
        push.ended_early = "the request was aborted on prefill"

    bench.begun()
    bench.layers(0, 1)
    bench.outcome.dead.add(ROOM)
    bench.outcome.on_end = abort
    bench.finish()
    bench.end()
    bench.closed()


def test_an_outcome_that_raises_does_not_keep_the_room(bench: Bench) -> None:
    def broken(_: PushRoom) -> None:
        raise RuntimeError("status socket is closed")

    bench.outcome.on_end = broken
    bench.begun(keep=False)
    bench.layers()
    bench.finish()
    bench.end()
    bench.closed()
    bench.outcome.on_end = lambda _: None
    bench.begun(8, keep=False)
    bench.finish(8)
    assert bench.end().failure is None  # the thread goes on
    bench.closed()


def test_an_old_generations_cancel_does_not_touch_a_new_announcement(bench: Bench) -> None:
    bench.announce(generation=1)
    bench.announce(generation=2)
    bench.side.cancel(ROOM, 1)
    bench.release(generation=1)
    assert bench.reply() == Released(ROOM, 1)
    assert bench.outcome.failed == []
    assert bench.side.begin(ROOM, TOKENS)
    bench.side.cancel(ROOM, 1)  # nor a running room
    bench.layers()
    bench.finish()
    push = bench.end()
    assert (push.entry.generation, push.ended_early) == (2, None)
    bench.closed(entries=1)
    bench.release(generation=1)
    assert bench.reply() == Released(ROOM, 1)
    bench.closed(entries=1)


def test_a_room_number_is_not_used_again_while_it_still_pushes(bench: Bench) -> None:
    bench.begun(generation=1)
    bench.p.hold()
    bench.layers(0)
    bench.writes_begun(1)
    bench.side.let_go(ROOM)
    bench.side.cancel(ROOM)
    bench.announce(generation=2)
    assert not bench.side.begin(ROOM, TOKENS)
    assert bench.side.fallbacks == {"room still pushes": 1}
    bench.release(generation=1)
    with pytest.raises(queue.Empty):
        bench.replies.get(timeout=SHORT_S)  # the first generation's write is still under way
    bench.p.release()
    assert bench.end().entry.generation == 1
    assert bench.reply() == Released(ROOM, 1)
    bench.closed()
    bench.begun(generation=3)


def test_a_decode_node_restarted_under_its_session_gets_nothing_old(bench: Bench) -> None:
    bench.begun()
    assert bench.add_peer(epoch=2)
    bench.layers()
    bench.finish()
    assert bench.end().ended_early is not None
    assert bench.p.log == []


def test_a_decode_node_that_registers_again_goes_on(bench: Bench) -> None:
    bench.begun()
    assert bench.add_peer()
    bench.layers()
    bench.finish()
    push = bench.end()
    assert (push.failure, push.ended_early) == (None, None)
    assert min(push.pushed) == TOKENS


# Released.


def test_released_comes_only_after_the_push_has_ended(bench: Bench) -> None:
    bench.p.hold()
    bench.begun()
    bench.layers(0)
    bench.writes_begun(1)
    bench.release()
    with pytest.raises(queue.Empty):
        bench.replies.get(timeout=SHORT_S)
    assert bench.outcome.ends.empty()
    bench.side.let_go(ROOM)
    bench.p.release()
    assert bench.reply() == Released(ROOM, 1)
    assert bench.end().ended_early is not None
    bench.closed()
    assert bench.replies.empty()


def test_a_room_that_still_pushes_does_not_delay_the_release_of_another(bench: Bench) -> None:
    bench.begun(1)
    bench.finish(1)
    bench.end()
    writes = len(bench.p.log)
    bench.p.hold()
    bench.begun(2)
    bench.layers(0, room=2)
    bench.writes_begun(writes + 1)
    bench.release(2)
    bench.release(1)
    assert bench.reply() == Released(1, 1)
    bench.side.let_go(2)
    bench.p.release()
    assert bench.reply() == Released(2, 1)
    bench.end()
    bench.closed()


def test_a_failed_push_drops_the_entry_and_is_fenced_before_released(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FENCE_TIMEOUT_S", SHORT_S)
    bench.p.script("d", 1, Fault(FaultKind.LATE, delay_s=5.0, spans=0))
    bench.begun()
    bench.layers()
    bench.finish()
    failure = bench.end().failure
    assert failure is not None and "scripted failure" in failure
    bench.closed(entries=1)  # late bytes are read from it
    bench.release()
    with pytest.raises(queue.Empty):
        bench.replies.get(timeout=4 * SHORT_S)  # its bytes may still land, and the fence says so
    bench.network.advance(5.0)

    assert bench.reply() == Released(ROOM, 1)  # fenced again by itself
    bench.closed()


def test_a_push_that_never_completes_is_given_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PUSH_TIMEOUT_S", SHORT_S)
    monkeypatch.setattr(module, "FENCE_TIMEOUT_S", SHORT_S)
    monkeypatch.setattr(module, "LIMITS", replace(module.LIMITS, doubt_s=0.3))
    bench = Bench()
    bench.p.script("d", 1, Fault(FaultKind.NEVER))
    bench.begun()
    bench.layers()
    bench.finish()
    failure = bench.end().failure
    assert failure is not None and "not complete after" in failure
    bench.release()
    bench.wait_for(lambda: bench.side.store.rooms == 0)  # given up in doubt
    bench.closed()
    bench.release()
    with pytest.raises(queue.Empty):
        bench.replies.get(timeout=SHORT_S)  # the promise can never be given


def test_a_release_that_overtakes_its_room_keeps_it_from_beginning(bench: Bench) -> None:
    bench.release()
    assert bench.reply() == Released(ROOM, 1)
    bench.announce()
    assert bench.reply() == Released(ROOM, 1)
    assert bench.outcome.failed == [(ROOM, GIVEN_UP)]
    assert not bench.side.begin(ROOM, TOKENS)
    assert bench.outcome.failed == [(ROOM, GIVEN_UP)] * 2 and bench.p.log == []
    bench.closed()
    bench.begun(generation=2)  # the number is used again


def test_a_release_that_overtook_the_hand_over_does_not_pass_for_its_end(bench: Bench) -> None:
    """A server process settled it before the entry came: it serves on and must be stopped."""
    bench.begun()
    bench.layers()
    bench.finish()
    bench.end()
    told: list[Release] = []
    submit = bench.side.server.submit
    bench.side.server.submit = told.append  # type: ignore[method-assign,assignment]
    release = Release(ROOM, 1, "d", D_END)
    bench.side._released(release, False)
    assert told == [release] and bench.replies.empty() and bench.side.store.rooms == 1
    bench.side.server.submit = submit  # type: ignore[method-assign]
    bench.side._released(release, True)  # the answer to that
    assert bench.reply() == Released(ROOM, 1)
    bench.closed()


def test_a_number_that_is_used_again_without_smartgen_goes_stock(bench: Bench) -> None:
    bench.announce()
    bench.release()
    assert bench.reply() == Released(ROOM, 1)
    bench.side.announced_stock(ROOM)
    assert not bench.side.begin(ROOM, 5)
    assert bench.outcome.failed == [(ROOM, GIVEN_UP)] and bench.side.fallbacks == {}
    bench.announce(generation=2)
    bench.side.announced_stock(ROOM)  # a room that lives stays
    assert bench.side.begin(ROOM, TOKENS)


def test_a_failed_hand_over_ends_the_room_though_it_is_served(bench: Bench) -> None:
    def broken(push: PushRoom) -> None:
        push.ended_early = "hand-over to d failed: no route"

    bench.outcome.on_start = broken
    bench.begun()
    bench.layers()
    bench.finish()
    assert bench.end().ended_early == "hand-over to d failed: no route"
    bench.wait_for(lambda: bench.side.store.rooms == 0)
    bench.closed()
    assert bench.replies.empty()


def add_other(bench: Bench) -> None:
    """Another decode node, `e`, that has the memory of `d`."""
    other = FakeTransport(bench.network, "e")
    for memory in (bench.there.memory, bench.mask, bench.metadata, bench.small):
        other.register(memory.region)
    assert bench.add_peer(session="e")


def test_a_hung_decode_node_holds_up_no_push_to_another(bench: Bench) -> None:
    add_other(bench)
    bench.p.script("d", 1, Fault(FaultKind.DELAY, delay_s=1.0))  # of a clock that stands still
    for session, room in (("d", 1), ("e", 2)):
        bench.announce(room, session=session)
        assert bench.side.begin(room, TOKENS)
        bench.layers(room=room)
        bench.finish(room)
    push = bench.end()
    assert (push.entry.room, push.failure, push.ended_early) == (2, None, None)
    assert bench.outcome.started == [2] and bench.outcome.ends.empty()
    bench.network.advance(1.0)
    push = bench.end()
    assert (push.entry.room, push.failure, push.ended_early) == (1, None, None)
    bench.closed(entries=2)


def test_a_peer_whose_fence_hangs_holds_up_no_other_peer(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung, real = threading.Event(), bench.p.fence

    def fence(peer: str, scratch: int, timeout_s: float) -> bool:
        if peer == "d":
            hung.wait(PATIENCE_S)
        return real(peer, scratch, timeout_s)

    monkeypatch.setattr(bench.p, "fence", fence)
    add_other(bench)
    for session, room in (("d", 1), ("e", 2)):
        bench.p.script(session, 1, Fault(FaultKind.FAIL))
        bench.announce(room, session=session)
        assert bench.side.begin(room, TOKENS)
        bench.layers(room=room)
        bench.finish(room)
        assert bench.end().failure is not None
        bench.side.submit(Release(room, 1, session, D_END))
    assert bench.reply() == Released(2, 1)
    assert bench.replies.empty()
    hung.set()
    assert bench.reply() == Released(1, 1)
    bench.closed()
