"""P's side: which rooms push, what each layer adds, and how a room ends.

Owner: the KV manager of a prefill rank creates one, with its push and fetch threads. SGLang's
bootstrap thread announces peers and rooms and hands over Fetch and Release; the scheduler thread
begins, fills and finishes rooms; the push thread reports back through `_pushed`. A store entry is
held by the scheduler until it will not fill it any more and by the push thread until it has sent
it, so its bytes cannot get a new owner under either; a server process holds it from `hand_over`
until it has let go of it.
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
from sglang_smartgen.core.room_plan import RoomPlan
from sglang_smartgen.engine.layer_capture import LayerCapture
from sglang_smartgen.engine.model_facts import ModelFacts
from sglang_smartgen.engine.peers import Peers
from sglang_smartgen.engine.prefill_room import Announced, Outcome, PrefillRoom
from sglang_smartgen.engine.push_policy import PushPolicy
from sglang_smartgen.engine.room_endings import RoomEndings
from sglang_smartgen.select.base import Selector
from sglang_smartgen.transfer.fetch_server import Reply
from sglang_smartgen.transfer.messages import (
    Endpoint,
    Fetch,
    Grant,
    OpenRoom,
    Registration,
    Release,
    Released,
)
from sglang_smartgen.transfer.push import PushRoom, PushWorker
from sglang_smartgen.transfer.serve_channel import TransportSpec
from sglang_smartgen.transfer.serve_parent import ServeError
from sglang_smartgen.transfer.store import PrefillStore, StoreEntry
from sglang_smartgen.transfer.store_server import StoreServer
from sglang_smartgen.transfer.transport import Transport

logger = logging.getLogger(__name__)

PUSH_TIMEOUT_S = 60.0
STORE_TTL_S = 1800
"""Age after which an entry may make room: D releases its rooms, so it must have died."""
FENCE_TIMEOUT_S = 30.0
FINISHED_KEPT = 16


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
    ) -> None:
        """`process_transport` is that of a server process, where the configuration asks for one.

        on_move: `serve_endpoint` has changed; every decode rank must be told.
        """
        self.config = config
        self.facts = facts
        self.epoch = time.time_ns()
        """Differs from one process to the next; D tells them apart by it."""
        self._selector = selector
        self._transport = transport
        self._outcome = outcome
        try:
            self.store = PrefillStore(facts.geometry, selector, int(config.store_gb * (1 << 30)))
        except (OSError, OverflowError, ValueError) as error:
            raise ConfigError(
                f"store_gb is {config.store_gb}; this machine cannot map that much memory ({error})"
            ) from None
        transport.register(self.store.region)
        self._push = PushWorker(
            transport,
            selector,
            facts.req_to_token.shape[1],
            PUSH_TIMEOUT_S,
            on_busy=lambda busy: self.server.pushing(busy),
        )
        self._reply = reply
        self._policy = PushPolicy(config, facts, selector, transport)
        self._peers = Peers(facts, selector.fingerprint())
        self._announced: dict[int, Announced] = {}
        self._rooms: dict[int, PrefillRoom] = {}
        self._lock = threading.Lock()
        self._capture = LayerCapture(facts, self._push, self._rooms)
        self._endings = RoomEndings(
            self._room_of,
            self._peers,
            fence=lambda *arguments: self.server.fence(*arguments),
            answer=self._answer,
            push_timeout_s=PUSH_TIMEOUT_S,
            fence_timeout_s=FENCE_TIMEOUT_S,
        )
        self.bytes_proactive = 0
        self.bytes_metadata = 0
        self.finished: deque[dict[str, Any]] = deque(maxlen=FINISHED_KEPT)
        self.fallbacks: dict[str, int] = {}
        self.server = self._start_server(process_transport, on_move)

    def _start_server(self, spec: TransportSpec | None, on_move: Callable[[], None]) -> StoreServer:
        as_process = self.config.store_server == "process"
        try:
            if as_process and spec is None:
                raise ServeError("no transport for it is given")
            return StoreServer(
                self._transport,
                self.store,
                process=spec if as_process else None,
                peer_of=self._peers.get,
                reply=self._reply,
                settle=self._endings.settled,
                released=self._released,
                doubt=self._endings.doubt,
                moved=on_move,
                timeout_s=self.config.fetch_timeout_s,
                busy=self._push.busy,
            )
        except ServeError as error:
            raise ConfigError(f"store_server is 'process', which fails here: {error}") from None

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
        if not self._peers.add(registration, keys, values):
            return False
        self.server.add_peer(registration)
        return True

    def announce(
        self, message: OpenRoom, session: str, endpoint: Endpoint, slots: npt.NDArray[np.int64]
    ) -> None:
        """D opened a room and gave its slots; the request itself may not be here yet."""
        # The peer as it is now: a decode node restarted under this session has other addresses.
        announced = Announced(message, self._peers.get(session), endpoint, slots)
        with self._lock:
            self._announced[message.room] = announced

    def submit(self, message: Fetch | Grant | Release) -> None:
        """Hand a message to the server of the store."""
        if isinstance(message, Release):
            self.cancel(message.room, message.generation)
        self.server.submit(message)

    # Scheduler thread -----------------------------------------------------------------------

    def begin(self, room: int, prompt_len: int) -> bool:
        """The request is about to prefill; False: stock full transfer, with the reason counted."""
        with self._lock:
            announced = self._announced.get(room)
        if announced is None:
            return False
        reason = self._obstacle(announced, prompt_len)
        plan: RoomPlan | None = None
        if reason is None and announced.peer is not None:
            session = announced.peer.registration.session
            try:
                plan = self._policy.plan(announced.message, session)
            except ValueError as error:
                reason = str(error)
        entry = None if plan is None else self._open_entry(announced.message)
        with self._lock:
            if self._announced.pop(room, None) is not announced:
                # Released in between: D has given the slots up, so it is no stock transfer either.
                reason = "released"
            elif entry is not None and plan is not None:
                self._rooms[room] = self._make_room(announced, entry, plan)
                return True
        if entry is not None:
            for _ in ("scheduler", "push thread"):
                self.store.release(entry)
            self.store.drop(room, announced.message.generation)
        return self._fall_back(room, reason or "prefill store full")

    def _obstacle(self, announced: Announced, prompt_len: int) -> str | None:
        """Why an announced room cannot be SmartGen's, if it cannot."""
        if announced.peer is None:
            return "peer differs"
        if prompt_len != announced.message.prompt_len:
            return "prompt lengths differ"
        if announced.message.room in self._rooms:
            return "room still pushes"  # a client used its number again
        return None

    def _open_entry(self, message: OpenRoom) -> StoreEntry | None:
        """A store entry held by scheduler and push thread; None when there is no room for it."""
        room, generation, prompt_len = message.room, message.generation, message.prompt_len
        entry = self.store.open(room, generation, prompt_len, users=2)
        if entry is None and self._drop_forgotten():
            entry = self.store.open(room, generation, prompt_len, users=2)
        return entry

    def _make_room(self, announced: Announced, entry: StoreEntry, plan: RoomPlan) -> PrefillRoom:
        message, peer = announced.message, announced.peer
        assert peer is not None
        session = peer.registration.session
        return PrefillRoom(
            PushRoom(
                entry=entry,
                plan=plan,
                peer=peer,
                reply=announced.endpoint,
                slots=announced.slots,
                row=message.row,
                with_metadata=message.metadata,
                keep=message.keep and not plan.whole,
                verify=message.verify,
                is_live=lambda: (
                    self._peers.get(session) == peer and self._outcome.live(message.room)
                ),
            )
        )

    def _drop_forgotten(self) -> bool:
        """Drop entries that no living decode node can still want; True when there were any."""
        old = self.store.older_than(STORE_TTL_S)
        for room, generation in old:
            logger.warning("room %s: dropped from the prefill store after %d s", room, STORE_TTL_S)
            self.server.drop(room, generation)
        return bool(old)

    def _fall_back(self, room: int, reason: str) -> bool:
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1
        logger.info("room %s: full transfer, reason: %s", room, reason)
        return False

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
        state = self._rooms.get(room)
        if state is None or not state.scheduler_holds:
            return
        entry = state.push.entry
        self._capture.sweep(state, slots)
        if state.began is not None:
            state.push.prefill_s = time.monotonic() - state.began
            self._policy.speed.learn(entry.prompt_len, state.push.prefill_s)
        self._finish(state)
        self.let_go(room)

    def let_go(self, room: int) -> None:
        """The scheduler will not fill this room's entry any more (sent, aborted or cleared)."""
        state = self._rooms.get(room)
        if state is not None and state.scheduler_holds:
            self.store.release(state.push.entry)
            with self._lock:
                state.scheduler_holds = False
                self._forget_if_over(state)

    def _forget_if_over(self, state: PrefillRoom) -> None:
        if state.ended.is_set() and not state.scheduler_holds:
            del self._rooms[state.push.entry.room]

    # Any thread -----------------------------------------------------------------------------

    def cancel(self, room: int, generation: int | None = None) -> None:
        """End a room early: what is queued is skipped, what is under way is waited for."""
        with self._lock:
            announced = self._announced.get(room)
            if announced is not None and generation in (None, announced.message.generation):
                del self._announced[room]
            else:
                announced = None
        if announced is not None:
            # Not a stock transfer either: D has given the slots up.
            self._outcome.fail(room, "the request ended before its prefill")
        state = self._rooms.get(room)
        if state is not None and generation in (None, state.push.entry.generation):
            with self._lock:
                if not state.finishing:
                    state.push.ended_early = "the request ended before its prefill did"
            self._finish(state)

    def _finish(self, state: PrefillRoom) -> None:
        with self._lock:
            if state.finishing:
                return
            state.finishing = True
        self._push.finish(state.push, self._pushed)

    # Push thread ----------------------------------------------------------------------------

    def _pushed(self, push: PushRoom) -> None:
        room = push.entry.room
        state = self._rooms[room]
        self.finished.append(_record(state))
        self.bytes_proactive += push.proactive_bytes
        self.bytes_metadata += push.metadata_bytes
        push.entry.residual.set_order(push.plan.residual())
        if push.keep and not (push.failure or push.ended_early):
            self.server.hand_over(push.entry)
        try:
            self._outcome.pushed(push)
        finally:
            if push.failure is not None:
                self._endings.doubt(room, push.entry.generation)
            if push.failure or push.ended_early or not push.keep:
                self.server.drop(room, push.entry.generation)
            self.store.release(push.entry)
            with self._lock:
                state.ended.set()
                self._forget_if_over(state)

    # Threads of the server and settle thread ------------------------------------------------

    def _released(self, release: Release) -> None:
        """The server process has settled a Release on its side; now ours."""
        self.cancel(release.room, release.generation)
        self.server.drop(release.room, release.generation)
        if self._endings.settled(release):
            self._answer(release)

    def _answer(self, release: Release) -> None:
        self._reply(release.reply, Released(release.room, release.generation))

    def _room_of(self, release: Release) -> PrefillRoom | None:
        with self._lock:
            state = self._rooms.get(release.room)
        same = state is not None and state.push.entry.generation == release.generation
        return state if same else None

    def snapshot(self) -> dict[str, Any]:
        """State for `/server_info`."""
        sessions = self._peers.sessions()
        return {
            "role": "prefill",
            "config": msgspec.to_builtins(self.config),
            "bytes_proactive": self.bytes_proactive,
            "bytes_metadata": self.bytes_metadata,
            **self.server.snapshot(),
            "layers_swept": self.layers_swept,
            "bandwidth": max(filter(None, map(self._transport.bandwidth, sessions)), default=None),
            "fallbacks": dict(self.fallbacks),
            "finished": list(self.finished),
            "open_rooms": len(self._rooms),
            "store_rooms": self.store.rooms,
            "store_used_bytes": self.store.used_bytes,
            "store_bytes": self.store.region.length,
        }


def _record(state: PrefillRoom) -> dict[str, Any]:
    """When a room computed and what it pushed; times are monotonic seconds of this machine."""
    push = state.push
    return {
        "room": push.entry.room,
        "began_at": state.began,
        "prefill_s": push.prefill_s,
        "writes": [list(write) for write in push.writes],
    }
