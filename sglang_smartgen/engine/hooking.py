"""Typed hooks on SGLang: checked against its signatures before, and for being in place after.

SGLang logs and swallows every plugin error and would then serve stock; so each hook is checked here
and the process refuses to start when one is missing (design.md 2.6). Each hook counts its calls,
for the tests that ask "did it fire".
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

Kind = Literal["before", "after", "around"]
Role = Literal["prefill", "decode"]


class Hook(NamedTuple):
    """One hook: where, what, of which kind, in which roles, and why it is needed.

    parameters: the target's parameter names in the pinned SGLang.
    """

    target: str
    kind: Kind
    function: Callable[..., Any]
    parameters: tuple[str, ...]
    roles: tuple[Role, ...]
    why: str


class HookError(RuntimeError):
    """A hook that cannot be placed; its text names the target and what differs."""


carrier: Literal["hooks", "patches"] | None = None
"""What carries SmartGen in this process: hooks on SGLang, or a patched SGLang; None so far."""

fired: Counter[str] = Counter()
_installed: list[tuple[Hook, Any]] = []
"""Hooks with the object that each target was before it; many are decorated in SGLang already."""


def problems(hooks: Sequence[Hook]) -> list[str]:
    """One sentence for each hook whose target is missing or has other parameters than expected."""
    found = []
    for hook in hooks:
        try:
            target = pkgutil.resolve_name(hook.target)
        except (ImportError, AttributeError) as error:
            found.append(f"{hook.target} is missing in this SGLang ({error}); {hook.why}")
            continue
        names = tuple(inspect.signature(inspect.unwrap(target)).parameters)
        if names != hook.parameters:
            found.append(
                f"{hook.target} takes {', '.join(names)} in this SGLang; "
                f"SmartGen expects {', '.join(hook.parameters)}"
            )
    return found


def install(hooks: Sequence[Hook]) -> None:
    """Check the hooks and register them with SGLang. Raises HookError, and then registers none."""
    global carrier
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if found := problems(hooks):
        raise HookError("SmartGen refuses to start: " + "; ".join(found))
    for hook in hooks:
        _installed.append((hook, pkgutil.resolve_name(hook.target)))
        HookRegistry.register(hook.target, _counted(hook), HookType(hook.kind))
    carrier = "hooks"


def verify(role: str) -> None:
    """Raises HookError unless every target of this role has changed since `install`."""
    missing = [
        hook.target
        for hook, before in _installed
        if role in hook.roles and pkgutil.resolve_name(hook.target) is before
    ]
    if missing or not _installed:
        raise HookError(
            "SmartGen refuses to start: SGLang did not apply the hooks on "
            + (", ".join(missing) or "any target")
        )


def _counted(hook: Hook) -> Callable[..., Any]:
    @functools.wraps(hook.function)
    def call(*args: Any, **kwargs: Any) -> Any:
        fired[hook.target] += 1
        return hook.function(*args, **kwargs)

    return call
