"""The selectors by name."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sglang_smartgen.select.artifact import Artifact
from sglang_smartgen.select.base import KVShape, Selector
from sglang_smartgen.select.exact import ExactSelector
from sglang_smartgen.select.hata import HataSelector
from sglang_smartgen.select.infinigen import InfinigenSelector
from sglang_smartgen.select.quest import QuestSelector
from sglang_smartgen.select.streaming import StreamingSelector

SELECTORS: dict[str, type[Selector]] = {}


def register(selector: type[Selector]) -> type[Selector]:
    """Make a selector class known by its `name`; usable as a decorator.

    Raises ValueError when another class has the name.
    """
    if SELECTORS.setdefault(selector.name, selector) is not selector:
        raise ValueError(f"selector {selector.name!r} is registered already")
    return selector


for _selector in (ExactSelector, HataSelector, InfinigenSelector, QuestSelector, StreamingSelector):
    register(_selector)


def check_name(name: str) -> None:
    """Raise ValueError naming the selectors that exist unless `name` is one of them."""
    if name not in SELECTORS:
        allowed = ", ".join(sorted(SELECTORS))
        raise ValueError(f"selector is {name!r}; allowed are {allowed}")


def selector_class(name: str) -> type[Selector]:
    """Return the class of the selector `name`. Raises ValueError for another name."""
    check_name(name)
    return SELECTORS[name]


def make_selector(
    name: str,
    shape: KVShape,
    dtype: torch.dtype = torch.float32,
    *,
    artifact: Artifact | None = None,
    first_kv_head: int = 0,
    options: Mapping[str, object] | None = None,
) -> Selector:
    """Return the selector `name` for a rank of geometry `shape` whose pool stores `dtype`.

    `artifact` is the whole model's; the rank's KV heads, from `first_kv_head`, are taken of it.
    Check it with `check_artifact` first. Raises ValueError for another name, a missing artifact,
    or an option that is not known.
    """
    return selector_class(name)(
        shape, dtype, artifact=artifact, first_kv_head=first_kv_head, options=options
    )
