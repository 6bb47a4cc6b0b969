"""One NIXL agent with its UCX backend, on a host without a GPU too (wheel `nixl-cu12`, optional).

Threads: NIXL's progress thread, which moves the bytes of both ends.

The agent is not safe for threads by itself, so `_lock` guards every call; none of them waits for a
peer. A transfer that NIXL has not ended is never released: UCX cannot cancel it, would go on
reading its memory, and would no longer say when it is over.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import logging
import os
import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sglang_smartgen.transfer.transport import Region, Span, TransportError

MODULES = ("nixl_cu12._api", "nixl_cu13._api", "nixl._api")
PROGRESS_US = 1000  # of NIXL's progress thread, where no event has woken it before
MISSING = "NIXL is not installed (pip install --no-deps nixl-cu12==1.5.1)"
_MEANINGS = {
    "nixlRemoteDisconnectError": "the peer is dead, or the connection to it was lost",
    "nixlBackendError": "UCX cannot reach the peer",
    "nixlNotFoundError": "an address is not registered, here or by the peer",
}


class Lost(Exception):
    """NIXL refused or gave up a transfer. sent: some of its bytes may be under way."""

    def __init__(self, cause: str, *, sent: bool) -> None:
        super().__init__(cause)
        self.sent = sent


class NixlAgent:
    """See above. TransportError when NIXL is missing or does not start.

    host: the address whose network device is used; "" = any. `name` is another one in each process.
    """

    def __init__(self, host: str = "") -> None:
        # UCX reads it when it is loaded. Its InfiniBand module ends the process with a segmentation
        # fault at exit (libnl-route as this wheel has it), so it is loaded where it is of use only.
        if not Path("/sys/class/infiniband").exists():
            os.environ.setdefault("UCX_MODULES", "^ib")
        api = _api()
        api.logger.setLevel(logging.WARNING)  # it writes to the standard output
        self.name = f"smartgen-{os.getpid()}-{secrets.token_hex(4)}"
        device = device_of(host) if host else None
        options = {} if device is None else {"engine_config": f"NET_DEVICES={device}"}
        try:
            with _calm(api.nixlBind):
                self._agent: Any = api.nixl_agent(self.name, api.nixl_agent_config(backends=[]))
            self._agent.create_backend("UCX", options)
        except Exception as error:
            raise TransportError(f"NIXL does not start: {error}") from None
        self._lock = threading.Lock()
        self._registered: dict[Region, Any] = {}

    def metadata(self) -> str:
        """What a peer must know to write here: connection and registered memory, in base64."""
        with self._lock:
            return base64.b64encode(self._agent.get_agent_metadata()).decode()

    def register(self, region: Region) -> None:
        """Make it readable for transfers, and known to those who get the metadata from now on."""
        with self._lock:
            try:
                made = self._agent.register_memory([(*region, 0, "")], "DRAM")
            except Exception as error:
                raise TransportError(f"cannot register {region}: {error}") from None
            self._registered[region] = made

    def unregister(self, region: Region) -> None:
        """No transfer that reads it may be under way."""
        with self._lock:
            self._agent.deregister_memory(self._registered.pop(region))

    def know(self, metadata: str) -> str:
        """Connect to the owner of the metadata, or learn what it has registered since; its name."""
        packed = base64.b64decode(metadata)
        with self._lock:
            try:
                name = self._agent.add_remote_agent(packed)
            except Exception as error:
                raise Lost(_meaning(error), sent=False) from None
        return name.decode() if isinstance(name, bytes) else str(name)

    def post(self, name: str, spans: Sequence[Span]) -> tuple[Any, bool]:
        """Begin a transfer to a connected peer; it, and whether it goes on. Raises Lost."""
        here = [(span.source, span.length, 0) for span in spans]
        there = [(span.destination, span.length, 0) for span in spans]
        sent = False
        with self._lock:
            try:
                local = self._agent.get_xfer_descs(here, "DRAM")
                remote = self._agent.get_xfer_descs(there, "DRAM")
                transfer = self._agent.initialize_xfer("WRITE", local, remote, name)
                sent = True
                state = self._agent.transfer(transfer)
            except Exception as error:
                raise Lost(_meaning(error), sent=sent) from None
            return transfer, self._goes_on(transfer, state)

    def goes_on(self, transfer: Any) -> bool:
        """False when it is complete: its bytes can be read at the peer. Raises Lost."""
        with self._lock:
            try:
                state = self._agent.check_xfer_state(transfer)
            except Exception as error:
                self._release(transfer)
                raise Lost(_meaning(error), sent=True) from None
            return self._goes_on(transfer, state)

    def leave(self, transfer: Any) -> None:
        """The process will not ask about this transfer again, although it goes on."""
        transfer._released = True  # or Python would release it
        _LEFT.append(self)

    def _goes_on(self, transfer: Any, state: str) -> bool:
        if state == "PROC":
            return True
        self._release(transfer)
        if state != "DONE":
            raise Lost("NIXL returned an error", sent=True)
        return False

    def _release(self, transfer: Any) -> None:
        try:
            self._agent.release_xfer_handle(transfer)
        except Exception:
            self.leave(transfer)


_LEFT: list[NixlAgent] = []
"""Agents with a transfer that was left: they stay, because UCX reads their memory."""


@contextlib.contextmanager
def _calm(bindings: Any) -> Iterator[None]:
    """Agents that are made in here have a progress thread that sleeps until something comes.

    NIXL's Python API sets its delay to 0, with which it polls without a pause: a core of each
    process that has an agent, also while nothing moves.
    """
    config: Any = bindings.nixlAgentConfig

    def set_field(self: Any, name: str, value: object) -> None:
        config.__setattr__(self, name, PROGRESS_US if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = type("Calm", (config,), {"__setattr__": set_field})
    try:
        yield
    finally:
        bindings.nixlAgentConfig = config


def device_of(host: str) -> str | None:
    """Name of the network device with this IPv4 address; None when there is none."""
    from sglang_smartgen.transfer.rails.make import address_of

    if host.startswith("127."):
        return "lo"
    for _, name in socket.if_nameindex():
        if address_of(name) == host:
            return name
    return None


def _api() -> Any:
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise TransportError(MISSING)


def _meaning(error: Exception) -> str:
    kind = type(error).__name__
    return _MEANINGS.get(kind) or f"NIXL says {error or kind}"
