"""SGLang's entry point `sglang.srt.plugins`, and the table of hooks.

`register` runs in every SGLang process. Without SGLANG_SMARTGEN_CONFIG it leaves SGLang alone (on a
host without a GPU it still applies the CPU-host help). In an SGLang that `smartgen patch` has
patched no hook is laid; what the patches made room for is used instead. SGLang swallows what it
raises, so a failure ends the process here instead.
"""

from __future__ import annotations

import os
import sys

from sglang_smartgen.config import ConfigError, config_from_env
from sglang_smartgen.engine import cpu_host, scheduler_hooks
from sglang_smartgen.engine.cuda import hooks as device_hooks
from sglang_smartgen.engine.hooking import Hook, HookError, install
from sglang_smartgen.engine.native import connect, refuse
from sglang_smartgen.patching.series import PatchError
from sglang_smartgen.patching.tree import carried

STALL_LIMITS = ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC")
STALL_LIMIT_S = "10"
"""Seconds until Mooncake drops a stalled connection (its default: 30); a fence waits so long."""

_DECODE = "sglang.srt.disaggregation.decode."
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."

HOOKS = (
    Hook(
        "sglang.srt.disaggregation.utils.get_kv_class",
        "around",
        scheduler_hooks.smartgen_classes,
        ("transfer_backend", "class_type"),
        ("prefill", "decode"),
        "it brings in SmartGen's KV manager, sender and receiver",
    ),
    Hook(
        _SCHEDULER + "__init__",
        "after",
        scheduler_hooks.check_hooks,
        ("self", "server_args", "port_args"),
        ("prefill", "decode"),
        "it checks that all other hooks are in place",
    ),
    Hook(
        _SCHEDULER + "run_batch",
        "around",
        scheduler_hooks.run_batch,
        ("self", "batch", "pp_proxy_tensors"),
        ("prefill", "decode"),
        "it tells P the rooms of a batch and ends failed requests on D",
    ),
    Hook(
        _SCHEDULER + "on_idle",
        "after",
        scheduler_hooks.yield_when_idle,
        ("self",),
        ("prefill", "decode"),
        "it leaves the interpreter to the push and fetch threads while a scheduler is idle",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.internal_state."
        "SchedulerInternalStateController.get_internal_state",
        "after",
        scheduler_hooks.add_state,
        ("self", "recv_req"),
        ("prefill", "decode"),
        "it adds SmartGen's block to /server_info",
    ),
    Hook(
        "sglang.srt.mem_cache.common.release_kv_cache",
        "around",
        scheduler_hooks.release_kv_cache,
        ("req", "tree_cache", "checkpoint"),
        ("decode",),
        "it keeps slots from a new owner until P has let go of them",
    ),
    Hook(
        _DECODE + "DecodePreallocQueue._send_kv_metadata",
        "before",
        scheduler_hooks.remember_request,
        ("self", "decode_req", "kv_indices", "page_size", "state_indices", "metadata_kwargs"),
        ("decode",),
        "it gives the receiver its request's row",
    ),
    Hook(
        _DECODE + "DecodeTransferQueue._commit_transfer_to_req",
        "after",
        scheduler_hooks.commit_room,
        ("self", "decode_req"),
        ("decode",),
        "it starts a room's decode",
    ),
    Hook(
        _DECODE + "DecodeTransferQueue.has_pending_deferred_releases",
        "after",
        scheduler_hooks.has_pending_releases,
        ("self",),
        ("decode",),
        "it keeps quarantined slots from being taken for a leak",
    ),
    Hook(
        _DECODE + "SchedulerDisaggregationDecodeMixin.process_decode_queue",
        "before",
        scheduler_hooks.drain_quarantine,
        ("self",),
        ("decode",),
        "it frees quarantined slots",
    ),
)


ran = False
"""Whether SGLang has called `register` in this process."""


def register() -> None:
    """Place SmartGen in this process, or end the process with one sentence."""
    global ran
    ran = True
    cpu_host.install()
    try:
        config = config_from_env()
        if config is None:
            return
        from sglang_smartgen.engine import options

        patched = carried()
        options.register()
        if "sglang.srt.managers.scheduler" in sys.modules:
            from sglang_smartgen.engine import runtime
            from sglang_smartgen.engine.layer_hook import wrap_backend_factories

            for name in STALL_LIMITS:
                os.environ.setdefault(name, STALL_LIMIT_S)
            runtime.read_token()
            on_device = config.device_path != "cpu"
            if patched and on_device:
                raise ConfigError(
                    f"device_path is {config.device_path}; in an SGLang that `smartgen patch` has "
                    "patched SmartGen allows cpu"
                )
            if patched:
                connect()
            else:
                install((*HOOKS, *device_hooks.HOOKS) if on_device else HOOKS)
                wrap_backend_factories()
    except (ConfigError, HookError, PatchError) as error:
        refuse(str(error))
    except Exception as error:
        refuse(f"cannot be placed in SGLang: {type(error).__name__}: {error}")
