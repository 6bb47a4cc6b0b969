"""Control messages between P and D: msgspec structs over SGLang's own sockets.

On the wire a message is three frames: TAG, the protocol version, and a msgpack payload. Two of them
(Registration, OpenRoom) travel as one extra frame of SGLang's registration and metadata messages,
so that they cannot be separated from them. Where a token is set, one more frame seals it (seal.py).
Every message about a request carries room and generation. What a field may hold is checked while a
message is read, so nothing else gets further; what depends on a peer's memory is checked where it
is used.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from sglang_smartgen.transfer.rails.reach import Card
from sglang_smartgen.transfer.seal import Sealer, SealError, digest

TAG = b"SMARTGEN"
VERSION = 3
ALIVE_ROOMS = 256

MAX_MESSAGE_BYTES = 256 << 20
"""A Fetch of a whole batch is the largest; it stays far below."""
MAX_ITEMS = 4096
"""Rooms in one message: more than a decode batch has."""
MAX_LAYERS = MAX_HEADS = 4096
MAX_TEXT = 16384
MAX_SIZE = 1 << 40
"""Of a count or a number of bytes; products of three still fit a 64-bit address or are refused."""

Number = Annotated[int, Meta(ge=0)]
"""Room, generation or sequence."""
Address = Annotated[int, Meta(ge=0)]
"""Where a peer's memory is, below 2**64."""
Size = Annotated[int, Meta(ge=0, le=MAX_SIZE)]
Positive = Annotated[int, Meta(ge=1, le=MAX_SIZE)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Layers = Annotated[int, Meta(ge=1, le=MAX_LAYERS)]


class MessageError(ValueError):
    """A message that is malformed or of another protocol version."""


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """Where a peer listens for control messages."""

    host: Annotated[str, Meta(max_length=255)]
    port: Annotated[int, Meta(ge=0, le=65535)]


class Registration(msgspec.Struct, frozen=True, tag="registration"):
    """D to P, once a P rank: what P must know to write into D. All addresses are D's.

    `mask` is int8 [layers, mask_rows, mask_width]; `metadata` holds one address per sparse layer of
    a pool [slots, kv_heads, metadata_width]; fetches land in `arena`, speculative bytes in `fill`;
    `scratch` are 64 bytes that anyone may overwrite; `epoch` differs from one process to the next,
    even when session and addresses come back. `rails`: D's other ways in; None: `session` alone.
    """

    version: Size
    session: Text
    epoch: Number
    fingerprint: Text
    layers: Layers
    kv_row_bytes: Size
    mask: Address
    mask_rows: Size
    mask_width: Size
    metadata: Annotated[list[Address], Meta(max_length=MAX_LAYERS)]
    metadata_row_bytes: Size
    arena: Address
    arena_bytes: Size
    fill: Address
    fill_bytes: Size
    scratch: Address
    tp_size: Positive
    rails: Card | None = None


class OpenRoom(msgspec.Struct, frozen=True, tag="open"):
    """D to P, with a request's slots: row and generation of its mask, and what to push when."""

    version: Size
    room: Number
    generation: Number
    row: Size
    prompt_len: Positive
    blocks_per_layer: Positive
    proactive_blocks: Size | None  # None: P computes K_r from its speed and the network's
    order: Text
    k: Positive  # entries that a decode step uses of each KV head
    recording: Text  # order `oracle`: name of the recorded selections of this very prompt
    metadata: bool  # False: every entry is used, so no selector runs and none is sent
    keep: bool  # False: P drops the entry when the push is done (full, proactive_only)
    verify: bool = False  # Started is to bring checksums


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """P to D after a Registration was accepted: the P that listens there speaks SmartGen.

    `serve`: where to send Fetch, Grant and Release from now on; None: there too. A second Hello
    with another one: what was asked at the first is lost. `epoch` differs from one process to the
    next, even at the same address: with another one, the process before has ended.
    """

    host: Annotated[str, Meta(max_length=255)]
    port: Annotated[int, Meta(ge=0, le=65535)]
    serve: Endpoint | None = None
    epoch: Number = 0


class Started(msgspec.Struct, frozen=True, tag="started"):
    """P to D, before SGLang's Success: the room starts on partial KV; bytes of the pushes.

    `prefill_s` is P's compute from the first to the last layer, `left` the entries not on D yet,
    `epoch` that of the P process (see Hello), `checksums` uint32 [layers, stretches] of the
    prompt's KV where they were asked for.
    """

    room: Number
    generation: Number
    proactive_bytes: Size
    metadata_bytes: Size
    prefill_s: Annotated[float, Meta(ge=0)]
    left: Size
    epoch: Number = 0
    checksums: bytes = b""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """P to D, before SGLang's Failed status, which carries no reason: why the room failed."""

    room: Number
    generation: Number
    cause: Text


class FetchItem(msgspec.Struct, frozen=True, array_like=True):
    """The entries of one request: int32 token positions per KV head, written to one arena range.

    Rows land head after head, `[n, 2, head_dim]` with K and V of an entry side by side.
    """

    room: Number
    generation: Number
    arena_offset: Size
    positions: Annotated[list[bytes], Meta(max_length=MAX_HEADS)]


class Fetch(msgspec.Struct, frozen=True, tag="fetch"):
    """D to P: one message a peer and layer for the whole batch."""

    sequence: Number
    session: Text
    reply: Endpoint
    layer: Annotated[int, Meta(ge=0, lt=MAX_LAYERS)]
    items: Annotated[list[FetchItem], Meta(max_length=MAX_ITEMS)]


class FetchDone(msgspec.Struct, frozen=True, tag="fetched"):
    """P to D: every item of `sequence` has landed, but for `failures` (room, cause).

    `late`: a copy of those bytes may land again before the rooms are released.
    """

    sequence: Number
    failures: Annotated[list[tuple[Number, Text]], Meta(max_length=MAX_ITEMS)]
    late: bool = False


class GrantItem(msgspec.Struct, frozen=True, array_like=True):
    """Leave to write `length` bytes of one room's residual to D's arena, from `arena_offset` on."""

    room: Number
    generation: Number
    arena_offset: Size
    length: Size


class Grant(msgspec.Struct, frozen=True, tag="grant"):
    """D to P at the start of a decode step: the credit of speculative fill, a range a room.

    paced: send only what fits between D's fetches; else at once, behind the fetches that wait.
    """

    session: Text
    reply: Endpoint
    paced: bool
    items: Annotated[list[GrantItem], Meta(max_length=MAX_ITEMS)]


class Filled(msgspec.Struct, frozen=True, tag="filled"):
    """P to D: `length` bytes at `arena_offset` of a grant hold these entries of the prompt.

    tokens: int32 codes `layer * prompt_len + token`, layers ascending; the bytes begin with their K
    rows, then their V rows. entries: int32 codes `(layer * prompt_len + token) * kv_heads + head`,
    layers ascending; their K and V follow side by side, `[n, 2, head_dim]`. `left`: entries that
    are still to come. `failure`: nothing more will come, and what was granted may still be written
    to. `late`: a copy of these bytes may land again before the room is released.
    """

    room: Number
    generation: Number
    arena_offset: Size
    length: Size
    tokens: bytes
    entries: bytes
    left: Size
    failure: Text | None = None
    late: bool = False


class Release(msgspec.Struct, frozen=True, tag="release"):
    """D to P: this generation is over; nothing may be written for it after the answer."""

    room: Number
    generation: Number
    session: Text
    reply: Endpoint


class Released(msgspec.Struct, frozen=True, tag="released"):
    """P to D: the store entry is gone and no write of this generation can land any more."""

    room: Number
    generation: Number


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """D to P every few seconds: these generations are open, at most `ALIVE_ROOMS` a message.

    P's leave to write for a generation, and to keep its store entry, is a lease that this renews.
    `epoch` as in D's Registration.
    """

    session: Text
    epoch: Number
    rooms: Annotated[list[tuple[Number, Number]], Meta(max_length=ALIVE_ROOMS)]


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
    """The message in a payload frame. Raises MessageError when it is malformed or too large."""
    if len(payload) > MAX_MESSAGE_BYTES:
        raise MessageError(
            f"SmartGen message of {len(payload)} bytes; allowed are {MAX_MESSAGE_BYTES}"
        )
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise MessageError(f"malformed SmartGen message of {len(payload)} bytes: {error}") from None


def to_frames(
    message: Message, sealer: Sealer | None = None, to: Endpoint | None = None
) -> list[bytes]:
    """The frames of a message that travels on its own; with `sealer` sealed for the receiver."""
    payload = pack(message)
    frames = [TAG, str(VERSION).encode(), payload]
    return frames if sealer is None else [*frames, sealer.seal(payload, _where(to))]


def from_frames(
    frames: list[bytes], sealer: Sealer | None = None, at: Endpoint | None = None
) -> Message:
    """The message in frames that start with TAG. Raises MessageError.

    at: the address of this side that its peers know. With `sealer` a message must be sealed for
    it; without one a sealed message is refused, since its answer would be.
    """
    expected = (3,) if sealer is None else (3, 4)  # of 3 it is said that the seal is missing
    if len(frames) not in expected or frames[0] != TAG:
        raise MessageError(f"SmartGen message has {len(frames)} frames; expected {expected[-1]}")
    if frames[1] != str(VERSION).encode():
        raise MessageError(
            f"SmartGen protocol version {frames[1][:16]!r}; this side speaks {VERSION}"
        )
    if sealer is not None:
        _check(sealer, frames[3:], frames[2], _where(at))
    return unpack(frames[2])


def seal_behind(frames: list[bytes], message: Message | None, sealer: Sealer | None) -> list[bytes]:
    """SGLang's frames with a message (maybe none) behind them, and its seal over all of them."""
    payload = b"" if message is None else pack(message)
    if sealer is None:
        return [*frames, payload] if payload else frames
    return [*frames, payload, sealer.seal(payload, digest(frames))]


def unseal_behind(frames: list[bytes], count: int, sealer: Sealer | None) -> Message | None:
    """The message behind SGLang's `count` frames; None where there is none. Raises MessageError."""
    payload = frames[count] if len(frames) > count else b""
    if sealer is not None:
        _check(sealer, frames[count + 1 :], payload, digest(frames[:count]))
    return unpack(payload) if payload else None


def _where(endpoint: Endpoint | None) -> bytes:
    return b"" if endpoint is None else f"{endpoint.host}:{endpoint.port}".encode()


def _check(sealer: Sealer, seals: list[bytes], payload: bytes, where: bytes) -> None:
    try:
        sealer.check(seals[0] if len(seals) == 1 else b"", payload, where)
    except SealError as error:
        raise MessageError(str(error)) from None
