"""One request on D: its row, what of its prompt is local, and the machine that says how it ends."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

import msgspec
import numpy as np
import torch
from torch import Tensor

from sglang_smartgen.config import SmartGenConfig
from sglang_smartgen.core import decode_room as core
from sglang_smartgen.core import recordings
from sglang_smartgen.core.checksums import STRETCH, layer_checksums, whole_stretches
from sglang_smartgen.core.counts import counts
from sglang_smartgen.core.geometry import KVGeometry
from sglang_smartgen.core.mask import LOCAL, REMOTE
from sglang_smartgen.select.base import budget
from sglang_smartgen.transfer.entries import place_singles, place_tokens, words
from sglang_smartgen.transfer.messages import Endpoint, Started
from sglang_smartgen.transfer.residual import Portion

logger = logging.getLogger(__name__)


class RoomStats(msgspec.Struct):
    """What one request cost, in bytes, seconds and counts.

    opened_at, started_at: monotonic seconds at which D reserved its slots and began to decode.
    fetches, fetch_wait_s: layers of steps that asked P, and how long the forward thread stood
    still for them. trace: one [monotonic start, seconds waited, bytes fetched, bytes filled] a
    step, for a request that asks for it.
    """

    rid: str
    room: int
    mode: str
    prompt_len: int
    bytes_proactive: int = 0
    bytes_metadata: int = 0
    bytes_on_demand: int = 0
    bytes_speculative: int = 0
    steps_until_local: int | None = None
    prefill_s: float = 0.0
    local_share_at_start: float = 1.0
    entries_selected: int = 0
    entries_fetched: int = 0
    fetches: int = 0
    fetch_wait_s: float = 0.0
    fetched_layers: list[int] = []
    steps: int = 0
    fallback: str = ""
    opened_at: float = 0.0
    started_at: float = 0.0
    trace: list[list[float]] = []


class DecodeRoom:
    """State of one room and generation on D.

    mask: int8 [layers, prompt_len], P writes it (1 = the token's bytes are on D in that layer).
    held: int8 [sparse_layers, kv_heads, prompt_len], D writes it: 1 = this entry was fetched and is
    kept in the pool. An entry is local when either says so, so `minimum` of the two is its status.
    machine: what may be asked of P and when slots are free; DecodeRooms does what it answers.
    """

    def __init__(
        self,
        *,
        machine: core.DecodeRoom,
        rid: str,
        row: int,
        slots: Tensor,
        mask: Tensor,
        peer: Endpoint | None,
        bootstrap_addr: str,
        config: SmartGenConfig,
        geometry: KVGeometry,
    ) -> None:
        self.machine = machine
        self.room = room = machine.room
        self.generation = machine.generation
        self.rid = rid
        self.row = row
        self.slots = slots
        self.mask = mask
        self.peer = peer
        self.bootstrap_addr = bootstrap_addr
        self.config = config
        self.geometry = geometry
        self.prompt_len = int(slots.numel())
        self.k = budget(self.prompt_len, config.ratio)
        self.started: Started | None = None
        self.left = 0  # entries that are only on P, as P last counted
        self.committed = False  # SGLang has taken it over for decode
        self.told = False  # P has told SGLang itself that the request failed
        self.free: Callable[[], None] | None = None  # gives slots and row back, set at the end
        self.layer_is_local = [False] * geometry.layers
        self.held = torch.full(
            (len(geometry.sparse_layers), geometry.kv_heads, self.prompt_len),
            REMOTE,
            dtype=torch.int8,
        )
        self.counts: Tensor | None = None
        if config.record:
            self.counts = torch.zeros(self.held.shape, dtype=torch.int32)
        self.stats = RoomStats(rid, room, config.mode, self.prompt_len, opened_at=time.monotonic())

    @property
    def failure(self) -> str | None:
        """Why the room failed, when it did."""
        return self.machine.failure

    @property
    def selects_all(self) -> bool:
        """True when every entry of the prompt is used, so that no selector runs."""
        return self.k >= self.prompt_len

    @property
    def serial(self) -> bool:
        """True when this request has no parallel lanes: each layer fetches, then gathers."""
        return self.config.mode == "partial" or not self.config.parallel_lanes

    @property
    def all_local(self) -> bool:
        """True when every entry is here; `left` alone would not notice that a message was lost."""
        return all(self.status(layer) is None for layer in range(self.geometry.layers))

    def missing(self, left: int) -> int:
        """How many entries are not here when P counts `left`; its count misses a lost message."""
        return left or int(not self.all_local)

    def commit(self, whole: bool) -> None:
        """P reported success: on partial KV, or with the `whole` KV here."""
        self.committed = True
        self.stats.started_at = time.monotonic()
        if whole:
            self.mask.fill_(LOCAL)
        share = (self.mask == LOCAL).float().mean().item()
        self.stats.local_share_at_start = share
        counts.start_remote.add(1.0 - share)
        if self.started is not None:
            counts.bytes["proactive"] += self.started.proactive_bytes
            counts.bytes["metadata"] += self.started.metadata_bytes
            self.stats.bytes_proactive = self.started.proactive_bytes
            self.stats.bytes_metadata = self.started.metadata_bytes
            self.stats.prefill_s = self.started.prefill_s
            self.left = self.started.left
        if not self.left:
            self.stats.steps_until_local = 0

    @property
    def residual_blocks(self) -> int:
        """What is left, as blocks (l, m), rounded up."""
        blocks = min(self.config.blocks_per_layer, self.prompt_len)
        return math.ceil(self.left * blocks / (self.prompt_len * self.geometry.kv_heads))

    def begin_step(self) -> None:
        """A decode step picks the entries of its first sparse layer."""
        self.stats.steps += 1
        if self.config.trace:
            self.stats.trace.append([time.monotonic(), 0.0, 0, 0])

    def fetched(self, seconds: float, size: int) -> None:
        """A layer of this step waited so long for bytes that it had asked P for."""
        self.stats.fetches += 1
        self.stats.fetch_wait_s += seconds
        if self.stats.trace:
            self.stats.trace[-1][1] += seconds
            self.stats.trace[-1][2] += size

    def credit_bytes(self, share: int) -> int:
        """Bytes that P may have in flight in this step; 0: none.

        With credit `adaptive` P sends what fits between the fetches, and `share` is only what the
        arena has for a room.
        """
        config, g = self.config, self.geometry
        if config.mode != "smartgen" or not config.speculative_ratio or not self.machine.may_grant:
            return 0
        if config.credit == "fixed":
            share = math.ceil(config.speculative_ratio * self.prompt_len * g.token_bytes)
        # Whole tokens: a smaller range holds nothing, and pieces must keep the dtype's alignment.
        row = g.kv_heads * g.entry_bytes
        return min(max(1, share // row) * row, self.left * g.entry_bytes)

    def place(
        self, portion: Portion, piece: Tensor, left: int, keys: list[Tensor], values: list[Tensor]
    ) -> None:
        """Put a portion of the residual into the pool and count it as held.

        piece: its bytes, uint8, laid out as in `messages.Filled`. keys, values: pool buffers
        [slots, kv_heads, head_dim], one a layer. left: entries that are still on P. Raises
        ValueError, and then has placed nothing, when the codes are not of this prompt.
        """
        g = self.geometry
        self._check(portion, piece.numel())
        typed = piece[: portion.count(g.kv_heads) * g.entry_bytes].view(g.dtype)
        count = portion.tokens.numel()
        whole = typed[: count * g.kv_heads * 2 * g.head_dim].view(2, count, g.kv_heads, g.head_dim)
        rest = typed[whole.numel() :].view(-1, 2, g.head_dim)
        run_keys, run_values, run = words(whole[0]), words(whole[1]), words(rest)
        slots = self.slots.numpy()
        code = portion.entries // g.kv_heads
        heads = (portion.entries % g.kv_heads).numpy()
        tokens, singles = ((c % self.prompt_len).numpy() for c in (portion.tokens, code))
        # What is held is said behind the loops, by a thread that has the interpreter: a reader then
        # finds the bytes that a mark stands for.
        for layer, start, stop in _runs(portion.tokens // self.prompt_len):
            part, held = slice(start, stop), self.held_of(layer).numpy()
            pool = words(keys[layer]), words(values[layer])
            place_tokens(run_keys[part], run_values[part], tokens[part], slots, *pool)
            held[:, tokens[part]] = LOCAL
        for layer, start, stop in _runs(code // self.prompt_len):
            part, held = slice(start, stop), self.held_of(layer).numpy()
            pool = words(keys[layer]), words(values[layer])
            place_singles(run[part], singles[part], heads[part], slots, *pool)
            held[heads[part], singles[part]] = LOCAL
        size = portion.count(g.kv_heads) * g.entry_bytes
        self.stats.bytes_speculative += size
        counts.bytes["speculative"] += size
        counts.requests["speculative"] += 1
        if self.stats.trace:
            self.stats.trace[-1][3] += size
        self.left = left
        if not left:
            self.stats.steps_until_local = self.stats.steps

    def held_of(self, layer: int) -> Tensor:
        """`held` of a sparse layer: int8 [kv_heads, prompt_len], the same memory."""
        return self.held[self.geometry.sparse_layers.index(layer)]

    def _check(self, portion: Portion, length: int) -> None:
        """The codes come from the wire: each must name an entry of a sparse layer here."""
        heads = self.geometry.kv_heads
        size = portion.count(heads) * self.geometry.entry_bytes
        if size > length:
            raise ValueError(f"{length} bytes do not hold the {size} bytes of the portion")
        for codes, step in ((portion.tokens, 1), (portion.entries, heads)):
            if not codes.numel():
                continue
            layers = codes // (self.prompt_len * step)
            if int(codes.min()) < 0 or bool((layers.diff() < 0).any()):
                raise ValueError("codes of entries are negative or out of order")
            foreign = set(layers.unique_consecutive().tolist()) - set(self.geometry.sparse_layers)
            if foreign:
                raise ValueError(f"layers {sorted(foreign)} are never filled in")

    def pushed(self) -> Tensor:
        """int8 [sparse_layers, prompt_len]: 1 where P's proactive push brought the token."""
        return (self.mask[list(self.geometry.sparse_layers)] == LOCAL).to(torch.int8)

    def record(self, sparse: int, positions: Tensor) -> None:
        """Count what a step selects; positions int64 [kv_heads, k], -1 padded at the end."""
        if self.counts is None:
            return
        chosen = positions >= 0
        self.counts[sparse].scatter_add_(1, positions.clamp(min=0), chosen.to(torch.int32))

    def status(self, layer: int) -> Tensor | None:
        """int8 [kv_heads, prompt_len] status of every entry, or None when all are local."""
        if self.layer_is_local[layer]:
            return None
        status = self.mask[layer].expand(self.geometry.kv_heads, -1)
        if layer in self.geometry.sparse_layers:  # of a dense layer nothing is ever fetched
            status = torch.minimum(status, self.held_of(layer))
        if bool((status == LOCAL).all()):
            self.layer_is_local[layer] = True
            return None
        return status

    def compare(
        self, keys: list[Tensor], values: list[Tensor]
    ) -> tuple[int, list[tuple[int, int]]]:
        """Compare every stretch that is here whole with P's checksums.

        keys, values: pool buffers [slots, kv_heads, head_dim], one a layer. Returns how many were
        compared, and layer and first token of those that differ; none without checksums.
        """
        if self.started is None or not self.started.checksums:
            return 0, []
        layers = self.geometry.layers
        theirs = np.frombuffer(self.started.checksums, np.uint32).reshape(layers, -1)
        checked, wrong = 0, []
        for layer in range(layers):
            status = self.status(layer)
            here = np.ones(theirs.shape[1], np.bool_)
            if status is not None:
                here = whole_stretches((status == LOCAL).all(0))
            mine = layer_checksums(keys[layer][self.slots], values[layer][self.slots])
            checked += int(here.sum())
            found = np.flatnonzero(here & (mine != theirs[layer])).tolist()
            wrong += [(layer, stretch * STRETCH) for stretch in found]
        return checked, wrong

    def write_recording(self) -> None:
        """Write what the request has selected, if it asked for that; a lost one is only logged."""
        if self.counts is None:
            return
        try:
            recordings.write(
                self.config.record,
                counts=self.counts,
                pushed=self.pushed().numpy(),
                steps=self.stats.steps,
                rid=self.rid,
                prefill_s=self.stats.prefill_s,
                selector=self.config.selector,
                ratio=self.config.ratio,
            )
        except (OSError, ValueError) as error:
            logger.warning("recording %s is lost: %s", self.config.record, error)

    def fail(self, cause: str) -> None:
        """Remember the first cause; the scheduler hook ends the request with it."""
        self.machine.failed(cause)


def _runs(layers: Tensor) -> list[tuple[int, int, int]]:
    """(layer, start, stop) of the runs of equal values in ascending int64 [n]."""
    found, counts = layers.unique_consecutive(return_counts=True)
    stops = counts.cumsum(0).tolist()
    return list(zip(found.tolist(), [0, *stops][: len(stops)], stops, strict=True))
