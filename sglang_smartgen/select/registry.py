"""The selectors by name."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_smartgen.select.base import KVShape, Selector
from sglang_smartgen.select.exact import ExactSelector
from sglang_smartgen.select.hata import HataSelector

SELECTORS: dict[str, Callable[[KVShape, torch.dtype], Selector]] = {
    ExactSelector.name: ExactSelector,
    HataSelector.name: lambda shape, dtype: HataSelector(shape),
}


def check_name(name: str) -> None:
    """Raise ValueError naming the selectors that exist unless `name` is one of them."""
    if name not in SELECTORS:
        allowed = ", ".join(sorted(SELECTORS))
        raise ValueError(f"selector is {name!r}; allowed are {allowed}")


def make_selector(name: str, shape: KVShape, dtype: torch.dtype = torch.float32) -> Selector:
    """Return the selector `name` for a rank of geometry `shape` whose pool stores `dtype`.

    Raises ValueError for another name.
    """
    check_name(name)
    return SELECTORS[name](shape, dtype)
