"""Random input of every operator, and how close its results must come to the reference.

Sizes come from the edges on purpose: empty selections, one request, odd heads, a k that is no
power of two, duplicates, ties, all remote, slots out of order, padding anywhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reference import operators as reference

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Requests and KV heads of the cases that have several; the others have one of each, since a program
# takes the interpreter milliseconds.
PAIRS = ((1, 2), (2, 1), (1, 3), (3, 1), (2, 2))
SEVERAL = 0.2


class Case(NamedTuple):
    """Arguments of one call."""

    args: tuple[Any, ...]
    options: dict[str, Any]


class Source:
    """Random numbers of one case. `scale` multiplies k and N: 1 is for the interpreter."""

    def __init__(self, seed: str, scale: int = 1) -> None:
        self.dice = random.Random(seed)
        self.made = torch.Generator().manual_seed(self.dice.getrandbits(40))
        self.scale = scale

    def size(self, *choices: int) -> int:
        """One of the sizes, scaled."""
        return self.dice.choice(choices) * self.scale

    def pairs(self) -> tuple[int, int]:
        """A number of requests and one of KV heads."""
        return self.dice.choice(PAIRS) if self.dice.random() < SEVERAL else (1, 1)

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        """int64 from `low` up to, not including, `high`."""
        return torch.randint(low, high, shape, generator=self.made)

    def floats(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal."""
        return torch.randn(shape, generator=self.made).to(dtype)

    def slots(self, size: int, shape: tuple[int, ...]) -> Tensor:
        """Slots of a pool of `size` in any order, some repeated, some -1, some past the end."""
        slots = self.integers(0, max(size, 1), shape)
        share = self.dice.choice((0, 0, 0.3, 1))
        gone = torch.rand(shape, generator=self.made) < share
        return slots.masked_fill(gone, self.dice.choice((-1, -1, size)))


def _index(source: Source) -> tuple[Tensor, Tensor]:
    """index int64 [B, H, k] and mask int8 [B, N] or [B, H, N]."""
    batch, heads = source.pairs()
    k, length = source.size(0, 1, 3, 16, 17, 40), source.size(0, 1, 9, 40, 64)
    index = source.integers(-1, length + 1, (batch, heads, k))
    if source.dice.random() < 0.5 and length:
        index = index.clamp(0, length - 1)  # the common case: no padding
    low, high = source.dice.choice(((0, 3), (1, 3), (1, 2), (2, 3), (0, 1), (-1, 5)))
    wide = source.integers(low, high, (batch, heads, length + 5)).to(torch.int8)
    mask = wide[..., 2 : 2 + length]
    return index, mask[:, 0] if source.dice.random() < 0.5 else mask


def mask_gather(source: Source) -> Case:
    """A mask with strides and an index."""
    index, mask = _index(source)
    return Case((mask, index), {})


def split_lanes(source: Source) -> Case:
    """An index and the mask of each entry."""
    index, mask = _index(source)
    return Case((index, reference.mask_gather(mask, index)), {})


def split_and_reorder(source: Source) -> Case:
    """An index and a mask with strides."""
    return Case(_index(source), {})


def gather_rows(source: Source) -> Case:
    """Pools whose rows have an odd number of bytes now and then."""
    batch, heads = source.pairs()
    size, dim = source.size(0, 1, 50), source.dice.choice((1, 3, 7, 16, 64, 80))
    dtype = source.dice.choice((torch.float32, torch.bfloat16, torch.int8))
    pools = source.integers(-100, 100, (2, size, heads, dim)).to(dtype)
    slots = source.slots(size, (batch, heads, source.size(0, 1, 5, 33)))
    return Case((pools[0], pools[1], slots), {})


def hash_encode(source: Source) -> Case:
    """Vectors with a zero among them; the matrix is integers, as the selector's is."""
    tokens, heads = source.size(0, 1, 5, 17), source.pairs()[1]
    dim, bits = source.dice.choice((1, 16, 40, 64)), source.dice.choice((32, 96, 128))
    x = source.floats((heads, tokens, dim), source.dice.choice(FLOATS)).transpose(0, 1)
    if tokens:
        x[0] = 0
    matrix = source.integers(-127, 128, (heads, dim, bits)).float()
    centre = source.floats((heads, dim)) if source.dice.random() < 0.5 else None
    return Case((x, matrix), {"centre": centre, "norm": source.dice.random() < 0.5})


def _pool(source: Source) -> tuple[int, int, int, int, Tensor | None]:
    """Requests, heads, group and size of a pool, and perhaps the slots of each request."""
    batch, heads = source.pairs()
    group, size = source.dice.choice((1, 2, 3, 5)), source.size(1, 2, 40, 65)
    if source.dice.random() < 0.5:
        return 1, heads, group, size, None
    return batch, heads, group, size, source.slots(size, (batch, source.size(0, 1, 33, 50)))


def hash_score(source: Source) -> Case:
    """Codes of few bits, so that scores tie."""
    batch, heads, group, size, slots = _pool(source)
    bits = source.dice.choice((32, 96, 128))
    code = source.integers(-(2**31), 2**31, (batch, heads, group, bits // 32)).to(torch.int32)
    metadata = source.integers(-(2**31), 2**31, (size, heads, bits // 32 + 1)).to(torch.int32)
    metadata[..., -1] = source.floats((size, heads)).abs().view(torch.int32)
    return Case((code, metadata, bits), {"slots": slots})


def partial_score(source: Source) -> Case:
    """Few columns of query and key."""
    batch, heads, group, size, slots = _pool(source)
    dim, dtype = source.dice.choice((8, 25, 32)), source.dice.choice(FLOATS)
    query = source.floats((batch, heads, group, dim), dtype)
    return Case((query, source.floats((size, heads, dim), dtype), dim**-0.5), {"slots": slots})


def sparse_decode(source: Source) -> Case:
    """Gathered rows with NaN in the padding, and a tail, either of them perhaps empty."""
    batch, heads = source.pairs()
    group, dim = source.dice.choice((1, 2, 5)), source.dice.choice((16, 40, 64))
    k, tail, size = source.size(0, 1, 17, 70), source.size(0, 1, 6), source.size(1, 20)
    dtype = source.dice.choice(FLOATS)
    query = source.floats((batch, heads * group, dim), dtype)
    keys, values = source.floats((2, batch, heads, k, dim), dtype)
    index = source.slots(1000, (batch, heads, k))
    keys[index < 0] = torch.nan
    values[index < 0] = torch.nan
    pools = source.floats((2, size, heads, dim), dtype)
    slots = source.slots(size, (batch, tail))
    return Case((query, keys, values, index, pools[0], pools[1], slots, dim**-0.5), {})


class Operator(NamedTuple):
    """How to test one operator."""

    make: Callable[[Source], Case]
    want: Callable[..., Any]
    exact: bool = True
    large: int = 30  # the scale at which a kernel has several blocks and steps


OPERATORS = {
    "mask_gather": Operator(mask_gather, reference.mask_gather),
    "split_index": Operator(split_lanes, reference.split_index),
    "reorder_descending": Operator(split_lanes, reference.reorder_descending),
    "split_and_reorder": Operator(split_and_reorder, reference.split_and_reorder),
    "gather_rows": Operator(gather_rows, reference.gather_rows),
    "hash_encode": Operator(hash_encode, reference.hash_encode, large=4),
    "hash_score": Operator(hash_score, reference.hash_score, large=8),
    "partial_score": Operator(partial_score, reference.partial_score, exact=False, large=8),
    "sparse_decode": Operator(sparse_decode, reference.sparse_decode, exact=False),
}


def compare(operator: Operator, case: Case, found: tuple[Tensor, ...]) -> str | None:
    """None when the results are right, else what is wrong with them."""
    wanted = operator.want(*case.args, **case.options)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    if len(found) != len(wanted):
        return f"{len(found)} results; expected {len(wanted)}"
    for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
        if a.shape != b.shape:
            return f"result {number} is {list(a.shape)}; expected {list(b.shape)}"
        if operator.exact:
            if a.dtype != b.dtype or not torch.equal(a, b):
                return f"result {number} differs: {a} {b}"
            continue
        error = relative_error(a, b)
        # float32 arithmetic inside; a result in bfloat16 or float16 is rounded once more, and the
        # weights of sparse_decode are rounded before the second product.
        short = any(isinstance(x, Tensor) and x.dtype in FLOATS[1:] for x in case.args)
        if not error <= (1e-2 if short else 1e-3):
            return f"result {number} is off by {error} of its largest value"
    return None


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest magnitude; infinities must be at the same places."""
    a, b = found.double(), wanted.double()
    if not torch.equal(a.isinf(), b.isinf()) or a.isnan().any():
        return float("inf")
    a, b = a.masked_fill(a.isinf(), 0), b.masked_fill(b.isinf(), 0)
    if not a.numel():
        return 0.0
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-6))
