"""Spans must move exactly the rows that were asked for, in as few pieces as possible."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_smartgen.transfer import mooncake
from sglang_smartgen.transfer.spans import coalesce, spans_for_slots
from sglang_smartgen.transfer.transport import Span, checked_spans

SOURCE, DESTINATION = 1 << 20, 1 << 30


def byte_map(spans: list[Span]) -> dict[int, int]:
    """Destination byte -> source byte of a write, spans applied in order."""
    return {span.destination + i: span.source + i for span in spans for i in range(span.length)}


# Slots of a request: distinct, mostly in runs.
slot_lists = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 6)), min_size=1, max_size=12
).map(lambda runs: list(dict.fromkeys(s + i for s, n in runs for i in range(n))))


@given(slots=slot_lists, row_bytes=st.integers(1, 5), data=st.data())
def test_rows_arrive_in_their_slots_and_runs_are_one_span(slots, row_bytes, data):
    tokens = sorted(data.draw(st.sets(st.integers(0, len(slots) - 1))))
    there = [slots[t] for t in tokens]
    rows = np.array(tokens, np.int64), np.array(there, np.int64)
    spans = spans_for_slots(SOURCE, row_bytes, DESTINATION, *rows)
    wanted = {
        DESTINATION + slots[t] * row_bytes + i: SOURCE + t * row_bytes + i
        for t in tokens
        for i in range(row_bytes)
    }
    assert byte_map(spans) == wanted
    pairs = itertools.pairwise(zip(tokens, there, strict=True))
    breaks = sum((b[0] - a[0], b[1] - a[1]) != (1, 1) for a, b in pairs)
    assert len(spans) == (breaks + 1 if tokens else 0)


@given(slots=slot_lists, row_bytes=st.integers(1, 5), seed=st.integers(0, 99))
def test_coalesce_keeps_every_byte_and_leaves_no_mergeable_neighbours(slots, row_bytes, seed):
    rows = [
        Span(SOURCE + t * row_bytes, DESTINATION + slot * row_bytes, row_bytes)
        for t, slot in enumerate(slots)
    ]
    shuffled = random.Random(seed).sample(rows, len(rows))
    merged = coalesce([*shuffled, Span(SOURCE, DESTINATION, 0)])
    assert byte_map(merged) == byte_map(rows)
    for left, right in itertools.pairwise(merged):
        assert left.destination < right.destination
        touching = left.destination + left.length == right.destination
        assert not (touching and left.source + left.length == right.source)
    assert coalesce(merged) == merged


def test_neighbours_in_one_memory_only_are_not_merged():
    apart_here = [Span(0, 100, 10), Span(20, 110, 10)]
    apart_there = [Span(0, 100, 10), Span(10, 200, 10)]
    assert coalesce(apart_here) == apart_here
    assert coalesce(apart_there) == apart_there


def test_addresses_above_two_to_the_63_do_not_overflow():
    base = 2**64 - 2**40
    assert spans_for_slots(
        base, 4096, base, np.array([0, 1, 2]), np.array([30_000, 30_001, 7])
    ) == [
        Span(base, base + 30_000 * 4096, 8192),
        Span(base + 8192, base + 7 * 4096, 4096),
    ]


@pytest.mark.parametrize(
    ("kwargs", "field"),
    [
        ({"slots": [-2]}, "slots must be >= 0"),
        ({"tokens": [-2]}, "tokens must be >= 0"),
        ({"slots": [[1]]}, r"slots \[1, 1\]"),
        ({"tokens": [1, 2]}, r"tokens is \[2\]"),
        ({"row_bytes": 0}, "row_bytes"),
    ],
)
def test_bad_input_names_the_field(kwargs, field):
    arguments = {"row_bytes": 1, "tokens": [1], "slots": [1], **kwargs}
    for name in ("tokens", "slots"):
        arguments[name] = np.array(arguments[name])
    with pytest.raises(ValueError, match=field):
        spans_for_slots(source=0, destination=0, **arguments)


def test_checked_spans_drops_empty_and_refuses_negative_ones():
    assert checked_spans([Span(1, 2, 0), Span(1, 2, 3)]) == [Span(1, 2, 3)]
    for span in (Span(-1, 0, 1), Span(0, -1, 1), Span(0, 0, -1)):
        with pytest.raises(ValueError, match="must be >= 0"):
            checked_spans([span])


@settings(deadline=None)
@given(
    lengths=st.lists(
        st.one_of(
            st.integers(1, 4096), st.integers(1, 5 * mooncake.MAX_SPAN_BYTES), st.just(200 << 20)
        ),
        max_size=30,
    ),
    repeat=st.sampled_from([1, 50]),
)
def test_mooncake_chunks_stay_inside_the_limits_and_lose_nothing(lengths, repeat):
    spans, offset = [], 0
    for length in lengths * repeat if sum(lengths) < 50_000 else lengths:
        spans.append(Span(SOURCE + offset, DESTINATION + offset, length))
        offset += length + 1
    out = list(mooncake.chunks(spans))
    for chunk in out:
        assert 0 < len(chunk) <= mooncake.MAX_CHUNK_SPANS
        assert sum(span.length for span in chunk) <= mooncake.MAX_CHUNK_BYTES
        assert max(span.length for span in chunk) <= mooncake.MAX_SPAN_BYTES
    assert coalesce([span for chunk in out for span in chunk]) == spans
