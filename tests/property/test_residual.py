"""The residual: whatever is marked, ordered and taken, every entry is accounted for once."""

from __future__ import annotations

import torch
from asked_entries import asked
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_smartgen.core.geometry import KVGeometry
from sglang_smartgen.transfer.residual import Portion, Residual

LAYERS, HEADS, TOKENS = 3, 2, 7
CODES = LAYERS * TOKENS
GEOMETRY = KVGeometry(LAYERS, HEADS, 4, torch.float32)


def entries_of(portion: Portion, heads: int = HEADS) -> list[int]:
    """Entry codes of a portion, whole tokens first."""
    whole = portion.tokens[:, None] * heads + torch.arange(heads)
    return whole.flatten().tolist() + portion.entries.tolist()


def layers_ascend(codes: Tensor, step: int) -> bool:
    layers = (codes // step).tolist()
    return layers == sorted(layers)


layer = st.integers(0, LAYERS - 1)
span = st.lists(st.integers(0, TOKENS), min_size=2, max_size=2).map(sorted)
positions = st.lists(st.integers(0, TOKENS - 1), max_size=5)
steps = st.one_of(
    st.tuples(st.just("tokens"), layer, span),
    st.tuples(st.just("entries"), layer, st.integers(0, HEADS - 1), positions),
    st.tuples(st.just("order"), st.lists(st.integers(0, CODES - 1), unique=True)),
    st.tuples(st.just("take"), st.integers(0, CODES * HEADS)),
)


@settings(deadline=None, max_examples=150)
@given(st.lists(steps, max_size=25))
def test_nothing_is_lost_or_doubled(script: list[tuple]) -> None:
    residual = Residual(GEOMETRY, TOKENS)
    there: set[int] = set()  # the plain reference: entries that are on D
    for kind, *values in [*script, ("order", [])]:
        if kind == "tokens":
            at, (start, stop) = values
            residual.mark_tokens(at, torch.arange(start, stop))
            first, last = ((at * TOKENS + token) * HEADS for token in (start, stop))
            there |= set(range(first, last))
        elif kind == "entries":
            at, head, wanted = values
            residual.mark_entries(at, asked(HEADS, {head: wanted}))
            there |= {(at * TOKENS + token) * HEADS + head for token in wanted}
        elif kind == "order":
            residual.set_order(torch.tensor(values[0], dtype=torch.int64))
        else:
            portion = residual.take(values[0])
            if portion is None:
                continue
            taken = entries_of(portion)
            assert 0 < len(taken) == len(set(taken)) == portion.count(HEADS)
            assert len(taken) <= max(values[0], HEADS)
            assert not there & set(taken)
            assert layers_ascend(portion.tokens, TOKENS)
            assert layers_ascend(portion.entries, TOKENS * HEADS)
            there |= set(taken)
        assert residual.left == CODES * HEADS - len(there)
    while (portion := residual.take(5)) is not None:
        assert not there & set(entries_of(portion))
        there |= set(entries_of(portion))
    assert len(there) == CODES * HEADS and residual.left == 0


@settings(deadline=None)
@given(st.permutations(range(CODES)), st.integers(0, CODES), st.integers(1, 9))
def test_the_order_is_kept_and_the_rest_follows_it(order: list[int], named: int, at: int) -> None:
    residual = Residual(GEOMETRY, TOKENS)
    residual.set_order(torch.tensor(order[:named], dtype=torch.int64))
    wanted = order[:named] + sorted(order[named:])
    while wanted:
        portion = residual.take(at * HEADS)
        assert portion is not None
        assert portion.tokens.tolist() == sorted(wanted[:at]) and not portion.entries.numel()
        del wanted[:at]
    assert residual.take(1) is None


def test_what_a_fetch_took_of_a_token_leaves_single_entries() -> None:
    residual = Residual(GEOMETRY, TOKENS)
    residual.set_order(torch.tensor([5, TOKENS + 1]))
    residual.mark_entries(0, asked(HEADS, {1: [5]}))
    portion = residual.take(2 * HEADS)
    assert portion is not None
    assert portion.tokens.tolist() == [TOKENS + 1] and portion.entries.tolist() == [5 * HEADS]


def test_before_there_is_an_order_nothing_is_taken() -> None:
    residual = Residual(GEOMETRY, TOKENS)
    assert residual.take(9) is None and residual.left == CODES * HEADS
