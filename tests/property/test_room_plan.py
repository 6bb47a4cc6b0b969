"""A room's plan against a plain reference: what goes out when, and what is left in which order."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_smartgen.core.blocks import block_bounds
from sglang_smartgen.core.geometry import KVGeometry
from sglang_smartgen.core.observe import block_means, observed_importance
from sglang_smartgen.core.orders import ORDERS, SINK_TOKENS, mixed_importance
from sglang_smartgen.core.room_plan import RoomPlan

HEADS, GROUP, DIM, K, SCALING = 2, 2, 4, 3, 0.5
STATIC = [order for order in ORDERS if order != "observed"]


class Case(NamedTuple):
    """A room, and what the plain reference computes of it."""

    geometry: KVGeometry
    prompt_len: int
    blocks: int
    k_r: int
    seed: int
    edges: list[int]  # of the chunks
    importance: Tensor

    @property
    def bounds(self) -> list[int]:
        return block_bounds(self.prompt_len, self.blocks)

    @property
    def per_layer(self) -> int:
        return len(self.bounds) - 1

    @property
    def sparse(self) -> tuple[int, ...]:
        return self.geometry.sparse_layers

    @property
    def budget(self) -> int:
        """Blocks of the sparse layers that K_r leaves room for."""
        dense = self.geometry.layers - len(self.sparse)
        return min(max(0, self.k_r - dense * self.per_layer), len(self.sparse) * self.per_layer)

    def plan(self, order: str, importance: Tensor | None) -> RoomPlan:
        return RoomPlan(
            self.geometry,
            order=order,
            prompt_len=self.prompt_len,
            blocks=self.blocks,
            k_r=self.k_r,
            k=K,
            scaling=SCALING,
            seed=self.seed,
            importance=importance,
        )

    def ranking(self, order: str) -> list[tuple[int, int]]:
        """All (place among the sparse layers, m), best first."""
        every = [(i, m) for i in range(len(self.sparse)) for m in range(self.per_layer)]
        if order == "sequential":
            return every
        if order == "random":
            shuffled = torch.Generator().manual_seed(self.seed)
            return [every[at] for at in torch.randperm(len(every), generator=shuffled).tolist()]
        if order == "streaming":
            sinks = [m for m in range(self.per_layer) if self.bounds[m] < SINK_TOKENS]
            rest = [m for m in range(self.per_layer) if m not in sinks]
            return [(i, m) for m in sinks + rest[::-1] for i in range(len(self.sparse))]
        return sorted(every, key=lambda b: (-float(self.rows[b]), *b))

    @property
    def rows(self) -> Tensor:
        """The importance of the sparse layers."""
        return self.importance[list(self.sparse)]

    def picked(self, plan: RoomPlan) -> Tensor:
        """The chosen blocks of the sparse layers; of a dense one the plan chooses none."""
        assert not bool(plan.chosen[list(self.geometry.dense_layers)].any())
        return plan.chosen[list(self.sparse)]

    def keys(self) -> Tensor:
        """[layers, prompt_len, heads, dim]; each layer its own."""
        made = torch.Generator().manual_seed(self.seed)
        return torch.randn((self.geometry.layers, self.prompt_len, HEADS, DIM), generator=made)

    def queries(self) -> Tensor:
        made = torch.Generator().manual_seed(self.seed + 1)
        count = min(5, self.prompt_len)
        return torch.randn((self.geometry.layers, count, HEADS * GROUP, DIM), generator=made)

    def tokens(self, i: int, m: int) -> list[int]:
        """Codes of a block's tokens."""
        base = self.sparse[i] * self.prompt_len
        return [base + token for token in range(self.bounds[m], self.bounds[m + 1])]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layers = draw(st.integers(1, 5))
    sliding = draw(st.frozensets(st.integers(2, max(2, layers - 1)), max_size=2))
    sliding = frozenset(layer for layer in sliding if layer < layers)
    geometry = KVGeometry(layers, HEADS, DIM, torch.float32, sliding)
    prompt_len, blocks = draw(st.integers(1, 90)), draw(st.integers(1, 20))
    edges = draw(st.sets(st.integers(1, prompt_len), max_size=4)) | {0, prompt_len}
    per_layer, seed = min(blocks, prompt_len), draw(st.integers(0, 99))
    # Few values, so that there are ties.
    shape = (layers, per_layer)
    importance = torch.randint(0, 4, shape, generator=torch.Generator().manual_seed(seed)).float()
    k_r = draw(st.integers(0, (layers + 1) * per_layer))
    return Case(geometry, prompt_len, blocks, k_r, seed, sorted(edges), importance)


def run(case: Case, plan: RoomPlan, *, looking: bool = True) -> list[list[list[int]]]:
    """Prefill chunk by chunk: the token codes of [chunk][layer], as they go out."""
    keys, queries, pushed = case.keys(), case.queries(), []
    for start, stop in pairwise(case.edges):
        chunk = []
        for layer in range(case.geometry.layers):
            seen = queries[layer] if looking and stop == case.prompt_len else None
            ranges = plan.ranges(layer, start, stop, seen, keys[layer, :stop])
            assert all(first < last for first, last in ranges)
            assert all(a[1] < b[0] for a, b in pairwise(ranges))
            assert all(last <= stop for _, last in ranges)
            base = layer * case.prompt_len
            chunk.append([base + t for first, last in ranges for t in range(first, last)])
        pushed.append(chunk)
        for layer in range(case.geometry.layers):  # a late job of a chunk that has gone out
            assert plan.ranges(layer, stop, stop, None, keys[layer, :stop]) == []
    return pushed


def flat(pushed: list[list[list[int]]]) -> list[int]:
    return [code for chunk in pushed for layer in chunk for code in layer]


def dense_codes(case: Case) -> set[int]:
    return {
        layer * case.prompt_len + token
        for layer in case.geometry.dense_layers
        for token in range(case.prompt_len)
    }


@settings(deadline=None, max_examples=40)
@given(cases(), st.sampled_from(STATIC))
def test_a_static_order_sends_its_first_blocks_whatever_the_chunks(case: Case, order: str) -> None:
    plan = case.plan(order, case.importance)
    assert not plan.looks
    ranking = case.ranking(order)
    first, rest = ranking[: case.budget], ranking[case.budget :]
    wanted = dense_codes(case) | {code for block in first for code in case.tokens(*block)}
    pushed = run(case, plan)
    sent = flat(pushed)
    assert len(sent) == len(set(sent)) and set(sent) == wanted
    for (start, stop), chunk in zip(pairwise(case.edges), pushed, strict=True):
        for codes in chunk:
            assert all(start <= code % case.prompt_len < stop for code in codes)
    assert plan.residual().tolist() == [code for block in rest for code in case.tokens(*block)]
    assert plan.whole is (not rest)


@settings(deadline=None, max_examples=40)
@given(cases(), st.booleans(), st.booleans())
def test_observed_sends_exactly_its_quota_and_looks_at_the_end(
    case: Case, prior: bool, looking: bool
) -> None:
    plan = case.plan("observed", case.importance if prior else None)
    count = len(case.sparse)
    if prior:
        first = case.ranking("profile")[: case.budget]
        quota = [sum(i == at for i, _ in first) for at in range(count)]
    else:
        quota = [case.budget // count + (i < case.budget % count) for i in range(count)]
    pushed = run(case, plan, looking=looking)
    assert case.picked(plan).sum(1).tolist() == quota
    sent = flat(pushed)
    chosen = [(i, m) for i, m in case.picked(plan).nonzero().tolist()]
    wanted = dense_codes(case) | {code for block in chosen for code in case.tokens(*block)}
    assert len(sent) == len(set(sent)) and set(sent) == wanted
    # Earlier chunks spend their share on whole blocks of their own.
    for (start, stop), chunk in zip(pairwise(case.edges), pushed[:-1], strict=False):
        for i, layer in enumerate(case.sparse):
            blocks = [m for m in range(case.per_layer) if case.tokens(i, m)[0] in chunk[layer]]
            assert len(blocks) <= quota[i] * (stop - start) // case.prompt_len
            assert sum(len(case.tokens(i, m)) for m in blocks) == len(chunk[layer])
            inside = [start <= case.bounds[m] and case.bounds[m + 1] <= stop for m in blocks]
            assert all(inside)
    left = plan.residual().tolist()
    everything = set(range(case.geometry.layers * case.prompt_len))
    assert len(left) == len(set(left)) and set(left) == everything - wanted


@settings(deadline=None, max_examples=25)
@given(cases(), st.booleans())
def test_observed_ranks_by_what_the_last_queries_select(case: Case, prior: bool) -> None:
    case = case._replace(edges=[0, case.prompt_len])
    plan = case.plan("observed", case.importance if prior else None)
    assert plan.looks is (not plan.whole)
    run(case, plan)
    if plan.whole:
        assert plan.residual().numel() == 0
        return
    keys, queries = case.keys(), case.queries()
    seen = torch.stack(
        [
            block_means(observed_importance(queries[i], keys[i], K, SCALING), case.bounds)
            for i in case.sparse
        ]
    )
    for i in range(len(case.sparse)):
        score = mixed_importance(case.rows[i] if prior else None, seen[i]).tolist()
        best = sorted(range(case.per_layer), key=lambda m: (-score[m], m))
        quota = int(case.picked(plan)[i].sum())
        assert case.picked(plan)[i].nonzero().flatten().tolist() == sorted(best[:quota])
    score = mixed_importance(case.rows if prior else None, seen).tolist()
    rest = [(i, m) for i, m in (~case.picked(plan)).nonzero().tolist()]
    rest.sort(key=lambda block: (-score[block[0]][block[1]], *block))
    assert plan.residual().tolist() == [code for block in rest for code in case.tokens(*block)]


@settings(deadline=None, max_examples=40)
@given(cases(), st.sampled_from(ORDERS), st.integers(1, 9), st.data())
def test_an_elastic_plan_sends_everything_once_but_what_it_gives_up(
    case: Case, order: str, count: int, data: st.DataObject
) -> None:
    plan, keys, queries = case.plan(order, case.importance), case.keys(), case.queries()
    sent: list[int] = []
    stops = [0] * case.geometry.layers

    def take(layer: int, first: int, last: int) -> None:
        assert 0 <= first < last <= stops[layer]
        sent.extend(layer * case.prompt_len + t for t in range(first, last))

    given_up: set[int] = set()
    for start, stop in pairwise(case.edges):
        for layer in range(case.geometry.layers):
            stops[layer] = stop
            seen = queries[layer] if stop == case.prompt_len else None
            for first, last in plan.ranges(layer, start, stop, seen, keys[layer, :stop]):
                if layer in case.sparse and data.draw(st.booleans()):
                    plan.give_up(layer, torch.arange(first, last))
                    base = layer * case.prompt_len
                    given_up |= {base + t for t in range(first, last)}
                else:
                    take(layer, first, last)
        for layer, ranges in plan.more(stops, count).items():
            assert layer in case.sparse
            for first, last in ranges:
                given_up -= {layer * case.prompt_len + t for t in range(first, last)}
                take(layer, first, last)
    left = plan.residual().tolist()
    everything = set(range(case.geometry.layers * case.prompt_len))
    assert given_up <= set(left)
    assert set(sent) | set(left) == everything
    longest = max(b - a for a, b in pairwise(case.bounds))
    while found := plan.more(stops, count):
        tokens = sum(last - first for ranges in found.values() for first, last in ranges)
        assert tokens <= count * longest
    assert plan.residual().numel() == 0


@settings(deadline=None, max_examples=25)
@given(cases(), st.sampled_from(STATIC))
def test_more_takes_the_best_that_is_left(case: Case, order: str) -> None:
    plan = case.plan(order, case.importance)
    rest = case.ranking(order)[case.budget :]
    found = plan.more([case.prompt_len] * case.geometry.layers, 2)
    runs = [(layer, a, b) for layer, ranges in found.items() for a, b in ranges]
    codes = [layer * case.prompt_len + t for layer, a, b in runs for t in range(a, b)]
    assert codes == sorted(code for block in rest[:2] for code in case.tokens(*block))


def test_an_order_without_its_importance_is_refused() -> None:
    case = Case(KVGeometry(4, HEADS, DIM, torch.float32), 8, 4, 9, 0, [0, 8], torch.zeros(4, 4))
    for order in ("profile", "oracle"):
        with pytest.raises(ValueError, match=f"order is {order}; it needs importance"):
            case.plan(order, None)
    with pytest.raises(ValueError, match="order is 'best'"):
        case.plan("best", None)
