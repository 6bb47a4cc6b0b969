"""Control messages between P and D: msgspec structs over SGLang's own sockets.

On the wire a message is three frames: TAG, the protocol version, and a msgpack payload. Two of them
(Registration, OpenRoom) travel as one extra frame of SGLang's registration and metadata messages,
so that they cannot be separated from them. Every message about a request carries room and
generation.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

TAG = b"SMARTGEN"
VERSION = 3
ALIVE_ROOMS = 256


class MessageError(ValueError):
    """A message that is malformed or of another protocol version."""


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """Where a peer listens for control messages."""

    host: str
    port: int


class Registration(msgspec.Struct, frozen=True, tag="registration"):
    """D to P, once a P rank: what P must know to write into D. All addresses are D's.

    `mask` is int8 [layers, mask_rows, mask_width]; `metadata` holds one address per sparse layer of
    a pool [slots, kv_heads, metadata_width]; fetches land in `arena`, speculative bytes in `fill`;
    `scratch` are 64 bytes that anyone may overwrite; `epoch` differs from one process to the next,
    even when session and addresses come back.
    """

    version: int
    session: str
    epoch: int
    fingerprint: str
    layers: int
    kv_row_bytes: int
    mask: int
    mask_rows: int
    mask_width: int
    metadata: list[int]
    metadata_row_bytes: int
    arena: int
    arena_bytes: int
    fill: int
    fill_bytes: int
    scratch: int
    tp_size: int


class OpenRoom(msgspec.Struct, frozen=True, tag="open"):
    """D to P, with a request's slots: row and generation of its mask, and what to push when."""

    version: int
    room: int
    generation: int
    row: int
    prompt_len: int
    blocks_per_layer: int
    proactive_blocks: int | None  # None: P computes K_r from its speed and the network's
    order: str
    k: int  # entries that a decode step uses of each KV head
    recording: str  # order `oracle`: name of the recorded selections of this very prompt
    metadata: bool  # False: every entry is used, so no selector runs and none is sent
    keep: bool  # False: P drops the entry when the push is done (full, proactive_only)
    verify: bool = False  # Started is to bring checksums


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """P to D after a Registration was accepted: the P that listens there speaks SmartGen.

    `serve`: where to send Fetch, Grant and Release from now on; None: there too. A second Hello
    with another one: what was asked at the first is lost. `epoch` differs from one process to the
    next, even at the same address: with another one, the process before has ended.
    """

    host: str
    port: int
    serve: Endpoint | None = None
    epoch: int = 0


class Started(msgspec.Struct, frozen=True, tag="started"):
    """P to D, before SGLang's Success: the room starts on partial KV; bytes of the pushes.

    `prefill_s` is P's compute from the first to the last layer, `left` the entries not on D yet,
    `epoch` that of the P process (see Hello), `checksums` uint32 [layers, stretches] of the
    prompt's KV where they were asked for.
    """

    room: int
    generation: int
    proactive_bytes: int
    metadata_bytes: int
    prefill_s: float
    left: int
    epoch: int = 0
    checksums: bytes = b""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """P to D, before SGLang's Failed status, which carries no reason: why the room failed."""

    room: int
    generation: int
    cause: str


class FetchItem(msgspec.Struct, frozen=True, array_like=True):
    """The entries of one request: int32 token positions per KV head, written to one arena range.

    Rows land head after head, `[n, 2, head_dim]` with K and V of an entry side by side.
    """

    room: int
    generation: int
    arena_offset: int
    positions: list[bytes]


class Fetch(msgspec.Struct, frozen=True, tag="fetch"):
    """D to P: one message a peer and layer for the whole batch."""

    sequence: int
    session: str
    reply: Endpoint
    layer: int
    items: list[FetchItem]


class FetchDone(msgspec.Struct, frozen=True, tag="fetched"):
    """P to D: every item of `sequence` has landed, but for `failures` (room, cause)."""

    sequence: int
    failures: list[tuple[int, str]]


class GrantItem(msgspec.Struct, frozen=True, array_like=True):
    """Leave to write `length` bytes of one room's residual to D's arena, from `arena_offset` on."""

    room: int
    generation: int
    arena_offset: int
    length: int


class Grant(msgspec.Struct, frozen=True, tag="grant"):
    """D to P at the start of a decode step: the credit of speculative fill, a range a room.

    paced: send only what fits between D's fetches; else at once, behind the fetches that wait.
    """

    session: str
    reply: Endpoint
    paced: bool
    items: list[GrantItem]


class Filled(msgspec.Struct, frozen=True, tag="filled"):
    """P to D: `length` bytes at `arena_offset` of a grant hold these entries of the prompt.

    tokens: int32 codes `layer * prompt_len + token`, layers ascending; the bytes begin with their K
    rows, then their V rows. entries: int32 codes `(layer * prompt_len + token) * kv_heads + head`,
    layers ascending; their K and V follow side by side, `[n, 2, head_dim]`. `left`: entries that
    are still to come. `failure`: nothing more will come, and what was granted may still be written
    to.
    """

    room: int
    generation: int
    arena_offset: int
    length: int
    tokens: bytes
    entries: bytes
    left: int
    failure: str | None = None


class Release(msgspec.Struct, frozen=True, tag="release"):
    """D to P: this generation is over; nothing may be written for it after the answer."""

    room: int
    generation: int
    session: str
    reply: Endpoint


class Released(msgspec.Struct, frozen=True, tag="released"):
    """P to D: the store entry is gone and no write of this generation can land any more."""

    room: int
    generation: int


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """D to P every few seconds: these generations are open, at most `ALIVE_ROOMS` a message.

    P's leave to write for a generation, and to keep its store entry, is a lease that this renews.
    `epoch` as in D's Registration.
    """

    session: str
    epoch: int
    rooms: list[tuple[int, int]]


Message: TypeAlias = (
    Registration
    | OpenRoom
    | Hello
    | Started
    | Failed
    | Fetch
    | FetchDone
    | Grant
    | Filled
    | Release
    | Released
    | Alive
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def pack(message: Message) -> bytes:
    """The payload frame of a message."""
    return _encoder.encode(message)


def unpack(payload: bytes) -> Message:
    """The message in a payload frame. Raises MessageError when it is malformed."""
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise MessageError(f"malformed SmartGen message of {len(payload)} bytes: {error}") from None


def to_frames(message: Message) -> list[bytes]:
    """The frames of a message that travels on its own."""
    return [TAG, str(VERSION).encode(), pack(message)]


def from_frames(frames: list[bytes]) -> Message:
    """The message in frames that start with TAG. Raises MessageError."""
    if len(frames) != 3 or frames[0] != TAG:
        raise MessageError(f"SmartGen message has {len(frames)} frames; expected 3")
    if frames[1] != str(VERSION).encode():
        raise MessageError(
            f"SmartGen protocol version {frames[1][:16]!r}; this side speaks {VERSION}"
        )
    return unpack(frames[2])
