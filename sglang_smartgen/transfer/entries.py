"""Entries of one layer as a fetch names them, and the loops that move them on CPU tensors.

An entry is K and V of one token and KV head; a run of them is `[n, 2, head_dim]`, ascending by KV
head. A step that fetches in every layer moves few entries at a time, some thirty times on P and
again on D, so the work of a call is what counts: one loop in the place of some twenty tensor
operations. The loops move words, not numbers, so every dtype is exact. They check nothing: who
calls them has made sure that heads, positions, columns and slots are inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_smartgen.core.mask import LOCAL
from sglang_smartgen.triton_kernels.compiled import compiled

Words = NDArray[Any]
_WORDS = ("int64", "uint8")


class Entries(msgspec.Struct, frozen=True):
    """positions: int32 [n]; KV head h has those from `bounds[h]` to `bounds[h + 1]`."""

    positions: NDArray[np.int32]
    bounds: NDArray[np.int64]

    @classmethod
    def of(cls, packed: Sequence[bytes]) -> Entries:
        """Entries of a FetchItem: an int32 array for each KV head. Raises ValueError otherwise."""
        for head, part in enumerate(packed):
            if len(part) % 4:
                raise ValueError(
                    f"positions of KV head {head} are {len(part)} bytes, no int32 array"
                )
        bounds = np.zeros(len(packed) + 1, np.int64)
        np.cumsum([len(part) // 4 for part in packed], dtype=np.int64, out=bounds[1:])
        return cls(np.frombuffer(bytearray().join(packed), np.int32), bounds)

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.positions)

    def inside(self, tokens: int) -> bool:
        """Whether every position is one of the first `tokens`."""
        # As unsigned numbers negative ones are larger than any position.
        return not self.count or int(self.positions.view(np.uint32).max()) < tokens


def words(rows: Tensor) -> Words:
    """A contiguous CPU tensor as words of 8 bytes, or of one where a row is no whole number."""
    row_bytes = rows.shape[-1] * rows.element_size()
    return rows.view(torch.int64 if row_bytes % 8 == 0 else torch.uint8).numpy()


def _each(signature: str) -> list[str]:
    return [signature.replace("word", word) for word in _WORDS]


@compiled(*_each("void(word[:,:,:,::1], int32[::1], int64[::1], word[:,:,::1])"))
def gather_entries(
    kv: Words, positions: NDArray[np.int32], bounds: NDArray[np.int64], out: Words
) -> None:
    """Copy entries of a layer's K and V [2, tokens, H, W] to the run `out` [n, 2, W]."""
    for h in range(len(bounds) - 1):
        for i in range(bounds[h], bounds[h + 1]):
            token = positions[i]
            for w in range(out.shape[2]):
                out[i, 0, w] = kv[0, token, h, w]
            for w in range(out.shape[2]):
                out[i, 1, w] = kv[1, token, h, w]


@compiled("void(boolean[:,::1], int64, int32[::1], int64[::1])")
def mark_entries(
    sent: NDArray[np.bool_], first: int, positions: NDArray[np.int32], bounds: NDArray[np.int64]
) -> None:
    """Set `sent` [tokens, H] for the entries of the layer that begins at row `first`."""
    for h in range(len(bounds) - 1):
        for i in range(bounds[h], bounds[h + 1]):
            sent[first + positions[i], h] = True


@compiled(
    *_each(
        "void(word[:,:,::1], word[:,:,::1], int64[::1], int64[::1], word[:,:,::1], word[:,:,::1])"
    )
)
def place_tokens(
    run_keys: Words,
    run_values: Words,
    tokens: NDArray[np.int64],
    slots: NDArray[np.int64],
    keys: Words,
    values: Words,
) -> None:
    """Put K and V [n, H, W] of whole `tokens` of the prompt into the pool; see place_entries."""
    for i in range(len(tokens)):
        slot = slots[tokens[i]]
        for h in range(run_keys.shape[1]):
            for w in range(run_keys.shape[2]):
                keys[slot, h, w] = run_keys[i, h, w]
            for w in range(run_keys.shape[2]):
                values[slot, h, w] = run_values[i, h, w]


@compiled(
    *_each("void(word[:,:,::1], int64[::1], int64[::1], int64[::1], word[:,:,::1], word[:,:,::1])")
)
def place_singles(
    run: Words,
    tokens: NDArray[np.int64],
    heads: NDArray[np.int64],
    slots: NDArray[np.int64],
    keys: Words,
    values: Words,
) -> None:
    """Put a run [n, 2, W] into the pool, each entry with its token and KV head; as place_tokens."""
    for i in range(len(tokens)):
        slot, h = slots[tokens[i]], heads[i]
        for w in range(run.shape[2]):
            keys[slot, h, w] = run[i, 0, w]
        for w in range(run.shape[2]):
            values[slot, h, w] = run[i, 1, w]


@compiled(
    *_each(
        "void(word[:,:,::1], int64[::1], int64[:,::1], int64[:,::1], int64[::1],"
        " word[:,:,::1], word[:,:,::1], int8[:,::1], word[:,:,::1], word[:,:,::1])"
    )
)
def place_entries(
    run: Words,
    counts: NDArray[np.int64],
    position: NDArray[np.int64],
    column: NDArray[np.int64],
    slots: NDArray[np.int64],
    keys: Words,
    values: Words,
    held: NDArray[np.int8],
    keys_out: Words,
    values_out: Words,
) -> None:
    """Put a run [n, 2, W] into the pool and at its place among what a step has gathered.

    KV head h has the next `counts[h]` entries: at `position` [H, k] of the prompt, whose pool slots
    are `slots` [tokens], and at `column` [H, k] of `keys_out` and `values_out` [H, k, W], which may
    be empty. keys, values: [pool_slots, H, W]. held: [H, tokens], LOCAL for each from now on; the
    calling thread alone may read it, for a loop gives no other one an order of its writes.
    """
    wanted = keys_out.shape[1] > 0
    i = 0
    for h in range(len(counts)):
        for j in range(counts[h]):
            token = position[h, j]
            slot = slots[token]
            for w in range(run.shape[2]):
                keys[slot, h, w] = run[i, 0, w]
            for w in range(run.shape[2]):
                values[slot, h, w] = run[i, 1, w]
            if wanted:
                at = column[h, j]
                for w in range(run.shape[2]):
                    keys_out[h, at, w] = run[i, 0, w]
                for w in range(run.shape[2]):
                    values_out[h, at, w] = run[i, 1, w]
            held[h, token] = LOCAL
            i += 1
