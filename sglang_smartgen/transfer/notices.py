"""What a stranger is told: sent without waiting for him, and with bounded memory.

Who sends a message that is refused may name any address as his own, thousands of them, or one where
nobody listens. So a notice is dropped rather than waited for, and only so many sockets are kept.
Used by one thread.
"""

from __future__ import annotations

import contextlib

import zmq

MAX_SOCKETS = 64
MAX_WAITING = 64
"""Notices that wait for one address to answer."""


class Notices:
    """Sockets to the addresses that were told something last."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}

    def send(self, address: str, frames: list[bytes], ipv6: bool = False) -> None:
        """Queue frames for a ZMQ address; they are lost when its queue is full or it is none."""
        end = self._sockets.pop(address, None)
        with contextlib.suppress(zmq.ZMQError):
            if end is None:
                end = self._connected(address, ipv6)
            self._sockets[address] = end  # the newest is the last to be closed
            end.send_multipart(frames, zmq.DONTWAIT)

    def close(self) -> None:
        """Close every socket; what waits is lost."""
        for end in self._sockets.values():
            end.close(linger=0)
        self._sockets.clear()

    def _connected(self, address: str, ipv6: bool) -> zmq.Socket[bytes]:
        while len(self._sockets) >= MAX_SOCKETS:
            oldest = next(iter(self._sockets))
            self._sockets.pop(oldest).close(linger=0)
        end = self._context.socket(zmq.PUSH)
        end.setsockopt(zmq.LINGER, 0)
        end.setsockopt(zmq.SNDHWM, MAX_WAITING)
        end.setsockopt(zmq.IPV6, ipv6)
        try:
            end.connect(address)
        except zmq.ZMQError:
            end.close(linger=0)
            raise
        return end
