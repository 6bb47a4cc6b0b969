"""Which layers are selected from."""

from __future__ import annotations

import pytest
import torch

from sglang_smartgen.core.geometry import KVGeometry


@pytest.mark.parametrize(
    ("layers", "sliding", "sparse"),
    [
        (5, (), (2, 3, 4)),
        (2, (), ()),
        (1, (), ()),
        (18, tuple(layer for layer in range(18) if layer % 6 != 5), (5, 11, 17)),
        (6, (0, 2, 4), (3, 5)),
        (4, (0, 1, 2, 3), ()),
    ],
)
def test_sparse_layers(layers: int, sliding: tuple[int, ...], sparse: tuple[int, ...]) -> None:
    """All from 2 on that attend to everything; the others are dense, each layer is one or other."""
    geometry = KVGeometry(layers, 2, 16, torch.float32, frozenset(sliding))
    assert geometry.sparse_layers == sparse
    assert geometry.dense_layers == tuple(sorted(set(range(layers)) - set(sparse)))
