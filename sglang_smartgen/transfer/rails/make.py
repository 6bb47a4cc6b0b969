"""The rails that a configuration names, or that this machine has.

A rail is written `kind` or `kind@address`: `mooncake@10.0.0.2` is an engine at that local address,
`socket@10.0.0.2` a framed TCP socket, `shm` other processes of this machine, `nixl` UCX. Both
sides name their own; rails of one kind are paired (see reach.py).
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from sglang_smartgen.transfer.mooncake import MooncakeTransport
from sglang_smartgen.transfer.rails.name import split
from sglang_smartgen.transfer.rails.reach import MAX_RAILS, Rail
from sglang_smartgen.transfer.rails.shm import ShmTransport
from sglang_smartgen.transfer.rails.transport import RailsTransport
from sglang_smartgen.transfer.seal import TOKEN_ENV
from sglang_smartgen.transfer.socket import SocketTransport
from sglang_smartgen.transfer.transport import TransportError

logger = logging.getLogger(__name__)

SOCKET_TIMEOUT_S = 2.0  # of one step of a write: a rail that is cut is soon free for a probe
_VIRTUAL = ("docker", "veth", "br-", "virbr", "cni", "flannel", "cali", "tun", "tap")
_SIOCGIFADDR = 0x8915


def discovered(host: str) -> list[str]:
    """What this machine has: shm, and Mooncake at `host` and at each further network's address."""
    others = [address for address in local_addresses() if address != host]
    return ["mooncake", "shm", *(f"mooncake@{address}" for address in others)][:MAX_RAILS]


def make_rails(
    rails: Sequence[str],
    host: str,
    protocol: str = "tcp",
    devices: str = "",
    *,
    engine: MooncakeTransport | None = None,
    session: str | None = None,
) -> RailsTransport:
    """The transport over the configured rails; none configured: what is found.

    host, protocol, devices: of a Mooncake rail without an address. engine: what serves as the first
    of these, SGLang's own. Raises TransportError when a rail that was asked for cannot be had; one
    that was found is left out.
    """
    wanted = [split(rail) for rail in (rails or discovered(host))]
    plain = None if engine is None else Rail("mooncake", host, engine)
    made: list[Rail] = []
    for kind, address in wanted:
        try:
            own = kind == "mooncake" and (address or host) == host
            if own and plain is not None and plain not in made:
                made.append(plain)
            else:
                made.append(_make(kind, address or host, protocol, devices))
        except TransportError as error:
            if rails:
                raise TransportError(f"rails has {kind!r}: {error}") from None
            logger.warning("SmartGen: no %s rail at %s: %s", kind, address or host, error)
    if plain is None:
        plain = next((rail for rail in made if rail.kind == "mooncake"), None)
    return RailsTransport(made, session, plain=plain)


def _make(kind: str, host: str, protocol: str, devices: str) -> Rail:
    if kind == "mooncake":
        return Rail(kind, host, MooncakeTransport.create(host, protocol, devices))
    if kind == "shm":
        shm = ShmTransport()
        return Rail(kind, "", shm, tier=0, settles=True, bandwidth=2e9, reaches=shm.reaches)
    if kind == "socket":
        token = os.environ.get(TOKEN_ENV, "").strip() or "no token is set on this cluster"
        key = hashlib.sha256(b"smartgen rails " + token.encode()).digest()
        return Rail(kind, host, SocketTransport(host, key, progress_timeout_s=SOCKET_TIMEOUT_S))
    from sglang_smartgen.transfer.rails.nixl import NixlTransport

    return Rail(kind, host, NixlTransport(host))


def local_addresses() -> list[str]:
    """IPv4 addresses of this machine's networks that are up, without loopback and bridges."""
    found: list[str] = []
    for _, name in socket.if_nameindex():
        state = Path(f"/sys/class/net/{name}/operstate")
        if name == "lo" or name.startswith(_VIRTUAL) or not state.exists():
            continue
        address = address_of(name)
        if address is not None and state.read_text().strip() != "down":
            found.append(address)
    return found


def address_of(device: str) -> str | None:
    """IPv4 address of a network device; None when it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            packed = struct.pack("256s", device.encode()[:15])
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, packed)
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
