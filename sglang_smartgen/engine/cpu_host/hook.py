"""One change to SGLang code, described without importing SGLang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple


class Hook(NamedTuple):
    """Arguments of SGLang's `HookRegistry.register`; `kind` is a value of its `HookType`."""

    target: str
    function: Callable[..., Any]
    kind: Literal["before", "after", "around", "replace"]
