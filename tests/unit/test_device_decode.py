"""A decode step of the device path, layer by layer, beside attention over what is selected."""

from __future__ import annotations

import pytest
import torch
from device_bench import DeviceBench
from lane_bench import ROOM, SPARSE, TOKENS
from reference.operators import sparse_decode as attention
from small_rank import DIM, HEADS, LAYERS, SLOTS

from sglang_smartgen.core.mask import LOCAL
from sglang_smartgen.engine.cuda.decode import DeviceDecode, LayerCall
from sglang_smartgen.engine.cuda.step import Step
from sglang_smartgen.triton_kernels import sparse_decode

ROW, STOCK_ROW, NEW = 1, 3, 2  # rows of the room and of a short prompt; tokens made so far
LENGTHS = [TOKENS + NEW, 9]
SCALING = DIM**-0.5


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    """The path on CPU tensors, and on a GPU where there is one."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    name: str = request.param
    return name


class StepBench:
    """A room with some new tokens and a request that is not SmartGen's, in one batch."""

    def __init__(self, device: str = "cpu", local: bool = False, **settings: object) -> None:
        self.device = DeviceBench(device, **settings)
        self.bench = bench = self.device.bench
        bench.answers_at_once = True
        if local:
            bench.rank.pool[:, :, bench.slots] = bench.kept
            bench.room.mask.fill_(LOCAL)
        used = torch.isin(torch.arange(SLOTS), bench.slots)
        free = torch.arange(SLOTS)[~used]
        self.table = bench.rank.facts.req_to_token
        self.table[ROW, : TOKENS + NEW] = torch.cat((bench.slots, free[:NEW])).int()
        self.table[STOCK_ROW, : LENGTHS[1]] = free[NEW : NEW + LENGTHS[1]].int()
        on_device = self.table.to(self.device.device)
        self.decode = DeviceDecode(bench.side, self.device.lanes, self.attend, on_device)

    def attend(self, *args: object) -> torch.Tensor:
        late, rows = self.device.late, args[1]
        assert not late.is_aside and isinstance(rows, torch.Tensor)
        if rows.shape[2] and self.device.device.type == "cpu":
            assert late.joined  # gathered aside: the last gather has been joined by now
        return sparse_decode(*args)  # type: ignore[arg-type]

    def run(self, call: LayerCall, step: Step) -> torch.Tensor:
        """One layer, with what `call` has in host memory on the device."""
        call.query = call.query.to(self.device.device)
        if call.next_query is not None:
            call.next_query = call.next_query.to(self.device.device)
        return self.decode.run(call, step).cpu()

    def pools(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.device.pools(layer)

    def step(
        self, queries: torch.Tensor, early: torch.Tensor | None, rows: int = 2
    ) -> list[torch.Tensor]:
        """All layers; queries [layers, B, q_heads, dim], early those that the layer before saw."""
        step = Step([ROW, STOCK_ROW][:rows], LENGTHS[:rows])
        found = []
        for layer in range(LAYERS):
            call = LayerCall(layer, queries[layer], self.pools(layer), SCALING)
            if early is not None and layer + 1 in SPARSE:
                call.next_query, call.next_pools = early[layer + 1], self.pools(layer + 1)
            found.append(self.run(call, step))
        return found

    def expected(self, layer: int, query: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """[2, q_heads, dim] of both requests; `seen` is the query that selects."""
        bench = self.bench
        head = torch.arange(HEADS)[:, None]
        positions = torch.arange(TOKENS).expand(HEADS, -1)
        if layer in SPARSE:
            positions = bench.pick(layer, seen[0].to(self.device.device)).cpu()
        rows = [bench.kept[side, layer, positions, head][None] for side in range(2)]
        tail = self.table[ROW, TOKENS : TOKENS + NEW].long()[None]
        pools = self.bench.rank.pool[0, layer], self.bench.rank.pool[1, layer]
        ours = attention(query[:1], *rows, positions[None], *pools, tail, SCALING)
        nothing = torch.empty(1, HEADS, 0, DIM, dtype=query.dtype)
        none = torch.empty(1, HEADS, 0, dtype=torch.int64)
        stock = self.table[STOCK_ROW, : LENGTHS[1]].long()[None]
        theirs = attention(query[1:], nothing, nothing, none, *pools, stock, SCALING)
        return torch.cat((ours, theirs))


def some_queries(seed: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn((LAYERS, 2, 2 * HEADS, DIM), generator=made).bfloat16()


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(found.double(), wanted, rtol=1e-2, atol=1e-2)


def test_every_layer_attends_to_what_its_early_query_selects(device: str) -> None:
    bench = StepBench(device)
    queries, early = some_queries(1), some_queries(2)
    for layer, found in enumerate(bench.step(queries, early)):
        assert close(found, bench.expected(layer, queries[layer], early[layer])), layer
    assert bench.bench.asked and bench.bench.room.failure is None


def test_without_lookahead_a_layer_selects_with_its_own_query(device: str) -> None:
    bench = StepBench(device, lookahead=False)
    queries = some_queries(3)
    for layer, found in enumerate(bench.step(queries, None)):
        assert close(found, bench.expected(layer, queries[layer], queries[layer])), layer
    assert bench.bench.asked


def test_the_answer_does_not_depend_on_what_was_local(device: str) -> None:
    """Bit for bit, in a first step with fetches and a second one without (design.md 2.1)."""
    remote, local = StepBench(device), StepBench(device, local=True)
    for _ in range(2):
        queries, early = some_queries(4), some_queries(5)
        for ours, theirs in zip(
            remote.step(queries, early), local.step(queries, early), strict=True
        ):
            assert torch.equal(ours, theirs)
    assert remote.bench.asked and not local.bench.asked


def test_a_padded_batch_gives_the_real_rows_the_same(device: str) -> None:
    """What a CUDA graph adds to fill its batch attends to the padding slot, harmlessly."""
    bench = StepBench(device, local=True)
    queries, early = some_queries(6), some_queries(7)
    alone = bench.step(queries, early)
    step = Step([ROW, STOCK_ROW], LENGTHS)
    wide = torch.cat((queries, queries[:, :1]), dim=1)
    wide_early = torch.cat((early, early[:, :1]), dim=1)
    for layer in range(LAYERS):
        call = LayerCall(layer, wide[layer], bench.pools(layer), SCALING)
        if layer + 1 in SPARSE:
            call.next_query, call.next_pools = wide_early[layer + 1], bench.pools(layer + 1)
        found = bench.run(call, step.padded(3))
        assert torch.equal(found[:2], alone[layer]) and found.shape[0] == 3


def test_a_window_reaches_back_as_far_as_the_cpu_path_does(device: str) -> None:
    """Positions from `length - 1 - window` on; see SGLang's torch_native mask."""
    bench = StepBench(device)
    query = some_queries(8)[0]
    call = LayerCall(0, query, bench.pools(0), SCALING, window=3)
    found = bench.run(call, Step([ROW, STOCK_ROW], LENGTHS))
    slots = bench.table[STOCK_ROW, LENGTHS[1] - 4 : LENGTHS[1]].long()[None]
    nothing = torch.empty(1, HEADS, 0, DIM, dtype=query.dtype)
    none = torch.empty(1, HEADS, 0, dtype=torch.int64)
    pool = bench.bench.rank.pool
    wanted = attention(query[1:], nothing, nothing, none, pool[0, 0], pool[1, 0], slots, SCALING)
    assert close(found[1:], wanted)


def test_a_layer_that_was_not_looked_ahead_to_fails_the_room() -> None:
    bench = StepBench()
    queries = some_queries(9)
    bench.step(queries, None)
    assert "did not look ahead to 2" in (bench.bench.room.failure or "")


def test_a_step_that_was_broken_off_gives_its_slab_back() -> None:
    bench = StepBench()
    queries, early = some_queries(10), some_queries(11)
    step = Step([ROW, STOCK_ROW], LENGTHS)
    call = LayerCall(1, queries[1], bench.pools(1), SCALING, None, early[2], bench.pools(2))
    bench.run(call, step)
    assert bench.bench.side.room(ROOM) is not None and len(bench.bench.asked) == 1
    for layer, found in enumerate(bench.step(queries, early)):
        assert close(found, bench.expected(layer, queries[layer], early[layer])), layer
    assert bench.bench.side.arena.quarantined == 0
