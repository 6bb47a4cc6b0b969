"""P's side: which rooms push, what each layer adds, and how a push ends.

Owner: the KV manager of a prefill rank creates one, with its push and fetch threads. SGLang's
bootstrap thread announces peers and rooms and hands over Fetch and Release; the scheduler thread
begins, fills and finishes rooms; the push thread reports back through `_pushed`. When a room may
write and when it is over is PrefillRooms' business. A store entry is held by the scheduler until it
will not fill it any more and by the push thread until it has sent it, so its bytes cannot get a new
owner under either; a server process holds it from `hand_over` until it has let go of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from torch import Tensor

from sglang_smartgen.config import ConfigError, SmartGenConfig
from sglang_smartgen.core import prefill_room as core
from sglang_smartgen.engine.admission import Admission
from sglang_smartgen.engine.device_path import DevicePath
from sglang_smartgen.engine.host_tier import HostTier
from sglang_smartgen.engine.layer_capture import LayerCapture
from sglang_smartgen.engine.lending import Lending
from sglang_smartgen.engine.model_facts import ModelFacts
from sglang_smartgen.engine.peers import Peers
from sglang_smartgen.engine.prefill_room import Outcome, PrefillRoom
from sglang_smartgen.engine.prefill_rooms import PrefillRooms
from sglang_smartgen.engine.push_policy import PushPolicy
from sglang_smartgen.select.base import Selector
from sglang_smartgen.transfer.fetch_server import Reply
from sglang_smartgen.transfer.messages import (
    Alive,
    Endpoint,
    Fetch,
    Grant,
    OpenRoom,
    Registration,
    Release,
    Released,
)
from sglang_smartgen.transfer.push import GONE, PushWorker
from sglang_smartgen.transfer.push_room import Peer, PushRoom
from sglang_smartgen.transfer.rails.introduce import introduce
from sglang_smartgen.transfer.rails.transport import RailsTransport
from sglang_smartgen.transfer.serve_channel import TransportSpec
from sglang_smartgen.transfer.serve_parent import ServeError
from sglang_smartgen.transfer.store import PrefillStore
from sglang_smartgen.transfer.store_server import StoreServer
from sglang_smartgen.transfer.tiered_store import TieredStore
from sglang_smartgen.transfer.transport import Transport, TransportError

logger = logging.getLogger(__name__)

PUSH_TIMEOUT_S = 60.0
FENCE_TIMEOUT_S = 30.0
FINISHED_KEPT = 16
LIMITS = core.PrefillLimits(lease_s=30.0, idle_s=1800.0, fence_retry_s=1.0, doubt_s=300.0)
"""D names its rooms every 2 s. doubt_s is more than D's quarantine: the slots are given up then."""


class PrefillSide:
    """Everything a prefill rank keeps for SmartGen."""

    def __init__(
        self,
        *,
        config: SmartGenConfig,
        facts: ModelFacts,
        selector: Selector,
        transport: Transport,
        reply: Reply,
        outcome: Outcome,
        process_transport: TransportSpec | None = None,
        on_move: Callable[[], None] = lambda: None,
        path: DevicePath | None = None,
        tiered: bool = False,
    ) -> None:
        """`process_transport` is that of a server process, None where there can be none.

        on_move: `serve_endpoint` has changed; every decode rank must be told. path: of this host;
        None: a CPU host's. tiered: P has a hierarchical cache, to be given to `borrow_from`.
        """
        path = path or DevicePath()
        self.config = config
        self.facts = facts
        self.epoch = time.time_ns()
        """Differs from one process to the next; D tells them apart by it."""
        self._selector = selector
        self._transport = transport
        self._outcome = outcome
        try:
            # A server process does not see SGLang's host tier: the store keeps copies there.
            kind = TieredStore if tiered and config.store_server != "process" else PrefillStore
            self.store = kind(facts.geometry, selector, int(config.store_gb * (1 << 30)))
        except (OSError, OverflowError, ValueError) as error:
            raise ConfigError(
                f"store_gb is {config.store_gb}; this machine cannot map that much memory ({error})"
            ) from None
        path.pin(self.store.memory)
        transport.register(self.store.region)
        self._push = PushWorker(
            transport,
            selector,
            PUSH_TIMEOUT_S,
            on_busy=lambda busy: self.server.pushing(busy),
        )
        self._reply = reply
        self._peers = Peers(facts, selector.fingerprint())
        self._rooms = PrefillRooms(
            LIMITS,
            outcome,
            fence=self._fence,
            stop=lambda release: self.server.submit(release),
            answer=lambda r: reply(r.reply, Released(r.room, r.generation)),
            drop=lambda key: self.server.drop(*key),
            finish=self._finish,
            start=self._start,
        )
        copies = path.copies(self._push.layer_ready, selector)
        self._capture = LayerCapture(facts, copies, self._rooms.active)
        policy = PushPolicy(config, facts, selector, transport)
        self._speed = policy.speed
        self._admission = Admission(self.store, policy, self._rooms, outcome)
        self._counting = threading.Lock()  # there is a push thread a decode session
        self.bytes_proactive = 0
        self.bytes_metadata = 0
        self.finished: deque[dict[str, Any]] = deque(maxlen=FINISHED_KEPT)
        self.lending: Lending | None = None
        self._on_move = on_move
        self.server = self._start_server(process_transport, tiered)

    def _start_server(self, spec: TransportSpec | None, tiered: bool) -> StoreServer:
        wanted = self.config.store_server
        try:
            if wanted == "process" and spec is None:
                raise ServeError("no transport for it is given")
            inside = wanted == "auto" and (tiered or self.config.transport == "rails")
            return self._server(None if wanted == "thread" or inside else spec)
        except ServeError as error:
            if wanted == "process":
                raise ConfigError(f"store_server is 'process', which fails here: {error}") from None
            logger.warning("SmartGen serves its store in a thread, for a process fails: %s", error)
            return self._server(None)

    def _server(self, process: TransportSpec | None) -> StoreServer:
        return StoreServer(
            self._transport,
            self.store,
            process=process,
            peer_of=self._peers.get,
            reply=self._reply,
            settle=self._stopped,
            released=self._released,
            doubt=self._rooms.doubt,
            moved=self._on_move,
            timeout_s=self.config.fetch_timeout_s,
            busy=self._push.busy,
        )

    @property
    def fallbacks(self) -> dict[str, int]:
        """How often each reason sent a room to a full transfer."""
        return self._admission.fallbacks

    @property
    def layers_swept(self) -> int:
        """Layers that the layer hook has missed, over all rooms."""
        return self._capture.layers_swept

    @property
    def serve_endpoint(self) -> Endpoint | None:
        """Where D sends Fetch, Grant and Release; None: to SGLang's bootstrap socket."""
        return self.server.endpoint

    # Bootstrap thread -----------------------------------------------------------------------

    def add_peer(self, registration: Registration, keys: list[int], values: list[int]) -> bool:
        """A decode rank announced itself; False when its layout differs (stock transfer)."""
        introduce(self._transport, registration)
        if not self._peers.add(registration, keys, values):
            return False
        self.server.add_peer(registration)
        self._rooms.peer_replaced(registration.session, registration.epoch)
        return True

    def peer(self, session: str) -> Peer | None:
        """The registered decode rank of a session."""
        return self._peers.get(session)

    def announce(
        self, message: OpenRoom, session: str, endpoint: Endpoint, slots: npt.NDArray[np.int64]
    ) -> None:
        """D opened a room and gave its slots; the request itself may not be here yet."""
        # The peer as it is now: a decode node restarted under this session has other addresses.
        peer = self._peers.get(session)
        epoch = peer.registration.epoch if peer is not None else 0
        machine = core.PrefillRoom(
            message.room, message.generation, epoch, time.monotonic(), LIMITS
        )
        self._rooms.announce(PrefillRoom(machine, message, session, peer, endpoint, slots))

    def announced_stock(self, room: int) -> None:
        """D opened a room without SmartGen: what ended under that number before does not count."""
        self._rooms.forget_announced(room)

    def submit(self, message: Fetch | Grant | Release | Alive) -> None:
        """A message of D that came to this process."""
        if isinstance(message, Release):
            self._rooms.release(message)
        elif isinstance(message, Alive):
            self._rooms.renew(message)
        else:
            self.server.submit(message)

    # Scheduler thread -----------------------------------------------------------------------

    def begin(self, room: int, prompt_len: int) -> bool:
        """The request is about to prefill; False: stock full transfer, with the reason counted."""
        return self._admission.begin(room, prompt_len)

    def borrow_from(self, cache: Any) -> None:
        """Let the store read the host tier of SGLang's tree cache, where there is one.

        Raises ConfigError for one that it cannot read.
        """
        if isinstance(self.store, TieredStore) and cache.cache_controller is not None:
            tier = HostTier(cache, self.facts.geometry)
            try:
                self._transport.register(tier.region)
            except TransportError as error:
                raise ConfigError(f"the host tier of P's cache cannot be used: {error}") from None
            self.lending = Lending(tier, self.store, self._rooms.active)

    def set_batch(self, rooms: list[int | None]) -> None:
        """The rooms of the batch that runs next, in the order of its rows."""
        self._capture.set_batch(rooms)

    def on_layer(
        self, layer: int, rows: Tensor, stops: list[int], new: list[int], queries: Tensor
    ) -> None:
        """Layer `layer` wrote its KV for every row of the batch, tokens up to `stops` [batch].

        rows: int [>= batch] rows of req_to_token. queries: [sum of `new`, q_heads * head_dim], the
        queries of each row's `new` last tokens, row after row. Copies what is new to the store and
        wakes the push.
        """
        self._capture.on_layer(layer, rows, stops, new, queries)

    def finish(self, room: int, slots: Tensor) -> None:
        """The whole prompt is in the pool at `slots` [prompt_len]: SGLang's last send."""
        state = self._rooms.active.get(room)
        if state is None or state.push is None or not state.scheduler_holds:
            return
        self._capture.sweep(state, slots)
        if state.began is not None:
            state.push.prefilled(time.monotonic() - state.began)
            self._speed.learn(state.push.entry.prompt_len, state.push.prefill_s)
        self._capture.behind(lambda: self._finish(state))
        self.let_go(room)

    def let_go(self, room: int) -> None:
        """The scheduler will not fill this room's entry any more (sent, aborted or cleared)."""
        state = self._rooms.active.get(room)
        if state is not None:
            state.filled = True
            self._capture.behind(lambda: self._let_go(state, scheduler=True))

    def _let_go(self, state: PrefillRoom, scheduler: bool) -> None:
        assert state.push is not None
        entry = state.push.entry
        self._rooms.let_go(state, lambda: self.store.release(entry), scheduler)

    # Any thread -----------------------------------------------------------------------------

    def cancel(self, room: int, generation: int | None = None) -> None:
        """The request ended here: what is queued is skipped, what is under way is waited for."""
        announced, state = self._rooms.announced(room), self._rooms.active.get(room)
        if announced is not None and generation in (None, announced.message.generation):
            self._rooms.abort(announced, "the request ended before its prefill")
        if state is not None and generation in (None, state.message.generation):
            if not state.finishing:
                self._rooms.abort(state, "the request ended before its prefill did")
            self._finish(state)

    def _finish(self, state: PrefillRoom) -> None:
        """End the room's pushes behind what is queued, once."""
        if self._rooms.finishes(state):
            assert state.push is not None
            self._push.finish(state.push, lambda _: self._pushed(state))

    # Push thread ----------------------------------------------------------------------------

    def _pushed(self, state: PrefillRoom) -> None:
        push = state.push
        assert push is not None
        with self._counting:
            self.finished.append(_record(state, push))
            self.bytes_proactive += push.proactive_bytes
            self.bytes_metadata += push.metadata_bytes
        push.entry.residual.set_order(push.plan.residual())
        try:
            if not (push.failure or push.ended_early):
                self._conclude(state, push)
        except Exception as error:
            logger.exception("room %s: hand-over to decode failed", push.entry.room)
            push.ended_early = push.ended_early or f"hand-over failed: {error}"
        try:
            if cause := push.failure or push.ended_early:
                self._rooms.start_failed(state, cause)
            self._outcome.ended(push)
        finally:
            self._let_go(state, scheduler=False)

    def _conclude(self, state: PrefillRoom, push: PushRoom) -> None:
        """The last write to D, SGLang's own; then D may ask, and then it may start."""
        if not push.gate.live() or not push.gate.began():
            push.ended_early = push.ended_early or GONE
            return
        done = False
        try:
            self._outcome.conclude(push)
            done = push.failure is None
        finally:
            push.gate.ended(done)
        if push.failure or push.ended_early:
            return
        keep = push.keep and push.entry.residual.left > 0
        if not self._rooms.pushed(state, keep, lambda: self.server.hand_over(push.entry)):
            push.ended_early = push.ended_early or state.machine.failure or GONE

    def _start(self, state: PrefillRoom) -> None:
        assert state.push is not None
        self._outcome.start(state.push)

    # Threads of the server, and those of the fences -----------------------------------------

    def _released(self, release: Release, held: bool) -> None:
        """The server process has settled a Release: D's, or the one that ends a room there."""
        if not (held and self._rooms.stopped(release.room, release.generation)):
            self._rooms.release(release)

    def _stopped(self, release: Release) -> bool:
        """The serve thread has ended a room. Never True: PrefillRooms answers D."""
        self._rooms.stopped(release.room, release.generation)
        return False

    def _fence(self, session: str) -> bool:
        peer = self._peers.get(session)
        if peer is None:
            return True
        return self.server.fence(session, peer.registration.scratch, FENCE_TIMEOUT_S)

    def snapshot(self) -> dict[str, Any]:
        """State for `/server_info`."""
        sessions = self._peers.sessions()
        over = self._transport if isinstance(self._transport, RailsTransport) else None
        return {
            "role": "prefill",
            "config": msgspec.to_builtins(self.config),
            "bytes_proactive": self.bytes_proactive,
            "bytes_metadata": self.bytes_metadata,
            **self.server.snapshot(),
            "layers_swept": self.layers_swept,
            "bandwidth": max(filter(None, map(self._transport.bandwidth, sessions)), default=None),
            "rails": ([] if over is None else over.snapshot()) + self.server.rails(),
            "rail_switches": 0 if over is None else over.switches,
            "fallbacks": dict(self.fallbacks),
            "finished": list(self.finished),
            "open_rooms": len(self._rooms.active),
            "store_rooms": self.store.rooms,
            "store_used_bytes": self.store.used_bytes,
            "store_bytes": self.store.region.length,
            **({} if self.lending is None else self.lending.snapshot()),
        }


def _record(state: PrefillRoom, push: PushRoom) -> dict[str, Any]:
    """When a room computed and what it pushed; times are monotonic seconds of this machine."""
    return {
        "room": push.entry.room,
        "began_at": state.began,
        "prefill_s": push.prefill_s,
        "writes": [list(write) for write in push.writes],
    }
