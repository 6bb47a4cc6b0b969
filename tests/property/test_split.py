"""Algorithm 1 on any index and any mask, against plain loops and against what must always hold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import split as reference
from torch import Tensor

from sglang_smartgen.core import LOCAL, PADDING, REMOTE, SplitIndex, split_index

MASKS = {
    "mixed": (PADDING, LOCAL, REMOTE),
    "all local": (LOCAL,),
    "all remote": (REMOTE,),
    "all padding": (PADDING,),
}


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """An index [B, H, k] (padding anywhere, perhaps duplicates, perhaps k > N) and its mask."""
    batch, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    length, k = draw(st.integers(1, 12)), draw(st.integers(0, 16))
    values = st.sampled_from(MASKS[draw(st.sampled_from(sorted(MASKS)))])
    shape = draw(st.sampled_from([(batch, length), (batch, heads, length)]))
    size = int(torch.Size(shape).numel())
    mask = torch.tensor(draw(st.lists(values, min_size=size, max_size=size)), dtype=torch.int8)
    entries = st.integers(-1, length - 1)
    rows = st.lists(entries, min_size=k, max_size=k) | st.just([-1] * k)
    index = [[draw(rows) for _ in range(heads)] for _ in range(batch)]
    return torch.tensor(index, dtype=torch.int64).view(batch, heads, k), mask.view(shape)


@settings(max_examples=300, deadline=None)
@given(cases())
def test_split_equals_the_loops(case: tuple[Tensor, Tensor]) -> None:
    index, mask = case
    split = split_index(index, mask)
    index_mask = reference.mask_gather(mask, index)
    reordered, order = reference.reorder_descending(index, index_mask)
    assert torch.equal(split.reordered, reordered)
    assert torch.equal(split.order, order)
    assert torch.equal(split.remote, reference.lane(index, index_mask, REMOTE)[1])
    assert torch.equal(split.local, reference.lane(index, index_mask, LOCAL)[1])


@settings(max_examples=300, deadline=None)
@given(cases())
def test_remote_first_stable_and_nothing_lost(case: tuple[Tensor, Tensor]) -> None:
    index, mask = case
    split = split_index(index, mask)
    per_head = mask if mask.dim() == 3 else mask.unsqueeze(1).expand(-1, index.shape[1], -1)
    for b in range(index.shape[0]):
        for h in range(index.shape[1]):
            _check_row(index[b, h].tolist(), per_head[b, h].tolist(), split, b, h)


def _check_row(index: list[int], mask: list[int], split: SplitIndex, b: int, h: int) -> None:
    row, order = split.reordered[b, h].tolist(), split.order[b, h].tolist()
    remote, local = int(split.remote[b, h]), int(split.local[b, h])
    assert sorted(order) == list(range(len(index)))  # a permutation: nothing lost or doubled
    lanes = (row[:remote], row[remote : remote + local])
    assert all(mask[i] == REMOTE for i in lanes[0])
    assert all(mask[i] == LOCAL for i in lanes[1])
    assert set(row[remote + local :]) <= {-1}
    kept = [i for i in index if i >= 0 and mask[i] != PADDING]
    assert sorted(lanes[0] + lanes[1]) == sorted(kept)
    assert [index[c] for c in order[: remote + local]] == lanes[0] + lanes[1]
    for columns in (order[:remote], order[remote : remote + local], order[remote + local :]):
        assert columns == sorted(columns)  # stable inside a group


def test_position_outside_the_mask_counts_as_padding() -> None:
    index = torch.tensor([[[7, 1, -5, 0]]])
    split = split_index(index, torch.tensor([[LOCAL, REMOTE]], dtype=torch.int8))
    assert split.reordered.tolist() == [[[1, 0, -1, -1]]]
    assert (split.remote.item(), split.local.item()) == (1, 1)


def test_strided_mask_and_index_are_read_as_they_are() -> None:
    mask = torch.tensor([[0, 1], [2, 2], [1, 0]], dtype=torch.int8).t()  # [2, 3]
    index = torch.tensor([[[0], [1]], [[1], [2]]]).transpose(0, 2)  # [1, 2, 2]
    split = split_index(index, mask[1:])
    assert split.reordered.tolist() == [[[1, 0], [1, -1]]]


@pytest.mark.parametrize(
    ("index", "mask", "sentence"),
    [
        (torch.zeros(1, 1, 2), torch.zeros(1, 4, dtype=torch.int8), "index is float32 [1, 1, 2]"),
        (torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int8), "[B, H, k]"),
        (torch.zeros(1, 1, 2, dtype=torch.int64), torch.zeros(1, 4), "mask is float32 [1, 4]"),
        (
            torch.zeros(1, 3, 2, dtype=torch.int64),
            torch.zeros(1, 2, 4, dtype=torch.int8),
            "int8 [1, N] or [1, 3, N]",
        ),
        (
            torch.zeros(1, 1, 2, dtype=torch.int64, device="meta"),
            torch.zeros(1, 4, dtype=torch.int8),
            "mask is on cpu; it must be on meta",
        ),
    ],
)
def test_bad_input_is_named(index: Tensor, mask: Tensor, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        split_index(index, mask)
    assert sentence in str(caught.value)
