"""Every operator refuses what it cannot work with, in one sentence that names the field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference.cases import OPERATORS, Source

from sglang_smartgen import triton_kernels as operators

INDEX = torch.zeros(1, 2, 3, dtype=torch.int64)
BYTES = INDEX.to(torch.int8)
POOL = torch.zeros(4, 2, 8)
CODE = torch.zeros(1, 2, 3, 1, dtype=torch.int32)
METADATA = torch.zeros(5, 2, 2, dtype=torch.int32)
VECTORS, MATRIX = torch.zeros(4, 2, 8), torch.zeros(2, 8, 32)
QUERY = torch.zeros(1, 2, 3, 8)
SLOTS = torch.zeros(2, 5, dtype=torch.int64)
DECODE = (
    torch.zeros(1, 4, 8),
    torch.zeros(1, 2, 3, 8),
    torch.zeros(1, 2, 3, 8),
    INDEX,
    POOL,
    POOL,
    torch.zeros(1, 2, dtype=torch.int64),
    1.0,
)


def swapped(number: int, value: object) -> tuple[object, ...]:
    """The arguments of sparse_decode with one replaced."""
    return (*DECODE[:number], value, *DECODE[number + 1 :])


@pytest.mark.parametrize(
    ("operator", "args", "sentence"),
    [
        (operators.mask_gather, (BYTES[0], INDEX), "it must be int8 [1, N] or [1, 2, N]"),
        (operators.mask_gather, (BYTES, INDEX.int()), "index is int32 [1, 2, 3]; it must be int64"),
        (operators.split_index, (INDEX, BYTES[..., :2]), "index_mask is int8 [1, 2, 2]; it must"),
        (operators.split_index, (INDEX, BYTES.to("meta")), "index_mask is on meta; it must be on"),
        (operators.reorder_descending, (INDEX[0], BYTES), "index is int64 [2, 3]; it must be"),
        (operators.reorder_descending, (INDEX, INDEX), "index_mask is int64 [1, 2, 3]; it must be"),
        (operators.split_and_reorder, (INDEX, BYTES.int()), "mask is int32 [1, 2, 3]; it must be"),
        (operators.split_and_reorder, (INDEX, BYTES.to("meta")), "mask is on meta; it must be on"),
        (operators.gather_rows, (POOL, POOL, INDEX.int()), "slots is int32 [1, 2, 3]; it must be"),
        (operators.gather_rows, (POOL[:, :1], POOL, INDEX), "keys is float32 [4, 1, 8]; it must"),
        (operators.gather_rows, (POOL, POOL.half(), INDEX), "values is float16 [4, 2, 8]; it must"),
        (operators.gather_rows, (POOL, POOL[..., :4], INDEX), "values is float32 [4, 2, 4]"),
        (operators.gather_rows, (POOL[::2], POOL[::2], INDEX), "it must be contiguous"),
        (operators.gather_rows, (POOL, POOL.to("meta"), INDEX), "values is on meta; it must be on"),
        (operators.gather_rows, (POOL, POOL, INDEX, (POOL, POOL)), "out is float32 [4, 2, 8]"),
        (operators.hash_encode, (VECTORS.long(), MATRIX), "x is int64 [4, 2, 8]; it must be"),
        (operators.hash_encode, (VECTORS, MATRIX[:1]), "matrix is float32 [1, 8, 32]; it must be"),
        (operators.hash_encode, (VECTORS, MATRIX[..., :8]), "bits a multiple of 32"),
        (operators.hash_encode, (VECTORS, MATRIX, MATRIX), "centre is float32 [2, 8, 32]"),
        (operators.hash_score, (CODE, METADATA, 33), "bits is 33; it must be"),
        (operators.hash_score, (CODE, METADATA, 64), "code is int32 [1, 2, 3, 1]; it must be"),
        (operators.hash_score, (CODE, METADATA[..., :1], 32), "metadata is int32 [5, 2, 1]"),
        (operators.hash_score, (CODE, METADATA, 32, SLOTS), "slots is int64 [2, 5]; it must be"),
        (operators.hash_score, (CODE.repeat(2, 1, 1, 1), METADATA, 32), "slots is not given"),
        (operators.partial_score, (QUERY.double(), POOL, 1.0), "query is float64 [1, 2, 3, 8]"),
        (operators.partial_score, (QUERY, POOL[..., :4], 1.0), "keys is float32 [4, 2, 4]; it"),
        (operators.partial_score, (QUERY, POOL, 1.0, SLOTS), "slots is int64 [2, 5]; it must be"),
        (operators.sparse_decode, swapped(0, torch.zeros(1, 3, 8)), "Hq must be a multiple of 2"),
        (operators.sparse_decode, swapped(0, QUERY), "query is float32 [1, 2, 3, 8]; it must be"),
        (operators.sparse_decode, swapped(1, POOL), "keys is float32 [4, 2, 8]; it must be"),
        (operators.sparse_decode, swapped(3, BYTES), "index is int8 [1, 2, 3]; it must be int64"),
        (operators.sparse_decode, swapped(5, POOL[:2]), "tail_values is float32 [2, 2, 8]"),
        (operators.sparse_decode, swapped(6, SLOTS), "tail_slots is int64 [2, 5]; it must be"),
    ],
)
def test_bad_input_is_named(
    operator: Callable[..., Any], args: tuple[Any, ...], sentence: str
) -> None:
    with pytest.raises(ValueError) as caught:
        operator(*args)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", OPERATORS)
def test_good_input_is_not_refused(name: str) -> None:
    """So that a check that refuses everything fails somewhere near its cause."""
    case = OPERATORS[name].make(Source(name))
    getattr(operators, name)(*case.args, **case.options)
