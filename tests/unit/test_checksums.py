"""Checksums of the prompt's KV: what lies wrong on D is found, at the start and at the end."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from decode_bench import ROOM, ROW, TOKENS, Bench
from small_rank import LAYERS

from sglang_smartgen.core.checksums import STRETCH, layer_checksums, whole_stretches
from sglang_smartgen.core.mask import LOCAL
from sglang_smartgen.transfer.messages import Started


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def begun(bench: Bench) -> None:
    """A room that starts with the first STRETCH tokens of layer 2 local, and all of 0 and 1."""
    keys, values = bench.rank.facts.keys, bench.rank.facts.values
    sums = [layer_checksums(keys[n][bench.slots], values[n][bench.slots]) for n in range(LAYERS)]
    message = bench.opened(overrides={"verify": True})
    assert message.verify
    checksums = np.stack(sums).tobytes()
    started = Started(ROOM, message.generation, 0, 0, 0.5, 9, checksums=checksums)
    bench.side.on_message(started)
    bench.mark(0, 1)
    bench.side.masks[2, ROW, :STRETCH] = LOCAL


def test_what_differs_at_the_start_fails_the_room(bench: Bench) -> None:
    begun(bench)
    bench.rank.facts.values[1][bench.slots[STRETCH + 3], 0, 0] += 1
    bench.side.commit(ROOM)
    room = bench.side.room(ROOM)
    assert room is not None and room.failure is not None
    assert f"room {ROOM}, decode rank 0: KV differs from P's in layer 1 from" in room.failure
    assert bench.side.counters["stretches_wrong"] == 1


def test_what_is_not_here_whole_is_not_compared(bench: Bench) -> None:
    begun(bench)
    bench.rank.facts.keys[2][bench.slots[STRETCH]] += 1
    bench.side.commit(ROOM)
    room = bench.side.room(ROOM)
    assert room is not None and room.failure is None
    stretches = -(-TOKENS // STRETCH)
    assert bench.side.counters["stretches_checked"] == 2 * stretches + 1


def test_a_late_write_into_the_slots_is_found_at_the_end(bench: Bench) -> None:
    begun(bench)
    bench.side.commit(ROOM)
    bench.rank.facts.keys[2][bench.slots[0], 0, 0] += 1
    bench.release()
    assert "layer 2 from token 0" in bench.side.finished[0]["failure"]


def test_a_request_that_does_not_ask_is_not_verified(bench: Bench) -> None:
    assert not bench.opened().verify
    bench.side.commit(ROOM)
    bench.release()
    assert bench.side.counters["stretches_checked"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_byte_counts(dtype: torch.dtype) -> None:
    keys, values = torch.randn(2, 100, 2, 4).to(dtype)
    before = layer_checksums(keys, values)
    assert before.shape == (2,)
    values[99, 1, 3] += 1
    assert (layer_checksums(keys, values) != before).tolist() == [False, True]
    assert whole_stretches(torch.arange(100) < 80).tolist() == [True, False]
