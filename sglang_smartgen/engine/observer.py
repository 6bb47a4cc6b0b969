"""What a patched SGLang tells SmartGen: the observer of its scheduler.

Its methods are those of `SchedulerObserver` in `patches/0005-scheduler-observer.diff`, and do what
the hooks do (`scheduler_hooks`). Each call is counted under the name of the function that is hooked
in an SGLang without the patch, so that "did it fire" has one answer in both. All methods run on the
scheduler thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from sglang_smartgen.engine import runtime, scheduler_hooks
from sglang_smartgen.engine.hooking import fired

STANDS_FOR: dict[str, str] = {}
"""Method of the observer -> target of the hook that it replaces."""

_DECODE = "sglang.srt.disaggregation.decode."
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."


def _for(target: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        STANDS_FOR[method.__name__] = target

        @functools.wraps(method)
        def call(*args: Any) -> Any:
            fired[target] += 1
            return method(*args)

        return call

    return counted


class Observer:
    """Hands every call on."""

    def model_loaded(self, model_runner: Any) -> None:
        """Before a model runner's attention backend is built."""
        runtime.remember_model(model_runner)

    @_for(_SCHEDULER + "__init__")
    def scheduler_built(self, scheduler: Any) -> None:
        """At the end of `Scheduler.__init__`."""
        scheduler_hooks.begin_service(scheduler)

    @_for(_SCHEDULER + "run_batch")
    def before_batch(self, batch: Any) -> None:
        """Before anything of a batch runs."""
        scheduler_hooks.begin_batch(batch)

    def after_batch(self, batch: Any) -> None:
        """When the forward of a batch has been run."""
        scheduler_hooks.end_batch(batch)

    @_for(_SCHEDULER + "on_idle")
    def idle(self, scheduler: Any) -> None:
        """In each round of the event loop that has nothing to run."""
        scheduler_hooks.give_way()

    @_for(
        "sglang.srt.managers.scheduler_components.internal_state."
        "SchedulerInternalStateController.get_internal_state"
    )
    def add_internal_state(self, scheduler: Any, state: dict[str, Any]) -> None:
        """Add to what /server_info shows."""
        scheduler_hooks.add_block(scheduler, state)

    @_for(_DECODE + "DecodePreallocQueue._send_kv_metadata")
    def before_kv_metadata(self, decode_req: Any) -> None:
        """Before D tells P where a prompt's KV goes."""
        scheduler_hooks.hand_request(decode_req)

    @_for(_DECODE + "DecodeTransferQueue._commit_transfer_to_req")
    def transfer_committed(self, decode_req: Any) -> None:
        """When a transferred request is about to start its decode."""
        scheduler_hooks.begin_decode(decode_req)

    @_for(_DECODE + "SchedulerDisaggregationDecodeMixin.process_decode_queue")
    def before_decode_queue(self, scheduler: Any) -> None:
        """Before D looks at its queues, in every round."""
        scheduler_hooks.drain_quarantine(scheduler)

    @_for(_DECODE + "DecodeTransferQueue.has_pending_deferred_releases")
    def holds_kv(self) -> bool:
        """Whether KV slots are held back that no request owns any more."""
        return scheduler_hooks.holds_slots()

    @_for("sglang.srt.mem_cache.common.release_kv_cache")
    def takes_release(self, req: Any, release: Callable[[], None]) -> bool:
        """Whether `release`, which frees the KV of `req`, will be called by us."""
        return scheduler_hooks.takes_release(req, release)
