"""Doctor: what the machine offers: cores and NUMA, RDMA, network, ports, limits, environment."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

from sglang_smartgen.report.findings import Finding, error, ok, warning

SYS = Path("/sys")
FEW_FILES = 4096
DEFAULT_PORTS = (30000, 8998)
"""SGLang's server and its bootstrap server on P."""


def check_cores(root: Path = SYS) -> Iterator[Finding]:
    """Cores that this process may use, by NUMA node."""
    usable = os.sched_getaffinity(0)
    nodes = sorted((root / "devices/system/node").glob("node[0-9]*"))
    by_node = [f"{node.name}: {_read(node / 'cpulist')}" for node in nodes]
    text = f"{len(usable)} cores usable" + (f" ({'; '.join(by_node)})" if by_node else "")
    if len(usable) < 2:
        mend = "give it two or more: pushes and fetches run beside the scheduler"
        yield warning("machine", "cores", text, mend)
    else:
        yield ok("machine", "cores", text)
    if len(nodes) > 1:
        text = f"{len(nodes)} NUMA nodes; the store's pages lie where prefill first touches them"
        yield ok("machine", "numa", f"{text} (bind a server with numactl next to its NIC and GPU)")


def check_rdma(root: Path = SYS) -> Iterator[Finding]:
    """RDMA devices and their ports; none is fine, Mooncake then uses TCP."""
    asked = os.environ.get("MOONCAKE_PROTOCOL", "").strip().lower() == "rdma"
    devices = sorted((root / "class/infiniband").glob("*"))
    if not devices:
        if asked:
            mend = "unset MOONCAKE_PROTOCOL, or give the container its /dev/infiniband"
            yield error("network", "rdma", "MOONCAKE_PROTOCOL is rdma; there is no device", mend)
        else:
            yield ok("network", "rdma", "no device; Mooncake uses TCP")
        return
    for device in devices:
        states = [_read(port / "state") for port in sorted((device / "ports").glob("*"))]
        rate = next((_read(port / "rate") for port in sorted((device / "ports").glob("*"))), "")
        if any("ACTIVE" in state for state in states):
            yield ok("network", f"rdma {device.name}", rate or "active")
        else:
            text = f"no active port ({', '.join(states) or 'no port'})"
            yield warning("network", f"rdma {device.name}", text, "bring its link up: rdma link")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if locked != resource.RLIM_INFINITY:
        text = f"only {locked >> 10} KiB may be locked; RDMA registers pools whole"
        yield warning("network", "memlock", text, "ulimit -l unlimited (LimitMEMLOCK=infinity)")


def check_network(root: Path = SYS) -> Iterator[Finding]:
    """Interfaces that are up, and the address that a peer would be told."""
    up = []
    for device in sorted((root / "class/net").glob("*")):
        if device.name != "lo" and _read(device / "operstate") in ("up", "unknown"):
            speed = _read(device / "speed")
            known = f" {speed} Mbit/s" if speed.isdecimal() else ""
            up.append(f"{device.name}{known} (MTU {_read(device / 'mtu')})")
    if up:
        yield ok("network", "interfaces", ", ".join(up))
    else:
        text = "none is up besides loopback"
        mend = "prefill and decode can only run on this one machine"
        yield warning("network", "interfaces", text, mend)
    address = _own_address()
    if address is None or address.startswith("127."):
        text = f"peers would be told {address or 'nothing'}"
        yield warning(
            "network", "address", text, "start servers with --host and this host's address"
        )
    else:
        yield ok("network", "address", f"peers are told {address}")


def check_ports(ports: tuple[int, ...] = DEFAULT_PORTS) -> Iterator[Finding]:
    """Whether the ports of the servers are free."""
    for port in ports:
        name = f"port {port}"
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as end:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                end.bind(("0.0.0.0", port))
            except PermissionError:
                yield error("ports", name, "may not be used", "take one above 1023")
            except (OSError, OverflowError) as problem:
                mend = "another server holds it; end it or take another port"
                text = f"is taken ({getattr(problem, 'strerror', None) or problem})"
                yield warning("ports", name, text, mend)
            else:
                yield ok("ports", name, "free")
    first, last = _mooncake_range()
    if last - first < 10:
        mend = "give MC_MIN_RPC_PORT to MC_MAX_RPC_PORT 10 ports or more: closed ones rest a minute"
        yield warning("ports", "mooncake", f"only {first} to {last}", mend)
    else:
        yield ok("ports", "mooncake", f"{first} to {last}, open them between prefill and decode")


def check_limits() -> Iterator[Finding]:
    """Open files, and variables of the environment that SmartGen refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FEW_FILES:
        mend = f"ulimit -n {FEW_FILES} or more (LimitNOFILE=)"
        yield warning("machine", "open files", f"at most {hard}", mend)
    else:
        yield ok("machine", "open files", f"{soft}, may be raised to {hard}")
    from sglang_smartgen.engine.refusals import DEFERRED_RELEASE, REFUSED_ENV

    for name, why in REFUSED_ENV.items():
        if os.environ.get(name, "").lower() in ("1", "true", "yes"):
            yield error("machine", name, f"is set; {why}", "unset it")
    if os.environ.get(DEFERRED_RELEASE, "").lower() in ("0", "false", "no"):
        yield error(
            "machine", DEFERRED_RELEASE, "is off; aborted slots would be reused", "unset it"
        )


def check_token() -> Iterator[Finding]:
    """Whether control messages are authenticated."""
    from sglang_smartgen.transfer.seal import TOKEN_ENV, sealer_from_env

    try:
        sealer = sealer_from_env()
    except ValueError as problem:
        yield error("network", TOKEN_ENV, str(problem), "export one: openssl rand -hex 32")
        return
    if sealer is None:
        text = "is not set; anybody who reaches these ports is believed"
        yield ok("network", TOKEN_ENV, f"{text} (docs/security.md)")
    else:
        yield ok("network", TOKEN_ENV, "is set; it must be the same on every node")


def _mooncake_range() -> tuple[int, int]:
    def number(name: str, default: int) -> int:
        text = os.environ.get(name, "").strip()
        return int(text) if text.isdecimal() else default

    return number("MC_MIN_RPC_PORT", 15000), number("MC_MAX_RPC_PORT", 17000)


def _own_address() -> str | None:
    """The address of the interface of the default route; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
            end.connect(("192.0.2.1", 9))  # RFC 5737: nobody's
            return str(end.getsockname()[0])
    except OSError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
