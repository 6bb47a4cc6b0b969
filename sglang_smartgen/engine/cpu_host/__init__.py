"""What SGLang 0.5.23 needs on a host without a GPU: seven obstacles and two delays.

Each has a module. Nothing here imports SGLang before `install`. Obstacles 1, 2, 5 and 6 are met in
the launcher, by `prepare_environment`, before SGLang is imported; spawned processes inherit the
environment. Obstacles 3, 4 and 7 are hooks in each scheduler process, registered by `install`. In
an SGLang that `smartgen patch` has patched, obstacles 2 to 4 are met there. On a host with a GPU
all of this does nothing.
"""

from __future__ import annotations

import json
import os
import sys

from sglang_smartgen.patching.tree import state_here

from . import (
    arguments,
    cpu_engine,
    device_flags,
    host_register,
    host_tier,
    kept_memory,
    kernel_stand_in,
    no_flashinfer,
    retraction_backup,
    sender_indices,
)
from .hook import Hook
from .host import is_cpu_only

__all__ = ["Hook", "hooks", "install", "is_cpu_only", "prepare_environment", "statuses"]

STATUS_ENV = "SMARTGEN_CPU_HOST_STATUS"
"""The launcher's statuses as JSON, for the processes that it spawns."""

_OBSTACLES = (
    cpu_engine,
    kernel_stand_in,
    no_flashinfer,
    kept_memory,
    host_register,
    sender_indices,
    retraction_backup,
    device_flags,
    host_tier,
)
_HOOKED = (host_register, sender_indices)
PATCHED = "not needed: SGLang is patched"
_local: dict[str, str] = {}


def active(argv: list[str] | None = None) -> bool:
    """Whether the help applies: no GPU here, and no other device (`--device xpu`) asked for."""
    asked = arguments.value(argv, "--device") if argv is not None else None
    return asked in (None, "cpu") and is_cpu_only()


def prepare_environment(argv: list[str]) -> list[str]:
    """Prepare this process and those it spawns for SGLang on a CPU; call before importing SGLang.

    Sets environment variables the user has not set and returns `argv` with missing flags added;
    what the user gave is never changed. On a host with a GPU it returns `argv` as it is.
    """
    if not active(argv):
        return argv
    launcher = {
        cpu_engine.NAME: cpu_engine.prepare(os.environ),
        kernel_stand_in.NAME: PATCHED
        if state_here() == "patched"
        else kernel_stand_in.prepare(os.environ),
        no_flashinfer.NAME: no_flashinfer.prepare(os.environ),
        kept_memory.NAME: kept_memory.prepare(os.environ),
    }
    for obstacle in (retraction_backup, device_flags, host_tier):
        argv, launcher[obstacle.NAME] = obstacle.prepare(argv)
    os.environ[STATUS_ENV] = json.dumps(launcher)
    return argv


def hooks() -> list[Hook]:
    """The changes to SGLang code that a scheduler process needs here.

    None on a host with a GPU; in an SGLang that has the others as patches, those of the
    hierarchical cache.
    """
    launcher = json.loads(os.environ.get(STATUS_ENV, "{}"))
    tier = [*host_tier.HOOKS] if launcher.get(host_tier.NAME) == "applied" else []
    if not launcher or state_here() == "patched":
        return tier
    return [*(obstacle.HOOK for obstacle in _HOOKED), *tier]


def install() -> None:
    """Register `hooks()` with SGLang; call from the plugin, in every process.

    Only scheduler processes get them: hooking a function imports its module, and the other
    processes do not need those.
    """
    if not (needed := hooks()):
        return
    if "sglang.srt.managers.scheduler" not in sys.modules:
        _local.update({obstacle.NAME: "skipped: not a scheduler process" for obstacle in _HOOKED})
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in needed:
        HookRegistry.register(hook.target, hook.function, HookType(hook.kind))
    if state_here() != "patched":
        _local.update({obstacle.NAME: "applied" for obstacle in _HOOKED})


def statuses() -> dict[str, str]:
    """Each obstacle's status in this process: `applied`, `not needed` or `skipped: why`."""
    if not is_cpu_only():
        return {obstacle.NAME: "not needed" for obstacle in _OBSTACLES}
    inherited = json.loads(os.environ.get(STATUS_ENV, "{}"))
    if inherited and state_here() == "patched":
        inherited |= {obstacle.NAME: PATCHED for obstacle in _HOOKED}
    unknown = "skipped: this process was not started through sglang_smartgen.launch_server"
    waiting = "skipped: no scheduler runs in this process" if inherited else unknown
    return {
        obstacle.NAME: inherited.get(obstacle.NAME)
        or _local.get(obstacle.NAME)
        or (waiting if obstacle in _HOOKED else unknown)
        for obstacle in _OBSTACLES
    }
