"""Sealed control messages: only a holder of the token, only here, only now, only once."""

from __future__ import annotations

import random

import pytest

from sglang_smartgen.transfer import seal as module
from sglang_smartgen.transfer.messages import (
    TAG,
    Endpoint,
    Hello,
    MessageError,
    Released,
    from_frames,
    seal_behind,
    to_frames,
    unseal_behind,
)
from sglang_smartgen.transfer.seal import (
    SEAL_BYTES,
    SKEW_S,
    TOKEN_ENV,
    WINDOW,
    Sealer,
    SealError,
    sealer_from_env,
)

TOKEN = b"a token of a cluster"
HERE, THERE = Endpoint("10.0.0.1", 4000), Endpoint("10.0.0.2", 4000)
MESSAGE = Released(7, 3)


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000 * 10**9

    def __call__(self) -> int:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += int(seconds * 10**9)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def refused(sealer: Sealer | None, frames: list[bytes], at: Endpoint = HERE) -> str:
    with pytest.raises(MessageError) as caught:
        from_frames(frames, sealer, at)
    sentence = str(caught.value)
    assert "\n" not in sentence and len(sentence) < 200
    assert TOKEN.decode() not in sentence
    return sentence


def test_without_a_token_the_wire_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_ENV, raising=False)
    assert sealer_from_env() is None
    assert len(to_frames(MESSAGE)) == 3 and len(seal_behind([b"a"], MESSAGE, None)) == 2
    assert from_frames(to_frames(MESSAGE)) == MESSAGE


def test_a_holder_of_the_token_is_believed_once(clock: Clock) -> None:
    sender, receiver = Sealer(TOKEN, clock), Sealer(TOKEN, clock)
    frames = to_frames(MESSAGE, sender, HERE)
    assert len(frames) == 4 and len(frames[3]) == SEAL_BYTES
    assert from_frames(frames, receiver, HERE) == MESSAGE
    assert "replay" in refused(receiver, frames)
    # The same words, said again by the sender, are another message.
    assert from_frames(to_frames(MESSAGE, sender, HERE), receiver, HERE) == MESSAGE


def test_another_token_or_none_is_refused(clock: Clock) -> None:
    receiver = Sealer(TOKEN, clock)
    other = to_frames(MESSAGE, Sealer(b"the token of others", clock), HERE)
    assert "seal is wrong" in refused(receiver, other)
    assert "without a seal" in refused(receiver, to_frames(MESSAGE))
    assert "4 frames" in refused(None, to_frames(MESSAGE, receiver, HERE))


def test_a_message_for_another_node_is_refused(clock: Clock) -> None:
    frames = to_frames(MESSAGE, Sealer(TOKEN, clock), THERE)
    receiver = Sealer(TOKEN, clock)
    assert "another receiver" in refused(receiver, frames)
    # It was not used up by that.
    assert from_frames(frames, receiver, THERE) == MESSAGE


def test_a_foreign_room_or_generation_is_refused(clock: Clock) -> None:
    sender, receiver = Sealer(TOKEN, clock), Sealer(TOKEN, clock)
    frames = to_frames(MESSAGE, sender, HERE)
    for other in (Released(8, 3), Released(7, 4), Hello("a", 1)):
        assert "changed" in refused(receiver, [*frames[:2], to_frames(other)[2], frames[3]])


def test_any_changed_or_lost_byte_is_refused(clock: Clock) -> None:
    sender, receiver = Sealer(TOKEN, clock), Sealer(TOKEN, clock)
    frames = to_frames(MESSAGE, sender, HERE)
    for which in (2, 3):
        for at in range(len(frames[which])):
            changed = bytearray(frames[which])
            changed[at] ^= 1
            refused(receiver, [*frames[:which], bytes(changed), *frames[which + 1 :]])
            refused(receiver, [*frames[:which], frames[which][:at], *frames[which + 1 :]])
    assert not receiver._senders, "what was refused has left something behind"
    assert from_frames(frames, receiver, HERE) == MESSAGE


def test_an_old_message_is_refused_also_after_a_restart(clock: Clock) -> None:
    sender = Sealer(TOKEN, clock)
    frames = to_frames(MESSAGE, sender, HERE)
    clock.pass_by(SKEW_S + 1)
    assert "clocks must agree" in refused(Sealer(TOKEN, clock), frames)
    clock.pass_by(-2 * SKEW_S - 2)
    assert "clocks must agree" in refused(Sealer(TOKEN, clock), frames)


def test_messages_may_overtake_each_other(clock: Clock) -> None:
    sender, receiver = Sealer(TOKEN, clock), Sealer(TOKEN, clock)
    sent = [to_frames(MESSAGE, sender, HERE) for _ in range(300)]
    random.Random(0).shuffle(sent)
    for frames in sent:
        assert from_frames(frames, receiver, HERE) == MESSAGE
    for frames in sent:
        assert "replay" in refused(receiver, frames)


def test_what_lies_behind_the_window_is_refused(clock: Clock) -> None:
    sender, receiver = Sealer(TOKEN, clock), Sealer(TOKEN, clock)
    sent = [to_frames(MESSAGE, sender, HERE) for _ in range(WINDOW + 2)]
    from_frames(sent[-1], receiver, HERE)
    assert "replay" in refused(receiver, sent[0])
    assert "replay" in refused(receiver, sent[1])
    assert from_frames(sent[2], receiver, HERE) == MESSAGE


def test_silent_senders_are_forgotten_and_still_cannot_be_replayed(clock: Clock) -> None:
    receiver = Sealer(TOKEN, clock)
    first = to_frames(MESSAGE, Sealer(TOKEN, clock), HERE)
    from_frames(first, receiver, HERE)
    for _ in range(20):
        clock.pass_by(SKEW_S)
        from_frames(to_frames(MESSAGE, Sealer(TOKEN, clock), HERE), receiver, HERE)
    assert len(receiver._senders) <= 5
    assert "clocks must agree" in refused(receiver, first)


def test_a_message_behind_sglangs_frames_is_bound_to_them(clock: Clock) -> None:
    sender, receiver = Sealer(TOKEN, clock), Sealer(TOKEN, clock)
    theirs = [b"None", b"slots", b"addresses"]
    frames = seal_behind(theirs, MESSAGE, sender)
    for other in ([b"None", b"slot", b"saddresses"], [b"None", b"others", b"addresses"]):
        with pytest.raises(MessageError, match="changed"):
            unseal_behind([*other, *frames[3:]], 3, receiver)
    with pytest.raises(MessageError, match="without a seal"):
        unseal_behind(frames[:4], 3, receiver)
    assert unseal_behind(frames, 3, receiver) == MESSAGE
    with pytest.raises(MessageError, match="replay"):
        unseal_behind(frames, 3, receiver)


def test_a_token_that_could_be_guessed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_ENV, "short")
    with pytest.raises(ValueError, match=f"{TOKEN_ENV} has 5 bytes; it must have at least 16"):
        sealer_from_env()
    monkeypatch.setenv(TOKEN_ENV, f" {TOKEN.decode()}\n")
    sealer = sealer_from_env()
    assert sealer is not None
    frames = to_frames(MESSAGE, sealer, HERE)
    assert frames[0] == TAG and from_frames(frames, Sealer(TOKEN), HERE) == MESSAGE


def test_the_mac_compares_in_constant_time(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    asked: list[bytes] = []
    real = module.hmac.compare_digest
    monkeypatch.setattr(module.hmac, "compare_digest", lambda a, b: asked.append(a) or real(a, b))
    sealer = Sealer(TOKEN, clock)
    with pytest.raises(SealError):
        sealer.check(bytes(SEAL_BYTES), b"", b"")
    assert len(asked) == 1
