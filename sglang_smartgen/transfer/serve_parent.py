"""The scheduler process's end of the store's server process: start it, tell it, notice its death.

Owner: one `ServerProcess` a prefill rank, with one thread that reads the channel and waits for the
process's end. Bootstrap, scheduler and push thread only send. An entry that was handed over is held
in the store (its bytes cannot get a new owner) until the process says Gone or has ended; a process
that shows no life for `HUNG_S` is killed, so that "ended" is certain.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from sglang_smartgen.transfer.messages import Endpoint, Fetch, Grant, Registration, Release
from sglang_smartgen.transfer.region import SharedRegion
from sglang_smartgen.transfer.serve_channel import (
    STATUS_BYTES,
    AddPeer,
    Beat,
    Channel,
    ChannelClosed,
    Drop,
    Forward,
    Gone,
    Refused,
    Serving,
    Settled,
    Setup,
    Take,
    ToScheduler,
    ToServer,
    TransportSpec,
)
from sglang_smartgen.transfer.store import PrefillStore, StoreEntry

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
HUNG_S = 15.0
"""Without a sign of life (one a second): the process is stopped or hangs."""
MODULE = "sglang_smartgen.transfer.serve_process"
PINNING = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
"""The environment's ways to tie threads to the scheduler's cores."""

Key = tuple[int, int]
"""Room and generation."""


class ServeError(RuntimeError):
    """The server process did not start; the text says why."""


class ServerProcess:
    """The process while it lives. `settled` and `died` are called by its thread.

    The kernel ends the process with the thread that made this object, which must therefore live as
    long as the scheduler process does.
    """

    def __init__(
        self,
        spec: TransportSpec,
        store: PrefillStore,
        timeout_s: float,
        *,
        settled: Callable[[Release, bool], None],
        died: Callable[[str, list[Key]], None],
    ) -> None:
        """Start the process and wait until it serves. Raises ServeError.

        settled: see serve_channel.Settled. died: the process has
        ended without being closed; the cause, and the entries that it served.
        """
        self._store = store
        self._settled = settled
        self._died = died
        self._status = SharedRegion(STATUS_BYTES)
        self._flag = self._status.view()
        self._handed: dict[Key, StoreEntry] = {}
        self._lock = threading.Lock()
        self._over = False
        self._closing = False
        self._last_beat = Beat(0, 0, 0)
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        with theirs:
            try:
                self._process = self._spawn(theirs.fileno())
            except OSError as error:
                raise ServeError(f"the store server cannot be started: {error}") from None
        try:
            self.endpoint = self._start(spec, timeout_s)
        except BaseException:
            self._end()
            raise
        logger.info("SmartGen: store server %d listens on %s:%d", self._process.pid, *self._where())
        self._thread = threading.Thread(target=self._run, name="smartgen-store-server", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Of the server process."""
        return self._process.pid

    @property
    def served(self) -> Beat:
        """The counters of what it has served, at most a second old."""
        return self._last_beat

    def pushing(self, busy: bool) -> None:
        """Whether the push thread is sending: speculative bytes wait for it."""
        self._flag[0] = busy

    def add_peer(self, registration: Registration) -> None:
        """A decode rank has registered."""
        self._tell(AddPeer(registration))

    def forward(self, message: Fetch | Grant | Release) -> None:
        """A message of D that came here."""
        self._tell(Forward(message))

    def hand_over(self, entry: StoreEntry) -> bool:
        """Let the process serve a complete entry; False when it has ended."""
        key = (entry.room, entry.generation)
        with self._lock:
            if self._over:
                return False
            if self._store.acquire(*key) is None:
                return True  # dropped already: nobody will ask for it
            self._handed[key] = entry
        sent, order = entry.residual.packed()
        offset = self._store.offset(entry)
        # When this fails the thread finds the channel's end and gives the entry back.
        return self._tell(Take(*key, entry.prompt_len, offset, sent, order))

    def drop(self, room: int, generation: int) -> None:
        """Stop serving an entry; the store gets it back when the process has let go of it."""
        with self._lock:
            known = (room, generation) in self._handed
        if known:
            self._tell(Drop(room, generation))

    def close(self) -> None:
        """End the process; `died` is not called."""
        self._closing = True
        self._channel.close()
        self._thread.join(HUNG_S)

    def _tell(self, message: ToServer) -> bool:
        try:
            self._channel.send(message)
        except ChannelClosed as error:
            # Its end is handled by the thread, which this wakes where nothing else has.
            logger.warning("SmartGen: store server %d: %s", self.pid, error)
            self._channel.close()
            return False
        return True

    def _spawn(self, channel_fd: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", MODULE]
        command += ["--channel-fd", str(channel_fd), "--parent", str(os.getpid())]
        environment = {name: text for name, text in os.environ.items() if name not in PINNING}
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=(channel_fd, self._store.memory.fd, self._status.fd),
        )

    def _start(self, spec: TransportSpec, timeout_s: float) -> Endpoint:
        g = self._store.geometry
        setup = Setup(
            transport=spec,
            store_fd=self._store.memory.fd,
            store_bytes=self._store.region.length,
            status_fd=self._status.fd,
            layers=g.layers,
            kv_heads=g.kv_heads,
            head_dim=g.head_dim,
            dtype=str(g.dtype).removeprefix("torch."),
            sliding_layers=sorted(g.sliding_layers),
            timeout_s=timeout_s,
        )
        try:
            self._channel.send(setup)
            answer = self._channel.receive(START_TIMEOUT_S)
        except ChannelClosed:
            raise ServeError(f"the store server ended at once, {self._end()}") from None
        match answer:
            case [Serving(serve=endpoint), *rest]:
                for message in rest:  # it may have beaten already
                    self._heard(message)
                return endpoint
            case [Refused(cause=cause), *_]:
                raise ServeError(f"the store server refuses to start: {cause}")
        raise ServeError(f"the store server did not start within {START_TIMEOUT_S:.0f} s")

    def _where(self) -> tuple[str, int]:
        return self.endpoint.host, self.endpoint.port

    # The thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        alive_at = time.monotonic()
        cause = ""
        while not cause:
            try:
                messages = self._channel.receive(1.0)
            except ChannelClosed:
                break
            if messages:
                alive_at = time.monotonic()
            elif time.monotonic() - alive_at > HUNG_S:
                cause = f"killed: no sign of life for {HUNG_S:.0f} s"
            for message in messages:
                try:
                    self._heard(message)
                except Exception:
                    logger.exception("SmartGen: %s of the store server", type(message).__name__)
        ended = self._end()
        with self._lock:
            self._over = True
            lost = list(self._handed)
        try:
            if not self._closing:
                self._died(f"store server {self.pid}: {cause or ended}", lost)
        finally:
            for key in lost:
                self._give_back(*key)

    def _heard(self, message: ToServer | ToScheduler) -> None:
        match message:
            case Beat():
                self._last_beat = message
            case Gone(room=room, generation=generation):
                self._give_back(room, generation)
            case Settled(release=release, held=held):
                self._settled(release, held)
            case _:
                logger.warning("SmartGen: unexpected %s", type(message).__name__)

    def _give_back(self, room: int, generation: int) -> None:
        with self._lock:
            entry = self._handed.pop((room, generation), None)
        if entry is not None:
            self._store.release(entry)

    def _end(self) -> str:
        """Make sure that the process has ended; how it did, for a sentence."""
        self._channel.close()
        if not self._closing:
            # Its end of the channel closes a moment before the process has ended by itself.
            self._wait(1.0)
        elif self._wait(2.0) is None:
            logger.warning("SmartGen: store server %d is killed", self.pid)
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        code = self._process.wait()
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    def _wait(self, timeout_s: float) -> int | None:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
