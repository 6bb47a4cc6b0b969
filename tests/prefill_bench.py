"""A prefill side on fake transports, with the KV manager's part scripted by the test."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any

import torch
from small_rank import HEADS, LAYERS, ROWS, SLOTS, WIDTH, SmallRank, hata

from sglang_smartgen.config import SmartGenConfig
from sglang_smartgen.core.geometry import DENSE_LAYERS
from sglang_smartgen.engine.device_path import DevicePath
from sglang_smartgen.engine.prefill_side import PrefillSide
from sglang_smartgen.transfer.fake import FakeNetwork, FakeTransport
from sglang_smartgen.transfer.messages import (
    VERSION,
    Endpoint,
    Message,
    OpenRoom,
    Registration,
    Release,
)
from sglang_smartgen.transfer.push_room import PushRoom
from sglang_smartgen.transfer.region import HostRegion
from sglang_smartgen.transfer.serve_channel import TransportSpec

ROOM, ROW, TOKENS = 7, 2, 150  # longer than hata's anchor of 128 tokens
D_END = Endpoint("d", 2)
PATIENCE_S = 30.0  # bound of every wait that is expected to end at once
SHORT_S = 0.05


class ScriptedOutcome:
    """The KV manager as the test wants it; `ends` holds every end of a push, as it was told."""

    def __init__(self) -> None:
        self.dead: set[int] = set()
        self.failed: list[tuple[int, str]] = []
        self.started: list[int] = []
        self.ends: queue.Queue[PushRoom] = queue.Queue()
        self.on_end: Callable[[PushRoom], None] = lambda _: None
        self.on_start: Callable[[PushRoom], None] = lambda _: None

    def live(self, room: int) -> bool:
        return room not in self.dead

    def fail(self, room: int, cause: str) -> None:
        self.failed.append((room, cause))

    def conclude(self, room: PushRoom) -> None:
        self.on_end(room)

    def start(self, room: PushRoom) -> None:
        self.started.append(room.entry.room)
        self.on_start(room)

    def ended(self, room: PushRoom) -> None:
        self.ends.put(room)


class Bench:
    """A prefill side at node p; node d is memory of this process. `replies` is what D was told.

    session: D's; process: the transport of a server process, None: there can be none. config: more
    settings.
    """

    def __init__(
        self,
        store_gb: float = 0.001,
        *,
        session: str = "d",
        process: TransportSpec | None = None,
        path: DevicePath | None = None,
        **config: Any,
    ) -> None:
        self.network = FakeNetwork()
        self.session = session
        self.p, self.d = FakeTransport(self.network, "p"), FakeTransport(self.network, session)
        self.here, self.there = SmallRank(1), SmallRank(2)
        self.mask = HostRegion(LAYERS * ROWS * WIDTH)
        self.metadata = HostRegion(
            (LAYERS - DENSE_LAYERS) * SLOTS * HEADS * hata().metadata_width * 4
        )
        self.small = HostRegion(8192)
        for memory in (self.there.memory, self.mask, self.metadata, self.small):
            self.d.register(memory.region)
        self.outcome = ScriptedOutcome()
        self.replies: queue.Queue[Message] = queue.Queue()
        self.side = PrefillSide(
            config=SmartGenConfig(
                store_gb=store_gb,
                fetch_timeout_s=PATIENCE_S,  # a busy machine is no hung decode node
                **config,
            ),
            facts=self.here.facts,
            selector=hata(),
            transport=self.p,
            reply=lambda endpoint, message: self.replies.put(message),
            outcome=self.outcome,
            process_transport=process,
            path=path,
        )
        self.source = self.here.slots(WIDTH, seed=3)  # the request's slots on P
        self.here.facts.req_to_token[ROW] = self.source.to(torch.int32)
        self.target = self.there.slots(WIDTH, seed=4)  # and on D
        assert self.add_peer()

    def registration(self, **changed: object) -> Registration:
        step = SLOTS * HEADS * hata().metadata_width * 4
        g = self.there.facts.geometry
        values: dict[str, object] = {
            "version": VERSION,
            "session": self.session,
            "epoch": 1,
            "fingerprint": hata().fingerprint(),
            "layers": LAYERS,
            "kv_row_bytes": g.row_bytes,
            "mask": self.mask.region.address,
            "mask_rows": ROWS,
            "mask_width": WIDTH,
            "metadata": [
                self.metadata.region.address + i * step for i in range(len(g.sparse_layers))
            ],
            "metadata_row_bytes": step // SLOTS,
            "arena": self.small.region.address,
            "arena_bytes": 4096,
            "fill": self.small.region.address + 4096,
            "fill_bytes": 2048,
            "scratch": self.small.region.address + 6144,
            "tp_size": 1,
        }
        return Registration(**(values | changed))  # type: ignore[arg-type]

    def add_peer(self, **changed: object) -> bool:
        keys, values = ([layer.data_ptr() for layer in side] for side in self.there.pool)
        return self.side.add_peer(self.registration(**changed), keys, values)

    def announce(
        self,
        room: int = ROOM,
        generation: int = 1,
        *,
        tokens: int = TOKENS,
        keep: bool = True,
        proactive_blocks: int | None = 100,
        session: str | None = None,
        order: str = "sequential",
        recording: str = "",
    ) -> None:
        message = OpenRoom(
            version=VERSION,
            room=room,
            generation=generation,
            row=ROW,
            prompt_len=tokens,
            blocks_per_layer=50,
            proactive_blocks=proactive_blocks,
            order=order,
            k=10,
            recording=recording,
            metadata=True,
            keep=keep,
        )
        self.side.announce(message, session or self.session, D_END, self.target[:tokens].numpy())

    def begun(self, room: int = ROOM, generation: int = 1, *, keep: bool = True) -> None:
        self.announce(room, generation, keep=keep)
        assert self.side.begin(room, TOKENS)

    def layers(self, *layers: int, room: int = ROOM, stop: int = TOKENS) -> None:
        """The forward pass of one chunk, as far as these layers."""
        self.side.set_batch([room])
        for layer in layers or range(LAYERS):
            queries = torch.zeros(
                stop, self.here.facts.shape.q_heads * self.here.facts.shape.head_dim
            )
            self.side.on_layer(layer, torch.tensor([ROW]), [stop], [stop], queries)

    def finish(self, room: int = ROOM) -> None:
        self.side.finish(room, self.source[:TOKENS])

    def release(self, room: int = ROOM, generation: int = 1) -> None:
        self.side.submit(Release(room, generation, self.session, D_END))

    def end(self) -> PushRoom:
        return self.outcome.ends.get(timeout=PATIENCE_S)

    def reply(self) -> Message:
        return self.replies.get(timeout=PATIENCE_S)

    def wait_for(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not happened():
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def closed(self, entries: int = 0) -> None:
        """Nothing is under way any more, and the store holds `entries` entries."""
        self.wait_for(lambda: self.side.snapshot()["open_rooms"] == 0)
        assert self.outcome.ends.empty()
        self.wait_for(lambda: self.side.store.rooms == entries)  # a fence may come first
        assert (self.side.store.used_bytes == 0) is (entries == 0)

    def writes_begun(self, count: int) -> None:
        self.wait_for(lambda: len(self.p.log) >= count)
