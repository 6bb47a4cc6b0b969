"""What P and D read from the wire: ranges are checked, and no message crashes, hangs or changes.

10,000 damaged messages go through every parser; each is either refused or is a message again.
"""

from __future__ import annotations

import random
import socket
import struct
import time
from collections.abc import Callable

import numpy as np
import pytest
from decode_bench import Bench as DecodeBench
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from prefill_bench import Bench as PrefillBench

from sglang_smartgen.engine.frames import (
    METADATA_FRAMES,
    REGISTRATION_FRAMES,
    PeerFrames,
    RoomFrames,
    check_room,
    read_decode,
    read_prefill,
    sender_of,
)
from sglang_smartgen.transfer.messages import (
    VERSION,
    Alive,
    Endpoint,
    Failed,
    Fetch,
    FetchDone,
    FetchItem,
    Filled,
    Grant,
    GrantItem,
    Hello,
    Message,
    MessageError,
    OpenRoom,
    Registration,
    Release,
    Released,
    Started,
    from_frames,
    pack,
    seal_behind,
    to_frames,
    unpack,
)
from sglang_smartgen.transfer.seal import Sealer
from sglang_smartgen.transfer.serve_channel import Channel, ChannelClosed, Drop, Forward

LAYERS, TOKENS, ROOM = 3, 12, 77
D_END = Endpoint("10.0.0.2", 4000)

REGISTRATION = Registration(
    version=VERSION,
    session="10.0.0.2:15000",
    epoch=5,
    fingerprint="hata",
    layers=LAYERS,
    kv_row_bytes=64,
    mask=1 << 20,
    mask_rows=8,
    mask_width=32,
    metadata=[2 << 20],
    metadata_row_bytes=16,
    arena=3 << 20,
    arena_bytes=4096,
    fill=4 << 20,
    fill_bytes=4096,
    scratch=5 << 20,
    tp_size=1,
)
OPEN = OpenRoom(
    version=VERSION,
    room=ROOM,
    generation=9,
    row=3,
    prompt_len=TOKENS,
    blocks_per_layer=4,
    proactive_blocks=None,
    order="observed",
    k=3,
    recording="",
    metadata=True,
    keep=True,
)
POINTERS = struct.pack(f"{2 * LAYERS}Q", *range(1 << 30, (1 << 30) + 2 * LAYERS))


def registration_frames(message: Message = REGISTRATION, pointers: bytes = POINTERS) -> list[bytes]:
    start = [b"None", b"10.0.0.2", b"4000", REGISTRATION.session.encode(), pointers]
    return [*start, *[b""] * (REGISTRATION_FRAMES - len(start)), pack(message)]


def room_frames(message: Message = OPEN, slots: bytes | None = None) -> list[bytes]:
    packed = np.arange(TOKENS, dtype=np.int32).tobytes() if slots is None else slots
    start = [str(ROOM).encode(), b"10.0.0.2", b"4000", b"10.0.0.2:15000", packed]
    return [*start, *[b""] * (METADATA_FRAMES - len(start)), pack(message)]


def refused(frames: list[bytes], part: str) -> None:
    with pytest.raises(MessageError) as caught:
        read_prefill(frames)
    assert part in str(caught.value) and len(str(caught.value)) < 300


# What is right.


def test_a_registration_and_a_room_are_read() -> None:
    peer = read_prefill(registration_frames())
    assert isinstance(peer, PeerFrames)
    assert peer.registration == REGISTRATION and peer.endpoint == D_END
    assert peer.keys == [1 << 30, (1 << 30) + 1, (1 << 30) + 2]
    assert peer.values == [(1 << 30) + 3, (1 << 30) + 4, (1 << 30) + 5]
    room = read_prefill(room_frames())
    assert isinstance(room, RoomFrames)
    assert (room.message, room.session, room.endpoint) == (OPEN, "10.0.0.2:15000", D_END)
    assert room.slots.tolist() == list(range(TOKENS)) and room.slots.dtype == np.int64
    check_room(room.message, peer.registration)


def test_what_is_sglangs_is_left_alone() -> None:
    for frames in (
        [],
        [b"ABORT", b"1"],
        registration_frames()[:REGISTRATION_FRAMES],
        room_frames()[:METADATA_FRAMES],
        registration_frames(structs.replace(REGISTRATION, version=VERSION + 1)),
        room_frames(structs.replace(OPEN, version=VERSION + 1)),
    ):
        assert read_prefill(frames) is None
    assert read_decode([]) is None and read_decode([b"77", b"4", b"0"]) is None
    assert read_decode(to_frames(Released(1, 2))) == Released(1, 2)


def test_a_selector_without_metadata_has_no_address() -> None:
    empty = structs.replace(REGISTRATION, metadata=[0], metadata_row_bytes=0)
    assert isinstance(read_prefill(registration_frames(empty)), PeerFrames)


# With a token.

SEALER = Sealer(b"a token of a cluster")


def test_sealed_messages_are_read_once() -> None:
    frames = seal_behind(registration_frames()[:-1], REGISTRATION, SEALER)
    assert isinstance(read_prefill(frames, SEALER, D_END), PeerFrames)
    with pytest.raises(MessageError, match="replay"):
        read_prefill(frames, SEALER, D_END)
    frames = seal_behind(room_frames()[:-1], OPEN, SEALER)
    assert isinstance(read_prefill(frames, SEALER, D_END), RoomFrames)
    # A prompt that is too short for SmartGen proves where it is from all the same.
    assert read_prefill(seal_behind(room_frames()[:-1], None, SEALER), SEALER, D_END) is None
    assert read_prefill([b"ABORT", b"7"], SEALER, D_END) is None


@pytest.mark.parametrize("make", [registration_frames, room_frames])
def test_without_a_seal_not_even_sglangs_part_is_taken(make: Callable[[], list[bytes]]) -> None:
    whole = make()
    for frames in (whole, whole[:-1], [*whole, b""], [*whole, bytes(64)], whole[:3]):
        with pytest.raises(MessageError, match=r"without a seal|seal is wrong"):
            read_prefill(frames, SEALER, D_END)
        if frames[0] == b"None" or len(frames) < METADATA_FRAMES:
            assert sender_of(frames) is None
        else:
            assert sender_of(frames) == (ROOM, D_END)
    assert sender_of([b"7" * 21, *whole[1:]]) is None
    assert sender_of([b"7", b"\xff", *whole[2:]]) is None


# Ranges.


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"mask": 0}, "of mask at 0x0"),
        ({"mask": 2**64 - 100}, "of mask at"),
        ({"mask_width": 2**40, "mask_rows": 2**40}, "of mask at"),
        ({"arena": 2**64 - 4095}, "of arena at"),
        ({"fill": 0}, "of fill at"),
        ({"scratch": 2**64 - 63}, "of scratch at"),
        ({"metadata": [1 << 20, 2**64 - 1]}, "of metadata 1 at"),
        ({"kv_row_bytes": 2**40, "layers": 4}, "pool addresses for 4 layers"),
        ({"session": "10.0.0.3:15000"}, "under another name"),
    ],
)
def test_addresses_that_no_process_has(changes: dict[str, object], part: str) -> None:
    refused(registration_frames(structs.replace(REGISTRATION, **changes)), part)


@pytest.mark.parametrize("pointers", [b"", POINTERS[:-1], POINTERS[8:], POINTERS + b"\1"])
def test_pool_addresses_that_do_not_fit(pointers: bytes) -> None:
    refused(registration_frames(pointers=pointers), "pool addresses")


def test_pool_addresses_out_of_range() -> None:
    for bad in (0, 2**64 - 1):
        pointers = struct.pack(f"{2 * LAYERS}Q", *[1 << 30] * 5, bad)
        refused(registration_frames(pointers=pointers), "of pool 5 at")


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"room": ROOM + 1}, "do not fit its prompt"),
        ({"prompt_len": TOKENS + 1}, "do not fit its prompt"),
        ({"blocks_per_layer": TOKENS + 1}, "blocks a layer"),
        ({"k": TOKENS + 1}, "entries of a prompt"),
        ({"order": "best"}, "order is 'best'"),
    ],
)
def test_rooms_that_do_not_fit(changes: dict[str, object], part: str) -> None:
    refused(room_frames(structs.replace(OPEN, **changes)), part)


def test_slots_that_do_not_exist() -> None:
    slots = np.arange(TOKENS, dtype=np.int32)
    slots[4] = -2
    refused(room_frames(slots=slots.tobytes()), "slot -2 is negative")


@pytest.mark.parametrize("changes", [{"row": 8}, {"row": 2**40}, {"prompt_len": 33}])
def test_a_mask_outside_its_row(changes: dict[str, int]) -> None:
    with pytest.raises(MessageError, match="outside the masks"):
        check_room(structs.replace(OPEN, **changes), REGISTRATION)


@pytest.mark.parametrize(
    ("at", "frame"),
    [(1, b""), (1, b"h" * 256), (1, b"\xff"), (2, b""), (2, b"x"), (2, b"-1"), (2, b"65536")],
)
def test_a_decode_rank_that_listens_nowhere(at: int, frame: bytes) -> None:
    frames = registration_frames()
    frames[at] = frame
    refused(frames, "" if frame != b"\xff" else "not ASCII")


def test_digits_that_are_no_room() -> None:
    frames = room_frames()
    frames[0] = b"7" * 100_000
    refused(frames, "do not fit its prompt")


# Fuzz. A seed makes FUZZED messages, so that hypothesis' own work is not what takes the time.

EXAMPLES, FUZZED = 100, 100
SAMPLES: list[Message] = [
    REGISTRATION,
    OPEN,
    Hello("p", 1, Endpoint("p", 2)),
    Started(ROOM, 9, 100, 10, 0.5, 7),
    Failed(ROOM, 9, "gone"),
    Fetch(3, "d", D_END, 2, [FetchItem(ROOM, 9, 64, [b"\1\0\0\0", b""])]),
    FetchDone(3, [(ROOM, "gone")]),
    Grant("d", D_END, True, [GrantItem(ROOM, 9, 0, 64)]),
    Filled(ROOM, 9, 0, 64, b"\1\0\0\0", b"\2\0\0\0", 3),
    Release(ROOM, 9, "d", D_END),
    Released(ROOM, 9),
    Alive("d", 7, [(ROOM, 9)]),
]
assert {type(sample) for sample in SAMPLES} == set(Message.__args__)
WHOLE = [*(to_frames(message) for message in SAMPLES), registration_frames(), room_frames()]


def damaged(chance: random.Random) -> list[bytes]:
    """Frames of a message with something wrong in one of them, or in their number."""
    frames = list(chance.choice(WHOLE))
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(frames)) if chance.random() < 0.5 else len(frames) - 1
        frame = bytearray(frames[at])
        match chance.randrange(7):
            case 0 if frame:
                frame[chance.randrange(len(frame))] = chance.randrange(256)
            case 1:
                del frame[chance.randint(0, len(frame)) :]
            case 2:
                frame += chance.randbytes(chance.randrange(20))
            case 3:
                frame[:] = chance.randbytes(chance.randrange(60))
            case 4 if frame:
                start = chance.randrange(len(frame))
                frame[start : start + 9] = b"\xcf" + chance.randbytes(8)  # a 64-bit number
            case 5 if len(frames) > 1:
                del frames[at]
                continue
            case 6:
                frames.insert(at, chance.choice(frames))
                continue
        frames[at] = bytes(frame)
    return frames


def each(action: Callable[[list[bytes]], object]) -> Callable[[], None]:
    """A test that calls `action` with EXAMPLES x FUZZED damaged messages in all."""

    @settings(deadline=None, max_examples=EXAMPLES, database=None)
    @given(st.integers(0, 2**32))
    def run(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(FUZZED):
            action(damaged(chance))

    return run


def test_no_parser_crashes_or_hangs_on_ten_thousand_messages() -> None:
    slowest = 0.0

    def parse(frames: list[bytes]) -> None:
        nonlocal slowest
        before = [bytes(frame) for frame in frames]
        for read in (read_prefill, read_decode, from_frames, lambda f: unpack(f[-1])):
            began = time.process_time()
            try:
                found = read(frames)
                assert found is None or isinstance(
                    found, (*map(type, SAMPLES), PeerFrames, RoomFrames)
                )
            except MessageError as error:
                assert len(str(error)) < 400
            slowest = max(slowest, time.process_time() - began)
        assert frames == before

    each(parse)()
    assert slowest < 1.0


def test_with_a_token_none_is_believed_and_nothing_is_remembered() -> None:
    sealer = Sealer(b"a token of a cluster")

    def parse(frames: list[bytes]) -> None:
        for read in (read_prefill, read_decode):
            try:
                found = read(frames, sealer, D_END)
            except MessageError:
                continue
            assert found is None and frames[0] != b"SMARTGEN"

    each(parse)()
    assert not sealer._senders


def test_no_message_about_rooms_that_are_not_there_changes_a_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole messages, about nobody: rooms, store, masks and memory stay as they are."""
    prefill, decode = PrefillBench(), DecodeBench(monkeypatch)
    decode.opened(1)
    before = decode.side.snapshot(), decode.side.masks.clone()
    store = prefill.side.snapshot()
    here = prefill.there.memory.bytes.clone()
    chance = random.Random(3)
    for _ in range(300):
        frames = damaged(chance) if chance.random() < 0.7 else to_frames(chance.choice(SAMPLES))
        try:
            to_p, to_d = read_prefill(frames), read_decode(frames)
        except MessageError:
            continue
        if isinstance(to_p, Fetch | Grant | Release | Alive):
            prefill.side.submit(to_p)
        if to_d is not None and not isinstance(to_d, Hello):
            decode.side.on_message(to_d)
    after = decode.side.snapshot(), decode.side.masks
    assert after[0] == before[0] and bool((after[1] == before[1]).all())
    prefill.side.server.close()
    now = prefill.side.snapshot()
    assert {**now, "fetches": 0} == {**store, "fetches": 0}
    assert bool((prefill.there.memory.bytes == here).all())


def test_the_line_to_the_store_server_reads_or_ends() -> None:
    whole = [Drop(ROOM, 9), Forward(SAMPLES[5])]
    for seed in range(200):
        chance = random.Random(seed)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            sender, receiver = Channel(ours), Channel(theirs)
            sender.send(chance.choice(whole))
            raw = bytearray(theirs.recv(1 << 16))
            for _ in range(chance.randint(1, 3)):
                raw[chance.randrange(len(raw))] = chance.randrange(256)
            ours.setblocking(True)
            ours.sendall(raw[: chance.randint(0, len(raw))])
            ours.shutdown(socket.SHUT_WR)
            with pytest.raises(ChannelClosed):
                for _ in range(3):
                    receiver.receive(0)
