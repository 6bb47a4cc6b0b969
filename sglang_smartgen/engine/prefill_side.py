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
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sglang_smartgen.config import ConfigError, SmartGenConfig
from sglang_smartgen.core.observe import WINDOW
from sglang_smartgen.core.room_plan import RoomPlan
from sglang_smartgen.engine.model_facts import ModelFacts
from sglang_smartgen.engine.push_policy import PushPolicy
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
from sglang_smartgen.transfer.push import Peer, PushRoom, PushWorker
from sglang_smartgen.transfer.serve_channel import TransportSpec
from sglang_smartgen.transfer.serve_parent import ServeError
from sglang_smartgen.transfer.settler import Settler
from sglang_smartgen.transfer.store import PrefillStore, StoreEntry
from sglang_smartgen.transfer.store_server import StoreServer
from sglang_smartgen.transfer.transport import Transport

logger = logging.getLogger(__name__)

PUSH_TIMEOUT_S = 60.0
STORE_TTL_S = 1800
"""Age after which an entry may make room: D releases its rooms, so it must have died."""
FENCE_TIMEOUT_S = 30.0
FINISHED_KEPT = 16


class Outcome(Protocol):
    """What the KV manager does when a room's pushes have ended."""

    def live(self, room: int) -> bool:
        """False once the room has failed or was aborted."""

    def fail(self, room: int, cause: str) -> None:
        """End a room that has not begun to push."""

    def pushed(self, room: PushRoom) -> None:
        """The planned blocks are on D, or `room.failure` says why not (push thread)."""


class _Room(msgspec.Struct):
    push: PushRoom
    scheduler_holds: bool = True
    ended: threading.Event = msgspec.field(default_factory=threading.Event)
    finishing: bool = False
    began: float | None = None  # when its first layer had run


class _Announced(msgspec.Struct):
    message: OpenRoom
    peer: Peer | None
    endpoint: Endpoint
    slots: npt.NDArray[np.int64]


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
        self._settler = Settler(
            self._settle,
            lambda release: reply(release.reply, Released(release.room, release.generation)),
        )
        self._peers: dict[str, Peer] = {}
        self._announced: dict[int, _Announced] = {}
        self._rooms: dict[int, _Room] = {}
        self._lock = threading.Lock()
        self._batch: list[int | None] = []
        self._batch_slots: list[Tensor] | None = None
        # Rooms of which a write failed: its late bytes must be fenced before a Released.
        self._doubtful: set[tuple[int, int]] = set()
        self.bytes_proactive = 0
        self.bytes_metadata = 0
        self.finished: deque[dict[str, Any]] = deque(maxlen=FINISHED_KEPT)
        self.layers_swept = 0
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
                peer_of=self.peer,
                reply=self._reply,
                settle=self._settled,
                released=self._released,
                doubt=self._doubt,
                moved=on_move,
                timeout_s=self.config.fetch_timeout_s,
                busy=self._push.busy,
            )
        except ServeError as error:
            raise ConfigError(f"store_server is 'process', which fails here: {error}") from None

    @property
    def serve_endpoint(self) -> Endpoint | None:
        """Where D sends Fetch, Grant and Release; None: to SGLang's bootstrap socket."""
        return self.server.endpoint

    # Bootstrap thread -----------------------------------------------------------------------

    def add_peer(self, registration: Registration, keys: list[int], values: list[int]) -> bool:
        """A decode rank announced itself; False when its layout differs (stock transfer)."""
        g = self.facts.geometry
        same = (
            registration.layers == g.layers == len(keys) == len(values)
            and registration.kv_row_bytes == g.row_bytes
            and registration.tp_size == self.facts.tp_size
            and registration.fingerprint == self._selector.fingerprint()
        )
        if same:
            self._peers[registration.session] = Peer(registration, keys, values)
            self.server.add_peer(registration)
        else:
            logger.warning(
                "decode session %s differs from this node (selector, KV layout or TP size); its "
                "requests get a full transfer",
                registration.session,
            )
        return same

    def peer(self, session: str) -> Peer | None:
        """The registered decode rank of a session."""
        return self._peers.get(session)

    def announce(
        self, message: OpenRoom, session: str, endpoint: Endpoint, slots: npt.NDArray[np.int64]
    ) -> None:
        """D opened a room and gave its slots; the request itself may not be here yet."""
        # The peer as it is now: a decode node restarted under this session has other addresses.
        announced = _Announced(message, self._peers.get(session), endpoint, slots)
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

    def _obstacle(self, announced: _Announced, prompt_len: int) -> str | None:
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

    def _make_room(self, announced: _Announced, entry: StoreEntry, plan: RoomPlan) -> _Room:
        message, peer = announced.message, announced.peer
        assert peer is not None
        session = peer.registration.session
        return _Room(
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
        self._batch = rooms if any(room in self._rooms for room in rooms) else []
        self._batch_slots = None

    def on_layer(
        self, layer: int, rows: Tensor, stops: list[int], new: list[int], queries: Tensor
    ) -> None:
        """Layer `layer` wrote its KV for every row of the batch, tokens up to `stops` [batch].

        rows: int [>= batch] rows of req_to_token. queries: [sum of `new`, q_heads * head_dim], the
        queries of each row's `new` last tokens, row after row. Copies what is new to the store and
        wakes the push.
        """
        if not self._batch:
            return
        if self._batch_slots is None:
            table = self.facts.req_to_token
            self._batch_slots = [
                table[row, :stop].to(torch.int64)
                for row, stop in zip(rows.tolist()[: len(stops)], stops, strict=True)
            ]
        end = 0
        for room, slots, count in zip(self._batch, self._batch_slots, new, strict=True):
            end += count
            state = self._rooms.get(room) if room is not None else None
            if state is not None and state.scheduler_holds:
                state.began = state.began or time.monotonic()
                if len(slots) >= state.push.entry.prompt_len and state.push.plan.looks:
                    last = queries[max(end - count, end - WINDOW) : end]
                    shape = self.facts.shape
                    state.push.queries[layer] = last.reshape(
                        -1, shape.q_heads, shape.head_dim
                    ).clone()
                self._capture(state, layer, slots)

    def _capture(self, state: _Room, layer: int, slots: Tensor) -> None:
        entry = state.push.entry
        stop = min(len(slots), entry.prompt_len)
        if entry.capture(layer, slots, self.facts.keys[layer], self.facts.values[layer], stop):
            self._push.layer_ready(state.push, layer)

    def finish(self, room: int, slots: Tensor) -> None:
        """The whole prompt is in the pool at `slots` [prompt_len]: SGLang's last send."""
        state = self._rooms.get(room)
        if state is None or not state.scheduler_holds:
            return
        entry = state.push.entry
        swept = [layer for layer, stop in enumerate(entry.captured) if stop < entry.prompt_len]
        for layer in swept:
            self._capture(state, layer, slots)
        if swept:
            self.layers_swept += len(swept)
            logger.warning("room %s: the layer hook missed layers %s", room, swept)
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

    def _forget_if_over(self, state: _Room) -> None:
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

    def _finish(self, state: _Room) -> None:
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
                self._doubt(room, push.entry.generation)
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
        if self._settled(release):
            self._reply(release.reply, Released(release.room, release.generation))

    def _doubt(self, room: int, generation: int) -> None:
        self._doubtful.add((room, generation))

    def _settled(self, release: Release) -> bool:
        """True when no write of this generation can land any more; else the settler takes over."""
        state = self._room_of(release)
        key = (release.room, release.generation)
        if (state is None or state.ended.is_set()) and key not in self._doubtful:
            return True
        self._settler.submit(release)
        return False

    def _settle(self, release: Release) -> bool:
        """Wait for the room's last write, and fence when one failed; False at the deadline."""
        state = self._room_of(release)
        if state is not None and not state.ended.wait(PUSH_TIMEOUT_S):
            return False
        key = (release.room, release.generation)
        peer = self._peers.get(release.session)
        if key in self._doubtful and peer is not None:
            r = peer.registration
            if not self.server.fence(r.session, r.scratch, FENCE_TIMEOUT_S):
                return False
        self._doubtful.discard(key)
        return True

    def _room_of(self, release: Release) -> _Room | None:
        with self._lock:
            state = self._rooms.get(release.room)
        same = state is not None and state.push.entry.generation == release.generation
        return state if same else None

    def snapshot(self) -> dict[str, Any]:
        """State for `/server_info`."""
        return {
            "role": "prefill",
            "config": msgspec.to_builtins(self.config),
            "bytes_proactive": self.bytes_proactive,
            "bytes_metadata": self.bytes_metadata,
            **self.server.snapshot(),
            "layers_swept": self.layers_swept,
            "bandwidth": max(
                (rate for peer in list(self._peers) if (rate := self._transport.bandwidth(peer))),
                default=None,
            ),
            "fallbacks": dict(self.fallbacks),
            "finished": list(self.finished),
            "open_rooms": len(self._rooms),
            "store_rooms": self.store.rooms,
            "store_used_bytes": self.store.used_bytes,
            "store_bytes": self.store.region.length,
        }


def _record(state: _Room) -> dict[str, Any]:
    """When a room computed and what it pushed; times are monotonic seconds of this machine."""
    push = state.push
    return {
        "room": push.entry.room,
        "began_at": state.began,
        "prefill_s": push.prefill_s,
        "writes": [list(write) for write in push.writes],
    }
