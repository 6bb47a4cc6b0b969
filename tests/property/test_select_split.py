"""What must not matter to a selector: chunks, the rest of the batch, the number of ranks."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import select_cases as cases
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_smartgen.select import budget
from sglang_smartgen.select.batch import select_batch

RANKS = 2
TOKENS = 157  # not a multiple of a vector register or of Quest's page


@pytest.mark.parametrize("case", cases.CASES)
@settings(max_examples=8, deadline=None)
@given(
    edges=st.sets(st.integers(1, TOKENS - 1), max_size=12),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    prefix=st.integers(0, TOKENS - 1),
)
def test_chunks_and_prefix_hits_give_the_metadata_of_one_prefill(
    case: str, edges: set[int], dtype: torch.dtype, prefix: int
) -> None:
    selector = cases.selector_of(case, dtype=dtype)
    keys = cases.keys_of(TOKENS, 5, dtype)
    anchor = keys[: selector.anchor_tokens] if selector.anchor_tokens else None
    whole = selector.encode(3, keys, anchor)
    assert whole.shape == (TOKENS, 4, selector.metadata_width)
    assert whole.dtype == selector.metadata_dtype
    for cuts in (sorted({0, TOKENS, *edges}), [0, prefix, TOKENS] if prefix else [0, TOKENS]):
        pieces = [selector.encode(3, keys[a:b], anchor) for a, b in pairwise(cuts)]
        assert _same_bits(torch.cat(pieces), whole)
    # A pool's rows: other strides, other neighbours.
    pool = torch.zeros(2, 4, TOKENS + 3, 32, dtype=dtype)
    view = pool[1].transpose(0, 1)[3:]
    view.copy_(keys)
    assert _same_bits(selector.encode(3, view, anchor), whole)


@pytest.mark.parametrize("case", cases.CASES)
@settings(max_examples=6, deadline=None)
@given(
    lengths=st.lists(st.integers(1, TOKENS), min_size=1, max_size=4),
    ratio=st.sampled_from([0.05, 0.2, 1.0]),
    seed=st.integers(0, 99),
)
def test_a_padded_ragged_batch_is_each_request_alone(
    case: str, lengths: list[int], ratio: float, seed: int
) -> None:
    selector = cases.selector_of(case)
    batch, longest = len(lengths), max(lengths)
    counts = [budget(length, ratio) for length in lengths]
    queries = cases.queries_of(batch, seed).view(batch, 4, 2, 32)
    # What is behind a request's length must not be read: it is the worst there is.
    garbage = torch.iinfo(torch.int32).max if selector.metadata_dtype == torch.int32 else torch.nan
    shape = (batch, longest, 4, selector.metadata_width)
    metadata = torch.full(shape, garbage, dtype=selector.metadata_dtype)
    alone = []
    for b, length in enumerate(lengths):
        own = cases.encode(selector, 2, cases.keys_of(length, seed + b))
        metadata[b, :length] = own
        alone.append(selector.pick(selector.score(2, queries[b], own), counts[b]))
    index = select_batch(selector, 2, queries, metadata, lengths, counts)
    assert index.shape == (batch, 4, max(counts))
    for b, wanted in enumerate(alone):
        assert torch.equal(index[b, :, : wanted.shape[1]], wanted)
        assert bool((index[b, :, wanted.shape[1] :] == -1).all())


def test_a_batch_that_does_not_fit_is_named() -> None:
    selector = cases.selector_of("exact")
    queries, metadata = torch.zeros(2, 4, 2, 32), torch.zeros(2, 5, 4, 32)
    with pytest.raises(ValueError, match="2 queries, 2 metadata rows, 1 lengths and 2 counts"):
        select_batch(selector, 2, queries, metadata, [3], [1, 1])
    with pytest.raises(ValueError, match="length is 6; allowed are 1 to 5"):
        select_batch(selector, 2, queries, metadata, [3, 6], [1, 1])


def test_two_gloo_ranks_select_what_one_rank_selects(tmp_path: Path) -> None:
    artifacts = {case: cases.artifact_of(case) for case in cases.CASES}
    threads = torch.get_num_threads()
    arguments = (RANKS, str(tmp_path), artifacts, threads)
    torch.multiprocessing.spawn(cases.gloo_rank, args=arguments, nprocs=RANKS)
    found = torch.load(tmp_path / "selections.pt")
    assert found.keys() == cases.CASES.keys()
    for case, rows in found.items():
        assert torch.equal(rows, cases.selections(case, 0, 1, artifacts[case])), case


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    as_bytes = [x.contiguous().view(-1).view(torch.uint8) for x in (a, b)]
    return a.shape == b.shape and torch.equal(*as_bytes)
