"""What SmartGen does inside SGLang's scheduler loop.

Each function is the body of a hook (the table in `sglang_smartgen.plugin` says where it goes), or
shared by such a body and by `observer`, which a patched SGLang calls instead. All of them run on
the scheduler thread.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from sglang_smartgen.config import ConfigError
from sglang_smartgen.engine import hooking, metrics_feed, runtime
from sglang_smartgen.engine.hooking import fired, verify
from sglang_smartgen.engine.native import refuse

IDLE_SLEEP_S = 0.002
SWITCH_INTERVAL_S = 0.0005
"""Longest that a thread waits for the interpreter; Python's default of 5 ms is a whole fetch."""

OF_EVERY_RANK = (
    "open_rooms",
    "quarantined_rooms",
    "quarantined_slots",
    "quarantined_slabs",
    "granted_bytes",
    "store_rooms",
    "store_used_bytes",
    "free_slots",
    "free_rows",
    "counters",
    "fallbacks",
    "fetches",
)
"""What /server_info tells of every rank."""


def check_hooks(_result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """After `Scheduler.__init__`: every hook of this role is in place, or the process refuses."""
    verify(scheduler.disaggregation_mode.value)
    begin_service(scheduler)


def begin_service(scheduler: Any) -> None:
    """Shorten Python's switch interval for the threads that serve fetches; feed /metrics."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    side = runtime.decode_side() or runtime.prefill_side()
    if side is not None:
        metrics_feed.start(scheduler, side.snapshot)
    prefill = runtime.prefill_side()
    if prefill is not None:
        try:
            prefill.borrow_from(scheduler.tree_cache)
        except ConfigError as error:
            refuse(str(error))


def smartgen_classes(original: Callable[..., Any], backend: Any, class_type: Any) -> Any:
    """Around `get_kv_class`: SmartGen's manager, sender and receiver for the Mooncake backend."""
    from sglang.srt.disaggregation.utils import TransferBackend

    ours = kv_class(class_type) if backend == TransferBackend.MOONCAKE else None
    return original(backend, class_type) if ours is None else ours


def kv_class(class_type: Any) -> Any:
    """SmartGen's class of this type for the Mooncake backend; None where stock's is used."""
    from sglang.srt.disaggregation.utils import KVClassType

    from sglang_smartgen.engine.manager import SmartGenKVManager
    from sglang_smartgen.engine.receiver import SmartGenKVReceiver
    from sglang_smartgen.engine.sender import SmartGenKVSender

    ours = {
        KVClassType.MANAGER: SmartGenKVManager,
        KVClassType.SENDER: SmartGenKVSender,
        KVClassType.RECEIVER: SmartGenKVReceiver,
    }
    return ours.get(class_type)


def run_batch(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any) -> Any:
    """Around `run_batch`: `begin_batch`, the batch, `end_batch`."""
    begin_batch(batch)
    result = original(scheduler, batch, *args)
    end_batch(batch)
    return result


def begin_batch(batch: Any) -> None:
    """Before a batch: its rooms for P; on D the credits of a step."""
    prefill, decode = runtime.prefill_side(), runtime.decode_side()
    if prefill is not None and batch.forward_mode.is_extend():
        if prefill.lending is not None:
            prefill.lending.settle()
            for req in batch.reqs:
                room = getattr(req, "bootstrap_room", None)
                prefill.lending.before_batch(room, req.last_node, req.prefix_len)
        prefill.set_batch([getattr(req, "bootstrap_room", None) for req in batch.reqs])
    if decode is not None and batch.forward_mode.is_decode():
        rows = batch.req_pool_indices.tolist()
        decode.begin_step(rows)
        if runtime.on_device():
            runtime.note_step(rows, batch.seq_lens_cpu.tolist())


def end_batch(batch: Any) -> None:
    """After a batch: on D end the requests whose rooms have failed, on whatever rank.

    Here, since a rank whose fetch has failed still goes through the forward: the others wait for
    it in every layer.
    """
    decode = runtime.decode_side()
    if decode is None or not batch.forward_mode.is_decode():
        return
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    causes = decode.failures([req.bootstrap_room for req in batch.reqs])
    for req, cause in zip(batch.reqs, causes, strict=True):
        if cause is not None and req.to_finish is None:
            req.to_finish = FINISH_ABORT(cause, HTTPStatus.INTERNAL_SERVER_ERROR)


def remember_request(queue: Any, decode_req: Any, *args: Any, **kwargs: Any) -> None:
    """Before `DecodePreallocQueue._send_kv_metadata`: the receiver learns its request."""
    hand_request(decode_req)


def hand_request(decode_req: Any) -> None:
    """Give a request to its receiver, which SGLang's own does not know."""
    decode_req.kv_receiver.request = decode_req.req


def commit_room(_result: None, queue: Any, decode_req: Any) -> None:
    """After `DecodeTransferQueue._commit_transfer_to_req`: the room starts to decode."""
    begin_decode(decode_req)


def begin_decode(decode_req: Any) -> None:
    """A request's transfer is committed: its room starts to decode, unless it was aborted."""
    decode = runtime.decode_side()
    if decode is not None and decode_req.req.finished_reason is None:
        decode.commit(decode_req.req.bootstrap_room)


def drain_quarantine(scheduler: Any) -> None:
    """Before `process_decode_queue`, of either way: free the rooms that P has let go of."""
    decode = runtime.decode_side()
    if decode is not None:
        decode.drain()


def has_pending_releases(result: bool, queue: Any) -> bool:
    """After `has_pending_deferred_releases`: quarantined slots are pending too, not leaked."""
    return result or holds_slots()


def holds_slots() -> bool:
    """Whether D has slots in quarantine, or waits for another rank that has."""
    decode = runtime.decode_side()
    return decode is not None and decode.holds_slots


def release_kv_cache(
    original: Callable[..., None], req: Any, tree_cache: Any, *, checkpoint: bool
) -> None:
    """Around `release_kv_cache` on D: slots and row go when P can no longer write to them."""
    release = functools.partial(original, req, tree_cache, checkpoint=checkpoint)
    if not takes_release(req, release):
        release()


def takes_release(req: Any, release: Callable[[], None]) -> bool:
    """Whether D will call `release` itself: now, or when P has let go of the request's slots."""
    decode = runtime.decode_side()
    room = getattr(req, "bootstrap_room", None)
    if decode is None or decode.room(room) is None or not req.kv.holds_kv:
        return False
    finish = req.finished_reason.to_json()["type"] if req.finished() else "retracted"
    decode.release(room, finish, release)
    return True


def yield_when_idle(_result: None, scheduler: Any) -> None:
    """After `Scheduler.on_idle`: see `give_way`."""
    give_way()


def give_way() -> None:
    """SGLang's idle loop spins, and its spinning starves our threads.

    Push, fetch and decode threads need the same interpreter; two milliseconds of sleep cost an idle
    loop nothing that anyone can see and give them nearly all of it.
    """
    prefill = runtime.prefill_side()
    if prefill is not None and prefill.lending is not None:
        prefill.lending.settle()
    time.sleep(IDLE_SLEEP_S)


def add_state(result: Any, controller: Any, request: Any) -> Any:
    """After `get_internal_state`: a `smartgen` block in /server_info."""
    add_block(controller.scheduler, result.internal_state)
    return result


def add_block(scheduler: Any, state: dict[str, Any]) -> None:
    """Put SmartGen's block into what /server_info shows of a scheduler.

    SGLang shows rank 0's and asks all ranks, so theirs is told too, in short.
    """
    side = runtime.decode_side() or runtime.prefill_side()
    if side is None:
        return
    block = {
        **side.snapshot(),
        "free_slots": scheduler.token_to_kv_pool_allocator.available_size(),
        "free_rows": scheduler.req_to_token_pool.available_size(),
        "carried_by": hooking.carrier,
        "hooks_fired": dict(fired),
    }
    short = {key: block[key] for key in OF_EVERY_RANK if key in block}
    block["ranks"] = [json.loads(text) for text in runtime.agreement().texts(json.dumps(short))]
    state["smartgen"] = block
