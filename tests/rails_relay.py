"""A TCP relay in front of a socket transport, that is slow, cut, or breaks its connections.

One thread accepts, two a connection forward. `rate` is in bytes/s each way, None = as it comes;
`cut` keeps everything where it is; `reset` closes what is open.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

PIECE = 16 << 10


class Relay:
    """Forwards to `target` (host, port) from a port of its own."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.rate: float | None = None
        self.cut = False
        self._target = target
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def reset(self) -> None:
        """Break every connection."""
        with self._lock:
            open_, self._open = self._open, []
        for end in open_:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.reset()

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target, 5.0)
                far.settimeout(None)
            except OSError:
                continue
            with self._lock:
                self._open += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(PIECE):
                while self.cut and not self._closed:
                    time.sleep(0.005)
                if self.rate is not None:
                    time.sleep(len(piece) / self.rate)
                sink.sendall(piece)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
