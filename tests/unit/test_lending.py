"""P with a hierarchical cache: pushes wait for what comes back, and rooms borrow what is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from prefill_bench import ROOM, ROW, TOKENS, Bench
from small_rank import DIM, HEADS, LAYERS, ROWS, SLOTS, WIDTH

from sglang_smartgen.core.geometry import DENSE_LAYERS
from sglang_smartgen.core.mask import LOCAL
from sglang_smartgen.engine import prefill_side
from sglang_smartgen.engine.lending import Lending
from sglang_smartgen.engine.model_facts import wait_loaded
from sglang_smartgen.transfer.tiered_store import Pages, TieredStore
from sglang_smartgen.transfer.transport import Region

PREFIX = 90
NODE = object()


class Tier:
    """A host tier that holds the first tokens of the bench's prompt, and other bytes elsewhere."""

    def __init__(self, bench: Bench) -> None:
        self.memory = torch.full((2, LAYERS, SLOTS, HEADS, DIM), 3.0).to(torch.bfloat16)
        self.slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(9))[:PREFIX]
        self.memory[:, :, self.slots] = bench.here.pool[:, :, bench.source[:PREFIX]]
        self.asked: list[tuple[Any, int]] = []
        self.given_back = 0
        self.has = True

    def lend(self, node: Any, prefix_len: int) -> Pages | None:
        self.asked.append((node, prefix_len))
        return Pages(self.memory, self.slots, self._back) if self.has else None

    def _back(self) -> None:
        self.given_back += 1

    def settle(self) -> None:
        pass


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(prefill_side, "PrefillStore", TieredStore)
    made = Bench()
    yield made
    made.p.release()


def lending(bench: Bench) -> Tier:
    assert isinstance(bench.side.store, TieredStore)
    tier = Tier(bench)
    bench.p.register(Region(tier.memory.data_ptr(), tier.memory.nbytes))
    bench.side.lending = Lending(tier, bench.side.store, bench.side._rooms.active)
    return tier


def arrived(bench: Bench, layers: int) -> bool:
    """Whether the first layers of the whole prompt are on D as P computed them, and said so."""
    target, source = bench.target[:TOKENS], bench.source[:TOKENS]
    there, here = bench.there.pool[:, :layers, target], bench.here.pool[:, :layers, source]
    mask = bench.mask.tensor(0, (LAYERS, ROWS, WIDTH), torch.int8)[:layers, ROW, :TOKENS]
    return torch.equal(there, here) and bool((mask == LOCAL).all())


def test_a_borrowed_prefix_is_pushed_from_the_tier_and_given_back(bench: Bench) -> None:
    tier = lending(bench)
    bench.begun()
    whole = bench.side.store.used_bytes
    assert bench.side.lending is not None
    bench.side.lending.before_batch(ROOM, NODE, PREFIX)
    assert tier.asked == [(NODE, PREFIX)]
    saved = whole - bench.side.store.used_bytes
    assert abs(saved - PREFIX * bench.here.facts.geometry.token_bytes) < 64
    assert bench.side.snapshot()["tier_tokens_now"] == PREFIX
    bench.layers()
    bench.finish()
    push = bench.end()
    assert (push.failure, push.ended_early) == (None, None)
    assert arrived(bench, DENSE_LAYERS) and bench.side.layers_swept == 0
    bench.closed(entries=1)
    assert tier.given_back == 0
    bench.release()
    bench.reply()
    bench.closed()
    assert tier.given_back == 1
    assert bench.side.snapshot()["tier_tokens"] == PREFIX


def cancel(bench: Bench) -> None:
    bench.side.let_go(ROOM)
    bench.side.cancel(ROOM)
    bench.end()


def release(bench: Bench) -> None:
    bench.release()
    bench.side.let_go(ROOM)
    bench.end()
    bench.reply()


def fail(bench: Bench) -> None:
    bench.outcome.dead.add(ROOM)
    bench.layers()
    bench.finish()
    bench.end()


@pytest.mark.parametrize("end", [cancel, release, fail])
def test_it_is_given_back_however_the_room_ends(bench: Bench, end: Callable[[Bench], None]) -> None:
    tier = lending(bench)
    bench.begun()
    assert bench.side.lending is not None
    bench.side.lending.before_batch(ROOM, NODE, PREFIX)
    end(bench)
    bench.closed()
    bench.wait_for(lambda: tier.given_back == 1)


def test_it_is_borrowed_once_and_before_anything_is_captured(bench: Bench) -> None:
    tier = lending(bench)
    tier.has = False
    bench.begun()
    assert bench.side.lending is not None
    before_batch = bench.side.lending.before_batch
    before_batch(None, NODE, PREFIX)
    before_batch(ROOM + 1, NODE, PREFIX)
    before_batch(ROOM, NODE, 0)
    assert tier.asked == []
    before_batch(ROOM, NODE, TOKENS)  # one token is always computed
    assert tier.asked == [(NODE, TOKENS - 1)]
    bench.layers(stop=100)
    tier.has = True
    before_batch(ROOM, NODE, 100)  # its second chunk
    assert len(tier.asked) == 1
    bench.layers()
    bench.finish()
    assert bench.end().failure is None
    assert arrived(bench, DENSE_LAYERS)


# What comes back from the host tier.


class LateLoads:
    """SGLang's LayerDoneCounter; a layer's bytes come when somebody waits for them."""

    def __init__(self, bench: Bench, prefix: torch.Tensor) -> None:
        self._pool, self._prefix = bench.here.pool, prefix
        self._right = self._pool[:, :, prefix].clone()
        self._pool[:, :, prefix] = 0.0
        self.waited: list[int] = []

    def wait_until(self, threshold: int) -> None:
        self.waited.append(threshold)
        self._pool[:, threshold, self._prefix] = self._right[:, threshold]


def test_a_layer_is_read_when_it_has_come_back(bench: Bench) -> None:
    loads = LateLoads(bench, bench.source[:PREFIX])
    pool = SimpleNamespace(layer_transfer_counter=loads, start_layer=0)
    facts = replace(bench.here.facts, loaded=lambda layer: wait_loaded(pool, layer))
    bench.side._capture._facts = facts
    bench.begun()
    bench.layers(0)
    assert loads.waited == [0]
    bench.layers(*range(1, LAYERS))
    bench.finish()
    push = bench.end()
    assert push.failure is None
    assert arrived(bench, DENSE_LAYERS)
    here = bench.here.pool[:, :, bench.source[:TOKENS]].transpose(0, 1)
    assert torch.equal(push.entry.kv, here) and bool((here[:, :, :PREFIX] != 0).any())


def test_without_a_host_tier_nothing_is_waited_for() -> None:
    wait_loaded(SimpleNamespace(layer_transfer_counter=None), 3)
