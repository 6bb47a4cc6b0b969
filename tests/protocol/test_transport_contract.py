"""The promises of transport.py, kept by every transport: fake, socket, Mooncake over TCP, shm, two
sockets as rails, and NIXL where it is installed (over TCP, and in shared memory).
"""

from __future__ import annotations

import random
import signal
import threading
import time

import numpy as np
import pytest
from transport_worlds import CANARY, KINDS, REAL, SCRATCH, SIZE, STOPPABLE, done, failed, make

from sglang_smartgen.transfer import mooncake
from sglang_smartgen.transfer.fake import FakeTransport
from sglang_smartgen.transfer.mooncake import MooncakeTransport
from sglang_smartgen.transfer.socket import SocketTransport
from sglang_smartgen.transfer.transport import Region, Span, TransportError, WriteState

LARGE = "mooncake, as it sends a large chunk"


@pytest.fixture(scope="module", params=[*KINDS, LARGE])
def shared_world(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        kind = request.param
        if kind == LARGE:
            kind = "mooncake"
            patch.setattr(mooncake, "_SINGLY", 0)
            patch.setattr(mooncake, "_WATCHED", 1)
        made = make(kind, tmp_path_factory.mktemp("world"))
        yield made
        made.close()


@pytest.fixture
def world(shared_world):
    """A peer for tests that leave it alive; without failures to remember and with clean memory."""
    assert shared_world.fence(10.0)
    shared_world.memory[:] = CANARY
    return shared_world


@pytest.fixture(params=KINDS)
def own_world(request, tmp_path):
    made = make(request.param, tmp_path)
    yield made
    made.close()


@pytest.fixture(params=REAL)
def real_world(request, tmp_path):
    made = make(request.param, tmp_path)
    yield made
    made.close()


@pytest.fixture(params=STOPPABLE)
def stoppable_world(request, tmp_path):
    made = make(request.param, tmp_path)
    yield made
    made.close()


def test_bytes_land_exactly_and_neither_neighbour_is_touched(world):
    done(world.write((5, 4097, 1001)))
    expected = np.full(SIZE, CANARY, np.uint8)
    expected[4097 : 4097 + 1001] = world.source[5 : 5 + 1001]
    assert np.array_equal(world.memory, expected)


def test_scattered_spans_of_all_sizes_land_in_their_places(world):
    rng = random.Random(1)
    pieces, offset = [], 0
    for length in [1, 7, 4096, 65536, 65537, (1 << 20) + 3, 100, 3 << 20, 1]:
        pieces.append((rng.randrange(SIZE - length), offset, length))
        offset += length + rng.randrange(1, 500)
    rng.shuffle(pieces)
    expected = np.full(SIZE, CANARY, np.uint8)
    for source, destination, length in pieces:
        expected[destination : destination + length] = world.source[source : source + length]
    done(world.write(*pieces))
    assert np.array_equal(world.memory, expected)


def test_done_means_that_every_byte_is_visible(world):
    for value in range(30):
        world.source[: 1 << 20] = value
        done(world.write((0, 0, 1 << 19), (1 << 19, 1 << 19, 1 << 19)))
        assert (world.memory[: 1 << 20] == value).all()


def test_more_spans_than_a_mooncake_queue_takes(world):
    count = 5000
    done(world.write(*[(i * 16, i * 32, 16) for i in range(count)]), 20.0)
    rows = np.asarray(world.memory[: count * 32]).reshape(count, 32)
    assert np.array_equal(rows[:, :16], world.source[: count * 16].reshape(count, 16))
    assert (rows[:, 16:] == CANARY).all()


def test_an_empty_write_is_done_and_a_negative_span_is_refused(world):
    done(world.write(), 0.0)
    done(world.write((0, 0, 0)), 0.0)
    with pytest.raises(ValueError, match="must be >= 0"):
        world.write((0, 0, -1))


@pytest.mark.parametrize("offset", [SIZE - 99, SIZE + (64 << 20)], ids=["over the end", "outside"])
def test_a_bad_address_fails_and_the_sentence_names_the_peer(world, offset):
    error = failed(world.write((0, offset, 100)))
    assert world.shown in error and "1 span, 100 bytes" in error
    assert (world.memory == CANARY).all()
    done(world.write((0, 0, 100)))  # and the next good one works


def test_two_writers_do_not_disturb_each_other(world):
    errors: list[str] = []

    def writer(first: int) -> None:
        for turn in range(20):
            handle = world.write((first + turn, first, 65536), (turn, first + (1 << 20), 700))
            if handle.wait(10.0) is not WriteState.DONE:
                errors.append(str(handle.error))
            for source, destination, length in ((first + turn, 0, 65536), (turn, 1 << 20, 700)):
                got = world.memory[first + destination :][:length]
                if not np.array_equal(got, world.source[source:][:length]):
                    errors.append(f"turn {turn}: wrong bytes at {first + destination}")

    threads = [threading.Thread(target=writer, args=(i * (3 << 20),)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert errors == [] and not any(thread.is_alive() for thread in threads)


def test_a_fence_without_failure_is_true_at_once(world):
    assert world.fence(0.0) is True
    done(world.write((0, 0, 1 << 20)))
    start = time.monotonic()
    assert world.fence(5.0) is True
    assert time.monotonic() - start < 0.1


def test_a_fence_passes_after_a_failure_and_costs_its_time_once(world):
    failed(world.write((0, SIZE, 100), (0, 0, 64)))
    start = time.monotonic()
    assert world.fence(10.0) is True
    if isinstance(world.sender, MooncakeTransport):
        assert time.monotonic() - start > 1.9  # the engine's progress timeout
    start = time.monotonic()
    assert world.fence(10.0) is True
    assert time.monotonic() - start < 0.1
    assert (world.memory[64:SCRATCH] == CANARY).all()
    done(world.write((0, 0, 100)))


def test_registration_mistakes_say_what_they_are(world):
    region = Region(world.base, SIZE)
    with pytest.raises(TransportError, match="overlaps"):
        world.sender.register(Region(world.base + 100, 100))
    world.sender.unregister(region)
    with pytest.raises(TransportError, match="not registered"):
        world.sender.unregister(region)
    world.sender.register(region)


def test_writes_to_a_dead_peer_fail_in_time_and_no_fence_passes(own_world):
    world = own_world
    done(world.write((0, 0, 100)))
    world.kill()
    for _ in range(2):
        assert world.shown in failed(world.write((0, 0, 1 << 20)))
    start = time.monotonic()
    assert world.fence(0.5) is False
    assert time.monotonic() - start < 1.5


def test_a_restarted_peer_is_reached_again_and_the_old_one_is_not_mixed_up_with_it(own_world):
    world = own_world
    done(world.write((0, 0, 100)))
    old_peer, old_address = world.peer, world.at
    world.restart()
    if isinstance(world.sender, SocketTransport | FakeTransport):
        assert world.peer.split("/")[0] == old_peer.split("/")[0]
    failed(world.sender.write(old_peer, [Span(world.base, old_address, 100)]))
    done(world.write((0, 200, 100)))
    assert np.array_equal(world.memory[200:300], world.source[:100])
    assert (world.memory[:200] == CANARY).all()


def test_nothing_lands_after_the_fence_of_a_peer_that_hung(stoppable_world):
    world = stoppable_world
    done(world.write((0, 0, 100)))
    world.source[:] = 1
    world.process.send_signal(signal.SIGSTOP)
    start = time.monotonic()
    handle = world.write((0, 0, SCRATCH), deadline_s=5.0)
    assert time.monotonic() - start < 0.5  # write() waits for no byte
    assert handle.wait(0.05) is WriteState.PENDING
    assert world.fence(0.2) is False
    failed(handle, 8.0)
    assert world.fence(0.2) is False
    world.source[:] = 2  # what a caller that took FAILED for a fence would do
    world.process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + 20.0
    while not world.fence(5.0):
        assert time.monotonic() < deadline
    world.memory[:SCRATCH] = CANARY
    time.sleep(0.5)
    assert (world.memory[:SCRATCH] == CANARY).all()
    done(world.write((0, 0, 100)))


def test_bandwidth_is_measured_on_large_writes_only(real_world):
    assert real_world.sender.bandwidth(real_world.peer) is None
    done(real_world.write((0, 0, 100)))
    assert real_world.sender.bandwidth(real_world.peer) is None
    done(real_world.write((0, 0, 4 << 20)))
    assert 1e6 < real_world.sender.bandwidth(real_world.peer) < 1e12


def test_close_fails_what_is_pending_and_refuses_more(stoppable_world):
    done(stoppable_world.write((0, 0, 100)))
    stoppable_world.process.send_signal(signal.SIGSTOP)
    handles = [stoppable_world.write((0, 0, SCRATCH)) for _ in range(3)]
    start = time.monotonic()
    stoppable_world.sender.close()
    assert time.monotonic() - start < 2.0
    assert all("closed" in failed(handle, 0.0) for handle in handles)
    with pytest.raises(TransportError, match="closed"):
        stoppable_world.write((0, 0, 100))
    stoppable_world.sender.close()
