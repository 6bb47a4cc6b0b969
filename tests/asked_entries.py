"""Entries of a layer, as tests name them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_smartgen.transfer.entries import Entries


def asked(heads: int, wanted: dict[int, Sequence[int]]) -> Entries:
    """Positions by KV head; those that are not named ask for nothing."""
    return Entries.of([np.array(wanted.get(h, []), np.int32).tobytes() for h in range(heads)])
