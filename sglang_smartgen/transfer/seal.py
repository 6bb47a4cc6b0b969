"""Control messages that prove they are from a holder of the cluster's token, each only once.

Mooncake itself asks nobody who he is; this guards the messages that say what is read and written
where. Without `SMARTGEN_TOKEN` in the environment nothing is sealed and nothing is asked for. With
it, every message of SmartGen carries one more frame, and one without it is refused:

    sender (16 random bytes of the process), number (u64), time (u64, ns), HMAC-SHA256 (32)

The MAC is over all of that, where the message goes (`host:port`, or SGLang's frames that it came
with) and the payload, which names room and generation. A receiver takes each number of a sender
once, in any order within a window, and only while the time is close to its own: so it can forget a
sender that was silent for long, and what was recorded before it started is soon too old. The clocks
of the nodes must therefore agree to `SKEW_S`. The payload is not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterable

TOKEN_ENV = "SMARTGEN_TOKEN"
MIN_TOKEN_BYTES = 16
SKEW_S = 60.0
WINDOW = 4096
"""Numbers behind the newest one that may still come; threads and sockets overtake each other."""

_HEAD = struct.Struct("!16sQQ")
_MAC_BYTES = 32
SEAL_BYTES = _HEAD.size + _MAC_BYTES
_NS = 1_000_000_000


class SealError(ValueError):
    """A message that is not to be believed; its text is one sentence for the log."""


class _Sender:
    """What is known of one process: its newest number, and which of the WINDOW below it came."""

    def __init__(self) -> None:
        self.newest = -1
        self.came = 0  # bit i: number `newest - i`
        self.latest_ns = 0

    def take(self, number: int) -> bool:
        """True the first time that a number comes, unless it is too old to tell."""
        if number > self.newest:
            self.came = ((self.came << min(number - self.newest, WINDOW)) | 1) & ((1 << WINDOW) - 1)
            self.newest = number
            return True
        behind = self.newest - number
        if behind >= WINDOW or self.came >> behind & 1:
            return False
        self.came |= 1 << behind
        return True


class Sealer:
    """Seals what this process sends and checks what it receives. Any thread may use it."""

    def __init__(self, token: bytes, now_ns: Callable[[], int] = time.time_ns) -> None:
        """Raises ValueError for a token that could be guessed."""
        if len(token) < MIN_TOKEN_BYTES:
            raise ValueError(
                f"{TOKEN_ENV} has {len(token)} bytes; it must have at least {MIN_TOKEN_BYTES}"
            )
        self._token = token
        self._now_ns = now_ns
        self._me = secrets.token_bytes(16)
        self._numbers = itertools.count()
        self._senders: dict[bytes, _Sender] = {}
        self._swept_ns = 0
        self._lock = threading.Lock()

    def seal(self, payload: bytes, where: bytes) -> bytes:
        """The frame that goes with this payload to this receiver."""
        with self._lock:
            number = next(self._numbers)
        head = _HEAD.pack(self._me, number, self._now_ns())
        return head + self._mac(head, payload, where)

    def check(self, frame: bytes, payload: bytes, where: bytes) -> None:
        """Raises SealError unless a holder of the token sent this here, now and for the first time.

        Nothing changes before the MAC is found right.
        """
        if len(frame) != SEAL_BYTES:
            raise SealError(f"a message comes without a seal, and {TOKEN_ENV} is set here")
        head, mac = frame[: _HEAD.size], frame[_HEAD.size :]
        if not hmac.compare_digest(mac, self._mac(head, payload, where)):
            raise SealError(
                "a message's seal is wrong: another token, another receiver, or it was changed"
            )
        sender, number, sent_ns = _HEAD.unpack(head)
        now_ns = self._now_ns()
        if abs(now_ns - sent_ns) > SKEW_S * _NS:
            raise SealError(
                f"a message is {(now_ns - sent_ns) / _NS:.0f} s old; clocks must agree to "
                f"{SKEW_S:.0f} s"
            )
        with self._lock:
            self._sweep(now_ns)
            known = self._senders.setdefault(sender, _Sender())
            known.latest_ns = max(known.latest_ns, sent_ns)
            if not known.take(number):
                raise SealError("a message came twice: replay refused")

    def _mac(self, head: bytes, payload: bytes, where: bytes) -> bytes:
        mac = hmac.new(self._token, b"smartgen control message", hashlib.sha256)
        for part in (head, where, payload):
            mac.update(struct.pack("!Q", len(part)))
            mac.update(part)
        return mac.digest()

    def _sweep(self, now_ns: int) -> None:
        """Forget senders of which every message would be too old by now."""
        if now_ns - self._swept_ns < SKEW_S * _NS:
            return
        self._swept_ns = now_ns
        old = now_ns - 2 * SKEW_S * _NS
        for sender in [name for name, known in self._senders.items() if known.latest_ns < old]:
            del self._senders[sender]


def digest(frames: Iterable[bytes]) -> bytes:
    """What stands for SGLang's frames that a sealed one came with."""
    whole = hashlib.sha256()
    for frame in frames:
        whole.update(struct.pack("!Q", len(frame)))
        whole.update(frame)
    return whole.digest()


def sealer_from_env() -> Sealer | None:
    """The sealer of `SMARTGEN_TOKEN`, None where it is not set. Raises ValueError."""
    token = os.environ.get(TOKEN_ENV, "").strip()
    return Sealer(token.encode()) if token else None
