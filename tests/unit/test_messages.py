"""Every message survives the wire, and nothing else on it is more than a MessageError."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from sglang_smartgen.transfer.messages import (
    MAX_HEADS,
    MAX_ITEMS,
    MAX_LAYERS,
    MAX_SIZE,
    MAX_TEXT,
    TAG,
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
    to_frames,
    unpack,
)

number = st.integers(0, 2**63 - 1)
size = st.integers(0, 2**40)
positive = st.integers(1, 2**40)
layers = st.integers(1, 4096)
address = st.integers(0, 2**64 - 1)  # a Mooncake address may be above 2**63
text = st.text(max_size=12)
endpoint = st.builds(Endpoint, text, st.integers(0, 65535))
item = st.builds(FetchItem, number, number, size, st.lists(st.binary(max_size=16), max_size=4))
grant = st.builds(GrantItem, number, number, size, size)
packed = st.binary(max_size=16)

BY_TYPE = {
    Registration: st.builds(
        Registration,
        version=size,
        session=text,
        epoch=number,
        fingerprint=text,
        layers=layers,
        kv_row_bytes=positive,
        mask=address,
        mask_rows=positive,
        mask_width=positive,
        metadata=st.lists(address, max_size=4),
        metadata_row_bytes=size,
        arena=address,
        arena_bytes=size,
        fill=address,
        fill_bytes=size,
        scratch=address,
        tp_size=positive,
    ),
    OpenRoom: st.builds(
        OpenRoom,
        version=size,
        room=number,
        generation=number,
        row=size,
        prompt_len=positive,
        blocks_per_layer=positive,
        proactive_blocks=st.none() | size,
        order=text,
        k=positive,
        recording=text,
        metadata=st.booleans(),
        keep=st.booleans(),
    ),
    Hello: st.builds(Hello, text, st.integers(0, 65535), epoch=number),
    Started: st.builds(Started, number, number, size, size, st.floats(0), size, number, packed),
    Failed: st.builds(Failed, number, number, text),
    Alive: st.builds(Alive, text, number, st.lists(st.tuples(number, number), max_size=3)),
    Fetch: st.builds(
        Fetch, number, text, endpoint, st.integers(0, 4095), st.lists(item, max_size=3)
    ),
    FetchDone: st.builds(FetchDone, number, st.lists(st.tuples(number, text), max_size=3)),
    Grant: st.builds(Grant, text, endpoint, st.booleans(), st.lists(grant, max_size=3)),
    Filled: st.builds(Filled, number, number, size, size, packed, packed, size, st.none() | text),
    Release: st.builds(Release, number, number, text, endpoint),
    Released: st.builds(Released, number, number),
}
messages = st.one_of(list(BY_TYPE.values()))
quick = settings(deadline=None, max_examples=30)

FETCH = Fetch(3, "d:1", Endpoint("d", 9), 5, [FetchItem(7, 1, 64, [b"\1\0\0\0", b""])])


def test_every_kind_of_message_is_generated_here() -> None:
    assert set(BY_TYPE) == set(Message.__args__)


@pytest.mark.parametrize("kind", BY_TYPE, ids=lambda kind: kind.__name__)
@quick
@given(data=st.data())
def test_round_trip(kind: type, data: st.DataObject) -> None:
    message = data.draw(BY_TYPE[kind])
    assert unpack(pack(message)) == message
    back = from_frames(to_frames(message))
    assert back == message and type(back) is kind


def test_the_version_is_a_frame_of_its_own_and_another_one_is_refused() -> None:
    frames = to_frames(FETCH)
    assert frames[0] == TAG and len(frames) == 3
    for other in (str(VERSION + 1).encode(), b"", b"0" + frames[1], b"\xff" * 100):
        with pytest.raises(MessageError, match="protocol version") as caught:
            from_frames([TAG, other, frames[2]])
        assert str(caught.value).endswith(f"this side speaks {VERSION}")
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_a_wrong_number_of_frames_is_refused(count: int) -> None:
    frames = [*to_frames(FETCH), b""][:count]
    with pytest.raises(MessageError, match=f"{count} frames"):
        from_frames(frames)


def test_frames_of_somebody_else_are_refused() -> None:
    with pytest.raises(MessageError):
        from_frames([b"SMARTGEM", *to_frames(FETCH)[1:]])


@quick
@given(messages)
def test_every_truncation_is_refused(message: Message) -> None:
    payload = pack(message)
    for stop in range(len(payload)):
        with pytest.raises(MessageError):
            unpack(payload[:stop])
    with pytest.raises(MessageError):
        unpack(payload + b"\0")


def survives(payload: bytes) -> None:
    """What is not an error is a message; any other exception fails the test."""
    try:
        assert type(unpack(payload)) in BY_TYPE
    except MessageError as error:
        assert f"{len(payload)} bytes" in str(error)


@quick
@given(st.binary(max_size=200))
@example(b"\x91" * 20_000)
def test_random_bytes(payload: bytes) -> None:
    survives(payload)


@quick
@given(messages, st.data())
def test_a_damaged_byte(message: Message, data: st.DataObject) -> None:
    payload = bytearray(pack(message))
    at = data.draw(st.integers(0, len(payload) - 1))
    payload[at] = data.draw(st.integers(0, 255))
    survives(bytes(payload))


def test_text_that_is_not_utf8() -> None:
    payload = pack(Hello("abc", 1)).replace(b"abc", b"\xff\xff\xff")
    with pytest.raises(MessageError):
        unpack(payload)


def test_deep_nesting_in_an_unknown_field() -> None:
    payload = b"\x82\xa4type\xa5hello\xa1x" + b"\x91" * 200_000 + b"\xc0"
    with pytest.raises(MessageError):
        unpack(payload)


def test_a_message_of_an_unknown_kind() -> None:
    with pytest.raises(MessageError, match="bytes"):
        unpack(pack(Hello("abc", 1)).replace(b"hello", b"hullo"))


REGISTRATION = Registration(
    version=VERSION,
    session="d:1",
    epoch=1,
    fingerprint="f",
    layers=3,
    kv_row_bytes=8,
    mask=64,
    mask_rows=2,
    mask_width=9,
    metadata=[64],
    metadata_row_bytes=4,
    arena=64,
    arena_bytes=4,
    fill=64,
    fill_bytes=4,
    scratch=64,
    tp_size=1,
)
HERE = Endpoint("d", 9)


@pytest.mark.parametrize(
    "message",
    [
        Released(-1, 0),
        Released(0, -1),
        Hello("h" * 256, 1),
        Hello("h", 65536),
        Hello("h", 1, Endpoint("h", -1)),
        Failed(1, 2, "x" * (MAX_TEXT + 1)),
        Started(1, 1, 1, 1, -0.5, 1),
        Started(1, 1, 1, 1, float("nan"), 1),
        Started(1, 1, 1, 1, 0.5, -1),
        Fetch(1, "d", HERE, MAX_LAYERS, []),
        Fetch(1, "d", HERE, -1, []),
        Fetch(1, "d", HERE, 0, [FetchItem(1, 1, -4, [])]),
        Fetch(1, "d", HERE, 0, [FetchItem(1, 1, 0, [b""] * (MAX_HEADS + 1))]),
        Fetch(1, "d", HERE, 0, [FetchItem(1, 1, 0, [])] * (MAX_ITEMS + 1)),
        FetchDone(1, [(1, "x")] * (MAX_ITEMS + 1)),
        Grant("d", HERE, True, [GrantItem(1, 1, 0, 0)] * (MAX_ITEMS + 1)),
        Grant("d", HERE, True, [GrantItem(1, 1, 0, -1)]),
        Filled(1, 1, 0, MAX_SIZE + 1, b"", b"", 0),
        structs.replace(REGISTRATION, layers=0),
        structs.replace(REGISTRATION, layers=MAX_LAYERS + 1),
        structs.replace(REGISTRATION, mask_rows=-1),
        structs.replace(REGISTRATION, mask_width=MAX_SIZE + 1),
        structs.replace(REGISTRATION, metadata=[1] * (MAX_LAYERS + 1)),
        structs.replace(REGISTRATION, arena=-1),
        structs.replace(REGISTRATION, tp_size=0),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_is_out_of_range_is_refused_while_it_is_read(message: Message) -> None:
    with pytest.raises(MessageError) as caught:
        unpack(pack(message))
    assert len(str(caught.value)) < 200


def test_a_message_that_is_too_large_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_smartgen.transfer.messages.MAX_MESSAGE_BYTES", 30)
    with pytest.raises(MessageError, match="allowed are 30"):
        unpack(pack(Failed(1, 2, "x" * 30)))
