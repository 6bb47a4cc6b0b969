"""A decode side on a clock that the test moves; P is what the test says it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from small_rank import SmallRank, hata

from sglang_smartgen.config import SmartGenConfig
from sglang_smartgen.core.agreement import Agreement
from sglang_smartgen.core.mask import LOCAL
from sglang_smartgen.engine import decode_side as module
from sglang_smartgen.engine import heartbeat
from sglang_smartgen.engine.decode_side import RESEND_S, DecodeSide
from sglang_smartgen.transfer.fake import FakeNetwork, FakeTransport
from sglang_smartgen.transfer.messages import Endpoint, Hello, Message, OpenRoom, Started

ROOM, ROW, TOKENS = 7, 2, 150  # longer than hata's anchor of 128 tokens
P_END, D_END = Endpoint("p", 1), Endpoint("d", 2)
PATIENCE_S = 30.0  # bound of every wait that is expected to end at once
TICK_S = RESEND_S + 0.01
CONFIG = SmartGenConfig(blocks_per_layer=50, proactive_blocks=120, min_prompt_len=32)


class Bench:
    """A decode side on a clock that the test moves; `sent` is what it told P."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        config: SmartGenConfig = CONFIG,
        agreement: Agreement | None = None,
        rank: int = 0,
    ) -> None:
        self.now = 1000.0
        clock = SimpleNamespace(monotonic=lambda: self.now, time_ns=lambda: 5 << 20)
        monkeypatch.setattr(module, "time", clock)
        self.refusing: set[Endpoint] = set()
        monkeypatch.setattr(heartbeat, "refuses_connections", lambda peer: peer in self.refusing)
        self.sent: list[tuple[Endpoint, Message]] = []
        self.freed: list[int] = []
        self.failed: list[tuple[int, str]] = []
        self.rank = SmallRank(1)
        self.side = DecodeSide(
            config=config,
            facts=self.rank.facts,
            selector=hata(),
            transport=FakeTransport(FakeNetwork(), "d"),
            session="d",
            reply=D_END,
            send=lambda peer, message: self.sent.append((peer, message)),
            rank=rank,
            fail_request=lambda room, cause: self.failed.append((room, cause)),
            agreement=agreement,
        )
        self.slots = self.rank.slots(TOKENS)

    def open(
        self,
        *,
        room: int = ROOM,
        row: int = ROW,
        tokens: int = TOKENS,
        peer: Endpoint | None = P_END,
        overrides: object = None,
    ) -> OpenRoom | None:
        return self.side.open(
            room=room,
            rid=f"rid-{room}",
            row=row,
            slots=self.slots[:tokens],
            peer=peer,
            bootstrap_addr="p:0",
            overrides=overrides,
        )

    def opened(self, room: int = ROOM, overrides: object = None) -> OpenRoom:
        message = self.open(room=room, overrides=overrides)
        assert message is not None
        return message

    def started(self, generation: int, left: int = 0, epoch: int = 0) -> None:
        self.side.on_message(Started(ROOM, generation, 111, 22, 0.5, left, epoch))

    def hello(self, epoch: int = 0) -> None:
        self.side.on_message(Hello(P_END.host, P_END.port, epoch=epoch))

    def mark(self, *layers: int) -> None:
        """What P's mask writes for whole layers leave behind."""
        for layer in layers:
            self.side.masks[layer, ROW, :TOKENS] = LOCAL

    def release(self, room: int = ROOM, finish: str = "stop") -> None:
        self.side.release(room, finish, self.free(room))

    def free(self, room: int) -> Callable[[], None]:
        return lambda: self.freed.append(room)

    def wait_for(self, happened: Callable[[], bool]) -> None:
        """For what another thread does."""
        deadline = time.monotonic() + PATIENCE_S
        while not happened():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def tick(self, seconds: float = TICK_S) -> None:
        self.now += seconds
        self.side.drain()
