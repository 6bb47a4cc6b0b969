"""What SmartGen reads of the frames that SGLang's sockets receive, checked before anything uses it.

D's Registration is one frame behind SGLang's registration, its OpenRoom one behind SGLang's
metadata message. Addresses, sizes and slots come from the wire: whoever can reach the port can send
any. Everything here either returns what is in range or raises MessageError, and changes nothing.
Imports no SGLang, so that a fuzzer can run it.
"""

from __future__ import annotations

from typing import NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from sglang_smartgen.config import Order
from sglang_smartgen.transfer.messages import (
    TAG,
    VERSION,
    Endpoint,
    Message,
    MessageError,
    OpenRoom,
    Registration,
    from_frames,
    unseal_behind,
)
from sglang_smartgen.transfer.seal import Sealer

REGISTRATION_FRAMES = 20
METADATA_FRAMES = 10
ADDRESSES = 1 << 64
SCRATCH_BYTES = 64


class PeerFrames(NamedTuple):
    """A decode rank's registration: pool addresses of K and V by layer, and where it listens."""

    registration: Registration
    keys: list[int]
    values: list[int]
    endpoint: Endpoint


class RoomFrames(NamedTuple):
    """A room that D opened: the session of its rank, where it listens, and int64 slots."""

    message: OpenRoom
    session: str
    endpoint: Endpoint
    slots: npt.NDArray[np.int64]


def read_prefill(
    frames: list[bytes], sealer: Sealer | None = None, at: Endpoint | None = None
) -> Message | PeerFrames | RoomFrames | None:
    """What of a message to P is SmartGen's: a message of its own, or the part behind SGLang's.

    sealer, at: as in `messages.from_frames`; with a sealer the whole of SGLang's message is refused
    when it has no seal.
    None: nothing, or it is of another version of SmartGen (the peer then gets full transfers).
    Raises MessageError.
    """
    head = frames[0] if frames else b""
    if head == TAG:
        return from_frames(frames, sealer, at)
    if head == b"None":
        return _peer(frames, sealer)
    if head.isdigit():
        return _room(frames, sealer)
    return None


def read_decode(
    frames: list[bytes], sealer: Sealer | None = None, at: Endpoint | None = None
) -> Message | None:
    """The SmartGen message in frames to D, or None when they are SGLang's. Raises MessageError."""
    return from_frames(frames, sealer, at) if frames and frames[0] == TAG else None


def check_room(message: OpenRoom, registration: Registration) -> None:
    """Raises MessageError when the room's mask would not lie in its row of the peer's masks."""
    if message.row >= registration.mask_rows or message.prompt_len > registration.mask_width:
        raise MessageError(
            f"room {message.room}: row {message.row} with {message.prompt_len} tokens is outside "
            f"the masks of {registration.session}, {registration.mask_rows} rows of "
            f"{registration.mask_width}"
        )


def sender_of(frames: list[bytes]) -> tuple[int, Endpoint] | None:
    """Room and decode rank of a metadata message that was refused, where it says so."""
    try:
        if len(frames) >= METADATA_FRAMES and frames[0].isdigit() and len(frames[0]) <= 20:
            return int(frames[0]), _endpoint(frames)
    except MessageError:
        pass
    return None


def _peer(frames: list[bytes], sealer: Sealer | None) -> PeerFrames | None:
    registration = unseal_behind(frames, REGISTRATION_FRAMES, sealer)
    if not isinstance(registration, Registration) or registration.version != VERSION:
        return None
    r = registration
    if len(frames[4]) != 16 * r.layers:
        raise MessageError(
            f"decode session {r.session}: {len(frames[4])} bytes of pool addresses for "
            f"{r.layers} layers"
        )
    pointers = np.frombuffer(frames[4], dtype=np.uint64).tolist()
    if frames[3] != r.session.encode():
        raise MessageError(f"decode session {r.session} registers under another name")
    areas = {
        "mask": (r.mask, r.layers * r.mask_rows * r.mask_width),
        "arena": (r.arena, r.arena_bytes),
        "fill": (r.fill, r.fill_bytes),
        "scratch": (r.scratch, SCRATCH_BYTES),
    }
    for number, address in enumerate(r.metadata):
        areas[f"metadata {number}"] = (address, r.metadata_row_bytes)
    for number, address in enumerate(pointers):
        areas[f"pool {number}"] = (address, r.kv_row_bytes)
    for name, (address, length) in areas.items():
        if length and not 0 < address <= ADDRESSES - length:
            raise MessageError(
                f"decode session {r.session}: {length} bytes of {name} at {address:#x} are no "
                "memory of a process"
            )
    half = len(pointers) // 2
    return PeerFrames(r, pointers[:half], pointers[half:], _endpoint(frames))


def _room(frames: list[bytes], sealer: Sealer | None) -> RoomFrames | None:
    message = unseal_behind(frames, METADATA_FRAMES, sealer)
    if not isinstance(message, OpenRoom) or message.version != VERSION:
        return None
    m = message
    # A number of more than 20 digits is no 64-bit room.
    if len(frames[0]) > 20 or m.room != int(frames[0]) or len(frames[4]) != 4 * m.prompt_len:
        raise MessageError(f"room {m.room}: {len(frames[4]) // 4} slots do not fit its prompt")
    slots = np.frombuffer(frames[4], dtype=np.int32).astype(np.int64)
    if slots.min() < 0:
        raise MessageError(f"room {m.room}: slot {slots.min()} is negative")
    if m.blocks_per_layer > m.prompt_len or m.k > m.prompt_len:
        raise MessageError(
            f"room {m.room}: {m.blocks_per_layer} blocks a layer and {m.k} entries of a prompt of "
            f"{m.prompt_len} tokens"
        )
    if m.order not in get_args(Order):
        raise MessageError(f"room {m.room}: order is {m.order[:32]!r}, which is not known here")
    return RoomFrames(m, _text(frames[3]), _endpoint(frames), slots)


def _endpoint(frames: list[bytes]) -> Endpoint:
    host, port = _text(frames[1]), _text(frames[2])
    if not host or len(host) > 255 or not port.isdecimal() or len(port) > 5 or int(port) > 65535:
        raise MessageError(f"{host[:64]!r}:{port[:8]!r} is no address of a decode rank")
    return Endpoint(host, int(port))


def _text(frame: bytes) -> str:
    try:
        return frame.decode("ascii")
    except UnicodeDecodeError:
        raise MessageError(f"a name of {len(frame)} bytes is not ASCII") from None
