"""The operators of Algorithm 1 against plain loops.

The CPU path runs here. The Triton kernels run in Triton's interpreter, which must be switched on
before triton is imported, so in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference import split as reference
from torch import Tensor

from sglang_smartgen import triton_kernels as operators
from sglang_smartgen.core import mask
from sglang_smartgen.triton_kernels import _dispatch

# batch, heads, k, N; more than 1,024 columns take the kernels through a second step of their loop
SHAPES = [(1, 1, 1, 1), (2, 3, 17, 40), (1, 2, 40, 9), (1, 1, 1030, 1500)]


def check(batch: int, heads: int, k: int, length: int) -> None:
    """Compare every operator with its loops on random input of these sizes."""
    generator = torch.Generator().manual_seed(k)
    index = torch.randint(-1, length + 1, (batch, heads, k), generator=generator)
    wide = torch.randint(0, 3, (batch, heads, length + 5), generator=generator, dtype=torch.int8)
    for masks in (wide[..., 2 : 2 + length], wide[:, 0, :length]):
        index_mask = operators.mask_gather(masks, index)
        assert torch.equal(index_mask, reference.mask_gather(masks, index))
        lanes = operators.split_index(index, index_mask)
        local_index, local_count = reference.lane(index, index_mask, mask.LOCAL)
        remote_index, remote_count = reference.lane(index, index_mask, mask.REMOTE)
        wanted = operators.Lanes(local_index, remote_index, local_count, remote_count)
        wanted_order = reference.reorder_descending(index, index_mask)
        found = (*lanes, *operators.reorder_descending(index, index_mask))
        for name, a, b in zip(
            (*operators.Lanes._fields, *operators.Reordered._fields),
            found,
            (*wanted, *wanted_order),
            strict=True,
        ):
            assert a.dtype == b.dtype and torch.equal(a, b), name


@pytest.mark.parametrize("shape", SHAPES)
def test_cpu_path_equals_the_loops(shape: tuple[int, int, int, int]) -> None:
    assert not _dispatch.use_triton(torch.zeros(1))
    check(*shape)


def test_triton_kernels_equal_the_loops_in_the_interpreter() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import runpy; runpy.run_path(sys.argv[2])['interpreter_leg']()"
    )
    tests = Path(__file__).resolve().parents[1]
    run = subprocess.run(
        [sys.executable, "-P", "-c", code, str(tests), __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["checked", str(len(SHAPES))]


def interpreter_leg() -> None:
    """Run in a process that has TRITON_INTERPRET=1: CPU tensors go through the kernels."""
    assert _dispatch.use_triton(torch.zeros(1))
    for shape in SHAPES:
        check(*shape)
    print("checked", len(SHAPES))


def test_empty_rows_and_empty_masks() -> None:
    empty = torch.zeros(2, 3, 0, dtype=torch.int64)
    assert operators.mask_gather(torch.zeros(2, 5, dtype=torch.int8), empty).shape == (2, 3, 0)
    lanes = operators.split_index(empty, empty.to(torch.int8))
    assert lanes.local_index.shape == (2, 3, 0) and lanes.remote_count.tolist() == [[0] * 3] * 2
    assert operators.reorder_descending(empty, empty.to(torch.int8)).order.shape == (2, 3, 0)
    nothing = torch.zeros(1, 0, dtype=torch.int8)
    assert operators.mask_gather(nothing, torch.tensor([[[0, -1]]])).tolist() == [[[0, 0]]]


def test_values_that_are_no_mask_are_padding() -> None:
    index = torch.tensor([[[4, 5, 6, 7]]])
    index_mask = torch.tensor([[[3, 1, -2, 2]]], dtype=torch.int8)
    assert operators.reorder_descending(index, index_mask).reordered.tolist() == [[[7, 5, -1, -1]]]
    lanes = operators.split_index(index, index_mask)
    assert (lanes.local_count.item(), lanes.remote_count.item()) == (1, 1)


def test_mask_values_are_those_of_the_core() -> None:
    assert (_dispatch.LOCAL, _dispatch.REMOTE) == (mask.LOCAL, mask.REMOTE)


@pytest.mark.parametrize("operator", [operators.split_index, operators.reorder_descending])
def test_bad_input_is_named(operator: Callable[[Tensor, Tensor], object]) -> None:
    index = torch.zeros(1, 2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"index is int32 \[1, 2, 3\]; it must be int64"):
        operator(index.int(), index.to(torch.int8))
    with pytest.raises(ValueError, match=r"index_mask is int8 \[1, 2, 2\]; it must be int8 \[1, 2"):
        operator(index, index.to(torch.int8)[..., :2])
    with pytest.raises(ValueError, match="index_mask is on meta; it must be on cpu"):
        operator(index, index.to(torch.int8).to("meta"))
