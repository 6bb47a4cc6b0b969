"""A slow network on one machine: a network namespace whose loopback has a token bucket.

`enter` starts the running command again inside such a namespace, with the same arguments, so that
every server it starts and all their traffic with each other is held to the rate. `enter_adjustable`
does so for `set_rate`, which changes the rate under running servers. Needs root and the package
iproute2. The bucket holds 4 ms of the rate and at least one of the kernel's large packets.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from sglang_smartgen.config import ConfigError

SHAPED_ENV = "SMARTGEN_SHAPED_MBIT"
ADJUSTABLE = "adjustable"
TOOLS = ("unshare", "ip", "tc")
BUCKET_S = 0.004
QUEUE_S = 0.2  # of the rate: what waits before packets are dropped
LARGEST_PACKET = 65536
DECODE_HOST = "127.0.0.2"  # of a decode server whose direction is to have its own bucket
HTTP_PORTS = (("0x5000", "0xf000"), ("0x6000", "0xe000"))  # 20480 to 32767
_SBIN = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def enter(mbit: int | None) -> None:
    """Return inside a namespace of `mbit` Mbit/s, or at once for None.

    The first call does not return: it replaces this process. Raises ConfigError where the machine
    does not allow it.
    """
    if mbit is None or os.environ.get(SHAPED_ENV) == str(mbit):
        return
    if mbit < 1:
        raise ConfigError(f"--mbit is {mbit}; it must be at least 1")
    _start_again(str(mbit), given=str(mbit))


def enter_adjustable(given: str) -> None:
    """Return inside a namespace that is not shaped yet and whose rate `set_rate` sets.

    given: the value of --mbit, for the messages. The first call replaces this process. Raises
    ConfigError where the machine does not allow it.
    """
    if not is_adjustable():
        _start_again(ADJUSTABLE, given)


def possible() -> bool:
    """Whether this machine allows a namespace of its own."""
    if is_adjustable():
        return True
    if os.geteuid() != 0 or any(shutil.which(tool, path=_SBIN) is None for tool in TOOLS):
        return False
    return subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode == 0


def is_adjustable() -> bool:
    """Whether this process is inside a namespace whose rate `set_rate` sets."""
    return os.environ.get(SHAPED_ENV) == ADJUSTABLE


def set_rate(mbit: int | None, duplex: bool = False) -> None:
    """Hold loopback to `mbit` Mbit/s from now on, None: to nothing. Only after `enter_adjustable`.

    duplex: what goes to DECODE_HOST has a bucket of its own and everything else another, as on a
    full-duplex link, and HTTP (the servers' ports, see `cluster.PORTS`) has none, as if clients
    came by another network. Else one bucket holds it all. Raises ConfigError when the kernel
    refuses.
    """
    if not is_adjustable():
        raise ConfigError("the rate of this machine's own loopback is never changed")
    lines = ["tc qdisc replace dev lo root noqueue"]
    if mbit is not None:
        lines = [*lines, *_classes(mbit)] if duplex else [_bucket("replace", mbit)]
    for line in lines:
        done = subprocess.run(line.split(), capture_output=True, text=True, env=_tools_env())
        if done.returncode:
            raise ConfigError(f"--mbit is {mbit}; {line!r} failed: {done.stderr.strip()}")


def loopback_bytes() -> int:
    """Bytes that this namespace's loopback has sent so far; /sys would show the machine's."""
    counters = next(
        line for line in Path("/proc/self/net/dev").read_text().splitlines() if "lo:" in line
    )
    return int(counters.partition(":")[2].split()[8])


def set_link(*, up: bool) -> None:
    """Take the namespace's loopback down, or up again. Raises ConfigError outside of one."""
    if SHAPED_ENV not in os.environ:
        raise ConfigError("the network can be cut only in a namespace of its own; give --mbit")
    state = "up" if up else "down"
    subprocess.run(["ip", "link", "set", "lo", state], check=True, env=_tools_env())


def _start_again(mark: str, given: str) -> NoReturn:
    """Replace this process by the same command inside a namespace that is marked `mark`."""
    if os.geteuid() != 0:
        raise ConfigError(f"--mbit is {given}; to shape the network needs root")
    for tool in TOOLS:
        if shutil.which(tool, path=_SBIN) is None:
            raise ConfigError(f"--mbit is {given}; to shape the network needs the program {tool}")
    os.environ[SHAPED_ENV] = mark
    inside = [sys.executable, "-P", "-m", "sglang_smartgen.report.shaped", mark]
    os.execvpe("unshare", ["unshare", "--net", *inside, *sys.argv], os.environ)


def _bucket(verb: str, mbit: int) -> str:
    bucket = max(LARGEST_PACKET, int(mbit * 1e6 / 8 * BUCKET_S))
    return f"tc qdisc {verb} dev lo root tbf rate {mbit}mbit burst {bucket} latency 200ms"


def _classes(mbit: int) -> list[str]:
    """The commands that give each direction a bucket and HTTP a way around both."""
    burst = max(LARGEST_PACKET, int(mbit * 1e6 / 8 * BUCKET_S))
    queue = int(mbit * 1e6 / 8 * QUEUE_S)
    lines = ["tc qdisc replace dev lo root handle 1: htb default 30"]
    for number, rate in ((10, "100gbit"), (20, f"{mbit}mbit"), (30, f"{mbit}mbit")):
        lines.append(
            f"tc class add dev lo parent 1: classid 1:{number} htb rate {rate} "
            f"burst {burst} cburst {burst} quantum 60000"
        )
    lines += [
        f"tc qdisc add dev lo parent 1:{number} bfifo limit {max(queue, 2 * LARGEST_PACKET)}"
        for number in (20, 30)
    ]
    to_http = "tc filter add dev lo parent 1: protocol ip prio 1 u32 match ip"
    for value, mask in HTTP_PORTS:
        lines += [f"{to_http} {end} {value} {mask} flowid 1:10" for end in ("sport", "dport")]
    lines.append(
        f"tc filter add dev lo parent 1: protocol ip prio 2 u32 match ip dst {DECODE_HOST}/32 "
        "flowid 1:20"
    )
    return lines


def _tools_env() -> dict[str, str]:
    return {**os.environ, "PATH": _SBIN}


def main(argv: list[str]) -> NoReturn:
    """Inside the fresh namespace: shape loopback, then run the command line behind the mark."""
    mark, script, *arguments = argv
    lines = ["ip link set lo mtu 1500 up"]
    if mark != ADJUSTABLE:
        lines.append(_bucket("add", int(mark)))
    for line in lines:
        subprocess.run(line.split(), check=True, env=_tools_env())
    os.execv(sys.executable, [sys.executable, "-P", script, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
