"""Edges that random cases hit too seldom: long prompts, one kind of mask, given buffers."""

from __future__ import annotations

import pytest
import torch
from reference import operators as reference
from reference import split as loops
from reference.cases import OPERATORS, Case, Source, compare
from reference.legs import DirectLeg, InterpreterLeg
from torch import Tensor

from sglang_smartgen import triton_kernels as operators
from sglang_smartgen.core import mask
from sglang_smartgen.select.codes import pack_bits, quantise
from sglang_smartgen.triton_kernels import _dispatch

Leg = DirectLeg | InterpreterLeg
LONG = 131_072


def check(leg: Leg, name: str, *args: object, **options: object) -> tuple[Tensor, ...]:
    """Compare one call with the reference and return its results."""
    found = leg.run(name, *args, **options)
    wrong = compare(OPERATORS[name], Case(args, options), found)
    assert wrong is None, f"{name} on {leg.name}: {wrong}"
    return found


@pytest.mark.parametrize("value", [mask.PADDING, mask.LOCAL, mask.REMOTE])
def test_rows_of_one_kind(leg: Leg, value: int, seed: str) -> None:
    print(f"SMARTGEN_KERNEL_SEED={seed}")
    index = Source(seed).integers(0, 50, (1, 3, 37))
    status = torch.full((1, 50), value, dtype=torch.int8)
    reordered, order, remote, local = check(leg, "split_and_reorder", index, status)
    kept = index if value != mask.PADDING else torch.full_like(index, -1)
    assert torch.equal(reordered, kept) and torch.equal(order[0, 0], torch.arange(37))
    assert remote.tolist() == [[37 * (value == mask.REMOTE)] * 3]
    assert local.tolist() == [[37 * (value == mask.LOCAL)] * 3]


def test_the_longest_prompt(leg: Leg, seed: str) -> None:
    print(f"SMARTGEN_KERNEL_SEED={seed}")
    source = Source(seed)
    status = source.integers(0, 3, (1, LONG)).to(torch.int8)
    index = torch.stack([torch.randperm(LONG, generator=source.made)[:1500] for _ in range(3)])
    check(leg, "mask_gather", status, index[None])
    check(leg, "split_and_reorder", index[None], status)
    pool = source.integers(-100, 100, (2, LONG, 1, 8)).to(torch.int8)
    check(leg, "gather_rows", pool[0], pool[1], index[:1, None])
    slots = torch.randperm(LONG, generator=source.made)[None]
    code = source.integers(0, 4, (1, 1, 2, 1)).to(torch.int32)
    metadata = source.integers(0, 4, (LONG, 1, 2)).to(torch.int32)
    metadata[..., 1] = torch.ones(LONG, 1).view(torch.int32)
    (score,) = check(leg, "hash_score", code, metadata, 32, slots=slots)
    assert len(score.unique()) < 10  # almost all scores tie, and every leg has the same ones


def test_codes_are_those_of_the_selector(leg: Leg, seed: str) -> None:
    print(f"SMARTGEN_KERNEL_SEED={seed}")
    source = Source(seed)
    keys, query = source.floats((33, 3, 40)), source.floats((3, 2, 40))
    matrix = source.integers(-127, 128, (3, 40, 96)).float()

    def codes(x: Tensor) -> Tensor:
        return pack_bits(torch.matmul(quantise(x)[0], matrix) > 0)

    (metadata,) = leg.run("hash_encode", keys, matrix, norm=True)
    assert torch.equal(metadata[..., :-1].transpose(0, 1), codes(keys.transpose(0, 1)))
    (code,) = leg.run("hash_encode", query.transpose(0, 1), matrix)
    code = code.transpose(0, 1).contiguous()
    assert torch.equal(code, codes(query))
    check(leg, "hash_score", code[None], metadata, 96)


def test_gather_writes_to_given_buffers(leg: Leg, seed: str) -> None:
    print(f"SMARTGEN_KERNEL_SEED={seed}")
    source = Source(seed)
    keys, values = source.floats((2, 9, 2, 5), torch.bfloat16)
    slots = source.slots(9, (2, 2, 6))
    out = tuple(torch.full((2, 2, 6, 5), 7, dtype=torch.bfloat16) for _ in "kv")
    found = leg.run("gather_rows", keys, values, slots, out=out)
    for a, b in zip(found, reference.gather_rows(keys, values, slots), strict=True):
        assert torch.equal(a, b)
    if leg.name == "cpu":
        assert found[0].data_ptr() == out[0].data_ptr()


def test_many_rows_are_gathered_by_two_threads(leg: Leg, seed: str) -> None:
    if leg.name != "cpu":
        pytest.skip("the CPU path alone has a second thread")
    print(f"SMARTGEN_KERNEL_SEED={seed}")
    source = Source(seed)
    keys, values = source.floats((2, 700, 2, 96))
    slots = source.slots(700, (2, 2, 900))
    slots[1, 1, 7], slots[0, 0, -1] = -1, 700
    found = leg.run("gather_rows", keys, values, slots)
    assert found[0].nbytes > operators.gather_rows.__globals__["_TWO_THREADS"]
    for a, b in zip(found, reference.gather_rows(keys, values, slots), strict=True):
        assert torch.equal(a, b)


def test_a_large_batch_is_split_by_two_threads(leg: Leg, seed: str) -> None:
    if leg.name != "cpu":
        pytest.skip("the CPU path alone has a second thread")
    print(f"SMARTGEN_KERNEL_SEED={seed}")
    source = Source(seed)
    index = source.integers(-1, 9001, (3, 2, 12_000))
    status = source.integers(0, 3, (3, 9000)).to(torch.int8)
    assert index.numel() > operators.split_and_reorder.__globals__["_TWO_THREADS"]
    check(leg, "split_and_reorder", index, status)


def test_the_torch_version_equals_the_loops(seed: str) -> None:
    print(f"SMARTGEN_KERNEL_SEED={seed}")
    for number in range(100):
        (index, status), _ = OPERATORS["split_and_reorder"].make(Source(f"{seed}-{number}"))
        index_mask = loops.mask_gather(status, index)
        assert torch.equal(reference.mask_gather(status, index), index_mask)
        for value in (mask.LOCAL, mask.REMOTE):
            pairs = zip(
                reference.lane(index, index_mask, value),
                loops.lane(index, index_mask, value),
                strict=True,
            )
            assert all(torch.equal(a, b) for a, b in pairs)
        pairs = zip(
            reference.reorder_descending(index, index_mask),
            loops.reorder_descending(index, index_mask),
            strict=True,
        )
        assert all(torch.equal(a, b) for a, b in pairs)


def test_a_write_outside_a_result_is_found() -> None:
    """The canaries themselves: without this no failure of theirs would be noticed."""
    from reference import canary

    def overrun(index: Tensor) -> Tensor:
        out = _dispatch.allocate(index.shape, index.dtype, index.device)
        torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel())[0] = 1
        return out

    def scribble(index: Tensor) -> Tensor:
        return index.add_(1)

    with pytest.raises(AssertionError, match="outside a tensor of 24 bytes"):
        canary.run(overrun, (torch.zeros(3, dtype=torch.int64),), {})
    with pytest.raises(AssertionError, match="argument 0 was written to"):
        canary.run(scribble, (torch.zeros(3, dtype=torch.int64),), {})


def test_mask_values_are_those_of_the_core() -> None:
    found = (_dispatch.PADDING, _dispatch.LOCAL, _dispatch.REMOTE)
    assert found == (mask.PADDING, mask.LOCAL, mask.REMOTE)


def test_values_that_are_no_mask_are_padding() -> None:
    index = torch.tensor([[[4, 5, 6, 7]]])
    index_mask = torch.tensor([[[3, 1, -2, 2]]], dtype=torch.int8)
    assert operators.reorder_descending(index, index_mask).reordered.tolist() == [[[7, 5, -1, -1]]]
    lanes = operators.split_index(index, index_mask)
    assert (lanes.local_count.item(), lanes.remote_count.item()) == (1, 1)
