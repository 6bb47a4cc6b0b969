"""P's side with its store in a server process on real Mooncake: a room's life, and its early ends.

The pushes go through the fake transport; fetches, fill and messages take the way of production.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import zmq
from prefill_bench import D_END, PATIENCE_S, ROOM, TOKENS, Bench
from small_rank import DIM, HEADS, LAYERS

from sglang_smartgen.config import ConfigError
from sglang_smartgen.transfer import serve_parent
from sglang_smartgen.transfer.messages import (
    Endpoint,
    Fetch,
    FetchDone,
    FetchItem,
    Filled,
    Grant,
    GrantItem,
    Message,
    Release,
    Released,
    from_frames,
    to_frames,
)
from sglang_smartgen.transfer.mooncake import MooncakeTransport
from sglang_smartgen.transfer.push_room import PushRoom
from sglang_smartgen.transfer.serve_channel import TransportSpec

ENTRY = 2 * DIM * 2  # bytes, bfloat16
LAYER = LAYERS - 1  # the sequential order pushes it last: all of it is left


class ProcessBench(Bench):
    """The prefill bench with a Mooncake node in D's place and sockets to the server process."""

    def __init__(self) -> None:
        self.mooncake = MooncakeTransport.create("127.0.0.1")
        process = TransportSpec("mooncake", "127.0.0.1")
        super().__init__(session=self.mooncake.session, process=process)
        self.mooncake.register(self.small.region)
        serve = self.side.serve_endpoint
        assert serve is not None
        self._context = zmq.Context()
        self._push = self._context.socket(zmq.PUSH)
        self._push.connect(f"tcp://{serve.host}:{serve.port}")
        self._pull = self._context.socket(zmq.PULL)
        self.end_ = Endpoint("127.0.0.1", self._pull.bind_to_random_port("tcp://127.0.0.1"))
        self._numbers = itertools.count(1)

    def tell(self, message: Message) -> None:
        self._push.send_multipart(to_frames(message))

    def heard(self) -> Message:
        """What the server process says next; the rest is in `replies`."""
        assert self._pull.poll(int(1000 * PATIENCE_S))
        return from_frames(self._pull.recv_multipart())

    def fetch(self, generation: int, *heads: list[int]) -> list[tuple[int, str]]:
        packed = [np.array(head, dtype=np.int32).tobytes() for head in heads]
        item = FetchItem(ROOM, generation, 0, packed)
        number = next(self._numbers)
        self.tell(Fetch(number, self.session, self.end_, LAYER, [item]))
        done = self.heard()
        assert isinstance(done, FetchDone) and done.sequence == number
        return done.failures

    def release_there(self, generation: int) -> None:
        self.tell(Release(ROOM, generation, self.session, D_END))

    def pushing(self) -> bool:
        """What the server process is told, so that speculative bytes wait."""
        process = self.side.server._process
        assert process is not None
        return bool(process._status.view()[0])

    def close(self) -> None:
        self.side.server.close()
        self._context.destroy(linger=0)
        self.mooncake.close()


@pytest.fixture(scope="module")
def bench() -> Iterator[ProcessBench]:
    made = ProcessBench()
    yield made
    made.close()


def test_the_whole_life_of_a_room(bench: ProcessBench) -> None:
    handed: list[list[tuple[int, str]]] = []
    # What `start` sends lets D ask: the server must know of the room by then.
    bench.outcome.on_start = lambda _: handed.append(bench.fetch(1, [3, 149], [7]))
    bench.begun(generation=1)
    bench.layers()
    bench.finish()
    push = bench.end()
    bench.wait_for(lambda: handed == [[]])
    bench.outcome.on_start = lambda _: None
    pool = bench.here.pool[:, LAYER, bench.source[:TOKENS]]  # [2, tokens, heads, dim]
    rows = [pool[:, token, head] for head, token in ((0, 3), (0, 149), (1, 7))]
    landed = bench.small.tensor(0, (3, 2, DIM), torch.bfloat16)
    assert torch.equal(landed, torch.stack(rows))

    length = 2048
    bench.tell(Grant(bench.session, bench.end_, False, [GrantItem(ROOM, 1, 0, length)]))
    filled = bench.heard()
    assert isinstance(filled, Filled) and filled.failure is None
    assert filled.length > length - HEADS * ENTRY
    assert filled.left == push.entry.residual.left - 3 - length // ENTRY
    tokens = torch.from_numpy(np.frombuffer(filled.tokens, dtype=np.int32).astype(np.int64))
    keys = bench.small.tensor(4096, (len(tokens), HEADS, DIM), torch.bfloat16)
    for code, key in zip(tokens.tolist(), keys, strict=True):
        layer, token = divmod(code, TOKENS)
        assert torch.equal(key, bench.here.pool[0, layer, bench.source[token]])

    bench.release_there(1)
    assert bench.reply() == Released(ROOM, 1)
    bench.closed()
    shown = bench.side.snapshot()
    assert shown["store_server"] == "process" and shown["fetches"] == 1
    assert shown["bytes_on_demand"] == 3 * ENTRY
    assert shown["bytes_speculative"] == length // ENTRY * ENTRY


def test_a_release_during_the_push_is_settled_by_both(bench: ProcessBench) -> None:
    bench.p.hold()
    bench.begun(generation=2)
    begun = len(bench.p.log)
    bench.layers(0)
    bench.writes_begun(begun + 1)
    bench.release_there(2)
    state = bench.side._rooms.active[ROOM]
    bench.wait_for(lambda: state.push.ended_early is not None)
    assert bench.replies.empty()  # a write of it is under way
    assert bench.pushing()
    bench.side.let_go(ROOM)
    bench.p.release()
    assert bench.end().ended_early is not None
    assert bench.reply() == Released(ROOM, 2)
    bench.closed()
    bench.wait_for(lambda: not bench.pushing())
    assert "gone" in bench.fetch(2, [0], [0])[0][1]


def test_a_room_that_fails_after_it_was_handed_over_is_taken_back(bench: ProcessBench) -> None:
    def fail(push: PushRoom) -> None:
        push.ended_early = "the request was cleared"

    bench.outcome.on_start = fail
    bench.begun(generation=3)
    bench.layers()
    bench.finish()
    bench.end()
    bench.outcome.on_start = lambda _: None
    bench.wait_for(lambda: bench.side.store.rooms == 0)  # the process lets go a little later
    bench.closed()
    assert "gone" in bench.fetch(3, [0], [0])[0][1]
    bench.release_there(3)
    assert bench.reply() == Released(ROOM, 3)


def test_a_release_that_comes_to_the_bootstrap_socket_is_passed_on(bench: ProcessBench) -> None:
    bench.begun(generation=4)
    bench.layers()
    bench.finish()
    bench.end()
    assert bench.fetch(4, [0], [0]) == []
    bench.release(generation=4)
    assert bench.reply() == Released(ROOM, 4)
    bench.closed()


def test_a_process_that_cannot_start_is_a_configuration_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve_parent, "MODULE", "serve_stub")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv("STUB", "refuse")
    with pytest.raises(ConfigError, match=r"^store_server is 'process', .*: no engine today$"):
        Bench(process=TransportSpec("mooncake", "127.0.0.1"), store_server="process")


def test_where_no_process_was_asked_for_a_thread_takes_its_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serve_parent, "MODULE", "serve_stub")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv("STUB", "refuse")
    bench = Bench(process=TransportSpec("mooncake", "127.0.0.1"))
    assert bench.side.serve_endpoint is None and "no engine today" in caplog.text


@pytest.mark.parametrize("config", [{"store_server": "thread"}, {"transport": "rails"}])
def test_rails_and_a_wish_are_served_by_a_thread(config: dict[str, str]) -> None:
    spec = TransportSpec("mooncake", "127.0.0.1")
    assert Bench(process=spec, **config).side.serve_endpoint is None
