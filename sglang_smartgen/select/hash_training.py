"""Trains the hash matrices and key centres of one layer, all its KV heads at once.

All objectives see the same draws: a step takes one text, some query positions of its second half
and random keys of it, each query with the keys before it. They start alike on every machine and
draw from a seeded generator of their own. Random draws of whole rows, instead of a shuffled file of
pairs, need no dump of pairs and turn the loss into a few matrix products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sglang_smartgen.select.codes import MATRIX_LEVELS, hash_matrix
from sglang_smartgen.select.shape import KVShape, LayerSample

SEED = 0x5EED  # of the matrices that need no training, too
HIDDEN = -1e30  # the logit of a key that a query may not see
_QUERIES = 24
_KEYS = 1024


class Draw(NamedTuple):
    """One step's input: queries [n, Hkv, G, D], keys [m, Hkv, D], and what a query may see."""

    queries: Tensor
    keys: Tensor
    seen: Tensor  # bool [n, m]


class Learned(NamedTuple):
    """A layer's result: integers int8 [Hkv, D, bits] and the float32 key centre [Hkv, D]."""

    matrix: Tensor
    centre: Tensor


Drawer = Callable[[int], Draw]
Objective = Callable[[KVShape, int, Tensor, Drawer, int, int], tuple[Tensor, Tensor]]


def train(
    objective: Objective,
    shape: KVShape,
    layer: int,
    samples: list[LayerSample],
    *,
    bits: int,
    steps: int,
    seed: int,
) -> Learned:
    """Return what `objective` learns of `samples` (checked already). Runs on the CPU.

    The same input gives the same result on one machine and thread count.
    """
    mean, draw = text_draws(shape, layer, samples, seed)
    with torch.enable_grad():
        matrix, centre = objective(shape, layer, mean, draw, bits, steps)
    return Learned(_whole(matrix), centre.clone())


def text_draws(
    shape: KVShape, layer: int, samples: list[LayerSample], seed: int
) -> tuple[Tensor, Drawer]:
    """Return the mean key, float32 [Hkv, D], and what draws the input of a step."""
    generator = torch.Generator().manual_seed((seed << 16) + layer)
    total = sum(s.keys.shape[0] for s in samples)
    mean = torch.stack([s.keys.double().sum(0) for s in samples]).sum(0) / total

    def draw(step: int) -> Draw:
        sample = samples[step % len(samples)]
        tokens = sample.keys.shape[0]
        position = torch.randint(tokens // 2, tokens, (_QUERIES,), generator=generator)
        key = torch.randperm(tokens, generator=generator)[:_KEYS]
        # The token itself is always there, so that no query sees nothing.
        key = torch.cat((key, position.min().view(1)))
        queries = sample.queries[position].float()
        return Draw(
            queries.view(_QUERIES, shape.kv_heads, shape.group, shape.head_dim),
            sample.keys[key].float(),
            key <= position[:, None],
        )

    return mean.float(), draw


def random_matrices(dim: int, bits: int, layer: int, heads: range) -> Tensor:
    """Return the orthogonal random columns, float32 [heads, dim, bits], integers -127 to 127."""
    made = [hash_matrix(dim, bits, (SEED, layer, head)) for head in heads]
    return torch.from_numpy(np.stack(made))


def hard_signs(x: Tensor) -> Tensor:
    """Signs, with the gradient of tanh at the scale of each vector."""
    soft = torch.tanh(x / (x.detach().square().mean(-1, keepdim=True).sqrt() + 1e-6))
    return soft + (torch.sign(x) - soft).detach()


def _whole(matrix: Tensor) -> Tensor:
    """Round to int8, each column by its own largest magnitude: only signs are used of it."""
    largest = matrix.abs().amax(1, keepdim=True).clamp(min=1e-30)
    return (matrix * (MATRIX_LEVELS / largest)).round().to(torch.int8)
