"""Two decode ranks of one server: what happens to one of them ends or frees on both."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from decode_bench import P_END, ROOM, Bench
from thread_ranks import Result, ranks_of, together

from sglang_smartgen.config import ConfigError
from sglang_smartgen.core import recordings
from sglang_smartgen.core.agreement import Agreement
from sglang_smartgen.core.recordings import RecordingError
from sglang_smartgen.engine.model_facts import check_heads
from sglang_smartgen.engine.peers import check_sizes
from sglang_smartgen.transfer.messages import Failed, OpenRoom, Release, Released

CAUSE = "the prefill node ended"
SENTENCE = f"SmartGen fetch failed for room {ROOM} (decode rank 1, prefill p:0): {CAUSE}"


class Server:
    """A decode server of two ranks; `each` does the same on both, as SGLang's scheduler does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranks = [
            Bench(monkeypatch, agreement=Agreement(ranks), rank=number)
            for number, ranks in enumerate(ranks_of(2))
        ]

    def each(self, call: Callable[[Bench], Result]) -> list[Result]:
        return together([partial(call, rank) for rank in self.ranks])

    def opened(self, overrides: object = None) -> list[OpenRoom]:
        return self.each(lambda rank: rank.opened(overrides=overrides))

    def step(self) -> list[list[str | None]]:
        """A turn of the loop with a decode step of the room; why it must end, rank by rank."""
        self.each(Bench.tick)
        return self.each(lambda rank: rank.side.failures([ROOM, None]))

    def freed(self) -> list[list[int]]:
        self.each(Bench.tick)
        return [rank.freed for rank in self.ranks]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(monkeypatch)


def decoding(server: Server) -> list[OpenRoom]:
    """A room that both ranks decode, with entries that are on P only."""
    opened = server.opened()
    for rank, message in zip(server.ranks, opened, strict=True):
        rank.hello()
        rank.mark(0, 1)
        rank.started(message.generation, left=10)
    server.each(lambda rank: rank.side.commit(ROOM))
    assert server.step() == [[None, None]] * 2
    return opened


def test_a_failed_fetch_of_one_rank_ends_the_request_on_both(server: Server) -> None:
    decoding(server)
    room = server.ranks[1].side.room(ROOM)
    assert room is not None
    room.fail(CAUSE)
    assert server.step() == [[SENTENCE, None]] * 2
    other = server.ranks[0].side.room(ROOM)
    assert other is not None and other.failure == SENTENCE and not other.machine.may_ask
    server.each(lambda rank: rank.release(finish="abort"))
    assert server.freed() == [[ROOM]] * 2
    assert [rank.side.counters["failures"] for rank in server.ranks] == [1, 1]


def test_the_slots_of_a_request_that_decoded_are_free_at_once(server: Server) -> None:
    """As SGLang expects, which retracts requests until it has enough."""
    decoding(server)
    server.each(Bench.release)
    assert [rank.freed for rank in server.ranks] == [[ROOM]] * 2
    assert [rank.side.quarantined_rooms for rank in server.ranks] == [1, 1]
    assert not any(rank.side.holds_slots for rank in server.ranks)


def test_slots_that_one_rank_has_back_wait_for_the_other(server: Server) -> None:
    opened = server.opened()
    for rank in server.ranks:
        rank.hello()
    server.each(Bench.tick)
    server.each(lambda rank: rank.release(finish="abort"))
    assert server.freed() == [[], []]
    for number, rank in enumerate(server.ranks):
        assert all(each.side.holds_slots for each in server.ranks)
        assert (P_END, Release(ROOM, opened[number].generation, "d", rank.side._reply)) in rank.sent
        rank.side.on_message(Released(ROOM, opened[number].generation))
        assert server.freed() == ([[], []] if number == 0 else [[ROOM]] * 2)
    assert not any(rank.side.holds_slots for rank in server.ranks)
    assert server.freed() == [[ROOM]] * 2


def test_a_rank_whose_room_had_started_waits_too(server: Server) -> None:
    """One rank's push was complete, the other's failed: the request never decodes."""
    first, second = server.ranks
    opened = server.opened()
    server.each(Bench.hello)
    first.mark(0, 1)
    first.started(opened[0].generation, left=10)
    second.side.on_message(Failed(ROOM, opened[1].generation, "a write to D failed"))
    server.each(Bench.tick)
    server.each(lambda rank: rank.release(finish="abort"))
    assert server.freed() == [[], []]
    second.side.on_message(Released(ROOM, opened[1].generation))
    assert server.freed() == [[ROOM]] * 2


def test_a_rank_that_cannot_record_frees_with_the_other(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(recordings.RECORD_DIR_ENV, str(tmp_path))
    first, second = server.ranks
    message = first.opened(overrides={"record": "mine"})
    monkeypatch.setenv(recordings.RECORD_DIR_ENV, str(tmp_path / "not mounted"))
    with pytest.raises(RecordingError):
        second.open(overrides={"record": "mine"})
    first.hello()
    server.each(lambda rank: rank.release(finish="abort"))
    assert server.freed() == [[], []]
    first.side.on_message(Released(ROOM, message.generation))
    assert server.freed() == [[ROOM]] * 2


def test_each_rank_records_and_replays_its_own_heads(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(recordings.RECORD_DIR_ENV, str(tmp_path))
    asked = {"record": "mine", "recording": "theirs", "order": "oracle"}
    opened = server.opened(asked)
    assert [message.recording for message in opened] == ["theirs.rank0", "theirs.rank1"]
    rooms = [rank.side.room(ROOM) for rank in server.ranks]
    assert [room and room.config.record for room in rooms] == ["mine.rank0", "mine.rank1"]
    alone = Bench(monkeypatch)
    assert alone.opened(overrides=asked).recording == "theirs"


def test_wrong_overrides_are_refused_on_both(server: Server) -> None:
    def refused(rank: Bench) -> bool:
        with pytest.raises(ConfigError):
            rank.open(overrides={"ratio": 0})
        return rank.side.room(ROOM) is None

    assert server.each(refused) == [True, True]


def test_a_head_on_several_ranks_is_refused() -> None:
    check_heads("Qwen3ForCausalLM", 2, 2)
    with pytest.raises(ConfigError) as caught:
        check_heads("Qwen3ForCausalLM", 2, 4)
    assert str(caught.value) == (
        "--tp-size is 4; SmartGen cannot serve Qwen3ForCausalLM so, since its 2 KV heads would be "
        "on several ranks each; allowed is at most 2"
    )


def test_a_prefill_node_of_another_size_is_refused_with_both_sizes() -> None:
    check_sizes("p:8998", 2, 2)
    with pytest.raises(ConfigError) as caught:
        check_sizes("p:8998", 1, 2)
    assert str(caught.value) == (
        "the prefill node at p:8998 runs with --tp-size 1 and this decode node with 2; SmartGen "
        "allows equal sizes"
    )
